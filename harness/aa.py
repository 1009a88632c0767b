"""A/A: a column as both arms of its own comparison. Whatever differs then is the machine, and sets the margin.

An A/A session boots a column twice a round, as arm "a" and arm "b" (the "arm" of its process lines). Out of it come:

- a floor a cell: the 95th percentile of the mean log ratio over all relabellings of the arms, round by round. A share
  that is not further from 1 than that is what nothing looks like here, and `judge` takes it as the cell's margin;
- the pipeline's own false-alarm rate: the same tests, correction and margin on every relabelling;
- whether being first in a round matters: a position effect would falsify every comparison.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness import evidence, fingerprint, stats, stats_drift
from harness.evidence import Evidence, Key, Point
from harness.grid import UsageError
from harness.stats import Array
from harness.store import Store

SCHEMA = "1.0"
KIND = "tapgrid-floors"
PERCENTILE = 0.95
_MOST_RELABELLINGS = 64  # more would tell the rate more finely than one session can know it


@dataclass(frozen=True)
class Floor:
    """One cell against itself. Fractions: `floor` 0.02 is 2 %, of the mean over `rounds` rounds; `spread` of one round.

    `first` is how much faster the arm that booted first was, with the exact p of "no faster".
    """

    row: str
    column: str
    rounds: int
    floor: float
    spread: float
    ratios: tuple[float, ...]
    first: float
    first_p: float

    def at(self, rounds: int) -> float:
        """The floor for a session of another number of rounds: a mean's spread falls with the square root.

        >>> round(Floor("generate", "hf", 4, 0.02, 0.04, (), 0.0, 1.0).at(16), 4)
        0.01
        """
        return math.expm1(math.log1p(self.floor) * math.sqrt(self.rounds / max(rounds, 1)))


@dataclass(frozen=True)
class Floors:
    """All floors of one machine, model and grid, and how often the pipeline cried wolf: the share of `relabellings`
    with any cell called FASTER or SLOWER, and the mean number of such cells."""

    grid: str
    model: str
    metric: str
    machine: str
    cells: tuple[Floor, ...]
    relabellings: int
    alarm_rate: float
    alarms: float

    def margins(self, rounds: int) -> dict[Key, float]:
        """(row, column) -> margin for a session of so many rounds, as `judge(store, floors=...)` takes it."""
        return {(f.row, f.column): f.at(rounds) for f in self.cells}

    def misfit(self, store: Store) -> str | None:
        """Why these floors say nothing about that session, or None."""
        grid, machine = store.session["grid"], fingerprint.machine_id(store.session["fingerprint"])
        for what, ours, theirs in (
            ("machine", self.machine, machine),
            ("model", self.model, grid["model"]),
            ("metric", self.metric, grid.get("metric", "cpu")),
        ):
            if ours != theirs:
                return f"the floors are of {what} {ours!r}, the session is of {theirs!r}: run `tapgrid aa` here"
        return None


def measure(store: Store) -> Floors:
    """The floors that an A/A session shows."""
    arms = evidence.gather(store, "a"), evidence.gather(store, "b")
    if not any(p.get("arm") == "b" for p in store.processes):
        raise UsageError(f"{store.path} is no A/A session: no process is an arm; `tapgrid aa GRID` makes one")
    keys = [(r, c) for r in arms[0].rows for c in arms[0].columns if len(_pairs(arms, (r, c))) > 1]
    if not keys:
        raise UsageError(f"{store.path}: no cell has both arms in two rounds, so no spread can be told")
    alarms = _alarms(arms, keys)
    return Floors(
        grid=arms[0].grid,
        model=arms[0].model,
        metric=arms[0].metric,
        machine=fingerprint.machine_id(store.session["fingerprint"]),
        cells=tuple(_floor(arms, key) for key in keys),
        relabellings=len(alarms),
        alarm_rate=sum(a > 0 for a in alarms) / len(alarms),
        alarms=sum(alarms) / len(alarms),
    )


Arms = tuple[Evidence, Evidence]


def _pairs(arms: Arms, key: Key) -> dict[int, float]:
    """Round -> log speed of arm a less arm b."""
    a, b = (arm.of(*key) for arm in arms)
    metric = arms[0].metric
    both = {r: (a[r].speed[metric], b[r].speed[metric]) for r in a if r in b}
    return {r: x - y for r, (x, y) in both.items() if x is not None and y is not None}


def _floor(arms: Arms, key: Key) -> Floor:
    pairs = _pairs(arms, key)
    d = np.array(list(pairs.values()))
    means = np.abs(_flips(len(d)) @ d) / len(d)
    a, b = (arm.of(*key) for arm in arms)
    first = np.array([v if a[r].slot < b[r].slot else -v for r, v in pairs.items()])
    return Floor(
        row=key[0],
        column=key[1],
        rounds=len(d),
        floor=math.expm1(float(np.quantile(means, PERCENTILE))),
        spread=math.expm1(float(np.quantile(np.abs(d), PERCENTILE))),
        ratios=tuple(math.exp(v) for v in d),
        first=math.expm1(float(first.mean())),
        first_p=stats.sign_flip(first),
    )


def _flips(rounds: int, most: int = 1 << 15) -> Array:
    """Sign patterns of rounds, the first all +1; a pattern and its opposite are the same relabelling. Beyond `most` a
    fixed random set."""
    if 2 ** (rounds - 1) <= most:
        return np.array([(1.0, *s) for s in itertools.product((1.0, -1.0), repeat=rounds - 1)])
    signs = np.random.default_rng(0).choice([1.0, -1.0], size=(most, rounds))
    signs[0] = 1.0
    return signs


def _alarms(arms: Arms, keys: Sequence[Key]) -> list[int]:
    """For each relabelling, how many cells the pipeline calls different."""
    pairs = {key: _pairs(arms, key) for key in keys}
    rounds = sorted({r for by_round in pairs.values() for r in by_round})
    edge, found = math.log1p(arms[0].margin), []
    for signs in _flips(len(rounds), _MOST_RELABELLINGS):
        sign = dict(zip(rounds, signs, strict=True))
        flipped = {key: [sign[r] * v for r, v in by_round.items()] for key, by_round in pairs.items()}
        fits = {row: _fit(arms, row, [c for r, c in keys if r == row], sign) for row, _ in keys}
        ps = stats.benjamini_hochberg([_p(d, key[1], fits[key[0]], arms[0].alpha) for key, d in flipped.items()])
        beyond = [abs(sum(d) / len(d)) > edge for d in flipped.values()]
        found.append(sum(p is not None and p < arms[0].alpha and b for p, b in zip(ps, beyond, strict=True)))
    return found


def _fit(arms: Arms, row: str, columns: Sequence[str], sign: Mapping[int, float]) -> stats_drift.Fit | None:
    """A row's arms with the host's drift, each relabelled as its own column; None where there are too few to fit."""
    seen: list[tuple[tuple[str, float], Point]] = []
    for column in columns:
        rounds = _pairs(arms, (row, column))
        labelled = [
            ((column, twin * sign[r]), arm.of(row, column)[r])
            for r in rounds
            for arm, twin in zip(arms, (1.0, -1.0), strict=True)
        ]
        if len(rounds) >= stats_drift.LEAST:
            seen += labelled
    if len({label for label, _ in seen}) < 3:
        return None
    labels, points = zip(*seen, strict=True)
    design = stats_drift.Design(labels, tuple(p.round for p in points), tuple(p.slot for p in points))
    return stats_drift.Fit([p.speed[arms[0].metric] or 0.0 for p in points], design)


def _p(d: Sequence[float], column: str, fit: stats_drift.Fit | None, alpha: float) -> float:
    """p of an arm against its twin, as `judge` would come to it."""
    if len(d) < stats.rounds_for(alpha):
        return stats.sign_flip(d)
    fitted = fit is not None and (column, 1.0) in fit.columns
    contrast = fit.contrast((column, 1.0), (column, -1.0)) if fit and fitted else stats_drift.paired(d)
    return contrast.p if contrast.se > 0 else stats.sign_flip(d)


def write(floors: Floors, path: Path) -> Path:
    """Save floors as JSON."""
    path.write_text(
        json.dumps({"schema": SCHEMA, "kind": KIND, **dataclasses.asdict(floors)}, indent=1, allow_nan=False)
    )
    return path


def read(path: Path) -> Floors:
    """Floors that `write` saved."""
    try:
        data: dict[str, Any] = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: no floor file ({error}); `tapgrid aa GRID` writes one") from error
    if not isinstance(data, dict) or data.pop("kind", None) != KIND:
        raise UsageError(f"{path}: not a floor file; `tapgrid aa GRID` writes one")
    schema = str(data.pop("schema", ""))
    if schema.partition(".")[0] != SCHEMA.partition(".")[0]:
        raise UsageError(f"{path}: written with floor schema {schema}, this tapgrid reads {SCHEMA}; upgrade tapgrid")
    cells = tuple(Floor(**cell | {"ratios": tuple(cell["ratios"])}) for cell in data.pop("cells"))
    return Floors(cells=cells, **data)
