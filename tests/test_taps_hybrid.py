"""Taps in a trunk that keeps a state beside attention: compiled equals eager while requests come and go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from adapters.boot import load
from adapters.runtime import Output, Runtime
from harness.models import resolve

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

GRANITE = "synthetic:granitemoehybrid"  # layers 0 and 2 are Mamba, 1 and 3 attend
STEPS, LAYERS = 20, 4
# Three requests at once and 48 tokens a pass: prompts are cut to pieces, and a request that waits joins one by one.
SMALL: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 48,
    "skip_tokenizer_init": True,
}
LENGTHS = (5, 100, 47, 9, 70, 2)
PROMPTS = [[10 + i, *(20 + (7 * i + 3 * j) % 400 for j in range(n - 1))] for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def no_amx() -> Iterator[None]:
    """On a processor with AMX, vLLM's convolutions exist in bfloat16 alone, where equality cannot be shown."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        yield


@pytest.fixture(scope="module")
def eager(no_amx: None) -> Iterator[Runtime]:
    with load(resolve(GRANITE), engine="vllm", dtype="float32", **SMALL) as rt:
        yield rt


@pytest.fixture(scope="module")
def tapped(no_amx: None) -> Iterator[Runtime]:
    declared = ["resid_post.*"]
    with load(resolve(GRANITE), engine="vllm", backend="taps", taps=declared, dtype="float32", **SMALL) as rt:
        yield rt


def look(m: Any, *, steered: bool = False) -> None:
    for layer in range(LAYERS):
        if steered and layer == 0:  # Mamba
            m.resid_post[0] += 0.5
        elif steered and layer == 1:  # attends
            m.resid_post[1][:, 7] = 2.0
        m.save(f"post.{layer}", m.resid_post[layer])
    m.save("logits", m.logits)


def steer(m: Any) -> None:
    """Edits whose consequences the later layers keep in their states."""
    look(m, steered=True)


def passes(rt: Runtime, work: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Output], list[tuple[str, ...]]]:
    """What a run gave, and who was in each of its passes: a word a request, "prompt" or "decode"."""
    il, found = rt.engine.host.il, []  # type: ignore[attr-defined]
    begin = il.begin

    def recorded(rows: Any, jobs: Any) -> None:
        found.append(tuple("prompt" if job.is_prompt else "decode" for job in jobs))
        begin(rows, jobs)

    with monkeypatch.context() as patch:
        patch.setattr(il, "begin", recorded)
        return rt.run(PROMPTS, work, max_new_tokens=STEPS, ignore_eos=True), found


def worst(got: list[Output], wanted: list[Output]) -> float:
    """The largest relative error of anything saved; tokens must be equal and no row missing."""
    errors = []
    for a, b, prompt in zip(got, wanted, PROMPTS, strict=True):
        assert a.token_ids == b.token_ids
        for name in b.saves:
            x, y = a.cat(name), b.cat(name)
            assert x.shape == y.shape
            assert name == "logits" or x.shape[0] == len(prompt) + STEPS - 1
            errors.append(float((x - y).norm() / y.norm()))
    return max(errors)


@pytest.mark.parametrize("work", [look, steer, [look, steer, None, steer, look, steer]], ids=["look", "steer", "some"])
def test_tapped_equals_eager_with_prompts_among_decoding_requests(
    tapped: Runtime, eager: Runtime, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, mine = passes(tapped, work, monkeypatch)
    theirs, others = passes(eager, work, monkeypatch)
    assert mine == others
    mixed = [step for step in mine if {"prompt", "decode"} <= set(step)]
    assert len(mine) >= 2 * STEPS
    assert len(mixed) >= 5, mine
    assert worst(ours, theirs) < 2e-5


def test_the_tapped_engine_is_compiled_and_says_what_transformers_says(tapped: Runtime) -> None:
    from vllm.config import CompilationMode

    config = tapped.engine.core.vllm_config  # type: ignore[attr-defined]
    assert config.compilation_config.mode != CompilationMode.NONE
    assert config.scheduler_config.enable_chunked_prefill
    with load(resolve(GRANITE), engine="hf", dtype="float32", threads=1) as hf:
        wanted = hf.run(PROMPTS, steer, max_new_tokens=STEPS, ignore_eos=True)
    assert worst(tapped.run(PROMPTS, steer, max_new_tokens=STEPS, ignore_eos=True), wanted) < 2e-5


def test_neighbours_of_an_edited_request_keep_their_states(tapped: Runtime) -> None:
    plain = tapped.run(PROMPTS, look, max_new_tokens=STEPS, ignore_eos=True)
    works = [steer if i in (1, 4) else look for i in range(len(PROMPTS))]
    edited = tapped.run(PROMPTS, works, max_new_tokens=STEPS, ignore_eos=True)
    for i, (a, b) in enumerate(zip(edited, plain, strict=True)):
        assert torch.equal(a.cat("logits"), b.cat("logits")) == (i not in (1, 4)), i


def test_padding_before_a_prompt_is_no_part_of_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """`transformers` pads a batch on the left: with the masks of a compiled engine, a state must not have seen it."""
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)  # it takes 40 s, and the masks are made before
    path, taps = resolve(GRANITE), ["resid_post.*"]
    with (
        load(path, engine="hf", backend="taps", taps=taps, dtype="float32", threads=1) as rt,
        load(path, engine="hf", dtype="float32", threads=1) as plain,
    ):
        for runtime in (rt, plain):
            table = runtime.engine.model.get_input_embeddings().weight  # type: ignore[attr-defined]
            table.data[0] = table.data[1]  # what pads is not always zero
        ours = rt.run(PROMPTS, steer, max_new_tokens=STEPS, ignore_eos=True)
        assert worst(ours, plain.run(PROMPTS, steer, max_new_tokens=STEPS, ignore_eos=True)) < 1e-5
