"""Parks interventions on locations and serves them in the model's order.

One `Interleaver` an engine. For each forward pass the engine calls `begin`, then `visit` at every location
that somebody waits for (its hooks and seams do), then `end`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from greenlet import GreenletExit, getcurrent

from adapters.errors import (
    InterventionError,
    NeverRanError,
    PassedError,
    at_line,
    line_of,
)
from adapters.handed import LENT
from adapters.intervention import Intervention, Pass
from adapters.live import Job, Live
from adapters.modes import (
    InferenceMode,
    is_any_autocast_enabled,
    is_grad_enabled,
    is_inference_mode_enabled,
    set_grad_enabled,
)
from adapters.modules import Key, layer_stem, no_such_module, parameter, ran_before
from adapters.points import _STRIDE, UNEMBED, Location, Points
from adapters.recompute import replayed
from adapters.recorded import Recorder
from adapters.rows import Part, Rows
from adapters.served import served
from adapters.threads import Threads, runs_function

__all__ = ["Host", "Interleaver", "Key", "no_such_module", "parameter"]

# Up to so many rows of a request share a product with others': it is the reading of the head that takes its time, with
# more rows it is the arithmetic, and the logits of a whole batch of prompts need memory for all of them at once.
_FEW = 8
# How often a function that swallows the error of a pass that is over may go on reading before it is dropped.
_PATIENCE = 100


class Host(Protocol):
    """What an engine lends to interventions: its model's own pieces, and a way to be called at a location."""

    points: Points
    model: Any

    @property
    def tokenizer(self) -> Any: ...

    def attach(self, key: Key) -> None:
        """See that `visit(key, ...)` is called there; idempotent. UnknownModuleError for no such module."""

    def weight(self, path: str) -> torch.Tensor: ...

    def unembed(self, x: torch.Tensor) -> torch.Tensor: ...

    def norm(self, x: torch.Tensor) -> torch.Tensor: ...


