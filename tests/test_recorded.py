"""Passes in which all requests capture the same: whole tensors are kept, and every request gets its own rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adapters.declared import Capture
from adapters.errors import (
    BadCaptureError,
    LoadError,
    NeverRanError,
    NotDeclaredError,
    NotInRowsError,
    UnknownPointError,
)
from adapters.interleave import Interleaver
from adapters.layouts import shaped
from adapters.live import Job
from adapters.points import FAMILIES, Dimensions, Points
from adapters.recorded import Recorder
from adapters.rows import Batch, Part, Slab
from adapters.runtime import Runtime
from adapters.saves import copied
from tests.engines import by_hand, same_entries, tapped

DECLARED = ["resid_post.*", "resid_pre.1", "z.1", "q.0", "mlp_in.2", "mlp_act.1"]
EVERYTHING = Capture(*DECLARED)
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17]]


pytestmark = pytest.mark.timeout(600)  # a compiled engine may take minutes to boot


compiled = tapped(DECLARED)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the recorder took each pass, in order."""
    took: list[bool] = []
    honest = Recorder.begin

    def begin(self: Recorder, rows: Any, jobs: Any) -> bool:
        took.append(honest(self, rows, jobs))
        return took[-1]

    monkeypatch.setattr(Recorder, "begin", begin)
    return took


# ---- first of all: nothing has been recorded yet


def test_bodies_of_a_trace_and_of_steps_are_served(rt: Runtime, served: list[bool]) -> None:
    with rt.trace(PROMPTS[0]) as m:
        found = m.resid_post[1].clone()
    assert found.shape == (4, 128)
    assert [tuple(m.resid_post[0].shape) for m in rt.steps(PROMPTS[0], max_new_tokens=2)] == [(4, 128), (1, 128)]
    assert True not in served


# ---- against the same work as a function


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
def test_every_point_is_what_a_function_reads(rt: Runtime, served: list[bool], prompts: list[list[int]]) -> None:
    found = rt.run(prompts, EVERYTHING, max_new_tokens=4, ignore_eos=True)
    assert served.count(True) >= 4
    assert False not in served
    served.clear()
    same_entries(found, rt.run(prompts, by_hand(EVERYTHING), max_new_tokens=4, ignore_eos=True))
    assert True not in served
    for out, prompt in zip(found, prompts, strict=True):
        assert out.cat("resid_post.1").shape == (len(prompt) + 3, 128)
        assert out.cat("z.1").shape == (len(prompt) + 3, 4, 32)


def test_what_is_handed_out_is_ordinary_and_each_requests_own(rt: Runtime) -> None:
    a, b = rt.run([PROMPTS[0], PROMPTS[0]], Capture("resid_post.1"), max_new_tokens=3, ignore_eos=True)
    entries = a.saves["resid_post.1"]
    assert [tuple(e.shape) for e in entries] == [(4, 128), (1, 128), (1, 128)]
    assert not any(e.is_inference() for e in entries)
    entries[0].clone().requires_grad_().sum().backward()
    before = b.cat("resid_post.1").clone()
    for e in entries:
        e.zero_()
    assert torch.equal(b.cat("resid_post.1"), before)
    assert entries[0].untyped_storage().nbytes() == entries[0].nbytes, "no more is kept than its own rows"


def test_a_neighbour_without_captures_sends_the_pass_to_the_interleaver(rt: Runtime, served: list[bool]) -> None:
    alone = rt.run(PROMPTS[0], EVERYTHING, max_new_tokens=5, ignore_eos=True)
    served.clear()
    mixed = rt.run(PROMPTS[:2], [EVERYTHING, None], max_new_tokens=5, ignore_eos=True)
    assert True not in served
    assert mixed[0].saves.keys() == alone[0].saves.keys()
    for name in mixed[0].saves:
        torch.testing.assert_close(mixed[0].cat(name), alone[0].cat(name), atol=1e-4, rtol=1e-4)
    assert mixed[1].saves == {}


def test_a_request_may_go_from_one_way_of_serving_to_the_other(rt: Runtime, served: list[bool]) -> None:
    def leaves(m: Any) -> None:
        m.save("x", m.resid_post[0])
        if m.step == 1:
            m.stop()

    outs = rt.run(PROMPTS[:2], [EVERYTHING, leaves], max_new_tokens=6, ignore_eos=True)
    functions = rt.run(PROMPTS[:2], [by_hand(EVERYTHING), leaves], max_new_tokens=6, ignore_eos=True)
    # `transformers` computes the rows of a request that has ended along with the others'.
    assert (True in served) == (type(rt.engine).__name__ == "VLLMEngine")
    assert False in served
    same_entries(outs, functions)
    assert [len(out.token_ids) for out in outs] == [6, 2]


