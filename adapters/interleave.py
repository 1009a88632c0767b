"""Parks interventions on locations and serves them in the model's order.

One `Interleaver` an engine. For each forward pass the engine calls `begin`, then `visit` at every location
that somebody waits for (its hooks and seams do), then `end`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from adapters.errors import NeverRanError, UnknownPointError, at_user_line
from adapters.intervention import Intervention, Pass
from adapters.points import _STRIDE, LOGITS_KEY, SAMPLED_KEY, Location, Points
from adapters.rows import Rows

Key = tuple[str, str]


class Host(Protocol):
    """What an engine lends to interventions: its model's own pieces, and a way to be called at a location."""

    tokenizer: Any
    points: Points
    copies: bool  # whether reads are copies, because the engine reuses its buffers

    def attach(self, key: Key) -> None:
        """See that `visit(key, ...)` is called when the model gets there; idempotent. UnknownPointError for no such module."""

    def weight(self, path: str) -> torch.Tensor: ...

    def unembed(self, x: torch.Tensor) -> torch.Tensor: ...

    def norm(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass
class Live:
    """A request that interventions take part in, from its first pass to its last."""

    id: str
    passes: list[Pass] = field(default_factory=list)
    saves: dict[str, list[Any]] = field(default_factory=dict)
    state: dict[Any, Any] = field(default_factory=dict)
    stopped: bool = False
    error: BaseException | None = None
    seen: int = 0

    @property
    def ended(self) -> bool:
        return self.stopped or self.error is not None


@dataclass(frozen=True)
class Job:
    """One request's part of one pass: its place in the batch, its first position, its token count, whether a token is drawn."""

    live: Live
    index: int
    first: int
    tokens: int
    is_prompt: bool
    draws: bool = True


class Interleaver:
    """Runs the interventions of one engine beside its forward passes; `waiting` is what the engine's hooks look at."""

    def __init__(self, host: Host) -> None:
        self.host, self.points = host, host.points
        self.waiting: dict[Key, list[Pass]] = {}
        self._modules: dict[tuple[str, str], Location] = {}
        self._draws: set[int] = set()

    def live(self, id: str, fns: Sequence[Intervention], body: Any = None) -> Live:
        """A new live request with its interventions, in the order in which they see each other's writes.

        `body` is the greenlet of a `trace` or `steps` body, which sees the writes of all of them.
        """
        live = Live(id)
        live.passes = [Pass(self, live, fn, order) for order, fn in enumerate(fns)]
        if body is not None:
            m = Pass(self, live, None, len(fns))
            m.thread = body
            live.passes.append(m)
        return live

    # ---- one pass

    def begin(self, rows: Rows, jobs: Sequence[Job]) -> None:
        """Start every intervention of this pass; each runs to its first read."""
        hub = getcurrent()
        self._draws = {id(job.live) for job in jobs if job.draws}
        for job in jobs:
            for m in job.live.passes:
                m._begin(job.index, rows, job.first, job.tokens, job.is_prompt)
                m._hub = hub
                if m.fn is not None:
                    m.thread = greenlet(_run, hub)
                self._resume(m, m)

    def visit(self, key: Key, payload: Any) -> None:
        """The model is at `key` and holds `payload`: serve everybody who waits for it, in declared order."""
        served = self.waiting.pop(key, None)
        if served is None:
            return
        if len(served) > 1:
            served.sort(key=_by_order)
        for m in served:
            self._resume(m, payload)

    def end(self) -> None:
        """The pass is over: whoever still waits is told that its location never ran."""
        if not self.waiting:
            return
        left, self.waiting = self.waiting, {}
        for key, passes in left.items():
            for m in passes:
                quiet = m.live.error is not None or (key in (LOGITS_KEY, SAMPLED_KEY) and id(m.live) not in self._draws)
                self._throw(m, GreenletExit() if quiet else NeverRanError(_never(m, key)))
        # What a body catches and reads next has passed as well.
        if self.waiting:
            self.end()

    def abandon(self) -> None:
        """The pass died in the engine: let every parked intervention unwind."""
        left, self.waiting = self.waiting, {}
        for passes in left.values():
            for m in passes:
                self._throw(m, GreenletExit())

    def _resume(self, m: Pass, value: Any) -> None:
        if m.live.error is not None:
            self._throw(m, GreenletExit())
            return
        try:
            wanted = m.thread.switch(value)
        except Exception as error:
            m.live.error = error
            return
        if m.thread.dead or wanted is None:
            return
        self._park(m, wanted)

    def _park(self, m: Pass, loc: Location) -> None:
        key = loc.key
        waiting = self.waiting.get(key)
        if waiting is not None:
            waiting.append(m)
            return
        self.waiting[key] = [m]

    def _throw(self, m: Pass, error: BaseException) -> None:
        if not m.thread or m.thread.dead:
            return
        try:
            wanted = m.thread.throw(error)
        except Exception as raised:
            if m.live.error is None:
                m.live.error = raised
            return
        if isinstance(wanted, Location) and not m.thread.dead:
            self._park(m, wanted)

    # ---- modules by path

    def module_location(self, path: str, side: Literal["in", "out"]) -> Location:
        """The location of a module's input or output."""
        found = self._modules.get((path, side))
        if found is None:
            found = self._modules[path, side] = self.points.module(path, side)
        return found

    def is_behind(self, loc: Location, rank: int) -> bool:
        """Whether a module by path surely ran before `rank`: it belongs to an earlier layer."""
        if rank < 1:
            return False
        layer = re.search(r"\.(\d+)(\.|$)", loc.key[0])
        return layer is not None and int(layer.group(1)) < (rank - 1) // _STRIDE


def no_such_module(path: str, known: Sequence[str]) -> UnknownPointError:
    """The error for a module path that the model does not have, with near ones."""
    near = difflib.get_close_matches(path, known, n=3, cutoff=0.6)
    return UnknownPointError(
        at_user_line(f"the model has no module {path!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    )


def _run(m: Pass) -> None:
    assert m.fn is not None
    m.fn(m)
    m._finish()


def _by_order(m: Pass) -> int:
    return m.order


def _never(m: Pass, key: Key) -> str:
    where = f"{key[0]} ({'input' if key[1] == 'in' else 'output'})" if key[0] else key[1]
    return (
        f"{where} did not run after it was asked for in this pass (request {m.request}, step {m.step}): it is not on the path that the "
        "model took, or it had already run when it was read"
    )
