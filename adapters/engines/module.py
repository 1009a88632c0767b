"""Any `torch.nn.Module` as an engine: no tokens and no points, only its modules by path.

traced = tapgrid.wrap(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
with traced.trace(torch.zeros(1, 8)) as m:
    hidden = m.at("0").output
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from adapters.eager import Hooks
from adapters.errors import PointRefusedError, at_user_line
from adapters.interleave import Interleaver, Key, parameter
from adapters.intervention import Intervention, Pass
from adapters.live import Job, Live
from adapters.points import Location, Site
from adapters.rows import Slab
from adapters.trace import trace_of


class _NoPoints:
    """A module has no canonical points: its modules are reached by path."""

    def at(self, name: str, layer: int | None = None) -> Location:
        raise PointRefusedError(
            at_user_line(
                f"{name}: this is a plain module, which has no canonical points; m.at(path) reaches its modules"
            )
        )

    def there(self, key: tuple[str, str]) -> list[Location]:
        return []

    def module(self, path: str, side: Any) -> Location:
        name = f"at({path!r}).{'input' if side == 'in' else 'output'}"
        return Location(name, None, Site(path, side), (path, side), -1)


class Input(NamedTuple):
    """One request: rows [n, ...] of the module's input."""

    id: str
    rows: torch.Tensor
    fns: tuple[Intervention, ...] = ()
    body: Any = None


class Result(NamedTuple):
    """What one request gave back: its rows of the module's output, and what it saved."""

    output: Any
    saves: Mapping[str, list[Any]]
    error: BaseException | None = None


class WrappedModule:
    """A module with interventions. Requests of one call are one batch; each sees its own rows only."""

    in_process = True

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.tokenizer, self.points = model, None, _NoPoints()
        self.hooks = Hooks(model)
        self.il = Interleaver(self)  # type: ignore[arg-type]

    def attach(self, key: Key) -> None:
        self.hooks.attach(key, self.il)

    def weight(self, path: str) -> torch.Tensor:
        return parameter(self.model, path)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        raise PointRefusedError("a plain module has no final norm")

    unembed = norm

    @contextmanager
    def trace(self, rows: torch.Tensor) -> Iterator[Pass]:
        """One forward on `rows` [n, ...] with the body of the `with` as its intervention."""
        with trace_of(self, lambda body: Input("trace", rows, (), body)) as m:  # type: ignore[arg-type,return-value]
            yield m

    def forward(self, inputs: Sequence[torch.Tensor], intervention: Intervention) -> list[Result]:
        """One forward on all inputs, each [n, ...], with `intervention` called once for each of them."""
        return self.run([Input(str(i), rows, (intervention,)) for i, rows in enumerate(inputs)])

    def run(self, inputs: Sequence[Input]) -> list[Result]:
        il = self.il
        lives = [il.live(i.id, i.fns, i.body) for i in inputs]
        sizes = [i.rows.size(0) for i in inputs]
        starts = [0, *accumulate(sizes)]
        batch = inputs[0].rows if len(inputs) == 1 else torch.cat([i.rows for i in inputs])
        try:
            with torch.no_grad():
                il.begin(Slab(starts), [_job(live, k, starts) for k, live in enumerate(lives)])
                out = self.model(batch)
                il.end()
        finally:
            il.abandon()
            self.hooks.clear()
            for live in lives:
                live.passes.clear()  # each holds its request, which holds it
        in_rows = isinstance(out, torch.Tensor) and out.dim() and out.size(0) == starts[-1]
        apart = out.split(sizes) if in_rows else [out] * len(sizes)
        return [Result(rows, live.saves, live.error) for rows, live in zip(apart, lives, strict=True)]


def _job(live: Live, index: int, starts: list[int]) -> Job:
    return Job(live, index, 0, starts[index + 1] - starts[index], True, draws=False)
