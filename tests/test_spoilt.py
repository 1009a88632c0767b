"""What one request spoils with NaN or infinity is its own: whoever has its part of the cache next reads none of it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.boot import load
from adapters.declared import Add
from adapters.errors import InterventionError
from adapters.runtime import Runtime
from harness.models import resolve
from tests.engines import LLAMA, VLLM, capture, prompts, relative, run, same

IDS = prompts(3, shortest=9)
# Few blocks, so that a few dozen requests have every one of them; long prompts come in chunks.
SMALL = {**VLLM, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 64}
KEEP = capture(("resid_post", 1), ("z", 2), ("logits",))
LONG = prompts(1, shortest=150, longest=150)


def small(**more: Any) -> Runtime:
    given: dict[str, Any] = {**SMALL, "dtype": "float32", **more}
    return load(resolve(LLAMA), engine="vllm", **given)


KINDS = {
    "hf": lambda: load(resolve(LLAMA), engine="hf", dtype="float32", threads=1),
    "eager": small,
    "caching": lambda: small(enable_prefix_caching=True),
    "taps": lambda: small(backend="taps", taps=["resid_post.*", "z.2"], buffers=["resid_post.0"]),
}


@pytest.fixture(
    scope="module",
    params=[k if k.startswith("hf") else pytest.param(k, marks=pytest.mark.engine) for k in KINDS],
)
def rt(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with KINDS[request.param]() as runtime:
        yield runtime


def broken(value: float) -> Any:
    def fn(m: Any) -> None:
        m.resid_post[0] += value

    return fn


def raises(m: Any) -> None:
    """In the first chunk of a long prompt, before any row of it has come out of the model."""
    m.resid_post[0] += torch.nan
    m.resid_post[1]
    raise ZeroDivisionError


SPOILERS: dict[str, Any] = {
    "nan": broken(torch.nan),
    "infinity": broken(torch.inf),
    "stated": Add("resid_post.0", torch.full((128,), torch.nan)),
    "raises": raises,
}


@pytest.mark.parametrize("how", SPOILERS)
def test_nobody_after_it_reads_what_a_request_spoilt(rt: Runtime, how: str) -> None:
    wanted = run(rt, IDS, KEEP)
    spoiler = SPOILERS[how]
    for ids in (LONG[0], IDS[0]):
        try:
            spoilt, _, beside = run(rt, [ids, IDS[1], IDS[2]], [spoiler, None, KEEP], max_new_tokens=3)
        except ZeroDivisionError:
            assert how == "raises"
        else:
            assert len(spoilt.token_ids) == 3
            assert relative(beside.cat("logits"), wanted[2].cat("logits")[:3]) < 1e-4
    for _ in range(12):
        same(run(rt, IDS, KEEP), wanted)
    host: Any = getattr(rt.engine, "host", None)
    assert host is None or not host.to_wipe


def test_a_request_reads_what_it_spoilt_itself(rt: Runtime) -> None:
    """It is wiped when its owner has gone: a number that came of it is never made to look right."""

    def fn(m: Any) -> None:
        if m.step == 0:
            m.resid_post[0][0] = torch.nan
        m.save("logits", m.logits)

    (out,) = run(rt, IDS[:1], fn)
    assert all(bool(x.isnan().all()) for x in out.saves["logits"])
    with pytest.raises(InterventionError, match="NaN or infinity"):
        run(rt, IDS[:1], lambda m: broken(torch.nan)(m), check_finite=True)


@pytest.mark.engine
def test_the_cache_of_a_request_that_is_put_off_is_wiped_too() -> None:
    """Its blocks are given to others at once, and it computes them again later."""
    with small() as rt:
        host: Any = rt.engine.host  # type: ignore[attr-defined]
        run(rt, LONG, KEEP, max_new_tokens=1)
        seen: list[tuple[bool, bool]] = []

        def fn(m: Any) -> None:
            if m.step == 0:
                m.resid_post[0] += torch.nan
            elif m.step == 4:
                step = SimpleNamespace(finished_req_ids=set(), preempted_req_ids=set(host.live), scheduled_new_reqs=[])
                before = odd()
                host.scheduled(step)
                seen.append((before, odd()))

        def odd() -> bool:
            return any(bool(cache.isnan().any()) for cache in host.runner.kv_caches)

        run(rt, LONG, fn, max_new_tokens=4)
        assert seen == [(True, False)]


@pytest.mark.engine
def test_who_wrote_nothing_that_spoils_keeps_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wiping takes time, and so does looking: neither is for requests that read, and no wiping for ordinary edits."""
    from adapters.engines import vllm_worker

    wiped: list[str] = []
    looked: list[Any] = []
    monkeypatch.setattr(vllm_worker, "wipe", lambda runner, id: wiped.append(id))
    plain = vllm_worker.WorkerHost._look_for_spoilt
    monkeypatch.setattr(
        vllm_worker.WorkerHost,
        "_look_for_spoilt",
        lambda self, hidden, wrote: (looked.append(list(wrote)), plain(self, hidden, wrote)),
    )
    with small() as rt:
        run(rt, IDS, KEEP)
        assert not looked
        run(rt, IDS, [KEEP, broken(1.0), None], max_new_tokens=2)
        assert looked
        assert all(len(places) == 1 for places in looked)
        run(rt, IDS)
        assert not wiped
        run(rt, IDS, [KEEP, broken(torch.nan), None], max_new_tokens=2)
        run(rt, IDS)
        assert len(wiped) == 1
        assert not rt.engine.host.to_wipe  # type: ignore[attr-defined]
