"""Every statistical rule that a verdict hangs on: tests, intervals, corrections. numpy and scipy's distributions only.

All of it works on one number a process (never on runs, which are not independent) and on unrounded numbers.
Differences are of logarithms, so 0 is "the same" and +0.05 is 5 % faster. `tests/test_stats.py` holds every function
against full enumeration.

    index:  mann_whitney  sign_flip                            exact tests, unpaired and paired
            paired_interval  hodges_lehmann  tost              how large, and is it as good as nothing
            benjamini_hochberg  holm  max_t_*                  many tests at once
            minimum_p_*  rounds_for                            what n processes can show at best
            geometric_mean  matched_geometric_mean             summaries
            published_pooled_rule                              other people's rule, to reproduce their tables

Drift-adjusted comparison inside a session: `stats_drift`. Smallest detectable effect, rounds needed: `stats_power`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from scipy import special
from scipy.stats import rankdata

Array = npt.NDArray[np.float64]
Values = Sequence[float] | Array
Ps = Sequence[float | None]
K = TypeVar("K", bound=Hashable)

# Sums of the same numbers in another order differ in the last bits; closer than this they are a tie.
_TIE = 1e-12
_MOST_SIGNS = 40  # 2 x 2^20 half sums
_MOST_POOLED = 200


@dataclass(frozen=True)
class Interval:
    """An estimate and the interval around it."""

    estimate: float
    low: float
    high: float
    level: float = 0.95


def _checked(name: str, values: Values, least: int = 1) -> Array:
    x = np.asarray(values, dtype=float).ravel()
    if len(x) < least:
        raise ValueError(f"{name}: {len(x)} values, at least {least} are needed")
    if not np.isfinite(x).all():
        at = int(np.argmin(np.isfinite(x)))
        raise ValueError(f"{name}: value {at} is {x[at]}; leave out what was not measured")
    return x


def mann_whitney(a: Values, b: Values) -> float:
    """Exact two-sided p of the Mann-Whitney U test by the permutation law: twice the smaller tail, ties as they are.

    The law of the rank sum is counted by dynamic programming over the (doubled, so whole) midranks, so it is exact at
    every size and for every pattern of ties; nothing here turns into a normal approximation.

    >>> round(mann_whitney([1, 2, 3, 4, 5], [3, 4, 5, 6, 7]), 5)
    0.12698
    """
    x, y = _checked("a", a), _checked("b", b)
    if len(x) > len(y):
        x, y = y, x
    if len(x) + len(y) > _MOST_POOLED:
        raise ValueError(f"{len(x)} and {len(y)} values: the exact law is counted up to {_MOST_POOLED} in all")
    ranks = np.rint(2 * rankdata(np.concatenate([x, y]))).astype(int)
    n, seen = len(x), int(ranks[: len(x)].sum())
    top = int(np.sort(ranks)[-n:].sum())
    ways = np.zeros((n + 1, top + 1))  # [how many chosen, their rank sum]
    ways[0, 0] = 1.0
    for r in ranks:
        ways[1:, r:] += ways[:-1, : top + 1 - r].copy()
    total = ways[n].sum()
    return min(1.0, float(2 * min(ways[n, : seen + 1].sum(), ways[n, seen:].sum()) / total))


def sign_flip(differences: Values) -> float:
    """Exact two-sided p of the paired sign-flip test of the mean: the share of the 2^n sign patterns with a mean
    at least as far from 0. Counted in two halves that meet, so 40 pairs are no problem.

    >>> sign_flip([0.1, 0.2, 0.05, 0.3, 0.1, 0.2])
    0.03125
    """
    d = _checked("differences", differences)
    if len(d) > _MOST_SIGNS:
        raise ValueError(f"{len(d)} pairs: signs are enumerated up to {_MOST_SIGNS}")
    far = abs(d.sum()) - _TIE * np.abs(d).sum()
    if far <= 0:
        return 1.0
    left, right = _signed_sums(d[: len(d) // 2]), np.sort(_signed_sums(d[len(d) // 2 :]))
    beyond = int((len(right) - np.searchsorted(right, far - left, side="left")).sum())
    return min(1.0, math.ldexp(beyond, 1 - len(d)))


def _signed_sums(d: Array) -> Array:
    sums = np.zeros(1)
    for value in d:
        sums = np.concatenate([sums - value, sums + value])
    return sums


def paired_interval(differences: Values, level: float = 0.95) -> Interval:
    """Mean of the differences with its t interval.

    >>> i = paired_interval([0.1, 0.2, 0.3])
    >>> round(i.estimate, 3), round(i.low, 3), round(i.high, 3)
    (0.2, -0.048, 0.448)
    """
    d = _checked("differences", differences, least=2)
    mean, se = float(d.mean()), float(d.std(ddof=1)) / math.sqrt(len(d))
    half = float(special.stdtrit(len(d) - 1, (1 + level) / 2)) * se
    return Interval(mean, mean - half, mean + half, level)


def hodges_lehmann(differences: Values, level: float = 0.95) -> Interval:
    """Median of the pairwise averages, with the interval that inverts the exact signed-rank test.

    Below 6 pairs no 95 % interval of this kind exists, and it is all numbers.

    >>> hodges_lehmann([0.1, 0.2, 0.05, 0.3, 0.1, 0.2])
    Interval(estimate=0.15000000000000002, low=0.05, high=0.3, level=0.95)
    """
    d = _checked("differences", differences)
    i, j = np.triu_indices(len(d))
    walsh = np.sort((d[i] + d[j]) / 2)
    ways = np.ones(1)
    for rank in range(1, len(d) + 1):
        ways = np.concatenate([ways, np.zeros(rank)]) + np.concatenate([np.zeros(rank), ways])
    tail = np.cumsum(ways) / 2.0 ** len(d)
    cut = int(np.searchsorted(tail, (1 - level) / 2 * (1 + _TIE), side="right"))
    middle = float(np.median(walsh))
    if cut == 0:
        return Interval(middle, -math.inf, math.inf, level)
    return Interval(middle, float(walsh[cut - 1]), float(walsh[len(walsh) - cut]), level)


def tost(differences: Values, margin: float) -> float:
    """p of "the mean differs by the margin or more" (two one-sided t tests): small means as good as the same.

    >>> tost([0.001, -0.002, 0.0, 0.001, -0.001, 0.002], margin=0.03) < 0.001
    True
    """
    d = _checked("differences", differences, least=2)
    return equivalence(float(d.mean()), float(d.std(ddof=1)) / math.sqrt(len(d)), len(d) - 1, margin)


def equivalence(estimate: float, se: float, df: float, margin: float) -> float:
    """The same from an estimate and its standard error."""
    if margin <= 0:
        raise ValueError(f"margin = {margin}: nothing is equivalent within no margin")
    room = margin - abs(estimate)
    if se == 0:
        return 0.0 if room > 0 else 1.0
    return float(special.stdtr(df, -room / se))


def _adjusted(ps: Ps, rule: Any) -> list[float | None]:
    """Apply `rule` to the numbers among `ps`. None and NaN are "no test": not in the family, and None comes back."""
    tested = [i for i, p in enumerate(ps) if p is not None and not math.isnan(p)]
    p = np.array([ps[i] for i in tested], dtype=float)
    if ((p < 0) | (p > 1)).any():
        raise ValueError(f"{p[(p < 0) | (p > 1)][0]} is not a p-value")
    out: list[float | None] = [None] * len(ps)
    if tested:
        order = np.argsort(p, kind="stable")
        for place, value in zip(order, rule(p[order], len(p)), strict=True):
            out[tested[place]] = float(min(1.0, value))
    return out


def benjamini_hochberg(ps: Ps) -> list[float | None]:
    """p adjusted so that, of what is called at alpha, at most a share alpha is expected to be false.

    >>> benjamini_hochberg([0.01, None, 0.04, 0.03])
    [0.03, None, 0.04, 0.04]
    """
    return _adjusted(ps, lambda p, m: np.minimum.accumulate((p * m / np.arange(1, m + 1))[::-1])[::-1])


def holm(ps: Ps) -> list[float | None]:
    """p adjusted so that with probability 1 - alpha nothing called at alpha is false.

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    return _adjusted(ps, lambda p, m: np.maximum.accumulate(p * np.arange(m, 0, -1)))