def test_requests_that_capture_different_points_are_served_one_by_one(rt: Runtime, served: list[bool]) -> None:
    fns: list[Any] = [Capture("resid_post.0"), Capture("resid_post.1"), Capture("resid_post.0")]
    outs = rt.run(PROMPTS, fns, max_new_tokens=2, ignore_eos=True)
    assert True not in served
    assert [list(out.saves) for out in outs] == [["resid_post.0"], ["resid_post.1"], ["resid_post.0"]]
    served.clear()
    again = [rt.run(p, fn, max_new_tokens=2, ignore_eos=True)[0] for p, fn in zip(PROMPTS, fns, strict=True)]
    assert False not in served
    assert [list(out.saves) for out in again] == [["resid_post.0"], ["resid_post.1"], ["resid_post.0"]]


@pytest.mark.parametrize("capture", [Capture("logits"), Capture("resid_post.1", "sampled")])
def test_what_lies_outside_of_the_graph_is_not_recorded(rt: Runtime, served: list[bool], capture: Capture) -> None:
    found = rt.run(PROMPTS[0], capture, max_new_tokens=2, ignore_eos=True)
    assert True not in served
    same_entries(found, rt.run(PROMPTS[0], by_hand(capture), max_new_tokens=2, ignore_eos=True))


def test_an_installed_capture_is_recorded_and_a_second_one_is_not(rt: Runtime, served: list[bool]) -> None:
    rt.install(Capture("resid_post.1"), name="capture")
    try:
        assert list(rt.run(PROMPTS[0], max_new_tokens=2, ignore_eos=True)[0].saves) == ["resid_post.1"]
        assert False not in served
        served.clear()
        both = rt.run(PROMPTS[0], Capture("z.1"), max_new_tokens=2, ignore_eos=True)[0]
    finally:
        rt.remove("capture")
    assert True not in served
    assert sorted(both.saves) == ["resid_post.1", "z.1"]


def test_check_finite_looks_at_every_read(rt: Runtime, served: list[bool]) -> None:
    rt.run(PROMPTS[0], Capture("resid_post.1"), max_new_tokens=2, ignore_eos=True, check_finite=True)
    assert True not in served


# ---- what goes wrong is its own request's error


def test_an_undeclared_and_an_unknown_point_are_refused_as_ever(rt: Runtime, served: list[bool]) -> None:
    with pytest.raises(NotDeclaredError, match=r"Capture: attn_out\[1\] has no tap.*'attn_out.1'\]\) has one"):
        rt.run(PROMPTS[0], Capture("resid_post.1", "attn_out.1"), max_new_tokens=2, ignore_eos=True)
    assert served == [], "it is refused before anything runs"
    with pytest.raises((UnknownPointError, IndexError)):
        rt.run(PROMPTS[0], Capture("resid_post.99"), max_new_tokens=2, ignore_eos=True)
    assert rt.run(PROMPTS[0], Capture("resid_post.1"), max_new_tokens=2, ignore_eos=True)[0].error is None


class Host:
    """An engine of two locations, by hand."""

    def __init__(self) -> None:
        self.points = Points(FAMILIES["llama"], "vllm", Dimensions(3, 8, 2, 1, 4, 16, 50))
        self.attached: list[Any] = []
        self.il = Interleaver(self)  # type: ignore[arg-type]
        self.il.recorder = self.recorder = Recorder(self.il)

    def attach(self, key: Any) -> None:
        self.attached.append(key)

    def pass_of(self, lives: list[Any], starts: list[int], first: int, give: dict[str, torch.Tensor]) -> None:
        jobs = [Job(live, i, first, starts[i + 1] - starts[i], first == 0) for i, live in enumerate(lives)]
        self.il.begin(Slab(starts), jobs)
        kept = self.recorder.kept
        assert kept is not None
        for name, x in give.items():
            kept[self.points.parse(name).key] = x
        self.il.end()


def test_a_tap_that_is_not_visited_is_an_error_and_no_empty_capture() -> None:
    host = Host()
    live = host.il.live("a", [Capture("resid_post.0", "resid_post.1")])
    host.pass_of([live], [0, 2], 0, {"resid_post.0": torch.ones(2, 8)})
    assert isinstance(live.error, NeverRanError)
    assert "model.layers.1" in str(live.error)
    assert "did not run" in str(live.error)
    assert live.spoilt == 1


def test_rows_that_cannot_be_told_apart_are_an_error_of_every_request() -> None:
    host = Host()
    lives = [host.il.live(name, [Capture("resid_post.0")]) for name in "ab"]
    host.pass_of(lives, [0, 2, 3], 0, {"resid_post.0": torch.ones(7, 8)})
    for live in lives:
        assert isinstance(live.error, NotInRowsError)
        assert "resid_post[0]" in str(live.error)
        assert "(7, 8)" in str(live.error)


