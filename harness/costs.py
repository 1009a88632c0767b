"""What things cost on this machine, in wall seconds, and how much they scatter: measured where possible, else guessed.

Kept in one file beside the stores, so that the next plan begins with what the last session learnt.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness.environments import base_of
from harness.store import Line, Store
from harness.workloads import KINDS, Row, column_of, is_plain

COSTS = "costs.json"

# Before anything was measured: deliberately on the slow side of a two-core machine, in seconds.
_BOOT = {"vanilla": 150.0, "hf": 15.0, "tapgrid-hf": 15.0}
_BOOT_OTHER, _VALIDATE, _CLOSE = 45.0, 40.0, 3.0
_NEW_PER_SECOND, _NEW_PER_SECOND_AT_ONCE, _PROMPT_PER_SECOND = 12.0, 40.0, 300.0


@dataclass(frozen=True)
class Costs:
    """Wall seconds that things take: measured where they were, else estimates from a row's shape.

    `rows[column][row]` is one run, its untimed check included. `within` and `between` are the variances of the log
    of a value over the runs of a process and over processes; None: not known.
    """

    boot: Mapping[str, float] = field(default_factory=dict)
    validate: Mapping[str, float] = field(default_factory=dict)
    rows: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    within: float | None = None
    between: float | None = None

    def of_boot(self, column: str) -> float:
        """Everything that a column pays once a round: boot, text, validation, close."""
        column = column_of(column)
        boot = self.boot.get(column, _BOOT.get(base_of(column), _BOOT_OTHER))
        return boot + self.validate.get(column, 3.0 if is_plain(column) else _VALIDATE) + _CLOSE

    def of_row(self, column: str, row: Row, runs: int) -> float:
        """All runs of one cell and its warm-up."""
        column = column_of(column)
        measured = self.rows.get(column, {}).get(row.name)
        if measured is None and is_plain(column) and KINDS[row.name].plain != row.name:
            return 0.0  # refused at once
        return (runs + 1) * (_guess(row) if measured is None else measured)

    def of_round(self, columns: Sequence[str], rows: Sequence[Row], runs: int) -> float:
        return sum(self.of_boot(c) + sum(self.of_row(c, r, runs) for r in rows) for c in columns)

    def measured(self, columns: Sequence[str]) -> bool:
        return all(column_of(c) in self.boot for c in columns)


def _guess(row: Row) -> float:
    rate = _NEW_PER_SECOND_AT_ONCE if row.concurrent else _NEW_PER_SECOND
    return 0.5 + row.requests * (row.prompt_tokens / _PROMPT_PER_SECOND + row.new_tokens / rate)


def costs_of(store: Store, before: Costs | None = None) -> Costs:
    """What a session measured, over what was known before; the mean of its processes."""
    before = before or Costs()
    boot: dict[str, list[float]] = {}
    validate: dict[str, list[float]] = {}
    rows: dict[str, dict[str, list[float]]] = {}
    for process in store.processes:
        if process.get("boot_wall_seconds") is not None:
            boot.setdefault(process["column"], []).append(process["boot_wall_seconds"])
    for end in store.process_ends:
        took = end.get("seconds") or {}
        if took.get("validate") is not None:
            validate.setdefault(end["column"], []).append(took["validate"])
        for row, seconds in (took.get("rows") or {}).items():
            rows.setdefault(end["column"], {}).setdefault(row, []).append(seconds)
    merged = {c: dict(before.rows.get(c, {})) | _means(rows.get(c, {})) for c in {*before.rows, *rows}}
    within, between = variances(store.runs, store.session.get("grid", {}).get("metric", "cpu"))
    return Costs(
        {**before.boot, **_means(boot)},
        {**before.validate, **_means(validate)},
        merged,
        before.within if within is None else within,
        before.between if between is None else between,
    )


def variances(runs: Iterable[Line], metric: str) -> tuple[float | None, float | None]:
    """Variance of log values within processes and between them, the median over cells; None where none can be seen."""
    cells: dict[tuple[str, str], dict[str, list[float]]] = {}
    for r in runs:
        if value := r.get(f"value_{metric}"):
            cells.setdefault((r["row"], r["column"]), {}).setdefault(r["process"], []).append(math.log(value))
    within, between = [], []
    for processes in cells.values():
        whole = [p for p in processes.values() if len(p) > 1]
        inside = statistics.fmean(statistics.variance(p) for p in whole) if whole else None
        if inside is not None:
            within.append(inside)
        if inside is not None and len(whole) > 1:
            runs_each = statistics.fmean(len(p) for p in whole)
            between.append(max(0.0, statistics.variance(statistics.fmean(p) for p in whole) - inside / runs_each))
    return (statistics.median(within) if within else None), (statistics.median(between) if between else None)


def _means(lists: Mapping[str, list[float]]) -> dict[str, float]:
    return {k: sum(v) / len(v) for k, v in lists.items()}


def load_costs(home: Path, key: str) -> Costs:
    """What earlier sessions of this grid on this machine measured; empty where there were none."""
    try:
        return Costs(**json.loads((home / COSTS).read_text())[key])
    except (OSError, ValueError, KeyError, TypeError):
        return Costs()  # only an estimate hangs on it


def save_costs(home: Path, key: str, costs: Costs) -> None:
    """Keep them for the next plan. Replaced whole, so that a kill leaves the old file."""
    file = home / COSTS
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        known = {}
    known[key] = asdict(costs)
    scratch = file.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(known, indent=1))
    scratch.replace(file)