def max_t_sign_flip(rounds: npt.ArrayLike) -> list[float]:
    """Step-down max-T over joint sign flips of whole rounds; `rounds` is [rounds, cells] of paired differences.

    Exact under any dependence between cells that share processes, and its smallest p is 2/2^n however many the cells.
    The statistic is the plain mean: the studentized one can hardly win among 2^n patterns with several cells.

    >>> max_t_sign_flip([[.1, 0], [.2, .01], [.1, -.01], [.2, 0], [.1, .01], [.1, -.02]])[0]
    0.03125
    """
    d = np.asarray(rounds, dtype=float)
    if len(d) > 16:
        raise ValueError(f"{len(d)} rounds: joint flips are enumerated up to 16")
    signs = np.array([(1, *s) for s in itertools.product((1, -1), repeat=len(d) - 1)], dtype=float)
    return _step_down(np.abs(signs @ d) / len(d))


def max_t_permutation(a: npt.ArrayLike, b: npt.ArrayLike, most: int = 20_000, seed: int = 0) -> list[float]:
    """Step-down max-T over joint re-labellings of the rounds of two sessions; `a` and `b` are [rounds, cells], NaN
    where a cell was not measured. Controls the chance of any false call, as Holm does, but without Holm's discrete
    floor and with the dependence of cells that share processes. Up to `most` labellings all are used, else a fixed
    random set.

    >>> max_t_permutation([[0.0], [.01], [-.01], [0]], [[.2], [.21], [.19], [.2]])
    [0.02857142857142857]
    """
    x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    labels = _labellings(len(x), len(y), most, seed)
    pooled = np.concatenate([x, y])
    there = np.isfinite(pooled)
    pooled = np.where(there, pooled - np.nanmean(np.where(there, pooled, np.nan), axis=0), 0.0)
    return _step_down(_welch(labels, pooled, there.astype(float)))


