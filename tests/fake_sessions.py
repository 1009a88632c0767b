"""Stores made in memory for the tests of judging: chosen speeds, or a seeded host that drifts as the notes' does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.plan import rounds_of
from harness.store import Line, Store
from harness.workloads import KINDS, PLAIN_COLUMNS

# log speed of (round, column, row, run)
Speed = Callable[[int, str, str, int], float]
GRID = {"name": "g", "model": "m", "metric": "cpu", "margin": 0.03, "alpha": 0.05}
MACHINE = {"cpu": "a", "cores": 2, "memory_bytes": 8 << 30, "gpu": None, "driver": None, "power_limit": None}


def session(
    speed: Speed,
    *,
    columns: Sequence[str] = ("vanilla", "tapgrid-eager"),
    rows: Sequence[str] = ("generate",),
    rounds: int = 6,
    runs: int = 3,
    wall: Speed | None = None,
    grid: Mapping[str, Any] | None = None,
    machine: Mapping[str, Any] | None = None,
    started: str = "2025-01-01T00:00:00Z",
    packages: Mapping[str, str] | None = None,
    drop: Callable[[Line], bool] = lambda line: False,
    extra: Iterable[Line] = (),
    plan: Sequence[Sequence[str]] | None = None,
    arms: bool = False,
) -> Store:
    """A store in which every column ran every row it can; `drop` takes lines out, `extra` adds some."""
    plan = plan or rounds_of(list(columns), rounds)
    spec = {r: {"new_tokens": 32, "requests": 1, "unit": KINDS[r].unit, "plain": KINDS[r].plain} for r in rows}
    head = {
        "kind": "session", "schema": "1.0", "session": "s", "rounds": rounds, "runs": runs, "tier": "standard",
        "columns": list(columns), "rows": list(rows), "plan": [list(r) for r in plan], "key": "k", "model_hash": "w",
        "started": started, "fingerprint": MACHINE | dict(machine or {}),
        "grid": GRID | {"rows": spec} | dict(grid or {}),
    }  # fmt: skip
    lines: list[Line] = []
    for number, order in enumerate(plan):
        for place, column in enumerate(order):
            arm = ("a" if order.index(column) == place else "b") if arms else None
            lines += _process(number, place, column, arm, rows, runs, speed, wall or speed, packages or {"torch": "2"})
    return store([line for line in lines if not drop(line)] + list(extra), head)


def _process(
    number: int, place: int, column: str, arm: str | None, rows: Sequence[str], runs: int, speed: Speed, wall: Speed,
    packages: Mapping[str, str],
) -> list[Line]:  # fmt: skip
    name = f"r{number}-{place}-{column}"
    at = {"session": "s", "process": name, "round": number, "column": column}
    shown = f"{column}/{arm}" if arm else column
    lines: list[Line] = [
        {
            "kind": "process", **at, "order": place, "settings": {"dtype": "bfloat16"}, "env": {},
            "packages": dict(packages), **({"arm": arm} if arm else {}),
        },
        check(number, place, column),
    ]  # fmt: skip
    sequence = 0
    for row in rows:
        if column in PLAIN_COLUMNS and KINDS[row].plain != row:
            lines.append({"kind": "refusal", **at, "row": row, "code": "not-plain", "reason": "nothing attached"})
            continue
        sign = -1 if KINDS[row].unit == "s" else 1
        for run in range(runs):
            sequence += 1
            values = {
                f"value_{m}": math.exp(sign * s(number, shown, row, run)) for m, s in (("cpu", speed), ("wall", wall))
            }
            said = {"tokens": 32, "unit": KINDS[row].unit, "validated": True, "invalid_reason": None}
            lines.append({"kind": "run", **at, "row": row, "run": run, "sequence": sequence, **said, **values})
    return lines


def check(number: int, place: int, column: str, **changes: Any) -> Line:
    """A validation line of that process."""
    return {
        "kind": "validation", "session": "s", "process": f"r{number}-{place}-{column}", "round": number,
        "column": column, "row": None, "what": "read", "point": "resid_post", "layer": 3, "error": 0.01,
        "yardstick": 0.01, "ratio": 1.0, "slope": 1.0, "nearest_layer": 3, "verdict": "PASS", "reason": "",
    } | changes  # fmt: skip


def store(lines: Iterable[Line], head: Line) -> Store:
    """Lines by kind, as `harness.store.read` sorts them."""
    names = {"process": "processes", "validation": "validations", "refusal": "refusals", "run": "runs"}
    found: dict[str, list[Line]] = {n: [] for n in (*names.values(), "failed", "other")}
    for line in lines:
        found["failed" if line["kind"] == "failed" else names.get(line["kind"], "other")].append(line)
    return Store(path=Path("made.jsonl"), session=head, **{k: tuple(v) for k, v in found.items()})


def drifting_host(
    seed: int,
    columns: Sequence[str],
    rounds: int,
    effects: Mapping[str, float],
    *,
    drift: float = 0.05,
    rho: float = 0.9,
    process: float = 0.015,
    run: float = 0.008,
    noisier: Mapping[str, float] | None = None,
    plan: Sequence[Sequence[str]] | None = None,
) -> Speed:
    """The notes' host: an autoregressive drift over processes, a mistake of its own per process, one per run.

    `effects` are true log speeds by column, `noisier` factors on a column's process noise. Rows of a process share
    its drift and its noise.
    """
    rng = np.random.default_rng(seed)
    order = [(n, c) for n, names in enumerate(plan or rounds_of(list(columns), rounds)) for c in names]
    level, levels = rng.normal(0, drift), {}
    for number, column in order:
        level = rho * level + rng.normal(0, drift * math.sqrt(1 - rho**2))
        twin = (number, f"{column}/{'a' if (number, f'{column}/a') not in levels else 'b'}")
        own = rng.normal(0, process * (noisier or {}).get(column, 1.0))
        levels[twin] = levels[number, column] = level + own
    noise: dict[tuple[int, str, str, int], float] = {}

    def speed(number: int, column: str, row: str, at: int) -> float:
        key = number, column, row, at
        if key not in noise:
            noise[key] = rng.normal(0, run)
        return 3.0 + effects.get(column, 0.0) + levels[number, column] + noise[key]

    return speed
