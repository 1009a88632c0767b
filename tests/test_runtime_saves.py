"""What is saved is a copy of its own, and a capture that cannot be one is an error."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from adapters.errors import BadCaptureError, PassedError, StaleWriteError
from adapters.runtime import Output, Runtime
from adapters.saves import check, copied, joined
from tests.engines import booted, capture, prompts, rt, run, same

__all__ = ["rt"]  # fixtures

IDS = prompts(3, shortest=9)


class Two(NamedTuple):
    a: Any
    b: Any


def test_before_and_after_an_edit_in_place_are_not_the_same(rt: Runtime) -> None:
    """case 93."""

    def fn(m: Any) -> None:
        h = m.resid_post[1]
        m.save("before", h)
        h += 1
        m.save("after", h)
        m.save("list", [h, {"h": h}])
        h += 1
        m.save("twice", h)

    out = run(rt, [IDS[0]], fn)[0]
    assert torch.equal(out.cat("after"), out.cat("before") + 1)
    assert torch.equal(out.cat("twice"), out.cat("before") + 1 + 1)
    kept = out.saves["list"][0]
    assert torch.equal(kept[0], out.saves["after"][0])
    assert torch.equal(kept[1]["h"], out.saves["after"][0])


@pytest.mark.parametrize(
    "point", ["embed", "q.0", "attn_out.1", "mlp_out.1", "resid_post.1", "attn_in.2", "final_norm"]
)
def test_what_was_read_stays_what_it_was_when_the_model_goes_on(rt: Runtime, point: str) -> None:
    """case 2.

    An engine overwrites what the next norm or the rotary kernel reads; a value in the user's hands is theirs.
    """
    name, _, layer = point.partition(".")

    def fn(m: Any) -> None:
        h = getattr(m, name)[int(layer)] if layer else getattr(m, name)
        view = h[..., :4]
        m.save("then", h)
        m.logits  # noqa: B018
        m.save("later", h)
        m.save("view", view)

    for out in run(rt, IDS, fn):
        assert torch.equal(out.cat("then"), out.cat("later"))
        assert torch.equal(out.cat("view"), out.cat("then")[..., :4])


def test_saves_of_all_kinds_come_back(rt: Runtime) -> None:
    """case 50: Names are names: a value that is reassigned, None and small numbers are all kept."""
    array = np.zeros(2)

    def fn(m: Any) -> None:
        x = m.resid_post[0]
        m.save("x", x)
        x = 2
        m.save("none", None)
        m.save("zero", 0)
        m.save("zero", 0)
        m.save("x is now", x)
        m.save("text", "a")
        array[:] = m.step
        m.save("array", array)
        m.save("mixed", (1, [torch.ones(1)], Two(torch.zeros(1), None)))

    out = run(rt, [IDS[0]], fn, max_new_tokens=2)[0]
    assert len(out.saves["x"]) == 2
    assert out.saves["none"] == [None, None]
    assert out.saves["zero"] == [0, 0, 0, 0]
    assert out.cat("zero").tolist() == [0, 0, 0, 0]
    assert [a.tolist() for a in out.saves["array"]] == [[0, 0], [1, 1]]
    assert isinstance(out.saves["mixed"][0][2], Two)


def test_a_save_never_shares_memory_or_a_graph() -> None:
    held = torch.zeros(3, requires_grad=True)
    value = {"a": [held * 2], "n": np.arange(2), "pair": Two(held, 1)}
    kept = copied(value)
    assert not kept["a"][0].requires_grad
    value["n"][:] = 9  # type: ignore[index]
    with torch.no_grad():
        held += 1
    assert kept["n"].tolist() == [0, 1]
    assert kept["pair"].a.tolist() == [0, 0, 0]
    with torch.inference_mode():
        assert not copied(torch.zeros(1)).is_inference()


def test_saves_can_be_used_in_autograd(rt: Runtime) -> None:
    out = run(rt, [IDS[0]], capture(("embed",), ("resid_post", 1), ("logits",)))[0]
    for name in out.saves:
        x = out.cat(name)
        assert not x.is_inference()
        w = torch.ones_like(x, requires_grad=True)
        (x * w).sum().backward()
        assert torch.equal(w.grad, x)  # type: ignore[arg-type]


def test_cat_says_what_does_not_join() -> None:
    out = Output("r", (1,), (2,), {"a": [torch.zeros(1, 2), torch.zeros(1, 3)], "s": [1.5, 2.5], "one": [7]})
    with pytest.raises(ValueError, match=r"entries of shapes \(1, 2\), \(1, 3\) do not join"):
        out.cat("a")
    assert out.cat("s").tolist() == [1.5, 2.5]
    assert out.cat("one").tolist() == [7]
    with pytest.raises(KeyError, match="nothing was saved under 'b'; saved: a, one, s"):
        out.cat("b")
    assert "saved a x2, s x2, one x1" in repr(out)


def test_joined_keeps_the_order() -> None:
    assert joined([torch.tensor([1, 2]), torch.tensor([3])]).tolist() == [1, 2, 3]


# ---- what cannot be an activation

BAD = {
    "zeros": (lambda x: x * 0, "nothing but zeros"),
    "constant": (lambda x: x * 0 + 2.5, r"one constant \(2.5\)"),
    "nan": (lambda x: x * torch.nan, "NaN or infinity"),
    "one inf": (lambda x: torch.cat([x[..., :1], x[..., 1:] / 0], -1), "NaN or infinity"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_broken_model_is_an_error_and_never_a_result(kind: str) -> None:
    """cases 13 and 15.

    Somebody else's hook breaks the model: whoever only reads is told, whoever wrote it has made it so.
    """
    runtime = booted("hf")
    breaks, message = BAD[kind]
    layer = runtime.engine.model.model.layers[1]  # type: ignore[attr-defined]
    handle = layer.register_forward_hook(lambda module, args, output: breaks(output))
    try:
        with pytest.raises(
            BadCaptureError, match=rf"{message} in what was read at resid_post\[1\] and saved as 'x'"
        ) as caught:
            run(runtime, IDS, [lambda m: m.save("x", m.resid_post[1]), None, lambda m: m.save("y", m.resid_post[0])])
        outs = caught.value.outputs  # type: ignore[attr-defined]
        assert [o.error is None for o in outs] == [False, True, True]
        assert len(outs[2].saves["y"]) == 4
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "shapes",
    [[(3, 4), (1, 4), (1, 4)], [(2, 3, 3), (2, 1, 4), (2, 1, 5)], [(), (), ()], [(5,), (1,)], [(3, 4), (3,)]],
    ids=["rows", "patterns", "scalars", "flat", "mixed"],
)
def test_every_entry_is_looked_at_whatever_its_shape(shapes: list[tuple[int, ...]]) -> None:
    loc = booted("hf").engine.points.at("resid_post", 1)

    def wrong(entries: list[torch.Tensor]) -> str:
        return str(check("r", {"x": entries}, {"x": loc}))

    entries = [torch.randn(shape) for shape in shapes]
    assert check("r", {"x": entries}, {"x": loc}) is None
    assert "one constant (2.5)" in wrong([torch.full_like(e, 2.5) for e in entries])
    entries[-1].view(-1)[-1] = torch.nan
    assert "NaN or infinity" in wrong(entries)


@pytest.mark.parametrize("kind", BAD)
def test_what_an_intervention_made_itself_may_be_anything(rt: Runtime, kind: str) -> None:
    def assigns(m: Any) -> None:
        m.resid_post[1] = BAD[kind][0](m.resid_post[1])
        m.save("x", m.resid_post[1])
        m.save("below", m.resid_post[2])

    def computes(m: Any) -> None:
        m.save("x", BAD[kind][0](m.resid_post[1]))
        m.save("mean", m.resid_post[1].mean() * 0)

    def by_the_one_before(m: Any) -> None:
        m.save("x", m.resid_post[1])

    run(rt, [IDS[0]], assigns)
    run(rt, [IDS[0]], computes)
    rt.install(assigns, name="assigns")
    try:
        run(rt, [IDS[0]], by_the_one_before)
    finally:
        rt.remove("assigns")


def test_the_check_looks_at_the_whole_request() -> None:
    """One zero row (padding, an unused token) is an activation; nothing else in a request is not."""
    rows = torch.randn(3, 4)
    points: dict[str, Any] = {"x": booted("hf").engine.points.at("resid_post", 1)}
    assert check("r", {"x": [torch.zeros(1, 4), rows]}, points) is None
    assert check("r", {"x": [torch.zeros(1, 4), torch.zeros(2, 4)]}, points) is not None
    assert check("r", {"x": [torch.zeros(0, 4)]}, points) is not None
    assert check("r", {"x": [torch.tensor([5]), torch.tensor([5])]}, points) is None  # a token may repeat
    assert check("r", {"x": [torch.zeros(1, 1)]}, points) is None
    big = torch.randn(3000, 4096)
    assert check("r", {"x": [big, big]}, points) is None
    big[2999, 4095] = torch.nan
    assert check("r", {"x": [torch.randn(3000, 4096), big]}, points) is not None


def test_captures_again_are_the_same_bits(rt: Runtime) -> None:
    points = [("resid_post", 1), ("logits",)]
    same(run(rt, IDS, capture(*points)), run(rt, IDS, capture(*points)))


def test_a_save_without_a_copy_cannot_be_reached_any_more(rt: Runtime) -> None:
    """What nobody else holds is kept as it is. Whoever holds it, holds a view of it or reads it again, has his own."""

    def fn(m: Any) -> None:
        m.save("alone", m.resid_post[0])
        again = m.resid_post[0]
        m.save("held", again)
        again += 1
        m.save("edited", m.resid_post[0])
        view = m.z[1][:, 0]
        m.save("viewed", m.z[1])
        view += 1
        m.save("by view", m.z[1])
        m.save("positional", m.resid_post[1])
        m.save(name="keyword", value=m.resid_post[1])
        m.resid_post[1] *= 2
        m.save("written", m.resid_post[1])
        m.state.setdefault("rows", []).append(m.resid_post[2])
        m.save("kept", m.resid_post[2])
        for row in m.state["rows"]:
            row += 1

    def plain(m: Any) -> None:
        m.save("r0", m.resid_post[0])
        m.resid_post[0] += 1
        m.save("z", m.z[1])
        m.z[1][:, 0] += 1
        m.save("r1", m.resid_post[1])
        m.resid_post[1] *= 2
        m.save("r2", m.resid_post[2])
        m.resid_post[2] += 1

    for got, wanted in zip(run(rt, IDS, fn), run(rt, IDS, plain), strict=True):
        assert got.token_ids == wanted.token_ids
        r0, z, r1 = (wanted.cat(n) for n in ("r0", "z", "r1"))
        assert torch.equal(got.cat("alone"), r0)
        assert torch.equal(got.cat("held"), r0)
        assert torch.equal(got.cat("edited"), r0 + 1)
        assert torch.equal(got.cat("viewed"), z)
        assert torch.equal(got.cat("by view")[:, 0], z[:, 0] + 1)
        assert torch.equal(got.cat("positional"), r1)
        assert torch.equal(got.cat("keyword"), r1)
        assert torch.equal(got.cat("written"), r1 * 2)
        assert torch.equal(got.cat("kept"), wanted.cat("r2"))


def test_a_value_that_only_a_view_holds_is_still_watched(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        view = m.z[1][:, 0]
        m.resid_post[2]
        view += 1

    with pytest.raises(StaleWriteError, match=r"z\[1\] was edited in place after"):
        run(rt, IDS, fn)


def test_what_was_saved_has_passed_for_what_comes_before_it(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        m.save("x", m.resid_post[1])
        m.resid_mid[1]

    with pytest.raises(PassedError, match=r"resid_mid\[1\] had already passed.*the model was at resid_post\[1\]"):
        run(rt, IDS, fn)


def test_a_held_value_is_not_kept_to_the_end_of_the_pass(rt: Runtime) -> None:
    """Reading every layer of a long prompt holds one layer at a time."""

    def fn(m: Any) -> None:
        for layer in range(3):
            m.resid_post[layer].sum()
            m.save("remembered", len(m._handed))

    assert run(rt, IDS[:1], fn, max_new_tokens=1)[0].saves["remembered"] == [0, 0, 0]