class Interleaver:
    """Runs the interventions of one engine beside its forward passes; `waiting` is what the engine's hooks look at.

    Attributes:
        grad: whether the model runs with gradients; reads are then part of autograd's graph.
        inference: whether this pass runs in inference mode.
        lends: whether a read in this pass may be given what the model holds instead of a copy: where that is `fresh`,
            made by the module that is being visited and held by nobody else.
        recomputes: whether the engine may compute positions again (it preempts), so that writes are remembered.
        total: the whole batch's sum at a location that holds a pair, made once where a visit is `shared` by several.
        gathers: whether requests that unembed in this visit share one product: the head is read from memory once.
        recorder: what serves passes that capture and do nothing else, where the engine has taps.
        interrupt: what ended an intervention without being an `Exception` (Ctrl-C): the engine stops everything.
    """

    # Whether the model's own tensors may ever be handed out.
    lending = True

    def __init__(self, host: Host) -> None:
        self.host, self.points = host, host.points
        self.waiting: dict[Key, list[Pass]] = {}
        self.grad = self.recomputes = self.inference = False
        self.total: torch.Tensor | None = None
        self.shared = False
        self.lends = self.fresh = False
        self.recorder: Recorder | None = None
        self.gathers = False
        self.interrupt: BaseException | None = None
        self._threads = Threads(runs_function)
        # Modules by path, as far as they were asked for.
        self.inputs: dict[str, Location] = {}
        self.outputs: dict[str, Location] = {}
        self._stem = layer_stem(host.points)

    def live(self, id: str, fns: Sequence[Intervention], body: Any = None, check_finite: bool = False) -> Live:
        """A new live request with its interventions, in the order in which they see each other's writes.

        `body` is the greenlet of a `trace` or `steps` body, which sees the writes of all of them.
        """
        live = Live(id, written=[] if self.recomputes else None, check_finite=check_finite)
        live.passes = [Pass(self, live, fn, order) for order, fn in enumerate(fns)]
        if body is not None:
            m = Pass(self, live, None, len(fns))
            m.thread = body
            live.passes.append(m)
        return live

    # ---- one pass

    def begin(self, rows: Rows, jobs: Sequence[Job]) -> None:
        """Start every intervention of this pass; each runs to its first read."""
        if self.waiting:
            self.abandon()
        if self.recorder is not None and self.recorder.begin(rows, jobs):
            return
        self.inference = is_inference_mode_enabled()
        self.lends = bool(LENT) and self.lending and rows.alone and not self.inference and not self.grad
        self.fresh = False
        if self.inference:
            with InferenceMode(False):
                set_grad_enabled(False)
                self._begin(rows, jobs)
        else:
            self._begin(rows, jobs)

    def _begin(self, rows: Rows, jobs: Sequence[Job]) -> None:
        hub = getcurrent()
        for job in jobs:
            live, first, n, mine = job.live, job.first, job.tokens, rows
            if first < live.seen:
                first, n, mine = self._again(rows, job, hub)
                if n == 0:
                    continue
            live.seen = first + n
            if job.draws:
                live.drawn += 1
            for m in live.passes:
                m._begin(job.place, mine, first, n, job.is_prompt, job.draws, hub)
                if m.fn is not None:
                    m.thread = served(m) or self._threads.one(hub)
                self._resume(m, m)

    def _again(self, rows: Rows, job: Job, hub: Any) -> tuple[int, int, Rows]:
        """Part of this pass computes what interventions have seen: their writes are done again without them, and what
        is left for them is (first position, tokens, rows)."""
        live, n = job.live, min(job.live.seen - job.first, job.tokens)
        if live.wrote and live.written is None:
            live.error = InterventionError(
                f"the engine computes positions {job.first} to {job.first + n} again, which was not expected of it, "
                f"and what this request wrote there is not known any more (request {live.id})"
            )
        for order, fn in enumerate(replayed(live.written or (), job.first, n, job.draws and n == job.tokens)):
            m = Pass(self, Live(live.id), fn, -1 - order)
            m._begin(job.place, Part(rows, 0, n), job.first, n, job.is_prompt, job.draws, hub)
            m.thread = self._threads.one(hub)
            self._resume(m, m)
        return job.first + n, job.tokens - n, Part(rows, n, job.tokens)

    def visit(self, key: Key, payload: Any) -> Any:
        """The model is at `key` and holds `payload`: serve everybody who waits for it, in declared order.

        Returns what the model goes on with instead, or None when that is `payload` (edits have landed in it).
        """
        here = self.waiting.pop(key, None)
        if here is None:
            return None
        self.total = None
        self.shared = len(here) > 1
        if self.shared:
            here.sort(key=_by_order)
        instead, waiting, grad = None, self.waiting, self.grad
        # Interventions of one request see each other's writes in their order, so none may be held up for another's. A
        # tap's visit lets the model go on with the very memory that it had, whoever comes last.
        on_taps = self.recorder is not None and not grad
        self.gathers = on_taps and self.shared and len({id(m.live) for m in here}) == len(here)
        # Only ordinary tensors count their versions, and only they can be used in autograd afterwards.
        guard = InferenceMode(False) if self.inference else None  # a `with` costs twice as much
        try:
            if guard is not None:
                set_grad_enabled(False)
            # The hot loop: `_resume` and `_park` in one.
            for m in here:
                if m.live.error is not None:
                    self._throw(m, self._quiet(m))
                    continue
                try:
                    wanted = m.thread.switch(payload)
                except BaseException as error:
                    self._failed(m, error)
                    wanted = None
                if is_grad_enabled() is not grad:
                    set_grad_enabled(grad)
                if wanted is not None:
                    others = waiting.get(wanted.key)
                    if others is None:
                        waiting[wanted.key] = [m]
                    else:
                        others.append(m)
                if m._instead is not None:
                    payload = instead = m._instead
                    m._instead = None
            if self.gathers:
                self._unembed_together()
            return instead
        finally:
            self.gathers = False
            del guard

    def may_gather(self, m: Pass, x: torch.Tensor) -> bool:
        """Whether `m` may wait for a product with others: few rows [n, d_model], in no mode of its own."""
        return (
            x.dim() == 2
            and x.size(0) <= _FEW
            and getcurrent() is m.thread
            and not (is_grad_enabled() or is_inference_mode_enabled() or is_any_autocast_enabled())
        )

    def _unembed_together(self) -> None:
        while (here := self.waiting.pop(UNEMBED.key, None)) is not None:
            asked = [m._multiplied for m in here]
            for m, found in zip(here, self._logits(asked), strict=True):
                m._multiplied = None
                if isinstance(found, Exception):
                    self._throw(m, found)
                else:
                    self._resume(m, found)

    def _logits(self, asked: list[torch.Tensor]) -> list[torch.Tensor | Exception]:
        """The logits of each, or the error that is its own."""
        unembed = self.host.unembed
        if len(asked) > 1 and len({(x.dtype, x.shape[1]) for x in asked}) == 1:
            with suppress(Exception):
                whole = self.aside(unembed, torch.cat(asked))
                return [own.clone() for own in whole.split([len(x) for x in asked])]
        found: list[torch.Tensor | Exception] = []
        for x in asked:
            try:
                found.append(self.aside(unembed, x))
            except Exception as error:
                found.append(error)
        return found

    def end(self) -> None:
        """The pass is over: whoever still waits is told that its location never ran."""
        self.end_recording()
        self.total = None
        for _ in range(_PATIENCE):
            if not self.waiting:
                return
            left, self.waiting = self.waiting, {}
            for key, passes in left.items():
                for m in passes:
                    self._throw(m, self._never(m, key) if m.live.error is None else self._quiet(m))
        for m in (m for passes in self.waiting.values() for m in passes):
            # It would also swallow what ends a greenlet that is let go of, and never come back from there.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(m.thread))
            m.live.error = m.live.error or InterventionError(
                f"the pass was over and the intervention went on reading (request {m.request}, step {m.step}): "
                "does it catch every error around a read?"
            )
        self.waiting = {}

    def end_recording(self) -> None:
        """The model has run: what its taps kept goes to the requests."""
        if self.recorder is not None and self.recorder.kept is not None:
            self.recorder.end()

    def abandon(self) -> None:
        """The pass died in the engine: let every parked intervention unwind."""
        if self.recorder is not None:
            self.recorder.abandon()
        left, self.waiting = self.waiting, {}
        for passes in left.values():
            for m in passes:
                if m.fn is not None:
                    self._throw(m, GreenletExit())
                else:  # the body of a trace is the parent of the model's greenlet: it gets the engine's own error
                    m._end()
        self.waiting = {}

    def _resume(self, m: Pass, value: Any) -> None:
        if m.live.error is not None:
            self._throw(m, self._quiet(m))
            return
        try:
            wanted = m.thread.switch(value)
        except BaseException as error:
            self._failed(m, error)
            return
        finally:
            if is_grad_enabled() is not self.grad:
                set_grad_enabled(self.grad)
        if wanted is not None and not m.thread.dead:
            self._park(m, wanted)

    def _park(self, m: Pass, loc: Location) -> None:
        waiting = self.waiting.get(loc.key)
        if waiting is None:
            self.waiting[loc.key] = [m]
        else:
            waiting.append(m)

    def _throw(self, m: Pass, error: BaseException) -> None:
        if not m.thread or m.thread.dead:
            return
        # What catches it is the user's code, which must not run in the engine's inference mode.
        grad = is_grad_enabled()
        guard = InferenceMode(False) if is_inference_mode_enabled() else None
        if guard is not None:
            set_grad_enabled(False)
        try:
            wanted = m.thread.throw(error)
        except BaseException as raised:
            self._failed(m, raised)
            return
        finally:
            del guard
            if is_grad_enabled() is not grad:
                set_grad_enabled(grad)
        if isinstance(wanted, Location) and not m.thread.dead:
            self._park(m, wanted)

    def _quiet(self, m: Pass) -> BaseException:
        """What ends a function without a word, and the body of a trace with the error of the one that failed before."""
        return GreenletExit() if m.fn is not None or m.live.error is None else m.live.error

    def _failed(self, m: Pass, error: BaseException) -> None:
        """An error ends its own request only."""
        if m.live.error is None:
            m.live.error = error
            m.live.spoilt = int(m.draws)
        if not isinstance(error, Exception):
            self.interrupt = error

    def aside(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Run a module of the model for an intervention: whoever waits there is not served."""
        waiting, self.waiting = self.waiting, {}
        try:
            return function(x)
        finally:
            self.waiting = waiting

    # ---- modules by path

    def module_location(self, path: str, side: Literal["in", "out"]) -> Location:
        """The location of a module's input or output."""
        known = self.inputs if side == "in" else self.outputs
        found = known.get(path)
        if found is None:
            found = known[path] = replace(self.points.module(path, side), floor=self._floor(path))
        return found

    def _floor(self, path: str) -> int:
        """The rank below which everything has run when this module does: that of its layer's first point."""
        if not self._stem or not path.startswith(self._stem):
            return -1
        layer = path.removeprefix(self._stem).partition(".")[0]
        return int(layer) * _STRIDE if layer.isdigit() else -1

    def _never(self, m: Pass, key: Key) -> InterventionError:
        where = f"{key[0]} ({'input' if key[1] == 'in' else 'output'})" if key[0] else key[1]
        line = line_of(m.thread)
        if m._key is not None and ran_before(key, m._key):
            return PassedError(
                at_line(
                    f"{where} had already passed when it was read: the model was at {' '.join(m._key).strip()}", line
                )
            )
        return NeverRanError(
            at_line(
                f"{where} did not run after it was asked for in this pass (request {m.request}, step {m.step}): it is "
                "not on the path that the model took, or it had already run when it was read",
                line,
            )
        )


def _by_order(m: Pass) -> int:
    return m.order
