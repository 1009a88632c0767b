"""History: where a cell's share of plain stepped, over many sessions.

One series a cell and machine fingerprint, in the order the sessions started; other hardware, driver or clock limits
start a new series, so a new machine is never a regression. A series is cut into level stretches by an L1 Potts fit
(least absolute deviations plus a price a step, solved exactly), so one odd session is no step, and the same stores
always give the same steps.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from harness import fingerprint, judge
from harness.baseline import FullKey
from harness.judge import Cell
from harness.stats import Array
from harness.store import Store

LEAST = 2  # sessions in a stretch; a single one may be an accident
# Price of a step in units of the noise times log2(n). At 2, pure noise shows a step in 4 % of series of 4 to 6 sessions
# and 1 % of longer ones, and a step of three times the noise in the middle of 20 is found in nine of ten.
_PRICE = 2.0


@dataclass(frozen=True)
class TrendPoint:
    """One session of one cell: its share of plain, with the interval."""

    session: str
    started: str
    share: float
    low: float | None
    high: float | None
    verdict: str
    commit: str | None


@dataclass(frozen=True)
class Step:
    """A change of level. `index` is the first point of the new one; `change` a fraction of the share."""

    index: int
    before: float
    after: float
    change: float


@dataclass(frozen=True)
class Trend:
    """One cell on one machine."""

    key: FullKey
    machine: str
    points: tuple[TrendPoint, ...]
    steps: tuple[Step, ...]


def trend(sessions: Iterable[Store]) -> list[Trend]:
    """Every cell's series, in the order cells first appear, machines in the order they were first used."""
    points: dict[tuple[FullKey, str], list[TrendPoint]] = defaultdict(list)
    margins: dict[tuple[FullKey, str], float] = {}
    for store in sorted(sessions, key=lambda s: str(s.session.get("started") or "")):
        facts, model = store.session["fingerprint"], store.session["grid"]["model"]
        for cell in judge.judge(store):
            at = FullKey(cell.grid, model, cell.row, cell.column), fingerprint.machine_id(facts)
            if cell.share is None or cell.verdict == "INVALID":
                continue  # nothing that a level could be drawn through
            points[at].append(_point(store, cell, cell.share))
            margins[at] = cell.margin or 0.0
    return [
        Trend(key, machine, tuple(p), tuple(steps([q.share for q in p], margin=margins[key, machine])))
        for (key, machine), p in points.items()
    ]


def _point(store: Store, cell: Cell, share: float) -> TrendPoint:
    head = store.session
    return TrendPoint(
        session=str(head["session"]),
        started=str(head.get("started")),
        share=share,
        low=cell.low,
        high=cell.high,
        verdict=cell.verdict,
        commit=head["fingerprint"].get("git_commit"),
    )


def steps(values: Sequence[float], margin: float = 0.03, price: float = _PRICE) -> list[Step]:
    """Where a series of positive numbers changes level by more than the margin.

    >>> [s.index for s in steps([1.0, 1.01, 0.99, 1.0, 0.9, 0.91, 0.9, 0.89])]
    [4]
    """
    y = np.log(np.asarray(values, dtype=float))
    if len(y) < 2 * LEAST:
        return []
    bounds = _potts(y, price * max(_noise(y), 1e-9) * math.log2(len(y)))
    levels = [float(np.median(y[a:b])) for a, b in itertools.pairwise(bounds)]
    return [
        Step(at, math.exp(old), math.exp(new), math.expm1(new - old))
        for at, old, new in zip(bounds[1:-1], levels, levels[1:], strict=False)
        if abs(new - old) > math.log1p(margin)
    ]


def _noise(y: Array) -> float:
    """A session's own deviation, from its distance to the next: steps are few, so the median does not see them."""
    return float(np.median(np.abs(np.diff(y)))) / (0.6745 * math.sqrt(2))


def _potts(y: Array, price: float) -> list[int]:
    """Bounds of the stretches that make absolute deviations from their medians plus `price` a step least."""
    n = len(y)
    best, cut = np.full(n + 1, math.inf), np.zeros(n + 1, dtype=int)
    best[0] = -price
    for end in range(LEAST, n + 1):
        for start in range(end - LEAST + 1):
            if math.isinf(best[start]):
                continue
            cost = best[start] + price + float(np.abs(y[start:end] - np.median(y[start:end])).sum())
            if cost < best[end] - 1e-12:
                best[end], cut[end] = cost, start
    bounds = [n]
    while bounds[-1] > 0:
        bounds.append(int(cut[bounds[-1]]))
    return bounds[::-1]
