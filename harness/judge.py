"""A store -> one verdict a cell. The order of the verdicts, first that applies, is that of `VERDICTS`.

    INVALID       its activations failed validation in that very process, or it answered with a wrong token count
    UNSUPPORTED   the column cannot do this work; `code` and `reason` say why
    MISSING       nothing was measured: a crash, a hang, a session cut short
    REFERENCE     the plain column that the others of its engine are judged against
    FASTER/SLOWER adjusted p below alpha, and the share of plain beyond the margin
    SAME          equivalence to plain shown: the 90 % interval lies within the margin
    UNCLEAR       none of these; with the smallest difference that this run could have seen and the rounds needed

Which numbers are which: `share_*`, `low` and `high` are the plain paired ones, each round's column over the same
round's plain engine. `p` is the drift-adjusted paired test of `stats_drift` (there: why, and its measured error and
power), `p_adjusted` is Benjamini-Hochberg over the report. `p_exact` (sign flip) and `p_unpaired` (Mann-Whitney on
process means) stand beside them. Below `rounds_for(alpha)` rounds, p is the exact one, and nothing is claimed.

What is said here of plain is true of any column that `judge(..., against=...)` names instead.

At a true difference equal to the margin every rule is a coin toss.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import evidence, paired, stats
from harness.environments import beside
from harness.evidence import Evidence, Key, Point
from harness.paired import Compared
from harness.store import Store
from harness.workloads import PLAIN_COLUMNS

NOT_SELECTED = "not-selected"  # a cell that the user left out of the session: not a refusal of the column's
VERDICTS = ("INVALID", "UNSUPPORTED", "MISSING", "REFERENCE", "FASTER", "SLOWER", "SAME", "UNCLEAR")


@dataclass(frozen=True)
class Cell:
    """One row of one column, judged. Shares are of speed: above 1 is faster than plain, also where `unit` is seconds.

    `low` and `high` are the 95 % interval of the share of `against`; `clear` says that all of it is beyond the margin.
    `process_shares` and `process_rounds` have an entry for every round with both this column and `against`,
    `process_values` one for every process. `smallest_detectable` (0.04 is 4 %) and `rounds_needed` (in all; None:
    settled, or on the margin) look at this cell alone, without the family.
    """

    grid: str
    row: str
    column: str
    verdict: str
    reason: str
    unit: str
    metric: str
    value: float | None = None
    value_other: float | None = None
    share_vanilla: float | None = None
    share_eager: float | None = None
    share_hf: float | None = None
    against: str | None = None
    low: float | None = None
    high: float | None = None
    clear: bool = False
    margin: float | None = None
    rounds: int = 0
    runs: int = 0
    test: str | None = None
    p: float | None = None
    p_adjusted: float | None = None
    p_exact: float | None = None
    p_unpaired: float | None = None
    family: int = 0
    validated: bool = False
    code: str | None = None
    smallest_detectable: float | None = None
    rounds_needed: int | None = None
    process_values: tuple[float, ...] = ()
    process_shares: tuple[float, ...] = ()
    process_rounds: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def share(self) -> float | None:
        """The share that was judged, of `against`."""
        return stats.geometric_mean(self.process_shares) if self.process_shares else None


@dataclass(frozen=True)
class _Draft:
    """A cell before the family is known, and the numbers that its verdict will come from; None: it has its verdict."""

    cell: Cell
    numbers: Compared | None = None


def judge(store: Store, *, floors: Mapping[Key, float] | None = None, against: str | None = None) -> list[Cell]:
    """One cell for every row and column of the session, rows in canonical order, columns in the session's.

    `floors` are margins from an A/A session (`aa.Floors.margins`), by (row, column); a cell's margin is the largest of
    the grid's, its own and its reference's.
    `against` is a column that all are judged against, instead of each against the plain one of its engine.
    """
    found = evidence.gather(store)
    drafts = []
    for row in found.rows:
        fitted = paired.fit(found, row)
        for column in found.columns:
            draft = _draft(found, row, column, against or evidence.against(column, found.columns))
            if not draft.verdict:
                assert draft.against is not None
                numbers = paired.compare(found, row, column, draft.against, fitted)
                assert numbers is not None
                theirs = evidence.own_row(row, draft.against) or row
                wide = ((floors or {}).get(key, 0.0) for key in ((row, column), (theirs, draft.against)))
                margin = max(found.margin, *wide)
                drafts.append(_Draft(_numbered(found, draft, numbers, margin), numbers))
            else:
                drafts.append(_Draft(draft))
    cells = [_verdict(d.cell, d.numbers, found.alpha) if d.numbers else d.cell for d in _adjusted(drafts)]
    return [_with_added(cell, store) for cell in cells]


def _with_added(cell: Cell, store: Store) -> Cell:
    """A p-value is for a number of rounds that was fixed before anybody looked."""
    if not store.added or not cell.rounds:
        return cell
    note = f"{store.added} of the session's {len(store.plan)} rounds were added after the others had been seen"
    return dataclasses.replace(cell, warnings=(*cell.warnings, note))


def counts(cells: Iterable[Cell]) -> dict[str, int]:
    """Verdict -> how many cells; every verdict is there, and they add up to the number of cells."""
    seen = Counter(c.verdict for c in cells)
    return {v: seen[v] for v in VERDICTS}


def to_json(cell: Cell) -> dict[str, Any]:
    """The cell as plain data, `share` included."""
    plain = dataclasses.asdict(cell) | {"share": cell.share}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}


def _adjusted(drafts: Sequence[_Draft]) -> list[_Draft]:
    """With p adjusted over the report."""
    ps = stats.benjamini_hochberg([d.cell.p for d in drafts])
    family = sum(p is not None for p in ps)
    return [
        _Draft(dataclasses.replace(d.cell, p_adjusted=p, family=family), d.numbers) if p is not None else d
        for d, p in zip(drafts, ps, strict=True)
    ]


def _draft(found: Evidence, row: str, column: str, against: str | None) -> Cell:
    """The cell without its comparison; without a verdict where that hangs on one."""
    key, points = (row, column), found.points.get((row, column), ())
    cell = Cell(
        found.grid, row, column, "", "", evidence.unit(row), found.metric,
        against=against,
        runs=sum(p.runs for p in points),
        rounds=len(points),
        validated=bool(points) and not any(p.taint for p in points),
        warnings=_notes(found, key),
    )  # fmt: skip
    if not points:
        return _unmeasured(found, cell)
    cell = _valued(found, cell, points)
    if bad := [p for p in points if p.taint]:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        return _decided(cell, "INVALID", f"round {bad[0].round + 1}{more}: {bad[0].taint}")
    if cell.value is None:
        return _decided(cell, "MISSING", "not measured: no run came back with both a token and a time")
    cell = _shared(found, cell)
    if cell.against == column:
        return _decided(cell, "REFERENCE", "the others are judged against it")
    if cell.against is not None and evidence.own_row(row, cell.against) is None:
        return _decided(cell, "UNCLEAR", "no plain engine runs this row, so there is nothing to judge it against")
    if cell.against is None:
        return _decided(cell, "UNCLEAR", "this grid has no plain column of its engine to judge it against")
    if not paired.differences(found, row, column, cell.against, found.metric):
        return _decided(cell, "UNCLEAR", f"no round has a valid {cell.against} beside it")
    return cell


def _decided(cell: Cell, verdict: str, reason: str) -> Cell:
    return dataclasses.replace(cell, verdict=verdict, reason=reason)


def _unmeasured(found: Evidence, cell: Cell) -> Cell:
    key = cell.row, cell.column
    code, reason = found.refusals.get(key, (None, "not run in this session"))
    cell = dataclasses.replace(cell, code=code)
    if code is not None and code != NOT_SELECTED:
        return _decided(cell, "UNSUPPORTED", reason)
    return _decided(cell, "MISSING", found.failures[key][-1] if key in found.failures else reason)


def _notes(found: Evidence, key: Key) -> tuple[str, ...]:
    notes = [f"lost in {f}" for f in found.failures.get(key, ())]
    notes += [f"round {r + 1} was dropped for all columns: {why}" for r, why in found.dropped.items()]
    if key in found.refusals and key in found.points:
        notes.append(f"refused in another round: {found.refusals[key][1]}")
    return tuple(notes)


def _valued(found: Evidence, cell: Cell, points: Iterable[Point]) -> Cell:
    """With its absolute numbers: geometric means over processes of the judged metric and of the other."""
    sign = -1 if cell.unit == "s" else 1
    speeds = {m: [s for p in points if (s := p.speed[m]) is not None] for m in evidence.METRICS}
    values = {m: math.exp(sign * math.fsum(s) / len(s)) if s else None for m, s in speeds.items()}
    each = tuple(math.exp(sign * s) for s in speeds[found.metric])
    return dataclasses.replace(cell, value=values[found.metric], value_other=values[_other(found)], process_values=each)


def _shared(found: Evidence, cell: Cell) -> Cell:
    """With its mean in-round share of every plain column of its environment."""
    shares: dict[str, float | None] = {}
    for plain in PLAIN_COLUMNS:
        logs = paired.differences(found, cell.row, cell.column, beside(plain, cell.column), found.metric).values()
        shares[plain] = math.exp(math.fsum(logs) / len(logs)) if logs else None
    vanilla, eager, hf = (shares[p] for p in ("vanilla", "vanilla-eager", "hf"))
    return dataclasses.replace(cell, share_vanilla=vanilla, share_eager=eager, share_hf=hf)


def _numbered(found: Evidence, cell: Cell, numbers: Compared, margin: float) -> Cell:
    """With its interval, tests and warnings."""
    edge, interval = math.log1p(margin), numbers.interval
    cell = dataclasses.replace(
        cell,
        rounds=numbers.rounds,
        margin=margin,
        process_shares=tuple(math.exp(v) for v in numbers.differences.values()),
        process_rounds=tuple(numbers.differences),
        test=numbers.test,
        p=numbers.p,
        p_exact=numbers.p_exact,
        p_unpaired=numbers.p_unpaired,
        smallest_detectable=numbers.smallest_detectable(found.alpha, edge),
        rounds_needed=numbers.rounds_needed(found.alpha, edge),
        warnings=(*cell.warnings, *_one_round_far_off(numbers), *_metrics_disagree(found, cell, numbers.mean, edge)),
    )
    if interval is None:
        return cell
    clear = interval.low > edge or interval.high < -edge
    return dataclasses.replace(cell, low=math.exp(interval.low), high=math.exp(interval.high), clear=clear)


def _other(found: Evidence) -> str:
    return "wall" if found.metric == "cpu" else "cpu"


def _one_round_far_off(numbers: Compared) -> list[str]:
    t, ranks = numbers.interval, numbers.robust
    if t is None or ranks is None or math.isinf(ranks.low):
        return []
    if (t.low <= 0 <= t.high) == (ranks.low <= 0 <= ranks.high):
        return []
    said = " and ".join(
        f"the {name} interval [{_percent(i.low)}, {_percent(i.high)}]" for name, i in (("t", t), ("signed-rank", ranks))
    )
    return [f"{said} disagree about 0: look at the single rounds"]


def _metrics_disagree(found: Evidence, cell: Cell, judged: float, edge: float) -> list[str]:
    """Where processor time and wall time point different ways."""
    other = paired.differences(found, cell.row, cell.column, cell.against, _other(found)).values()
    mean = math.fsum(other) / len(other) if other else judged
    if abs(judged) <= edge or (judged * mean > 0 and abs(mean) > edge):
        return []
    names = {"cpu": "processor time", "wall": "wall time"}
    return [f"{names[found.metric]} says {_percent(judged)}, {names[_other(found)]} {_percent(mean)}"]


def _percent(log: float) -> str:
    return f"{100 * math.expm1(log):+.1f} %"


def _verdict(cell: Cell, numbers: Compared, alpha: float) -> Cell:
    """FASTER, SLOWER, SAME or UNCLEAR, with the sentence that says why."""
    assert cell.margin is not None
    assert cell.p_adjusted is not None
    least, edge, mean = stats.rounds_for(alpha), math.log1p(cell.margin), numbers.mean
    if cell.rounds < least or numbers.contrast is None:
        n = f"{cell.rounds} round{'s' * (cell.rounds != 1)}"
        return _decided(cell, "UNCLEAR", f"{n} cannot give p < {alpha:g}; {least} would")
    said = f"{_percent(mean)} against {cell.against} (margin {100 * cell.margin:.2g} %, p {cell.p_adjusted:.2g})"
    if cell.p_adjusted < alpha and abs(mean) > edge:
        warned = cell.low is not None and cell.high is not None and cell.low <= 1 <= cell.high
        note = ("the paired interval includes 1: the claim rests on the drift-adjusted test",) * warned
        cell = dataclasses.replace(cell, rounds_needed=None, warnings=cell.warnings + note)
        return _decided(cell, "FASTER" if mean > 0 else "SLOWER", said)
    if numbers.contrast.equivalence(edge) < alpha:
        cell = dataclasses.replace(cell, rounds_needed=None)
        return _decided(cell, "SAME", f"{said}; the 90 % interval lies within the margin")
    seen, needed = cell.smallest_detectable, cell.rounds_needed
    could = "could have seen no difference" if seen is None else f"could have seen {100 * seen:.1f} %"
    more = f"about {needed} rounds would settle it" if needed else "it sits on the margin, where more hardly help"
    return _decided(cell, "UNCLEAR", f"{said}; this run {could}; {more}")
