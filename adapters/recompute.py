"""Positions that an engine computes again, because it had to give up their cache (preemption).

An intervention has had its say about them: it is not asked again, its saves stay as they are, and its writes are done
again from what was remembered. Running the function a second time could not be right: a pass that covers many of the
original ones at once would show it the state, the step and the random numbers of another moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapters.points import LOGITS_KEY, SAMPLED_KEY, Location

if TYPE_CHECKING:
    from adapters.intervention import Pass


@dataclass(frozen=True)
class Written:
    """One write: where, at which positions, and what was left there."""

    loc: Location
    first: int
    tokens: int
    value: Any


def replayed(written: Sequence[Written], first: int, tokens: int, draws: bool) -> list[Callable[[Pass], None]]:
    """Interventions that do again what was written at positions `first` to `first + tokens`, one a location.

    What was written to the logits or the sampled token counts only when this pass draws that very token again.
    """
    by_place: dict[Location, list[Written]] = {}
    for w in written:
        outside = w.loc.key in (LOGITS_KEY, SAMPLED_KEY)
        again = draws and w.first + w.tokens == first + tokens if outside else True
        if again and w.first < first + tokens and w.first + w.tokens > first:
            by_place.setdefault(w.loc, []).append(w)
    return [_replay(loc, writes, first, tokens) for loc, writes in by_place.items()]


def _replay(loc: Location, writes: list[Written], first: int, tokens: int) -> Callable[[Pass], None]:
    def replay(m: Pass) -> None:
        held = m._read(loc)
        for w in writes:
            if loc.key in (LOGITS_KEY, SAMPLED_KEY):
                held.copy_(w.value)
                continue
            lo, hi = max(w.first, first), min(w.first + w.tokens, first + tokens)
            for old, new in zip(_each(held), _each(w.value), strict=True):
                old[lo - first : hi - first] = new[lo - w.first : hi - w.first]

    return replay


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
