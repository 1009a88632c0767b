"""A request that interventions take part in, and its part of one pass."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from adapters.saves import Saves, check

if TYPE_CHECKING:
    from adapters.intervention import Pass
    from adapters.ranks import Trail
    from adapters.recompute import Written
    from adapters.sites import Location
    from adapters.stacked import Stack


@dataclass(slots=True)
class Live:
    """A request that interventions take part in, from its first pass to its last.

    Attributes:
        as_read: names saved exactly as the model had them, before this request `wrote` anything -> their points.
        seen: positions that interventions have been given: what a pass computes below it is computed again.
        drawn: tokens that the passes of this request have drawn; `spoilt` of them by a pass that failed.
        stack: rows of this request that still lie with its neighbours'.
        written: every write, for an engine that may compute positions again; None for one that never does.
        trail: what was written, as digests, for a model that is split over ranks; None for one that is not.
    """

    id: str
    passes: list[Pass] = field(default_factory=list)
    saves: MutableMapping[str, list[Any]] = field(default_factory=dict)
    state: dict[Any, Any] = field(default_factory=dict)
    as_read: dict[str, Location] = field(default_factory=dict)
    check_finite: bool = False
    wrote: bool = False
    stopped: bool = False
    error: BaseException | None = None
    seen: int = 0
    drawn: int = 0
    spoilt: int = 0
    stack: Stack | None = None
    written: list[Written] | None = None
    trail: Trail | None = None

    @property
    def ended(self) -> bool:
        return self.stopped or self.error is not None

    def close(self) -> None:
        """The request is over: check what it kept as read, and let go of its passes."""
        self.passes.clear()
        if self.stack is not None:
            self.stack.close()
        try:
            self.saves = Saves.of(self.saves)
        except Exception as error:  # no memory is left
            self.saves, self.error = {}, self.error or error
        if self.error is None:
            self.error = check(self.id, self.saves, self.as_read)

    def keep(self, name: str, loc: Location, value: Any) -> None:
        """Save `value`, a copy that is the request's own, as what was read at `loc`."""
        entries = self.saves.get(name)
        if entries is None:
            entries = self.saves[name] = []
            if not self.wrote:
                self.as_read[name] = loc
        elif self.wrote:
            self.as_read.pop(name, None)
        entries.append(value)


class Job(NamedTuple):
    """One request's part of one pass: its place in the batch, first position and tokens, whether a token is drawn."""

    live: Live
    place: int
    first: int
    tokens: int
    is_prompt: bool
    draws: bool = True
