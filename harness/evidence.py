"""A store -> one number a process: what judge, gate, floors and trends all start from.

The unit of evidence is the process. A `Point` is one row in one process: the mean of the logarithm of its runs'
values, turned so that larger is faster, and the reason why it may not be believed, if there is one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.environments import base_of, beside
from harness.store import Store
from harness.workloads import KINDS, is_plain

METRICS = ("cpu", "wall")
WRITE_ROWS = ("steer", "ablate-head", "force-token")
Key = tuple[str, str]  # row, column


@dataclass(frozen=True)
class Point:
    """One row in one process. `speed` holds, by metric, the mean log value, larger is faster; None: not measured."""

    round: int
    slot: int
    process: str
    runs: int
    speed: Mapping[str, float | None]
    taint: str | None = None


@dataclass(frozen=True)
class Evidence:
    """Everything in a store that a verdict looks at, by (row, column)."""

    grid: str
    model: str
    metric: str
    margin: float
    alpha: float
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    points: Mapping[Key, tuple[Point, ...]]
    refusals: Mapping[Key, tuple[str, str]]
    failures: Mapping[Key, tuple[str, ...]]
    dropped: Mapping[int, str] = field(default_factory=dict)

    def of(self, row: str, column: str) -> dict[int, Point]:
        """Round -> point, of those that may be believed and hold the judged metric."""
        return {
            p.round: p for p in self.points.get((row, column), ()) if not p.taint and p.speed[self.metric] is not None
        }


def against(column: str, columns: Iterable[str]) -> str | None:
    """The plain column that a column is judged against: `hf` for those that run on it, else `vanilla`
    (`vanilla-eager` in a grid without it), always of the same environment.

    >>> against("tapgrid-hf", ["vanilla", "hf"]), against("tapgrid-taps", ["vanilla", "hf"]), against("hf", ["vanilla"])
    ('hf', 'vanilla', None)
    >>> against("tapgrid-taps@vllm-0.32", ["vanilla", "vanilla-eager@vllm-0.32"])
    'vanilla-eager@vllm-0.32'
    """
    candidates = ("hf",) if "hf" in base_of(column).split("-") else ("vanilla", "vanilla-eager")
    return next((c for p in candidates if (c := beside(p, column)) in set(columns)), None)


def plain_row(row: str) -> str | None:
    """The row that a plain column runs as the denominator of this one; None where there is none.

    >>> plain_row("capture-1-x8"), plain_row("gradient")
    ('generate-x8', None)
    """
    return KINDS[row].plain if row in KINDS else row


def own_row(row: str, column: str) -> str | None:
    """The row whose numbers stand for `column` when `row` is compared."""
    return plain_row(row) if is_plain(column) else row


def unit(row: str) -> str:
    return KINDS[row].unit if row in KINDS else "tok/s"


def gather(store: Store, arm: str | None = None) -> Evidence:
    """Read a store's lines once. In an A/A store (process lines with an "arm") only `arm` is taken, "a" by default."""
    grid: Mapping[str, Any] = store.session["grid"]
    processes = {p["process"]: p for p in store.processes if p.get("arm") in (None, arm or "a")}
    dropped = {
        line["round"]: line.get("reason", "contaminated") for line in store.other if line["kind"] == "contaminated"
    }
    columns = tuple(dict.fromkeys(store.session["columns"]))
    order = {r: i for i, r in enumerate(KINDS)}
    rows = tuple(sorted(dict.fromkeys(store.session["rows"]), key=lambda r: order.get(r, len(order))))
    refusals = {(r["row"], r["column"]): (r["code"], r["reason"]) for r in store.refusals}
    failures: dict[Key, list[str]] = defaultdict(list)
    for f in store.failed:
        for row in [f["row"]] if f.get("row") else rows:
            failures[row, f["column"]].append(f"round {f['round'] + 1}: {f['reason']}")
    metric = grid.get("metric", "cpu")
    if metric not in METRICS:
        raise ValueError(f"{store.path}: the session judges {metric!r}, which is neither of {', '.join(METRICS)}")
    return Evidence(
        grid=grid["name"],
        model=grid["model"],
        metric=metric,
        margin=float(grid.get("margin", 0.03)),
        alpha=float(grid.get("alpha", 0.05)),
        rows=rows,
        columns=columns,
        points=_points(store, processes, dropped),
        refusals=refusals,
        failures={k: tuple(v) for k, v in failures.items()},
        dropped=dropped,
    )


def _points(store: Store, processes: Mapping[str, Any], dropped: Mapping[int, str]) -> dict[Key, tuple[Point, ...]]:
    wide = 1 + max((p.get("order", 0) for p in store.processes), default=0)
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for run in store.runs:
        if run["process"] in processes and run["round"] not in dropped:
            runs[run["process"], run["row"]].append(run)
    checks: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for check in store.validations:
        checks[check["process"]].append(check)
    specs = store.session["grid"].get("rows", {})
    found: dict[Key, dict[int, Point]] = defaultdict(dict)
    for (name, row), those in runs.items():
        process = processes[name]
        at, taint = process["round"], _taint(row, process["column"], those, checks[name], specs.get(row, {}))
        speed = {m: _speed(row, [r.get(f"value_{m}") for r in those]) for m in METRICS}
        point = Point(at, at * wide + process.get("order", 0), name, len(those), speed, taint)
        before = found[row, process["column"]].get(at)
        # A column that booted twice in a round (a crash, a resume) measured a row whole only once; the fuller counts.
        if before is None or point.runs >= before.runs:
            found[row, process["column"]][at] = point
    return {key: tuple(by_round[r] for r in sorted(by_round)) for key, by_round in found.items()}


def _speed(row: str, values: Iterable[float | None]) -> float | None:
    logs = [math.log(v) for v in values if v is not None and v > 0 and math.isfinite(v)]
    if not logs:
        return None
    mean = math.fsum(logs) / len(logs)
    return -mean if unit(row) == "s" else mean


def _taint(
    row: str,
    column: str,
    runs: Iterable[Mapping[str, Any]],
    checks: Iterable[Mapping[str, Any]],
    spec: Mapping[str, Any],
) -> str | None:
    """Why this row of this process may not be believed."""
    checks = list(checks)
    for check in checks:
        if check["verdict"] == "FAIL" and _touches(check, row):
            layer = "" if check.get("layer") is None else f" layer {check['layer']}"
            return f"{check['what']} of {check['point'] or 'the run'}{layer} failed: {check['reason']}"
    expected = None if row == "gradient" or not spec else spec["new_tokens"] * spec.get("requests", 1)
    for run in runs:
        if run.get("validated") is not True:
            return f"run {run['run'] + 1} was not validated: {run.get('invalid_reason') or 'no reason given'}"
        if expected is not None and run["tokens"] != expected:
            return f"run {run['run'] + 1} came back with {run['tokens']} new tokens, {expected} were asked for"
    if not checks and not is_plain(column):  # a plain engine hands nothing back that could be wrong
        return "no activation of this process was validated"
    return None


def _touches(check: Mapping[str, Any], row: str) -> bool:
    if check.get("row") is not None:
        return bool(check["row"] == row)
    # A wrong read says that this process's activations cannot be trusted; a wrong write says it of the writing rows.
    return check["what"] != "write" or row in WRITE_ROWS
