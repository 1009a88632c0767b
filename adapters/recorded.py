"""Passes in which every request captures the same points: a tap keeps what the whole batch has there, in one operator.

Nobody waits, nothing is written and nothing is read by Python in such a pass, so its captures need no more than one
tensor a point: 17 us where a visit takes 34 with the caches cold, as they are between two layers. Whose rows they are
is sorted out when the pass is over, and they become ordinary tensors when the request is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from adapters.declared import Capture
from adapters.errors import NotInRowsError
from adapters.layouts import shaped
from adapters.live import Job
from adapters.modes import InferenceMode, is_any_autocast_enabled
from adapters.points import LOGITS_KEY, SAMPLED_KEY, Location
from adapters.rows import Rows

if TYPE_CHECKING:
    from adapters.interleave import Interleaver, Key

    Kept = dict[Key, torch.Tensor | None]


class Recorder:
    """Serves the passes of one engine that it can, and leaves the others to the `Interleaver`.

    Attributes:
        kept: in a pass that is served here, what each location held for the whole batch; None in any other pass.
    """

    def __init__(self, il: Interleaver) -> None:
        self.kept: Kept | None = None
        self._il = il
        self._fn: Capture | None = None
        self._places: list[tuple[str, Location, bool]] = []
        self._keys: list[Key] = []
        self._rows: Rows | None = None
        self._jobs: Sequence[Job] = ()

    def begin(self, rows: Rows, jobs: Sequence[Job]) -> bool:
        """Whether this pass is served here: all of its rows belong to requests whose only work is the same capture."""
        self.abandon()  # what died after its forward
        if not jobs or len(jobs) != rows.size or self._il.grad or is_any_autocast_enabled():
            return False
        fn = jobs[0].live.passes[0].fn
        if type(fn) is not Capture:  # a subclass may be called otherwise
            return False
        new = False
        for job in jobs:
            live = job.live
            if len(live.passes) != 1 or live.check_finite or job.first < live.seen:
                return False
            other = live.passes[0].fn
            if other is not fn and (type(other) is not Capture or other != fn):
                return False
            new = new or not live.seen
        if (fn is not self._fn and not self._takes(fn)) or (new and not self._attached()):
            return False
        for job in jobs:
            live = job.live
            live.seen = job.first + job.tokens
            live.drawn += job.draws
            live.recorded |= rows.size == 1
            live.passes[0]._begin(job.place, rows, job.first, job.tokens, job.is_prompt, job.draws, None)
        self.kept = dict.fromkeys(self._keys)
        self._rows, self._jobs = rows, jobs
        return True

    def end(self) -> None:
        """The model has run: to every request its rows. What goes wrong is the error of its request."""
        kept, rows, jobs = self.kept, self._rows, self._jobs
        assert kept is not None
        assert rows is not None
        self.abandon()
        if rows.size == 1:
            self._hand_out(kept, rows.of, jobs)
            return
        # A batch's tensor must not live as long as the longest of its requests. Made in the user's mode and not in the
        # engine's, the copies need not be copied again when the request is over.
        with InferenceMode(False):
            self._hand_out(kept, rows.copy, jobs)

    def _hand_out(self, kept: Kept, mine: Callable[[torch.Tensor, int], torch.Tensor], jobs: Sequence[Job]) -> None:
        each = [(name, loc, is_whole, kept[loc.key]) for name, loc, is_whole in self._places]
        for job in jobs:
            live, place = job.live, job.place
            m = live.passes[0]
            for name, loc, is_whole, x in each:
                try:
                    if x is None:
                        raise self._il._never(m, loc.key)
                    value = mine(x, place) if is_whole else _part(mine(x[0] if loc.site.lead else x, place), loc)
                    live.keep(name, loc, value)
                except Exception as error:
                    wrong = NotInRowsError(f"{loc}: {error}") if isinstance(error, NotInRowsError) else error
                    wrong.add_note(f"while {loc} was handed out (request {m.request}, step {m.step})")
                    self._il._failed(m, wrong)
                    break

    def abandon(self) -> None:
        """The pass died in the engine."""
        self.kept, self._rows, self._jobs = None, None, ()

    def _takes(self, fn: Capture) -> bool:
        """Whether a tap can keep whole what `fn` captures; then that is captured from now on."""
        try:
            places = fn.places(self._il.points)
        except Exception:
            return False  # as a visit it is its own request's error
        if any(loc.rank < 0 or not loc.site.in_place or loc.key in (LOGITS_KEY, SAMPLED_KEY) for _, loc in places):
            return False
        self._fn, self._keys = fn, [loc.key for _, loc in places]
        self._places = [(name, loc, _is_whole(loc)) for name, loc in places]
        return True

    def _attached(self) -> bool:
        try:
            for key in self._keys:
                self._il.host.attach(key)
        except Exception:
            return False
        return True


def _is_whole(loc: Location) -> bool:
    """Whether a request's rows of what lies there are the point as they are."""
    return not (loc.site.lead or loc.hi or loc.head_dim or loc.scale != 1.0)


def _part(x: torch.Tensor, loc: Location) -> torch.Tensor:
    value = shaped(x, loc)
    if loc.scale != 1.0:
        return value * loc.scale
    # A part of a fused projection must not keep the whole.
    return value.clone() if loc.hi or loc.site.part else value
