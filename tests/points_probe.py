"""What the tests of points share: one function that reads all there is, and how a write is told from no write."""

from __future__ import annotations

from typing import Any

import torch

from adapters.intervention import Intervention
from adapters.points import AFTER, BEFORE, PER_LAYER, Points, family_of
from adapters.runtime import Output, Runtime
from harness.twins import TWINS

# Beyond the windows of 16 that the twins slide, and of different lengths, so that one engine has to pad.
PROMPTS = [[100 + i for i in range(21)], [7, 300, 41, 12, 9], [5, 450, 33, 34, 35, 36, 37, 38, 39]]
SHORT = PROMPTS[1:]


def everywhere(points: Points) -> list[tuple[str, int | None]]:
    """Every point of a model, in the model's order."""
    layered = [(n, layer) for layer in range(points.dims.layers) for n in PER_LAYER if layer in points.layers(n)]
    return [
        *((n, None) for n in BEFORE if n in points.sites),
        *layered,
        *((n, None) for n in AFTER if n in points.sites),
    ]


def samples(points: Points) -> list[tuple[str, int | None]]:
    """Every point once, at a layer in the middle where it can be had there."""
    middle = {
        n: min(points.layers(n), key=lambda i: abs(i - points.dims.layers // 2)) for n in PER_LAYER if points.layers(n)
    }
    return [(n, layer) for n, layer in everywhere(points) if layer is None or layer == middle[n]]


def at(m: Any, name: str, layer: int | None) -> Any:
    return getattr(m, name) if layer is None else getattr(m, name)[layer]


def key(name: str, layer: int | None) -> str:
    return name if layer is None else f"{name}.{layer}"


def read_all(points: Points) -> Intervention:
    """Save every point under `name` or `name.layer`, one entry a pass, and what unembedding the last layer gives."""
    places, last = everywhere(points), points.dims.layers - 1

    def fn(m: Any) -> None:
        for name, layer in places:
            if name == "logits" and "final_norm" in points.sites:
                m.save("unembedded", m.unembed(m.state["stream"]))
                m.save("normed", m.norm(m.state["stream"]))
            value = at(m, name, layer)
            m.save(key(name, layer), value)
            if (name, layer) == ("resid_post", last):
                m.state["stream"] = value[-1:].clone()

    return fn


def run(rt: Runtime, fn: Any = None, prompts: list[list[int]] = PROMPTS, new: int = 3, **options: Any) -> list[Output]:
    return rt.run(prompts, fn, max_new_tokens=new, ignore_eos=True, **options)


def error(got: Any, wanted: Any) -> float:
    """The largest relative error between two lists of tensors, or two tensors."""
    if isinstance(got, torch.Tensor):
        got, wanted = [got], [wanted]
    assert [g.shape for g in got] == [w.shape for w in wanted]
    return max(
        float((g.double() - w.double()).norm() / w.double().norm().clamp(min=1e-30))
        for g, w in zip(got, wanted, strict=True)
    )


def nudge(value: torch.Tensor, name: str, seed: int = 7) -> torch.Tensor:
    """Another value of the same kind as large as the activation itself: what a write at a point leaves there."""
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).to(value)
    if name == "sampled":
        return (value + 5) % 300
    if name == "pattern":
        seen = (value > 0).to(value)
        return seen / seen.sum(-1, keepdim=True)
    return value + noise * value.std().clamp(min=0.1) * (5 if name in ("router", "logits") else 1)


def write(name: str, layer: int | None, *, how: Any = nudge, save: str | None = None) -> Intervention:
    """Write at a point; `save` keeps what was left there."""

    def fn(m: Any) -> None:
        value = at(m, name, layer)
        value.copy_(how(value, name))
        if save:
            m.save(save, value)

    return fn


def logits(m: Any) -> None:
    m.save("logits", m.logits)


def family(twin: str) -> Any:
    return family_of(TWINS[twin].model_type)
