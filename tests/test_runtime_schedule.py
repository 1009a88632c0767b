"""What vLLM's scheduler does behind a request's back: chunked prefill, the prefix cache, preemption, aborts."""

# ruff: noqa: PT012 (that an error comes out of a whole body is what is tested)

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from adapters.errors import NeverRanError
from adapters.recompute import Written, replayed
from adapters.runtime import Output, Runtime
from tests.engines import assert_clean, booted, capture, in_turn, prompts, run, same, vllm, worst

pytestmark = pytest.mark.engine

LONG = prompts(3, shortest=200, longest=203)
POINTS = [("embed",), ("resid_post", 1), ("z", 2), ("sampled",)]
TOLERANCE = 2e-5


@pytest.fixture
def plain() -> Iterator[Runtime]:
    runtime = booted("vllm")
    yield runtime
    assert_clean(runtime)


@pytest.fixture
def chunked() -> Iterator[Runtime]:
    """64 tokens a pass, and a prefix cache in blocks of 32."""
    runtime = vllm(max_num_batched_tokens=64, enable_prefix_caching=True, block_size=32)
    yield runtime
    assert_clean(runtime)


@pytest.fixture
def tight() -> Iterator[Runtime]:
    """A key-value cache of 13 blocks of 32: not enough for eight requests of 80 tokens."""
    runtime = vllm(block_size=32, num_gpu_blocks_override=14, max_model_len=256, disable_log_stats=False)
    yield runtime
    assert_clean(runtime)


def shapes(m: Any) -> None:
    m.save("rows", m.tokens)
    m.save("prompt", m.is_prompt)
    m.save("draws", m.draws)
    m.save("positions", m.positions)


# ---- chunked prefill


def test_a_prompt_in_chunks_is_the_prompt(chunked: Runtime, plain: Runtime) -> None:
    """case 6."""
    got = run(chunked, LONG[:1], in_turn(shapes, capture(*POINTS)))[0]
    wanted = run(plain, LONG[:1], in_turn(shapes, capture(*POINTS)))[0]
    n = len(LONG[0])
    assert got.saves["rows"] == [64, 64, 64, n - 192, 1, 1, 1]
    assert got.saves["draws"] == [False, False, False, True, True, True, True]
    assert got.saves["prompt"] == [True] * 4 + [False] * 3
    assert got.cat("positions").tolist() == list(range(n + 3))
    assert got.token_ids == wanted.token_ids
    for name, *layer in POINTS:
        key = ".".join(map(str, (name, *layer)))
        assert torch.allclose(got.cat(key), wanted.cat(key), rtol=1e-3, atol=1e-5)


def test_chunks_of_several_requests_at_once(chunked: Runtime, plain: Runtime) -> None:
    ids = [*LONG, *prompts(5)]
    for got, wanted in zip(run(chunked, ids, capture(*POINTS)), run(plain, ids, capture(*POINTS)), strict=True):
        assert got.token_ids == wanted.token_ids
        assert worst(got, wanted) < TOLERANCE


def test_only_the_pass_that_draws_has_logits(chunked: Runtime) -> None:
    """case 6: Reading them in an early chunk ends the function there, and no error is made of it."""

    def fn(m: Any) -> None:
        m.save("started", m.step)
        try:
            m.save("logits", m.logits)
        finally:
            m.save("unwound", m.step)
        m.save("token", m.sampled)

    out = run(chunked, LONG, fn)
    for o in out:
        assert len(o.saves["logits"]) == len(o.saves["token"]) == 4
        assert len(o.saves["started"]) == len(o.saves["unwound"]) > 4


def test_edits_in_chunks_land_where_they_would(chunked: Runtime, plain: Runtime) -> None:
    def fn(m: Any) -> None:
        m.resid_post[0][(m.positions == 70) | (m.positions == 201)] += 2.0
        m.save("post", m.resid_post[2])

    for got, wanted in zip(run(chunked, LONG, fn), run(plain, LONG, fn), strict=True):
        assert got.token_ids == wanted.token_ids
        assert worst(got, wanted) < TOLERANCE


def test_a_trace_of_a_chunked_prompt(chunked: Runtime) -> None:
    """Its body stands in the first pass; the logits belong to a later one, which is an error and not a silent exit."""
    with (
        pytest.raises(NeverRanError, match="early chunk of a long prompt and draws no token"),
        chunked.trace(LONG[0]) as m,
    ):
        assert not m.draws
        m.logits  # noqa: B018
    rows, tokens = [], []
    for m in chunked.steps(LONG[0], max_new_tokens=2):
        rows.append(m.resid_post[1].clone())
        if m.draws:
            tokens.append(int(m.sampled))
    out = run(chunked, LONG[:1], capture(("resid_post", 1)), max_new_tokens=2)[0]
    assert torch.equal(torch.cat(rows), out.cat("resid_post.1"))
    assert tuple(tokens) == out.token_ids


