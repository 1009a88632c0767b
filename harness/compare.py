"""Two sessions side by side: `tapgrid compare A B`.

Cells are joined by their full key and compared by their share of the same session's plain engine, so that a slower day
is not a regression. The two sessions are not paired, so the test re-labels rounds: a joint exact permutation test with
a step-down maximum over all cells. It keeps the chance of any false alarm among them below alpha, as Holm does, without
Holm's floor (40 cells at 6 rounds could never fail under Holm: 40 x 2/924 > 0.05).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from scipy import special

from harness import stats
from harness.baseline import FullKey, Side, differences, side
from harness.judge import Cell
from harness.limits import Gate
from harness.store import Store

# status -> (what it does to the gate, what it says). "fail" is 1, "blind" is 3, "strict" is 3 under strict.
STATUSES = {
    "invalid": ("fail", "failed validation"),
    "slower": ("fail", "slower beyond the limit"),
    "vanished": ("blind", "in the baseline, not measured now"),
    "incomparable": ("blind", "measured with other settings"),
    "no-baseline": ("blind", "its baseline cell holds no valid number"),
    "too-few": ("blind", "too few rounds to show anything"),
    "unconfirmed": ("strict", "slower, but not so in fresh rounds"),
    "inconclusive": ("strict", "neither a change nor its absence is shown"),
    "new": ("strict", "not in the baseline"),
    "faster": ("", "faster beyond the limit"),
    "same": ("", "the same within the limit"),
    "reference": ("", "a plain column, which the others are read against"),
    "no-share": ("", "has no plain engine to be read against"),
    "unsupported": ("", "not measured in the baseline either"),
}
NO_NUMBER = ("MISSING", "UNSUPPORTED")


@dataclass(frozen=True)
class Change:
    """One cell in both sessions. `before` and `after` are shares of plain; `change` is after / before - 1."""

    key: FullKey
    status: str
    reason: str
    limit: float
    before: float | None = None
    after: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_adjusted: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Every cell of either session, the changed ones first, by size. `machine`: why the machines are not the same."""

    changes: tuple[Change, ...]
    machine: str | None
    before: str
    after: str

    def counts(self) -> dict[str, int]:
        seen = Counter(c.status for c in self.changes)
        return {s: seen[s] for s in STATUSES if seen[s]}


def compare(
    before: Store | Side, after: Store | Side, rule: Gate | None = None, *, other_settings: bool = False
) -> Comparison:
    """Every cell of either session, `before` being the baseline. With `other_settings`, cells measured with settings
    that differ in what is not under test are compared all the same."""
    old, new = (s if isinstance(s, Side) else side(s) for s in (before, after))
    rule = rule or Gate()
    changes = [_status(old, new, key, rule, other_settings) for key in dict.fromkeys([*old.cells, *new.cells])]
    tested = _tested([c for c in changes if not c.status], old, new)
    done = [tested.get(c.key, c) for c in changes]
    done.sort(
        key=lambda c: (-abs(math.log1p(c.change)) if c.change is not None else 1.0, list(STATUSES).index(c.status))
    )
    return Comparison(tuple(done), _other_machine(old, new), old.name, new.name)


def _other_machine(old: Side, new: Side) -> str | None:
    if old.machine_id == new.machine_id:
        return None
    fields = sorted({*old.machine, *new.machine})
    said = [
        f"{k} {old.machine.get(k)} then, {new.machine.get(k)} now"
        for k in fields
        if old.machine.get(k) != new.machine.get(k)
    ]
    return "; ".join(said)


