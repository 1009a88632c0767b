"""`Capture` and `Add` without a greenlet: values, order and errors are those of the same work as a function."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from greenlet import GreenletExit

from adapters.declared import Add, Capture
from adapters.errors import InterventionError, NotInRowsError, WriteError
from adapters.points import FAMILIES, LOGITS_KEY, Dimensions, Points
from adapters.runtime import Runtime
from adapters.served import Served, served
from adapters.threads import Threads
from tests.engines import booted, by_hand, rt, same_entries, vllm

__all__ = ["rt"]

POINTS = Points(FAMILIES["llama"], "hf", Dimensions(3, 8, 2, 1, 4, 16, 50))
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17]]
EVERYTHING = Capture(
    "embed", "q.*", "k.*", "v.*", "z.*", "mlp_act.1", "resid_mid.*", "resid_post.*", "final_norm", "logits", "sampled"
)


# ---- against the same work as a function, on both engines


def test_every_point_is_what_a_function_reads(rt: Runtime) -> None:
    same_entries(
        rt.run(PROMPTS, EVERYTHING, max_new_tokens=3, ignore_eos=True),
        rt.run(PROMPTS, by_hand(EVERYTHING), max_new_tokens=3, ignore_eos=True),
    )
    same_entries(
        rt.run(PROMPTS[0], EVERYTHING, max_new_tokens=3, ignore_eos=True),
        rt.run(PROMPTS[0], by_hand(EVERYTHING), max_new_tokens=3, ignore_eos=True),
    )


@pytest.mark.parametrize(
    ("point", "width"), [("resid_post.1", (128,)), ("z.1", (4, 32)), ("v.0", (2, 32)), ("logits", (512,))]
)
def test_an_addition_lands_as_a_functions_does(rt: Runtime, point: str, width: tuple[int, ...]) -> None:
    add, watch = Add(point, torch.linspace(-1, 1, int(torch.Size(width).numel())).view(width), 3.0), Capture("logits")
    given = [add.then(watch) if not point.startswith("logits") else add, None, watch]
    hand = [[by_hand(add), by_hand(watch)] if not point.startswith("logits") else by_hand(add), None, by_hand(watch)]
    found = rt.run(PROMPTS, given, max_new_tokens=3, ignore_eos=True)
    expected = rt.run(PROMPTS, [_both(f) for f in hand], max_new_tokens=3, ignore_eos=True)
    same_entries(found, expected)
    plain = rt.run(PROMPTS, watch, max_new_tokens=3, ignore_eos=True)
    assert torch.equal(plain[2].cat("logits"), found[2].cat("logits"))
    if not point.startswith("logits"):
        assert not torch.equal(plain[0].saves["logits"][0], found[0].saves["logits"][0])


def _both(fns: Any) -> Any:
    """One function of several that wait for ever later points."""
    if not isinstance(fns, list):
        return fns

    def fn(m: Any) -> None:
        for each in fns:
            each(m)

    return fn


def test_installed_work_and_a_function_see_each_others_writes_in_order(rt: Runtime) -> None:
    one = torch.ones(128)

    def double(m: Any) -> None:
        m.resid_post[0] *= 2
        m.save("doubled", m.resid_post[0])

    before = rt.run(PROMPTS[1], Capture("resid_post.0"), max_new_tokens=1)[0].cat("resid_post.0")
    rt.install(Add("resid_post.0", one), name="add")
    rt.install(Capture("resid_post.0"), name="see")
    out = rt.run(PROMPTS[1], double, max_new_tokens=1)[0]
    rt.remove("add")
    rt.remove("see")
    torch.testing.assert_close(out.cat("resid_post.0"), before + 1)
    torch.testing.assert_close(out.cat("doubled"), (before + 1) * 2)


@pytest.mark.engine
def test_an_early_chunk_of_a_long_prompt_has_no_logits_and_all_of_its_rows() -> None:
    small = vllm(max_num_batched_tokens=16, enable_chunked_prefill=True)
    prompt = list(range(5, 45))
    out = small.run([prompt, PROMPTS[0]], Capture("resid_post.0", "logits"), max_new_tokens=2, ignore_eos=True)
    assert out[0].cat("resid_post.0").shape == (len(prompt) + 1, 128)
    assert len(out[0].saves["resid_post.0"]) > 2
    assert [tuple(e.shape) for e in out[0].saves["logits"]] == [(1, 512), (1, 512)]
    same_entries(
        out,
        small.run([prompt, PROMPTS[0]], by_hand(Capture("resid_post.0", "logits")), max_new_tokens=2, ignore_eos=True),
    )


def test_no_greenlet_is_made_for_stated_work(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Threads, hub: Any) -> Any:
        raise AssertionError("a greenlet")

    with monkeypatch.context() as patched:
        patched.setattr(Threads, "one", none)
        add = Add("resid_post.1", torch.ones(128))
        out = rt.run(PROMPTS, add.then(Capture("z.2")), max_new_tokens=2, ignore_eos=True)
        assert [o.cat("z.2").shape[0] for o in out] == [5, 3, 8]
        with pytest.raises(AssertionError, match="a greenlet"):
            rt.run(PROMPTS[0], lambda m: None, max_new_tokens=1)


def test_what_is_refused_ends_its_own_request_with_no_line_of_a_library(rt: Runtime) -> None:
    wrong = {
        "resid_pst.1": "resid_post",
        "resid_post.77": "layers 0 to 2",
        "router.1": "router",
    }
    for name, says in wrong.items():
        for stated in (Capture(name), Add(name, torch.ones(128))):
            out = rt.run(PROMPTS[:2], [stated, Capture("resid_post.1")], max_new_tokens=2, on_error="return")
            assert says in str(out[0].error)
            assert out[1].error is None
            assert out[1].cat("resid_post.1").shape == (3, 128)
    out = rt.run(PROMPTS[:2], [Add("resid_post.1", torch.ones(5)), None], max_new_tokens=2, on_error="return")
    assert isinstance(out[0].error, WriteError)
    assert ".py" not in str(out[0].error)  # the model called it, no line of the user's
    assert out[1].error is None


def test_autocast_is_refused_as_it_is_for_a_function() -> None:
    hf = booted("hf")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InterventionError, match="autocast"):
        hf.run(PROMPTS[0], Capture("resid_post.1"), max_new_tokens=1)


def test_a_capture_that_is_called_otherwise_is_called(rt: Runtime) -> None:
    class First(Capture):
        def __call__(self, m: Any) -> None:
            m.save("first", m.resid_post[0][:1])

    assert list(rt.run(PROMPTS[0], First("z.1"), max_new_tokens=1)[0].saves) == ["first"]


# ---- by itself


def fake(draws: bool = True, **live: Any) -> Any:
    """As much of a Pass as is looked at, and the keys that were asked for."""
    asked: list[Any] = []
    given = {"saves": {}, "as_read": {}, "wrote": False, "check_finite": False, "trail": None} | live
    il = SimpleNamespace(host=SimpleNamespace(attach=asked.append), grad=False)
    return SimpleNamespace(
        _il=il, _points=POINTS, draws=draws, live=SimpleNamespace(**given), fn=None, thread=None, _key=None, asked=asked
    )


def test_it_waits_for_one_place_at_a_time_in_the_models_order() -> None:
    done: list[Any] = []
    m = fake()
    places = Capture("logits", "resid_post.1", "z.0").places(POINTS)
    one = Served(places, lambda m, name, loc, payload: done.append((name, payload)))
    wanted = one.switch(m)
    assert wanted is not None
    assert (wanted.name, done) == ("z", [])
    assert str(one.switch("a")) == "resid_post[1]"
    assert str(one.switch("b")) == "logits"
    assert not one.dead
    assert one.switch("c") is None
    assert one.dead
    assert done == [("z.0", "a"), ("resid_post.1", "b"), ("logits", "c")]
    assert m.asked == [loc.key for _, loc in places]
    assert m._key == LOGITS_KEY


def test_the_next_pass_of_a_request_asks_the_engine_for_nothing_again() -> None:
    m = fake()
    done: list[str] = []
    m.thread = one = Served(Capture("z.0", "z.1").places(POINTS), lambda m, name, loc, payload: done.append(name))
    one.switch(m)
    one.throw(GreenletExit())  # a pass that was given up half way
    assert len(m.asked) == 1
    for _ in range(2):
        assert served(m) is one
        assert str(one.switch(m)) == "z[0]"
        assert not one.dead
        assert str(one.switch("x")) == "z[1]"
        assert one.switch("x") is None
    assert m.asked == [loc.key for _, loc in Capture("z.0", "z.1").places(POINTS)]
    assert done == ["z.0", "z.1"] * 2


def test_points_of_one_place_are_served_in_one_visit() -> None:
    fused = Points(FAMILIES["llama"], "vllm", Dimensions(3, 8, 2, 1, 4, 16, 50))
    places = Capture("q.0", "k.0", "v.0", "z.0").places(fused)
    assert len({loc.key for _, loc in places[:3]}) < 3
    done: list[str] = []
    m = fake()
    one = Served(places, lambda m, name, loc, payload: done.append(name))
    one.switch(m)
    visits = 0
    while not one.dead:
        one.switch("x")
        visits += 1
    assert done == [name for name, _ in places]
    assert visits == len(m.asked) == len({loc.key for _, loc in places})


def test_a_pass_that_draws_nothing_ends_before_the_logits() -> None:
    m = fake(draws=False)
    one = Served(Capture("logits").places(POINTS), lambda *_: pytest.fail("nobody's logits"))
    assert one.switch(m) is None
    assert one.dead
    assert m.asked == []


def test_what_ends_a_function_ends_it() -> None:
    m = fake()
    one = Served(Capture("z.0").places(POINTS), lambda *_: pytest.fail("it has ended"))
    one.switch(m)
    one.throw(GreenletExit())
    assert one.dead
    two = Served(Capture("z.0").places(POINTS), lambda *_: pytest.fail("it has ended"))
    two.switch(m)
    with pytest.raises(InterventionError, match="never ran"):
        two.throw(InterventionError("never ran"))
    assert two.dead


def test_rows_that_cannot_be_told_apart_name_the_point() -> None:
    def odd(*_: Any) -> None:
        raise NotInRowsError("shape (3, 3)")

    one, m = Served(Capture("z.1").places(POINTS), odd), fake()
    one.switch(m)
    m._payload = "a whole batch"
    with pytest.raises(NotInRowsError, match=r"^z\[1\]: shape \(3, 3\)$"):
        one.switch("x")
    assert one.dead
    assert one._m is None
    assert m._payload is None


@pytest.mark.parametrize(
    ("live", "grad", "fn"),
    [
        ({"check_finite": True}, False, Capture("z.0")),
        ({"trail": object()}, False, Capture("z.0")),
        ({}, True, Capture("z.0")),
        ({}, False, lambda m: None),
        ({}, False, Capture("z.0").then(Capture("z.1"))),
    ],
)
def test_where_every_read_is_looked_at_a_greenlet_does_it(live: dict[str, Any], grad: bool, fn: Any) -> None:
    m = fake(**live)
    m._il.grad, m.fn = grad, fn
    assert served(m) is None
    plain = fake()
    plain.fn = Add("z.0", torch.ones(2, 4))
    assert isinstance(served(plain), Served)