def test_stopping_and_failing_in_an_early_chunk(chunked: Runtime) -> None:
    def stops(m: Any) -> None:
        m.save("rows", m.tokens)
        m.stop()

    def fails(m: Any) -> None:
        if m.step == 1:
            raise ValueError("in the second chunk")

    outs = run(chunked, LONG, [stops, fails, None], on_error="return")
    assert outs[0].token_ids == () and outs[0].stopped and outs[0].saves["rows"] == [64]  # noqa: PT018
    assert outs[1].token_ids == () and isinstance(outs[1].error, ValueError)  # noqa: PT018
    assert len(outs[2].token_ids) == 4


# ---- prefix cache


def hits(runtime: Runtime) -> int:
    """Tokens of this request that were not computed, by the rows of a request without work beside it."""
    seen: list[int] = []
    runner = runtime.engine.host.runner  # type: ignore[attr-defined]
    forward = runner._model_forward

    def count(*args: Any, **kwargs: Any) -> Any:
        seen.append(int(runner.query_start_loc.np[runner.input_batch.num_reqs]))
        return forward(*args, **kwargs)

    runner._model_forward = count
    try:
        run(runtime, [LONG[1]], max_new_tokens=1)
    finally:
        del runner._model_forward
    return len(LONG[1]) - sum(seen)


def test_cold_and_warm_are_the_same_and_others_keep_their_hits(chunked: Runtime) -> None:
    """case 8."""
    engine: Any = chunked.engine
    engine.core.reset_prefix_cache()
    assert hits(chunked) == 0
    assert hits(chunked) == 192
    for _ in range(3):
        out = run(chunked, [LONG[1]], in_turn(shapes, capture(*POINTS)))[0]
        assert out.cat("positions").tolist() == list(range(len(LONG[1]) + 3))
    assert hits(chunked) == 192
    engine.core.reset_prefix_cache()
    same(run(chunked, [LONG[1]], in_turn(shapes, capture(*POINTS))), [out])
    assert hits(chunked) == 0  # what carries work never fills the cache for others


def test_an_edit_never_reaches_another_request_through_the_cache(chunked: Runtime) -> None:
    """case 8."""
    watch = capture(("resid_post", 2), ("logits",))
    engine: Any = chunked.engine
    engine.core.reset_prefix_cache()

    def edit(m: Any) -> None:
        m.resid_post[0][m.positions < 40] += 5.0
        watch(m)

    def only_draws(m: Any) -> None:
        if m.draws:
            m.save("logits", m.logits)

    cold = run(chunked, [LONG[1]], only_draws)
    edited = run(chunked, [LONG[1]], edit)
    same(run(chunked, [LONG[1]], edit), edited)
    warm = run(chunked, [LONG[1]])
    assert warm[0].token_ids == cold[0].token_ids
    same(run(chunked, [LONG[1]], only_draws), cold)
    assert edited[0].token_ids != cold[0].token_ids
    # At once: the plain one must not be fed by the edited one beside it, which has the same prompt.
    beside = run(chunked, [LONG[1]] * 3, [edit, None, edit])
    assert beside[1].token_ids == cold[0].token_ids
    assert beside[0].token_ids == beside[2].token_ids == edited[0].token_ids


# ---- preemption

EIGHT = prompts(8, 28, 34)


