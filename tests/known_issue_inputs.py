"""The inputs that show each known issue: `python -m tests.known_issue_inputs GROUP`, a process for each group.

Prints one JSON object: "found" is issue id -> [whether the installed library shows it, what was measured], "versions"
what is installed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from adapters.columns import all_columns, make
from adapters.engines.settings import environment, vllm_arguments
from adapters.peers.vanilla import version_of
from adapters.work import Capture, Nothing, Request, Settings
from harness.models import resolve
from validation.known_issues import known_issues

MODEL = "synthetic:llama"
SETTINGS = Settings(dtype="float32", max_model_len=512, max_concurrent=4)
IDS = list(range(5, 22))
Found = dict[str, tuple[bool, str]]


def vector(seed: int, size: int = 128) -> Any:
    import torch

    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size).astype(np.float32))


def booted(column: str, settings: Settings = SETTINGS) -> Any:
    adapter = make(all_columns()[column])
    adapter.boot(resolve(MODEL), settings)
    return adapter


def config() -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(resolve(MODEL))


# --- interp-engine on vLLM ---


def interp_engine() -> Found:
    from interp_engine import AddSpec, LayerSteeringSpec, SteeringSpec, to_address

    adapter = booted("interp-engine-vllm")
    model, loop = adapter._model, adapter._loop
    c = config()

    def captured(point: str, **more: Any) -> Any:
        return loop.run_until_complete(model.capture(IDS, [point], **more))[to_address(point)]

    try:
        value = captured("value.1")
        whole = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
        a, b = vector(1), vector(2)
        both = SteeringSpec(layers={1: LayerSteeringSpec([AddSpec(a, 1.0), AddSpec(b, 1.0)])})
        moved = captured("resid_post.1", steering_spec=both) - captured("resid_post.1")
        off_sum, off_last = float((moved - a - b).abs().max()), float((moved - b).abs().max())
    finally:
        adapter.close()
    return {
        "interp-engine-value": (
            value.shape[-1] == whole,
            f"value.1 is {tuple(value.shape)}, values are {c.num_key_value_heads * c.head_dim} wide",
        ),
        "interp-engine-last-operation": (
            off_last < 1e-4 < off_sum,
            f"the write is off the sum by {off_sum:.2g}, off the last operation by {off_last:.2g}",
        ),
    }


# --- vLLM-Lens ---


def vllm_lens() -> Found:
    settings = dataclasses.replace(SETTINGS, dtype="bfloat16")
    adapter = booted("vllm-lens", settings)
    import torch
    from vllm import SamplingParams
    from vllm_lens import Hook, SteeringVector

    def run(params: Any) -> Any:
        return adapter._llm.generate([{"prompt_token_ids": IDS}], params, use_tqdm=False)[0]

    def params(**extra: Any) -> Any:
        return SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, extra_args=extra)

    def keep(ctx: Any, h: Any) -> None:
        ctx.saved["h"] = h.float().cpu()

    def fail(ctx: Any, h: Any) -> None:
        raise ValueError("planted")

    def zero(ctx: Any, h: Any) -> Any:
        h = h.clone()
        h[:, 7] = 0
        return h

    try:
        before = run(params(output_residual_stream=[0])).activations["residual_stream"][0].float()
        seen = run(params(apply_hooks=[Hook(fn=keep, layer_indices=[1], pre=True)])).hook_results["0"]["h"]
        off = float((seen - before).norm() / before.norm())
        failed = run(params(apply_hooks=[Hook(fn=fail, layer_indices=[1])]))
        steered = params(
            apply_steering_vectors=[SteeringVector(activations=vector(1)[None], layer_indices=[1], scale=1.0)]
        )
        run(steered)
        left = [
            run(params(apply_hooks=[Hook(fn=zero, layer_indices=[layer])], output_residual_stream=[layer]))
            .activations["residual_stream"][0, :, 7].float().abs().max().item()
            for layer in range(3)
        ]  # fmt: skip
    finally:
        adapter.close()
    assert isinstance(seen, torch.Tensor)
    return {
        "vllm-lens-pre-hook": (off > 0.1, f"the pre-hook of layer 1 is off resid_post.0 by {off:.2g} of its norm"),
        "vllm-lens-swallowed-error": (
            len(failed.outputs[0].token_ids) == 1 and not (failed.hook_results or {}).get("0"),
            f"a hook that raised left {failed.hook_results!r} and the request went on",
        ),
        "vllm-lens-reused-parameters": (
            "apply_steering_vectors" not in (steered.extra_args or {}),
            f"after a call extra_args is {steered.extra_args!r}",
        ),
        "vllm-lens-rounded-write": (max(left) > 0, f"a coordinate set to 0 was left at up to {max(left):.2g}"),
    }


# --- nnsight on vLLM ---


def nnsight() -> Found:
    from adapters.peers.nnsight_cpu import CPUVLLM
    from adapters.peers.nnsight_works import save
    from adapters.peers.vanilla import shut_down

    model = resolve(MODEL)
    own = {k: v for k, v in vllm_arguments(model, SETTINGS, eager=True).items() if k not in ("model", "enforce_eager")}
    engine = CPUVLLM(str(model), dispatch=True, **own | {"enable_prefix_caching": True})
    layer = engine.model.layers[1]
    prompt, settings = list(range(3, 253)) + list(range(3, 153)), {"temperature": 0.0, "max_tokens": 1}
    _edit(engine, layer, save)
    counts = [engine.generate([{"prompt_token_ids": prompt}], **settings)[0].saves["rows"] for _ in range(2)]
    from nnsight.tracing.tracer import _saves

    _saves().clear()
    _trace(engine, layer)
    shut_down(engine.vllm_entrypoint)
    return {
        "nnsight-installed-rows": (
            counts[0] == [len(prompt)] and sum(counts[1]) < len(prompt),
            f"an installed block saw {counts[0]} rows of {len(prompt)}, the second time {counts[1]}",
        ),
        "nnsight-saved-ids": (len(_saves()) > 0, f"{len(_saves())} ids are kept after the trace has ended"),
    }


def _edit(engine: Any, layer: Any, save: Any) -> None:
    with engine.edit() as (tr, _):
        rows = save([])
        for _ in tr.all():
            rows.append(layer.output[0].shape[0])


def _trace(engine: Any, layer: Any) -> Any:
    with engine.trace({"prompt_token_ids": IDS}, temperature=0.0, max_tokens=1):
        kept = layer.output[0].save()
    return kept  # noqa: RET504  # the block runs elsewhere: it cannot return


# --- TransformerLens ---


def transformer_lens_vllm() -> Found:
    adapter = booted("transformerlens-batched")
    hook, add = "blocks.1.hook_out", {"op": "add", "value": vector(1).tolist()}

    def captured(**more: Any) -> Any:
        return adapter._bridge.run_with_cache([IDS], names_filter=[hook], return_logits=False, **more)[1][hook]

    try:
        plain, steered = captured(), captured(intervene={hook: add})
        misspelt = captured(interventions={hook: add})
    finally:
        adapter.close()
    moved, ignored = (float((x - plain).abs().max()) for x in (steered, misspelt))
    return {
        "transformerlens-unknown-arguments": (
            moved > 1 and ignored == 0,
            f"intervene= moved it by {moved:.2g}, interventions= by {ignored:.2g}, and neither raised",
        )
    }


def transformers() -> Found:
    return _hook_normalized() | _soft_cap()


def _hook_normalized() -> Found:
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(str(resolve(MODEL)), dtype=torch.float32, device="cpu")
    norm = bridge.blocks[1].ln1.original_component
    with torch.no_grad():
        norm.weight.copy_(1 + 0.5 * vector(3))  # a gain that is not one, as in any trained model
        _, cache = bridge.run_with_cache(torch.tensor([IDS]))
    normalized, out = cache["blocks.1.ln1.hook_normalized"], cache["blocks.1.ln1.hook_out"]
    off, without = (float((x - out).norm() / out.norm()) for x in (normalized, normalized * norm.weight))
    return {
        "transformerlens-hook-normalized": (
            without < 1e-5 < off,
            f"hook_normalized is off the norm's output by {off:.2g} of it, times the gain by {without:.2g}",
        )
    }


def _soft_cap() -> Found:
    import torch
    from transformers import AutoModelForCausalLM

    logits = {}
    for attention in ("eager", "sdpa"):
        net = AutoModelForCausalLM.from_pretrained(
            resolve("synthetic:gemma2"), dtype=torch.float32, attn_implementation=attention
        )
        for layer in net.model.layers:
            layer.self_attn.attn_logit_softcapping = 1e-3  # low enough to bind on a tiny model
        with torch.no_grad():
            logits[attention] = net(torch.tensor([IDS])).logits
    off = float((logits["sdpa"] - logits["eager"]).norm() / logits["eager"].norm())
    return {"transformers-soft-cap": (off > 1e-3, f"with sdpa the logits are off eager's by {off:.2g} of their norm")}


# --- vLLM's own extraction ---


def vllm_extract() -> Found:
    from adapters.peers import vllm_extract as column
    from adapters.peers.vanilla import prompts, sampling

    settings = dataclasses.replace(SETTINGS, max_model_len=128)
    adapter = column.VLLMExtract()
    # Whether files are written does not depend on compiling, which takes a minute.
    original, column.vllm_arguments = (
        column.vllm_arguments,
        lambda model, settings, eager: vllm_arguments(model, settings, eager=True),
    )
    adapter.boot(resolve(MODEL), settings)
    column.vllm_arguments = original
    request = Request("a", tuple(IDS), 2)
    whole = {"kv_transfer_params": {"include_output_tokens": True}}
    try:
        params = [adapter._sampling_params(**s, extra_args=whole) for s in sampling([request])]
        (output,) = adapter._llm.generate(prompts([request]), params, use_tqdm=False)
        file = Path(output.kv_transfer_params["hidden_states_path"])
        before = file.exists()
        adapter._write_the_last_files()
        after = file.exists()
        kept = adapter._outcome(output, Capture(("resid_post.1",))).values["resid_post.1"]
        again, steps, tokens = _a_text_that_repeats(adapter)
    finally:
        adapter.close()
    assert kept.shape == (len(IDS) + 1, 128)
    return {
        "vllm-extract-last-file": (
            not before and after,
            f"whether there is a file: {before} after generate, {after} a step later",
        ),
        "vllm-extract-draft": (
            again > 0 and steps < tokens,
            f"{tokens} tokens, {again} of them the same as the one before: {steps} steps",
        ),
    }


def _a_text_that_repeats(adapter: Any) -> tuple[int, int, int]:
    """Of the first of some texts in which a token comes twice in a row: how often it does, steps taken, new tokens."""
    engine, new = adapter._llm.llm_engine, 24
    plain, taken = engine.step, list[int]()

    def step() -> Any:
        taken.append(1)
        return plain()

    engine.step = step
    for first in range(5, 65):
        taken.clear()
        (outcome,) = adapter.run([Request(f"r{first}", (first, *IDS), new)], Nothing())
        again = sum(a == b for a, b in pairwise(outcome.token_ids))
        if again > 2:
            break
    return again, len(taken) - 1, len(outcome.token_ids)  # the last step is the column's, for the file


# --- vLLM's compiling ahead of time ---


def vllm_ahead() -> Found:
    from vllm.compilation.counter import compilation_counter as counted

    os.environ.pop("VLLM_USE_AOT_COMPILE")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["VLLM_CACHE_ROOT"] = cache
        booted("vanilla").close()
        saved = counted.num_aot_artifacts_saved
        booted("vanilla").close()
    compiled, loaded = counted.num_aot_compiles, counted.num_aot_artifacts_loaded
    return {
        "vllm-loads-no-graph": (
            (saved, compiled, loaded) == (1, 2, 0),
            f"two boots: {saved} graph saved by the first, {compiled} compiled, {loaded} loaded",
        )
    }


# The function, the module that must be there for it, and the issues that it shows.
GROUPS: dict[str, tuple[Callable[[], Found], str, tuple[str, ...]]] = {
    "interp-engine": (interp_engine, "interp_engine", ("interp-engine-value", "interp-engine-last-operation")),
    "vllm-lens": (
        vllm_lens,
        "vllm",
        (
            "vllm-lens-pre-hook",
            "vllm-lens-swallowed-error",
            "vllm-lens-reused-parameters",
            "vllm-lens-rounded-write",
        ),
    ),
    "nnsight": (nnsight, "nnsight", ("nnsight-installed-rows", "nnsight-saved-ids")),
    "transformer-lens-vllm": (transformer_lens_vllm, "transformer_lens", ("transformerlens-unknown-arguments",)),
    "transformers": (transformers, "transformer_lens", ("transformerlens-hook-normalized", "transformers-soft-cap")),
    "vllm-extract": (vllm_extract, "vllm", ("vllm-extract-last-file", "vllm-extract-draft")),
    "vllm-ahead": (vllm_ahead, "vllm", ("vllm-loads-no-graph",)),
}


def main(argv: Sequence[str]) -> int:
    run, _, issues = GROUPS[argv[0]]
    found = run()
    known = {i.id: i.library for i in known_issues()}
    # In this process: a plugin in a folder of its own is on no other's path.
    versions = {known[i]: version_of(known[i], f"{known[i]}-cpu").rpartition(" ")[2] for i in issues}
    print(json.dumps({"found": found, "versions": versions}))
    return 0


if __name__ == "__main__":
    os.environ.update(environment(SETTINGS))
    sys.exit(main(sys.argv[1:]))