def test_padding_rows_are_nobodys() -> None:
    host = Host()
    lives = [host.il.live(name, [Capture("resid_post.0")]) for name in "ab"]
    jobs = [Job(lives[0], 0, 0, 2, True), Job(lives[1], 1, 0, 1, True)]
    host.il.begin(Slab([0, 2, 3], 4), jobs)
    assert host.recorder.kept is not None
    host.recorder.kept[host.points.parse("resid_post.0").key] = torch.arange(32.0).view(4, 8)
    host.il.end()
    assert [live.saves["resid_post.0"][0][:, 0].tolist() for live in lives] == [[0.0, 8.0], [16.0]]


def test_taps_are_attached_for_new_requests_only() -> None:
    host = Host()
    live = host.il.live("a", [Capture("resid_post.0")])
    host.pass_of([live], [0, 2], 0, {"resid_post.0": torch.ones(2, 8)})
    host.pass_of([live], [0, 1], 2, {"resid_post.0": torch.ones(1, 8)})
    assert len(host.attached) == 1
    other = host.il.live("b", [Capture("resid_post.0")])
    host.pass_of([other], [0, 2], 0, {"resid_post.0": torch.ones(2, 8)})
    assert len(host.attached) == 2
    assert (live.seen, live.drawn, live.passes[0].step) == (3, 2, 1)


def test_a_batchs_tensor_does_not_live_as_long_as_its_requests() -> None:
    host = Host()
    lives = [host.il.live(name, [Capture("resid_post.0")]) for name in "ab"]
    host.pass_of(lives, [0, 500, 501], 0, {"resid_post.0": torch.ones(501, 8)})
    assert lives[1].saves["resid_post.0"][0].untyped_storage().nbytes() == 8 * 4


def test_a_pass_that_draws_no_token_counts_none() -> None:
    host = Host()
    live = host.il.live("a", [Capture("resid_post.0")])
    host.il.begin(Slab([0, 2]), [Job(live, 0, 0, 2, True, draws=False)])
    host.il.end()  # and its tap was dead
    assert isinstance(live.error, NeverRanError)
    assert (live.seen, live.drawn, live.spoilt) == (2, 0, 0)


@torch.no_grad()  # as an engine's forward
def test_a_pass_that_died_after_its_forward_does_not_swallow_the_next() -> None:
    host = Host()
    dead = host.il.live("a", [Capture("resid_post.0")])
    host.il.begin(Slab([0, 2]), [Job(dead, 0, 0, 2, True)])
    dead.close()
    seen = []
    live = host.il.live("b", [lambda m: seen.append(m.resid_post[0].clone())])
    host.il.begin(Slab([0, 2]), [Job(live, 0, 0, 2, True)])
    assert host.recorder.kept is None
    host.il.visit(host.points.parse("resid_post.0").key, (torch.ones(2, 8), torch.ones(2, 8)))
    host.il.end()
    assert live.error is None
    assert seen[0].tolist() == [[2.0] * 8] * 2


@pytest.mark.parametrize("point", ["resid_post.0", "q.0"])
def test_an_error_in_handing_out_is_its_requests(monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    honest = Slab.copy

    def full(self: Slab, x: torch.Tensor, i: int) -> torch.Tensor:
        if i == 0:
            raise RuntimeError("out of memory")
        return honest(self, x, i)

    host = Host()
    lives = [host.il.live(name, [Capture(point)]) for name in "ab"]
    monkeypatch.setattr(Slab, "copy", full)
    host.pass_of(lives, [0, 2, 3], 0, {point: torch.ones(3, 16)})
    assert "out of memory" in str(lives[0].error)
    assert any("was handed out (request a, step 0)" in note for note in lives[0].error.__notes__)  # type: ignore[union-attr]
    assert lives[1].error is None
    lives[0].close()
    assert lives[0].saves == {}
    assert len(lives[1].saves[point]) == 1


@torch.inference_mode()  # as an engine's forward
@pytest.mark.parametrize("point", ["resid_post.0", "q.0", "v.0"])
def test_a_batchs_rows_are_ordinary_as_soon_as_they_are_handed_out(point: str) -> None:
    """And are copied only once: the request has nothing left to be made ordinary."""
    host = Host()
    lives = [host.il.live(name, [Capture(point)]) for name in "ab"]
    whole = torch.arange(48.0).view(3, 16)
    host.pass_of(lives, [0, 2, 3], 0, {point: whole})
    loc = host.points.parse(point)
    for live, rows in zip(lives, (whole[:2], whole[2:]), strict=True):
        entry = live.saves[point][0]
        assert torch.equal(entry, shaped(rows, loc))
        assert not entry.is_inference()
        assert entry.untyped_storage().nbytes() == entry.nbytes
        live.close()
        assert live.saves[point][0] is entry
    host.pass_of([alone := host.il.live("c", [Capture(point)])], [0, 3], 0, {point: whole})
    assert not alone.saves[point][0].is_inference()


def test_an_error_in_handing_out_to_one_alone_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Slab, x: torch.Tensor, i: int) -> torch.Tensor:
        raise RuntimeError("out of memory")

    host = Host()
    live = host.il.live("a", [Capture("resid_post.0")])
    monkeypatch.setattr(Slab, "copy", full)
    host.pass_of([live], [0, 2], 0, {"resid_post.0": torch.ones(2, 8)})
    assert "out of memory" in str(live.error)
    live.close()
    assert live.saves == {}