def _status(old: Side, new: Side, key: FullKey, rule: Gate, other_settings: bool) -> Change:
    """What can be said of a cell without a test; status "" where it takes one."""
    was, now, limit = old.cells.get(key), new.cells.get(key), rule.limit(key.row, key.column)
    before, after = (c.share if c else None for c in (was, now))

    def said(status: str, reason: str = "") -> Change:
        return Change(key, status, reason or (STATUSES[status][1] if status else ""), limit, before, after)

    if now is not None and now.verdict == "INVALID":
        return said("invalid", now.reason)
    if now is None or now.verdict in NO_NUMBER:
        if was is None or was.verdict in NO_NUMBER:
            return said("unsupported")
        return said("vanished", f"not measured now: {now.reason if now else 'no such cell in this session'}")
    if was is None or was.verdict == "UNSUPPORTED":
        return said("new")
    if was.verdict in ("INVALID", "MISSING"):
        return said("no-baseline", f"its baseline is {was.verdict}: {was.reason}")
    if "REFERENCE" in (was.verdict, now.verdict):
        return said("reference")
    if not was.process_shares or not now.process_shares:
        return said("no-share", now.reason if not now.process_shares else was.reason)
    if (was.against, was.metric) != (now.against, now.metric):
        return said("incomparable", f"was {was.metric} against {was.against}, is {now.metric} against {now.against}")
    if not other_settings and (other := differences(old, new, key)):
        return said("incomparable", "; ".join(other))
    n, m = len(was.process_shares), len(now.process_shares)
    if min(n, m) < 2 or least_p(n, m) >= new.alpha:
        more = stats.processes_for(new.alpha)
        return said("too-few", f"{n} against {m} rounds cannot give p < {new.alpha:g}; {more} against {more} would")
    return said("")


def least_p(n: int, m: int) -> float:
    """The smallest p that re-labelling n against m rounds can give (with n = m a labelling and its mirror tie)."""
    return stats.minimum_p_unpaired(n, m) / (1 if n == m else 2)


def _tested(changes: Collection[Change], old: Side, new: Side) -> dict[FullKey, Change]:
    keys = [c.key for c in changes]
    if not keys:
        return {}
    a, b = _table(old, keys), _table(new, keys)
    adjusted = stats.max_t_permutation(a, b)
    done = {}
    for j, (change, p) in enumerate(zip(changes, adjusted, strict=True)):
        alone = stats.max_t_permutation(a[:, [j]], b[:, [j]])[0]
        done[change.key] = _called(change, _finite(a[:, j]), _finite(b[:, j]), alone, p, new.alpha)
    return done


def _table(of: Side, keys: list[FullKey]) -> stats.Array:
    """[rounds, cells] log shares; NaN where a cell lacks the round."""
    rounds = sorted({r for k in keys for r in _rounds(of.cells[k])})
    table = np.full((len(rounds), len(keys)), np.nan)
    for j, key in enumerate(keys):
        cell = of.cells[key]
        for r, share in zip(_rounds(cell), cell.process_shares, strict=True):
            table[rounds.index(r), j] = math.log(share)
    return table


def _rounds(cell: Cell) -> tuple[int, ...]:
    return cell.process_rounds or tuple(range(len(cell.process_shares)))


def _finite(values: stats.Array) -> stats.Array:
    kept: stats.Array = values[np.isfinite(values)]
    return kept


def _called(change: Change, a: stats.Array, b: stats.Array, p: float, adjusted: float, alpha: float) -> Change:
    mean, edge = float(b.mean() - a.mean()), math.log1p(change.limit)
    se, df = _welch(a, b)
    half = float(special.stdtrit(df, 0.975)) * se
    if adjusted < alpha and abs(mean) > edge:
        status = "faster" if mean > 0 else "slower"
    else:
        status = "same" if stats.equivalence(mean, se, df, edge) < alpha else "inconclusive"
    return dataclasses.replace(
        change,
        status=status,
        reason=STATUSES[status][1],
        change=math.expm1(mean),
        low=math.expm1(mean - half),
        high=math.expm1(mean + half),
        p=p,
        p_adjusted=adjusted,
    )


def _welch(a: stats.Array, b: stats.Array) -> tuple[float, float]:
    """Standard error of the difference of two means, and its degrees of freedom."""
    parts = [float(x.var(ddof=1)) / len(x) for x in (a, b)]
    if sum(parts) == 0:
        return 0.0, float(len(a) + len(b) - 2)
    return math.sqrt(sum(parts)), sum(parts) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(parts, (a, b), strict=True))