def preemptions(runtime: Runtime) -> float:
    engine: Any = runtime.engine
    return sum(m.value for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions")


def compare(tight: Runtime, plain: Runtime, fn: Any, new: int = 50) -> list[Output]:
    """The same on an engine that has to give up requests and compute them again, and on one that has not."""
    before = preemptions(tight)
    got = run(tight, EIGHT, fn, max_new_tokens=new)
    assert preemptions(tight) > before
    wanted = run(plain, EIGHT, fn, max_new_tokens=new)
    for a, b in zip(got, wanted, strict=True):
        assert a.token_ids == b.token_ids
        assert [len(e) for e in a.saves.values()] == [len(e) for e in b.saves.values()]
        assert worst(a, b) < TOLERANCE
    return got


def test_every_position_is_saved_once_and_in_order(tight: Runtime, plain: Runtime) -> None:
    """case 64."""
    for out in compare(tight, plain, in_turn(lambda m: m.save("positions", m.positions), capture(*POINTS))):
        assert out.cat("positions").tolist() == list(range(len(out.prompt_token_ids) + 49))


def test_edits_are_made_again_on_what_is_computed_again(tight: Runtime, plain: Runtime) -> None:
    """Edits that depend on the step, on state and on chance: none can be had by calling the function again."""

    def fn(m: Any) -> None:
        generator = m.state.setdefault("chance", torch.Generator().manual_seed(len(m.live.saves) + 5))
        if m.step % 3 == 0:
            m.resid_post[0] += torch.randn(m.tokens, 128, generator=generator)
        m.k[1][:, 0] *= 1.0 + 0.1 * m.state.get("calls", 0)
        m.at("model.layers.1.mlp").output *= 1.5
        m.state["calls"] = m.state.get("calls", 0) + 1
        m.save("post", m.resid_post[2])
        m.save("calls", m.state["calls"])

    for out in compare(tight, plain, fn):
        assert out.saves["calls"] == list(range(1, 51))


def test_forced_tokens_stay_forced(tight: Runtime, plain: Runtime) -> None:
    def fn(m: Any) -> None:
        m.save("embed", m.embed)
        m.sampled[:] = 5 + (m.step * 7) % 500

    for out in compare(tight, plain, fn):
        assert out.token_ids == tuple(5 + (i * 7) % 500 for i in range(50))


def test_composed_interventions_are_made_again_together(tight: Runtime, plain: Runtime) -> None:
    for runtime in (tight, plain):
        runtime.install(lambda m: m.resid_post[1].mul_(0.5), name="half")
    try:
        compare(tight, plain, lambda m: (m.resid_post[1].add_(1.0), m.save("post", m.resid_post[2])))
    finally:
        for runtime in (tight, plain):
            runtime.remove("half")


def test_writes_are_kept_only_where_they_may_be_needed_again(tight: Runtime, plain: Runtime) -> None:
    kept: dict[str, Any] = {}

    def fn(m: Any) -> None:
        m.resid_post[1] += 1
        m.logits  # noqa: B018
        kept["written"] = m.live.written

    run(plain, EIGHT[:1], fn)
    assert kept["written"] is None
    run(tight, EIGHT[:1], fn)
    assert [(w.first, w.tokens) for w in kept["written"]] == [
        (0, len(EIGHT[0])),
        *((len(EIGHT[0]) + i, 1) for i in range(3)),
    ]


def test_which_writes_a_pass_makes_again() -> None:
    plain: Any = booted("vllm")
    points = plain.engine.points
    a, logits = points.at("resid_post", 1), points.at("logits")
    value = torch.zeros(1)
    written = [
        Written(a, 0, 4, value),
        Written(logits, 0, 4, value),
        Written(a, 4, 1, value),
        Written(logits, 4, 1, value),
    ]
    assert len(replayed(written, 0, 5, draws=False)) == 1
    assert len(replayed(written, 0, 5, draws=True)) == 2
    assert len(replayed(written, 4, 1, draws=False)) == 1
    assert replayed(written, 5, 3, draws=True) == []
    assert replayed([], 0, 5, draws=True) == []


# ---- aborts


def test_ctrl_c_in_the_middle_of_a_stream(plain: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it strikes inside of the engine: the requests are taken back and the engine serves on."""
    engine: Any = plain.engine
    wanted = run(plain, EIGHT, capture(("resid_post", 1)))
    step, count = engine.core.step, iter(range(100))

    def struck() -> Any:
        if next(count) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine.core, "step", struck)
    with pytest.raises(KeyboardInterrupt):
        run(plain, EIGHT, capture(("resid_post", 1)), max_new_tokens=100)
    monkeypatch.undo()
    assert_clean(plain)
    assert not engine.core.has_unfinished_requests()
    same(run(plain, EIGHT, capture(("resid_post", 1))), wanted)


def test_a_request_that_cannot_be_submitted_takes_back_the_others(
    plain: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = plain.engine
    add, count = engine.core.add_request, iter(range(100))

    def fails(*args: Any) -> Any:
        if next(count) == 3:
            raise ValueError("no more")
        return add(*args)

    monkeypatch.setattr(engine.core, "add_request", fails)
    with pytest.raises(ValueError, match="no more"):
        run(plain, EIGHT, capture(("resid_post", 1)))
    monkeypatch.undo()
    assert_clean(plain)
    assert not engine.core.has_unfinished_requests()


def test_others_requests_on_the_same_engine_go_on(plain: Runtime) -> None:
    """A request that somebody else gave to the underlying engine is served along with ours."""
    from vllm import SamplingParams

    engine: Any = plain.engine
    wanted = run(plain, EIGHT, capture(("resid_post", 1)))
    theirs = engine.core.add_request(
        "theirs", {"prompt_token_ids": EIGHT[0]}, SamplingParams(max_tokens=3, detokenize=False)
    )
    got = run(plain, EIGHT, capture(("resid_post", 1)))
    assert [o.token_ids for o in got] == [o.token_ids for o in wanted]
    assert not engine.core.has_unfinished_requests()
    assert theirs.startswith("theirs")