def test_a_tap_that_cannot_be_armed_is_left_to_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(key: Any) -> None:
        raise LoadError("the memory of this model has been moved")

    host = Host()
    monkeypatch.setattr(host, "attach", moved)
    assert not host.recorder.begin(Slab([0, 2]), [Job(host.il.live("a", [Capture("resid_post.0")]), 0, 0, 2, True)])


def test_a_pass_that_dies_leaves_nothing_behind() -> None:
    host = Host()
    live = host.il.live("a", [Capture("resid_post.0")])
    host.il.begin(Slab([0, 2]), [Job(live, 0, 0, 2, True)])
    host.il.abandon()
    assert host.recorder.kept is None
    assert live.saves == {}


@pytest.mark.parametrize(
    "change",
    [
        {"check_finite": True},
        {"seen": 5},  # the engine computes positions again
    ],
)
def test_requests_that_need_more_than_a_copy_are_left_to_visits(change: dict[str, Any]) -> None:
    host = Host()
    live = host.il.live("a", [Capture("resid_post.0")])
    for name, value in change.items():
        setattr(live, name, value)
    assert not host.recorder.begin(Slab([0, 2]), [Job(live, 0, 0, 2, True)])
    assert host.recorder.kept is None


def test_no_requests_functions_subclasses_and_gradients_are_left_to_visits() -> None:
    class Mine(Capture):
        pass

    host = Host()
    assert not host.recorder.begin(Slab([0]), [])
    for fn in (Mine("resid_post.0"), by_hand(Capture("resid_post.0"))):
        assert not host.recorder.begin(Slab([0, 2]), [Job(host.il.live("a", [fn]), 0, 0, 2, True)])
    live = host.il.live("a", [Capture("resid_post.0")])
    host.il.grad = True
    assert not host.recorder.begin(Slab([0, 2]), [Job(live, 0, 0, 2, True)])
    host.il.grad = False
    assert host.recorder.begin(Slab([0, 2]), [Job(live, 0, 0, 2, True)])


# ---- what becomes of it when the request is over


def test_closing_checks_what_was_recorded_as_any_other_capture() -> None:
    host = Host()
    for bad, says in ((torch.zeros(2, 8), "zeros"), (torch.full((2, 8), float("nan")), "NaN")):
        live = host.il.live("a", [Capture("resid_post.0")])
        host.pass_of([live], [0, 2], 0, {"resid_post.0": bad})
        live.close()
        assert isinstance(live.error, BadCaptureError)
        assert says in str(live.error)


def test_what_was_made_in_inference_mode_becomes_ordinary_each_by_itself() -> None:
    with torch.inference_mode():
        batch = torch.randn(6, 4)
        saves = {"a": [batch[:3], batch[3:4]], "b": [torch.randn(2, 4)], "none": [], "heads": [torch.randn(0, 2, 2)]}
    expected = {name: [e.clone() for e in entries] for name, entries in saves.items()}
    saves = copied(saves)
    assert list(saves) == list(expected)
    entries = [e for name in saves for e in saves[name]]
    assert all(torch.equal(e, f) for name in saves for e, f in zip(saves[name], expected[name], strict=True))
    assert not any(e.is_inference() or e._is_view() for e in entries)
    assert [e.untyped_storage().nbytes() for e in entries] == [e.nbytes for e in entries]
    weight = torch.ones(4, requires_grad=True)
    saves["a"][0].mul_(weight).sum().backward()  # as an ordinary tensor may be
    assert torch.equal(weight.grad, expected["a"][0].sum(0))


def test_rows_say_how_many_requests_there_are() -> None:
    assert Slab([0, 3, 4]).size == Part(Slab([0, 3, 4]), 0, 1).size == 2
    assert Batch(3, 5, [0, 0, 2]).size == 3
