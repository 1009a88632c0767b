"""Passes in which every request captures the same points: a tap keeps what the whole batch has there, in one operator.

Nobody waits, nothing is written and nothing is read by Python in such a pass, so its captures need no more than one
tensor a point: 17 us where a visit takes 34 with the caches cold, as they are between two layers. Whose rows they are
is sorted out when the pass is over; of passes in which the same requests decode, now and then (`stacked.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from adapters.declared import Capture
from adapters.errors import NotInRowsError
from adapters.live import Job
from adapters.modes import InferenceMode, is_any_autocast_enabled
from adapters.points import LOGITS_KEY, SAMPLED_KEY
from adapters.rows import Rows
from adapters.stacked import Place, Stack

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
        self._places: list[Place] = []
        self._keys: list[Key] = []
        self._rows: Rows | None = None
        self._jobs: Sequence[Job] = ()
        self._stack: Stack | None = None

    def begin(self, rows: Rows, jobs: Sequence[Job]) -> bool:
        """Whether this pass is served here: all of its rows belong to requests whose only work is the same capture."""
        self.abandon()  # what died after its forward
        is_served = self._serves(rows, jobs)
        if self._stack is not None and not (is_served and self._stack.goes_on(jobs)):
            self._close_stack()
        if is_served:
            self.kept = dict.fromkeys(self._keys)
            self._rows, self._jobs = rows, jobs
        return is_served

    def _serves(self, rows: Rows, jobs: Sequence[Job]) -> bool:
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
            live.passes[0]._begin(job.place, rows, job.first, job.tokens, job.is_prompt, job.draws, None)
        return True

    def end(self) -> None:
        """The model has run: to every request its rows. What goes wrong is the error of its request."""
        kept, rows, jobs = self.kept, self._rows, self._jobs
        assert kept is not None
        assert rows is not None
        self.abandon()
        # What is made in the user's mode and not in the engine's need not be copied again when the request is over.
        with InferenceMode(False):
            if not self._is_stacked(kept, rows, jobs):
                self._hand_out(kept, rows, jobs)

    def _is_stacked(self, kept: Kept, rows: Rows, jobs: Sequence[Job]) -> bool:
        """Whether the pass is one of decoding, and has been added to those before it."""
        if any(job.tokens != 1 for job in jobs) or any(x is None for x in kept.values()):
            return False
        held: Any = kept
        try:
            if self._stack is not None and self._stack.fits(held):
                self._stack.add(held)
            else:
                self._close_stack()
                self._stack = Stack(self._places, jobs, rows, held)
                self._stack.add(held)
        except Exception:
            return False  # handed out, it is its own request's error
        return True

    def _close_stack(self) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None

    def _hand_out(self, kept: Kept, rows: Rows, jobs: Sequence[Job]) -> None:
        self._close_stack()
        each = [(place, kept[place.loc.key]) for place in self._places]
        for job in jobs:
            live, m = job.live, job.live.passes[0]
            for place, x in each:
                loc = place.loc
                try:
                    if x is None:
                        raise self._il._never(m, loc.key)
                    live.keep(place.name, loc, place.value(rows.copy(x[0] if loc.site.lead else x, job.place)))
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
        self._places = [Place.of(name, loc) for name, loc in places]
        return True

    def _attached(self) -> bool:
        try:
            for key in self._keys:
                self._il.host.attach(key)
        except Exception:
            return False
        return True
