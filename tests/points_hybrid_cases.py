"""Every point of a hybrid on vLLM, in bfloat16, which is all that its kernels compute in: judged by the yardstick.

Run by test_points_vllm.py in a process of its own. The reference is `transformers` in float32, the yardstick the same
in bfloat16; tokens are forced, since rounding may choose others.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import adapters
from adapters.points import PER_LAYER
from adapters.runtime import Output, Runtime
from harness.models import resolve
from tests import test_taps_hybrid as hybrid
from tests.points_probe import PROMPTS, at, error, everywhere, key, nudge, samples

SMALL = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 512, "skip_tokenizer_init": True}
FORCED = (40, 41, 42)
# The states are float32: in bfloat16 the kernel refuses them.
STATES = {"mamba_ssm_cache_dtype": "float32"}


@functools.cache
def engine(which: str) -> Runtime:
    path = resolve("synthetic:qwen3_next")
    if which == "vllm":
        return adapters.load(path, engine="vllm", dtype="bfloat16", **SMALL, **STATES)
    return adapters.load(path, engine="hf", dtype=which, attention="eager", threads=1)


def forced(rt: Runtime, fn: Any) -> list[Output]:
    def whole(m: Any) -> None:
        fn(m)
        m.sampled[:] = FORCED[m.step]

    return rt.run(PROMPTS, whole, max_new_tokens=3, ignore_eos=True)


def read(which: str) -> list[Output]:
    rt = engine(which)
    places = [p for p in everywhere(rt.engine.points) if p[0] != "sampled"]

    def fn(m: Any) -> None:
        for name, layer in places:
            m.save(key(name, layer), at(m, name, layer))

    return forced(rt, fn)


def test_the_points_are_those_of_transformers() -> None:
    found = [{n: rt.engine.points.layers(n) for n in PER_LAYER} for rt in (engine("vllm"), engine("float32"))]
    assert found[0] == found[1]
    assert found[0]["q"] == (1, 3)
    assert found[0]["router"] == (1, 2, 3)


def test_every_read_is_within_the_yardstick() -> None:
    ours, yardstick, truth = read("vllm"), read("bfloat16"), read("float32")
    far = {}
    for got, same_dtype, exact in zip(ours, yardstick, truth, strict=True):
        for name in exact.saves:
            wrong = error(floats(got.saves[name]), exact.saves[name])
            allowed = error(floats(same_dtype.saves[name]), exact.saves[name])
            if wrong > 2.5 * allowed + 2e-3:
                far[name] = (wrong, allowed)
    assert not far


def floats(entries: Any) -> list[torch.Tensor]:
    return [e.float() for e in entries]


def test_a_write_reads_back_and_reaches_the_logits() -> None:
    rt = engine("vllm")
    plain = forced(rt, lambda m: m.save("logits", m.logits))
    for name, layer in samples(rt.engine.points):
        if name in ("logits", "sampled"):
            continue

        def fn(m: Any, name: str = name, layer: int | None = layer) -> None:
            value = at(m, name, layer)
            value.copy_(nudge(value, name))
            m.save("left", value)

        rt.install(fn, name="edit")
        try:
            outs = forced(rt, lambda m, n=name, i=layer: (m.save("seen", at(m, n, i)), m.save("logits", m.logits)))
        finally:
            rt.remove("edit")
        for out, before in zip(outs, plain, strict=True):
            assert error(out.saves["seen"], out.saves["left"]) == 0, name
            assert error(out.saves["logits"][0], before.saves["logits"][0]) > 1e-3, name


def test_refusals_say_why() -> None:
    with pytest.raises(Exception, match="gated delta net"):
        engine("vllm").run([[5, 6, 7]], lambda m: m.q[0], max_new_tokens=1)
    engine("vllm").close()


def at_random(work: Any) -> Any:
    """`work`, and then a token that depends on the position alone."""

    def fn(m: Any) -> None:
        work(m)
        m.sampled[:] = 20 + int(m.positions[-1]) * 7 % 400

    return fn


def test_compiled_with_taps_is_within_the_yardstick_while_requests_join(monkeypatch: pytest.MonkeyPatch) -> None:
    works = (at_random(hybrid.look), at_random(hybrid.steer))
    path, taps = resolve("synthetic:qwen3_next"), ["resid_post.*"]
    half: dict[str, Any] = {"engine": "vllm", "dtype": "bfloat16", **hybrid.SMALL, **STATES}

    def plain(rt: Runtime) -> list[list[Output]]:
        return [rt.run(hybrid.PROMPTS, work, max_new_tokens=hybrid.STEPS, ignore_eos=True) for work in works]

    def mixed(rt: Runtime) -> list[list[Output]]:
        with rt:
            outs, steps = zip(*(hybrid.passes(rt, work, monkeypatch) for work in works), strict=True)
        assert all(sum({"prompt", "decode"} <= set(step) for step in some) >= 5 for some in steps)
        return list(outs)

    truth, yardstick = plain(engine("float32")), plain(engine("bfloat16"))
    tapped = mixed(adapters.load(path, backend="taps", taps=taps, **half))
    eager = mixed(adapters.load(path, **half))

    def furthest(runs: list[list[Output]], name: str) -> float:
        pairs = [pair for run, right in zip(runs, truth, strict=True) for pair in zip(run, right, strict=True)]
        assert all(a.token_ids == b.token_ids for a, b in pairs)
        return max(error(a.cat(name).float(), b.cat(name)) for a, b in pairs)

    for name in truth[0][0].saves:
        allowed = 2.5 * furthest(yardstick, name)
        assert furthest(tapped, name) <= allowed, name
        assert furthest(eager, name) <= allowed, name
