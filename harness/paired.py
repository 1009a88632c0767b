"""One column against its plain engine inside a session: shares round by round, their interval, and the tests.

`judge` turns these numbers into verdicts and `aa` takes them from an arm against its twin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from harness import evidence, stats, stats_drift, stats_power
from harness.evidence import Evidence, Point
from harness.stats_drift import Contrast, Design, Fit

# Below this a standard error is rounding, not noise: a store made by hand.
_NO_NOISE = 1e-9


@dataclass(frozen=True)
class Compared:
    """What one column's in-round differences (log, above 0 is faster) say.

    `contrast` is None under two rounds; `p` is its p, or the exact one where rounds are too few to claim anything.
    """

    differences: Mapping[int, float]
    p: float
    p_exact: float
    p_unpaired: float
    test: str
    contrast: Contrast | None = None
    interval: stats.Interval | None = None
    robust: stats.Interval | None = None

    @property
    def mean(self) -> float:
        return math.fsum(self.differences.values()) / len(self.differences)

    @property
    def rounds(self) -> int:
        return len(self.differences)

    def smallest_detectable(self, alpha: float, edge: float) -> float | None:
        if self.contrast is None:
            return None
        return stats_power.smallest_detectable(self.contrast.se, self.contrast.df, alpha, edge)

    def rounds_needed(self, alpha: float, edge: float) -> int | None:
        """Rounds in all that would settle what is seen now; None where it sits on the margin."""
        least = stats.rounds_for(alpha)
        if self.contrast is None:
            return least
        sd = self.contrast.se * math.sqrt(self.rounds)
        return stats_power.rounds_needed(self.contrast.estimate, sd, edge, alpha, least=max(least, self.rounds + 1))


def differences(found: Evidence, row: str, column: str, other: str | None, metric: str) -> dict[int, float]:
    """Round -> log share of `other` inside that round, where both may be believed."""
    other_row = evidence.own_row(row, other) if other else None
    if other_row is None or other is None or other not in found.columns or column == other:
        return {}
    ours, theirs = found.of(row, column), found.of(other_row, other)
    both = {r: (ours[r].speed[metric], theirs[r].speed[metric]) for r in ours if r in theirs}
    return {r: a - b for r, (a, b) in both.items() if a is not None and b is not None}


def fit(found: Evidence, row: str) -> Fit | None:
    """All columns of a row, plain ones by the row that is their denominator, fitted with the host's drift;
    None where fewer than three columns have the processes for it."""
    seen = []
    for column in found.columns:
        own = evidence.own_row(row, column)
        points = found.of(own, column) if own else {}
        if len(points) >= stats_drift.LEAST:
            seen += [(column, p) for p in points.values()]
    names = tuple(c for c, _ in seen)
    if len(set(names)) < 3:
        return None
    design = Design(names, tuple(p.round for _, p in seen), tuple(p.slot for _, p in seen))
    return Fit([_speed(p, found.metric) for _, p in seen], design)


def compare(found: Evidence, row: str, column: str, other: str, fitted: Fit | None) -> Compared | None:
    """The numbers of one cell; None where no round has both."""
    by_round = differences(found, row, column, other, found.metric)
    if not by_round:
        return None
    other_row = evidence.own_row(row, other)
    assert other_row is not None
    ours = [_speed(p, found.metric) for p in found.of(row, column).values()]
    theirs = [_speed(p, found.metric) for p in found.of(other_row, other).values()]
    return of_differences(by_round, ours, theirs, found.alpha, _contrast(fitted, column, other))


def of_differences(
    by_round: Mapping[int, float],
    ours: list[float],
    theirs: list[float],
    alpha: float,
    contrast: Contrast | None = None,
) -> Compared:
    """The numbers of in-round differences; `contrast` from a fit, else they are compared by themselves."""
    d = list(by_round.values())
    exact, unpaired = stats.sign_flip(d), stats.mann_whitney(ours, theirs)
    if len(d) < 2:
        return Compared(by_round, exact, exact, unpaired, "sign flip")
    contrast = contrast or stats_drift.paired(d)
    # Nothing is claimed where no exact p could be below alpha; where there is no noise to model, the exact one stands.
    modelled = len(d) >= stats.rounds_for(alpha) and contrast.se > _NO_NOISE
    return Compared(
        differences=by_round,
        p=contrast.p if modelled else exact,
        p_exact=exact,
        p_unpaired=unpaired,
        test=contrast.test if modelled else "sign flip",
        contrast=contrast,
        interval=stats.paired_interval(d),
        robust=stats.hodges_lehmann(d),
    )


def _contrast(fitted: Fit | None, column: str, plain: str) -> Contrast | None:
    return fitted.contrast(column, plain) if fitted and {column, plain} <= set(fitted.columns) else None


def _speed(point: Point, metric: str) -> float:
    speed = point.speed[metric]
    assert speed is not None  # `Evidence.of` hands out none without
    return speed
