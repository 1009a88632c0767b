"""Writes a model folder: `python -m harness.make_model gguf|twin ... OUT`. The only file of the harness that
loads weights, and so always a subprocess of its own: whoever asked never imports torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SEED = 0


def from_gguf(source: Path, out: Path, add_bos: bool) -> None:
    """Unpack a GGUF file into bfloat16 safetensors with its tokenizer.

    A model that transformers loaded from GGUF refuses `save_pretrained`, hence the fresh one of the same class;
    and unless told `dequantize`, it computes on packed weights, which would be another model than the one saved.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {"gguf_file": source.name}
    packed = AutoModelForCausalLM.from_pretrained(
        source.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **where
    )
    config = packed.config.__class__.from_dict(
        {k: v for k, v in packed.config.to_dict().items() if k != "quantization_config"}
    )
    fresh = type(packed)._from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(packed.state_dict(), strict=True)
    fresh.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    tokenizer.add_bos_token = add_bos
    tokenizer.save_pretrained(out)
    record_bos(out, add_bos)


def twin(family: str, out: Path) -> None:
    """A small random model of `family`, the same every time, with a tokenizer that knows bytes.

    Norm gains and biases are drawn too: a gain of one would hide a hook on the wrong side of a norm.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from harness.twins import TWINS

    config = AutoConfig.for_model(TWINS[family].model_type, **TWINS[family].kwargs())
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for _, p in sorted(model.named_parameters()):
            if p.ndim == 1:
                p.add_(torch.randn_like(p), alpha=0.1)
    model.to(torch.bfloat16).save_pretrained(out)
    byte_tokenizer(config.vocab_size).save_pretrained(out)
    record_bos(out, False)


def byte_tokenizer(vocab_size: int) -> Any:
    """Ids 0 <pad>, 1 <bos>, 2 <eos>, then the 256 bytes, then unused words up to `vocab_size`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<unused{i}>" for i in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def record_bos(out: Path, add_bos: bool) -> None:
    """Say in tokenizer_config.json whether prompts begin with the bos id, for readers without a tokenizer."""
    path = out / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": add_bos}, indent=2) + "\n")


def main(argv: list[str]) -> int:
    kind, source, out, *flags = argv
    if kind == "gguf":
        from_gguf(Path(source), Path(out), "bos" in flags)
    else:
        twin(source, Path(out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
