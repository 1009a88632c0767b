"""Gradients of what was read, inside a trace or an intervention, as autograd has them for the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adapters.errors import LoadError
from adapters.runtime import Runtime
from tests.engines import HEAD_DIM, HEADS, booted, hf, prompts, relative, run

__all__ = ["hf"]  # fixtures

IDS = prompts(4, shortest=6, longest=20)
PROMPT = IDS[0]


def loss_of(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """The summed log-probability of a prompt's own next tokens."""
    return torch.log_softmax(logits[:-1].float(), -1).gather(1, torch.tensor(ids[1:])[:, None]).sum()


def reference(model: Any, ids: list[int], module: str, tuple_index: int | None = None) -> torch.Tensor:
    """The gradient at a module's output, by plain autograd."""
    kept: list[torch.Tensor] = []

    def keep(_: Any, args: Any, output: Any) -> Any:
        found = output if tuple_index is None else output[tuple_index]
        leaf = found.detach().requires_grad_()
        kept.append(leaf)
        return leaf if tuple_index is None else (*output[:tuple_index], leaf, *output[tuple_index + 1 :])

    handle = model.get_submodule(module).register_forward_hook(keep)
    try:
        loss_of(model(torch.tensor([ids])).logits[0], ids).backward()
    finally:
        handle.remove()
    assert kept[0].grad is not None
    return kept[0].grad[0]


POINTS = {
    "embed": ("model.embed_tokens", None),
    "resid_post.0": ("model.layers.0", None),
    "attn_out.1": ("model.layers.1.self_attn", 0),
    "mlp_out.1": ("model.layers.1.mlp", None),
    "resid_post.1": ("model.layers.1", None),
    "mlp_pre.2": ("model.layers.2.mlp.gate_proj", None),
    "q.1": ("model.layers.1.self_attn.q_proj", None),
}


def read(m: Any, point: str) -> Any:
    name, _, layer = point.partition(".")
    return getattr(m, name)[int(layer)] if layer else getattr(m, name)


@pytest.mark.parametrize("point", POINTS)
def test_a_gradient_is_autograds(hf: Runtime, point: str) -> None:
    wanted = reference(hf.engine.model, PROMPT, *POINTS[point])  # type: ignore[attr-defined]
    with hf.trace(PROMPT, grad=True) as m:
        h = read(m, point)
        loss_of(m.unembed(m.resid_post[-1]), PROMPT).backward()
    assert relative(h.grad.flatten(1), wanted.flatten(1)) < 1e-5


def test_gradients_of_many_points_at_once(hf: Runtime) -> None:
    """Reading one does not cut off those before it."""
    model = hf.engine.model  # type: ignore[attr-defined]
    wanted = {p: reference(model, PROMPT, *where) for p, where in POINTS.items()}
    with hf.trace(PROMPT, grad=True) as m:
        held = {p: read(m, p) for p in sorted(POINTS, key=lambda p: m._points.parse(p).rank)}
        loss_of(m.unembed(m.resid_post[-1]), PROMPT).backward()
    for point, h in held.items():
        assert relative(h.grad.flatten(1), wanted[point].flatten(1)) < 1e-5, point


def test_the_gradient_of_the_sampled_rows_logits(hf: Runtime) -> None:
    with hf.trace(PROMPT, grad=True) as m:
        h = m.resid_post[0]
        logits = m.logits
        logits[0, 7].backward()
    assert torch.equal(logits.grad, torch.nn.functional.one_hot(torch.tensor([7]), logits.shape[1]).float())
    assert h.grad[-1].abs().sum() > 0


def test_heads_have_gradients_of_their_shape(hf: Runtime) -> None:
    """The residual's gradient through z is that of the projection: dz = W_O^T d(attn_out)."""
    with hf.trace(PROMPT, grad=True) as m:
        z = m.z[1]
        out = m.attn_out[1]
        loss_of(m.unembed(m.resid_post[-1]), PROMPT).backward()
    assert z.grad.shape == (len(PROMPT), HEADS, HEAD_DIM)
    weight = hf.engine.model.model.layers[1].self_attn.o_proj.weight  # type: ignore[attr-defined]
    assert relative(z.grad.flatten(1), out.grad @ weight) < 1e-5


def test_a_batch_of_different_lengths_is_each_alone(hf: Runtime) -> None:
    def fn(m: Any) -> None:
        ids = next(p for p in IDS if len(p) == m.tokens)
        h = m.resid_post[1]
        loss_of(m.unembed(m.resid_post[-1]), ids).backward()
        m.save("grad", h.grad)

    outs = run(hf, IDS, fn, max_new_tokens=1, grad=True)
    for ids, out in zip(IDS, outs, strict=True):
        wanted = reference(hf.engine.model, ids, "model.layers.1")  # type: ignore[attr-defined]
        assert relative(out.cat("grad"), wanted) < 1e-5
        assert not out.cat("grad").requires_grad


