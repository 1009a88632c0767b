"""Work that is stated instead of programmed: what to hand back, what to add.

`Capture` and `Add` are ordinary interventions, callable on a `Pass` like any function, on every backend. What is stated
an engine can also do by itself: a compiled one that was loaded with `buffers=[...]` does it inside its graph, and no
Python runs in the forward pass at all (`buffers.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from adapters.errors import UnknownPointError, WriteError, at_user_line
from adapters.points import PER_LAYER, Location, Points

if TYPE_CHECKING:
    from adapters.intervention import Pass


class Stated:
    """What is stated, of either kind."""

    def then(self, *others: Stated) -> Turns:
        """This and then others, as one intervention.

        >>> Capture("embed").then(Capture("z.1"), Capture("z.2")).parts
        (Capture(points=('embed',)), Capture(points=('z.1',)), Capture(points=('z.2',)))
        """
        return Turns(tuple(part for each in (self, *others) for part in one_by_one(each)))

    def __call__(self, m: Pass) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Turns(Stated):
    """Several, each as if it had been given by itself: what one writes, those after it see. Made by `then`."""

    parts: tuple[Stated, ...]

    def __call__(self, m: Pass) -> None:
        for part in self.parts:
            part(m)


@dataclass(frozen=True, init=False)
class Capture(Stated):
    """Save points at every pass, each under its own name: "resid_post.16", "logits", "z.*" (every layer).

    >>> import tapgrid
    >>> rt = tapgrid.load("synthetic:llama", dtype="float32")
    >>> out = rt.run([5, 6, 7], Capture("resid_post.1", "z.*"), max_new_tokens=2, ignore_eos=True)[0]
    >>> {name: tuple(out.cat(name).shape) for name in out.saves}
    {'z.0': (4, 4, 32), 'z.1': (4, 4, 32), 'resid_post.1': (4, 128), 'z.2': (4, 4, 32)}
    >>> rt.close()
    """

    points: tuple[str, ...]

    def __init__(self, *points: str) -> None:
        if not points or not all(isinstance(p, str) for p in points):
            raise TypeError(f"Capture takes the names of points, as in Capture('resid_post.16'), not {points!r}")
        object.__setattr__(self, "points", points)

    def places(self, points: Points) -> list[tuple[str, Location]]:
        """What is saved under which name, in the model's order."""
        return _places(self.points, points)

    def __call__(self, m: Pass) -> None:
        for name, loc in self.places(m._points):
            m.save(name, m._read(loc))


@dataclass(frozen=True, eq=False)
class Add(Stated):
    """Add `scale * vector` at a point, to every token of the request. The vector is copied here and now.

    >>> import tapgrid
    >>> rt = tapgrid.load("synthetic:llama", dtype="float32")
    >>> rt.install(Add("resid_post.1", torch.ones(128), 4.0), name="steer")
    >>> plain, steered = (rt.run([5, 6], Capture("resid_post.1"), max_new_tokens=1, edits=e)[0] for e in ([], None))
    >>> (steered.cat("resid_post.1") - plain.cat("resid_post.1")).mean().round().item()
    4.0
    >>> rt.close()
    """

    point: str
    vector: torch.Tensor = field(repr=False)
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.vector, torch.Tensor) or not self.vector.is_floating_point():
            raise TypeError(at_user_line(f"Add({self.point!r}): the vector is a tensor of floats"))
        object.__setattr__(self, "vector", self.vector.detach().clone())

    def amount(self, loc: Location, shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
        """What is added to a token's row of `shape`, in the dtype and on the device of `like`."""
        if self.vector.shape != shape:
            raise WriteError(
                at_user_line(
                    f"Add: a token's row at {loc} has shape {tuple(shape)}, the vector {tuple(self.vector.shape)}"
                )
            )
        return (self.vector if self.scale == 1.0 else self.vector * self.scale).to(like)

    def __call__(self, m: Pass) -> None:
        loc = m._points.parse(self.point)
        x = m._read(loc)
        x += self.amount(loc, x.shape[1:], x)


def is_stated(fn: Any) -> bool:
    """Whether `fn` does what its fields say and no more; a subclass may do something else when it is called."""
    return type(fn) in (Add, Capture)


def one_by_one(fn: Any) -> tuple[Any, ...]:
    """The interventions that one is made of: each waits for its own points, so their order is not the model's."""
    return fn.parts if isinstance(fn, Turns) else () if fn is None else (fn,)


@functools.lru_cache(maxsize=256)
def _places(names: tuple[str, ...], points: Points) -> list[tuple[str, Location]]:
    found = [place for point in names for place in every(point, points)]
    return sorted(dict(found).items(), key=lambda place: place[1].rank)


def every(point: str, points: Points) -> list[tuple[str, Location]]:
    """The places that "z.10", "z.*" or "embed" names: (name, location), in the model's order.

    >>> from adapters.points import points_of
    >>> llama = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    >>> [name for name, _ in every("z.*", points_of(llama, "hf"))]
    ['z.0', 'z.1']
    """
    name, star, _ = point.partition(".*")
    if not star:
        return [(point, points.parse(point))]
    if name not in PER_LAYER:
        raise UnknownPointError(f"{point!r}: {name} has no layers")
    # Where no layer has the point, the first one says why.
    return [(f"{name}.{layer}", points.at(name, layer)) for layer in points.layers(name) or (0,)]
