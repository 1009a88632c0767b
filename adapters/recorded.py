"""Passes in which every request captures the same points: a tap keeps what the whole batch has there, in one operator.

Nobody waits, nothing is written and nothing is read by Python in such a pass, so its captures need no more than one
tensor a point: 10 us where a visit takes 30 with the caches cold, as they are between two layers. Whose rows they are
is sorted out when the pass is over, and they become ordinary tensors when the request is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from adapters.declared import Capture
from adapters.errors import InterventionError, NotInRowsError
from adapters.layouts import shaped
from adapters.live import Job
from adapters.modes import is_any_autocast_enabled
from adapters.points import LOGITS_KEY, SAMPLED_KEY, Location
from adapters.rows import Rows

if TYPE_CHECKING:
    from adapters.interleave import Interleaver

Key = tuple[str, str]


class Recorder:
    """Serves the passes of one engine that it can, and leaves the others to the `Interleaver`.

    Attributes:
        kept: in a pass that is served here, what each location held for the whole batch; None in any other pass.
    """

    def __init__(self, il: Interleaver) -> None:
        self.kept: dict[Key, torch.Tensor | None] | None = None
        self._il = il
        self._fn: Capture | None = None
        self._places: list[tuple[str, Location]] = []
        self._keys: list[Key] = []
        self._rows: Rows | None = None
        self._jobs: Sequence[Job] = ()

    def begin(self, rows: Rows, jobs: Sequence[Job]) -> bool:
        """Whether this pass is served here: all of its rows belong to requests whose only work is the same capture."""
        if not jobs or len(jobs) != rows.size or self._il.grad or is_any_autocast_enabled():
            return False
        fn = jobs[0].live.passes[0].fn
        new = False
        for live, _, first, _, _, _ in jobs:
            if len(live.passes) != 1 or live.check_finite or live.trail is not None or first < live.seen:
                return False
            other = live.passes[0].fn
            if other is not fn and (type(other) is not Capture or other != fn):
                return False
            new = new or not live.seen
        if fn is not self._fn and not self._takes(fn):
            return False
        if new and not self._attached():
            return False
        for live, _, first, tokens, _, draws in jobs:
            live.seen = first + tokens
            live.drawn += draws
            live.recorded = True
            live.passes[0].step += 1
        self.kept = dict.fromkeys(self._keys)
        self._rows, self._jobs = rows, jobs
        return True

    def end(self) -> None:
        """The pass is over: to every request its rows."""
        kept, rows, jobs = self.kept, self._rows, self._jobs
        assert kept is not None
        assert rows is not None
        self.abandon()
        for job in jobs:
            live, saves = job.live, job.live.saves
            for name, loc in self._places:
                x = kept[loc.key]
                if x is None:
                    self._failed(job, self._il._never(live.passes[0], loc.key))
                    break
                try:
                    mine = shaped(rows.of(x[0] if loc.site.lead else x, job.place), loc)
                except NotInRowsError as odd:
                    self._failed(job, NotInRowsError(f"{loc}: {odd}"))
                    break
                entries = saves.get(name)
                if entries is None:
                    entries = saves[name] = []
                    if not live.wrote:  # buffers may have
                        live.as_read[name] = loc
                entries.append(mine if loc.scale == 1.0 else mine * loc.scale)

    def abandon(self) -> None:
        """The pass died in the engine."""
        self.kept, self._rows, self._jobs = None, None, ()

    def _takes(self, fn: Any) -> bool:
        """Whether `fn` is a capture of locations that a tap can keep whole; then it is what is captured from now on."""
        if type(fn) is not Capture:  # a subclass may be called otherwise
            return False
        try:
            places = fn.places(self._il.points)
        except (InterventionError, IndexError):
            return False  # as a visit it is its own request's error
        if any(loc.rank < 0 or not loc.site.in_place or loc.key in (LOGITS_KEY, SAMPLED_KEY) for _, loc in places):
            return False
        self._fn, self._places, self._keys = fn, places, [loc.key for _, loc in places]
        return True

    def _failed(self, job: Job, error: InterventionError) -> None:
        m = job.live.passes[0]
        m.draws = job.draws
        self._il._failed(m, error)

    def _attached(self) -> bool:
        try:
            for _, loc in self._places:
                self._il.host.attach(loc.key)
        except InterventionError:
            return False
        return True