def test_edits_are_part_of_the_graph(hf: Runtime) -> None:
    """A vector that was added has the gradient of where it was added; doubling doubles the gradient before it."""
    vector = torch.zeros(128, requires_grad=True)
    with hf.trace(PROMPT, grad=True) as m:
        before = m.resid_post[0]
        h = m.resid_post[1]
        h += vector
        loss_of(m.unembed(m.resid_post[-1]), PROMPT).backward()
    plain = reference(hf.engine.model, PROMPT, "model.layers.1")  # type: ignore[attr-defined]
    assert vector.grad is not None
    assert relative(vector.grad, plain.sum(0)) < 1e-5
    assert relative(before.grad, reference(hf.engine.model, PROMPT, "model.layers.0")) < 1e-5  # type: ignore[attr-defined]
    with hf.trace(PROMPT, grad=True) as m:
        m.resid_post[1] = m.resid_post[1] * 1.0 + torch.zeros(len(PROMPT), 128)
        assigned = m.resid_post[1]
        loss_of(m.unembed(m.resid_post[-1]), PROMPT).backward()
    assert relative(assigned.grad, plain) < 1e-5


def test_a_gradient_can_be_written(hf: Runtime) -> None:
    """What flows back through a point is edited by an ordinary hook on what was read."""
    with hf.trace(PROMPT, grad=True) as m:
        first = m.resid_post[0]
        second = m.resid_post[1]
        second.register_hook(lambda g: g * 0)
        loss_of(m.unembed(m.resid_post[-1]), PROMPT).backward()
    assert not first.grad.any()


def test_a_gradient_through_a_module_by_path(hf: Runtime) -> None:
    wanted = reference(hf.engine.model, PROMPT, "model.layers.1.mlp")  # type: ignore[attr-defined]
    with hf.trace(PROMPT, grad=True) as m:
        act = m.at("model.layers.1.mlp.down_proj").input
        out = m.at("model.layers.1.mlp").output
        loss_of(m.unembed(m.resid_post[-1]), PROMPT).backward()
    weight = hf.engine.model.model.layers[1].mlp.down_proj.weight  # type: ignore[attr-defined]
    assert relative(out.grad, wanted) < 1e-5
    assert relative(act.grad, wanted @ weight) < 1e-5


def test_the_forward_pass_is_the_same_with_gradients(hf: Runtime) -> None:
    with hf.trace(PROMPT) as m:
        plain = [m.resid_post[i].clone() for i in range(3)] + [m.logits.clone()]
    with hf.trace(PROMPT, grad=True) as m:
        tracked = [m.resid_post[i].detach().clone() for i in range(3)] + [m.logits.detach().clone()]
    for a, b in zip(tracked, plain, strict=True):
        assert relative(a, b) < 1e-6


def test_with_an_installed_intervention(hf: Runtime) -> None:
    hf.install(lambda m: m.resid_post[0].mul_(0), name="cut")
    try:
        with hf.trace(PROMPT, grad=True) as m:
            before = m.embed
            after = m.resid_post[1]
            loss_of(m.unembed(m.resid_post[-1]), PROMPT).backward()
    finally:
        hf.remove("cut")
    assert after.grad.any()
    assert before.grad is None or not before.grad.any()


def test_nothing_is_left_behind(hf: Runtime) -> None:
    model = hf.engine.model  # type: ignore[attr-defined]
    grad = torch.is_grad_enabled()
    with hf.trace(PROMPT, grad=True) as m:
        m.resid_post[0].sum().backward()
    assert torch.is_grad_enabled() is grad
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    out = run(hf, [PROMPT], lambda m: m.save("needs", m.resid_post[1].requires_grad))[0]
    assert out.saves["needs"] == [False] * 4


def test_where_there_are_none(hf: Runtime) -> None:
    with pytest.raises(ValueError, match="grad=True is one forward pass: max_new_tokens=1, not 4"):
        run(hf, [PROMPT], lambda m: None, grad=True)


@pytest.mark.engine
def test_vllm_refuses() -> None:
    with pytest.raises(LoadError, match=r"computes no gradients: load\(..., engine='hf'\)"):
        run(booted("vllm"), [PROMPT], lambda m: None, grad=True)
    with pytest.raises(LoadError, match="computes no gradients"), booted("vllm").trace(PROMPT, grad=True):
        pass