def _labellings(n: int, m: int, most: int, seed: int) -> Array:
    """[labellings, n + m] of 0 and 1, the true one first."""
    if math.comb(n + m, n) <= most:
        chosen = np.array(list(itertools.combinations(range(n + m), n)))
    else:
        rng = np.random.default_rng(seed)
        chosen = np.argsort(rng.random((most, n + m)), axis=1)[:, :n]
        chosen[0] = np.arange(n)
    labels = np.zeros((len(chosen), n + m))
    np.put_along_axis(labels, chosen, 1.0, axis=1)
    return labels


def _welch(labels: Array, values: Array, there: Array) -> Array:
    sides = []
    for side in (labels, 1 - labels):
        n = side @ there
        mean = (side @ values) / np.maximum(n, 1)
        spread = np.maximum(side @ values**2 - n * mean**2, 0) / np.maximum(n - 1, 1) / np.maximum(n, 1)
        sides.append((n, mean, spread))
    (n1, mean1, s1), (n2, mean2, s2) = sides
    scale = np.sqrt(s1 + s2 + (_TIE * np.abs(values).max(axis=0)) ** 2 + 1e-300)
    return np.where((n1 > 1) & (n2 > 1), np.abs(mean1 - mean2) / scale, 0.0)


def _step_down(statistic: Array) -> list[float]:
    """Adjusted p of every column of [labellings, cells], row 0 being what was seen."""
    seen = statistic[0]
    order = np.argsort(-seen, kind="stable")
    # Running maximum from the least extreme cell up: the family left once the more extreme ones are called.
    rest = np.maximum.accumulate(statistic[:, order[::-1]], axis=1)[:, ::-1]
    p = (rest >= seen[order] * (1 - 1e-9)).mean(axis=0)
    out = np.empty(len(seen))
    out[order] = np.maximum.accumulate(p)
    return [float(v) for v in out]


def minimum_p_unpaired(n: int, m: int | None = None) -> float:
    """The smallest p that n against m processes (m = n by default) can give, however far apart.

    >>> [round(minimum_p_unpaired(n), 5) for n in (3, 4, 5)]
    [0.1, 0.02857, 0.00794]
    """
    return min(1.0, 2 / math.comb(n + (n if m is None else m), n))


def minimum_p_paired(n: int) -> float:
    """The smallest p that n rounds can give.

    >>> minimum_p_paired(6)
    0.03125
    """
    return min(1.0, math.ldexp(1.0, 1 - n))


@dataclass(frozen=True)
class Least:
    """What n per side can show at best; `room`: how many unpaired tests Bonferroni leaves possible at alpha."""

    n: int
    unpaired: float
    paired: float
    room: int


def minimum_p_table(sizes: Sequence[int] = (3, 4, 5, 6, 8, 9, 10), alpha: float = 0.05) -> list[Least]:
    """The table of smallest p-values.

    >>> minimum_p_table([6])[0].room
    23
    """
    return [
        Least(n, minimum_p_unpaired(n), minimum_p_paired(n), math.floor(alpha / minimum_p_unpaired(n))) for n in sizes
    ]


def rounds_for(alpha: float = 0.05, tests: int = 1) -> int:
    """How many rounds an exact paired test needs before any p can be below alpha / tests.

    >>> rounds_for(0.05), rounds_for(0.05, tests=40)
    (6, 11)
    """
    return next(n for n in itertools.count(1) if minimum_p_paired(n) < alpha / tests)


def processes_for(alpha: float = 0.05, tests: int = 1) -> int:
    """The same for two unpaired groups of equal size.

    >>> processes_for(0.05), processes_for(0.05, tests=40)
    (4, 7)
    """
    return next(n for n in itertools.count(1) if minimum_p_unpaired(n) < alpha / tests)


def geometric_mean(values: Values) -> float:
    """
    >>> geometric_mean([1, 4])
    2.0
    """
    x = _checked("values", values)
    if (x <= 0).any():
        raise ValueError(f"{x[x <= 0][0]} has no logarithm; a geometric mean is of positive numbers")
    return float(np.exp(np.log(x).mean()))


@dataclass(frozen=True)
class Matched:
    """A geometric mean of ratios over the cells that both sides have; `interval` is None under two of them."""

    ratio: float | None
    interval: Interval | None
    n: int
    only_ours: tuple[Any, ...]
    only_theirs: tuple[Any, ...]


def matched_geometric_mean(ours: Mapping[K, float], theirs: Mapping[K, float], level: float = 0.95) -> Matched:
    """Geometric mean of ours / theirs over common keys only, with a t interval over the cells; the unmatched are named.

    >>> m = matched_geometric_mean({"a": 2.0, "b": 2.0, "c": 9.0}, {"a": 1.0, "b": 1.0, "d": 1.0})
    >>> m.ratio, m.n, m.only_ours, m.only_theirs
    (2.0, 2, ('c',), ('d',))
    """
    both = [k for k in ours if k in theirs]
    logs = np.log([geometric_mean([ours[k]]) / geometric_mean([theirs[k]]) for k in both])
    alone = tuple(k for k in ours if k not in theirs), tuple(k for k in theirs if k not in ours)
    if not both:
        return Matched(None, None, 0, *alone)
    interval = None
    if len(both) > 1:
        i = paired_interval(logs, level)
        interval = Interval(math.exp(i.estimate), math.exp(i.low), math.exp(i.high), level)
    return Matched(math.exp(logs.mean()), interval, len(both), *alone)


@dataclass(frozen=True)
class Pooled:
    """What the published rule says of two pools of runs."""

    ratio: float
    p: float
    bold: bool


def published_pooled_rule(runs_a: Values, runs_b: Values, alpha: float = 0.05, floor: float = 0.03) -> Pooled:
    """The rule that others publish with: all runs of all processes pooled (usually 9 against 9), exact Mann-Whitney
    p < alpha, means at least `floor` apart. Here to reproduce their tables. It treats runs of one process as
    independent, so under drift it finds differences that are not there in about one comparison in three.

    >>> published_pooled_rule(range(100, 109), range(110, 119)).bold
    True
    """
    a, b = _checked("runs_a", runs_a), _checked("runs_b", runs_b)
    ratio, p = float(a.mean() / b.mean()), mann_whitney(a, b)
    return Pooled(ratio, p, p < alpha and abs(ratio - 1) >= floor)
