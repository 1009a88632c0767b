"""One side of a comparison: judged cells by their full key, and everything that must be alike for them to be compared.

A side is made from a store, or read from a baseline file: `export` writes a session's cells and settings, small enough
to be committed, and `load` takes either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from harness import fingerprint, judge
from harness import store as stores
from harness.grid import UsageError
from harness.judge import Cell
from harness.store import Store

SCHEMA = "1.0"
KIND = "tapgrid-baseline"

# What a column is there to test may differ between two sessions; nothing else may.
UNDER_TEST = ("tapgrid", "nnsight", "interp-engine", "vllm-lens", "transformer-lens")
# Names of places and of this very process: they differ without changing a number.
_NO_SETTING = ("settings.model", "settings.tokenizer", "env.TAPGRID_")


@dataclass(frozen=True, order=True)
class FullKey:
    """What a cell is joined by. Never its position."""

    grid: str
    model: str
    row: str
    column: str

    def __str__(self) -> str:
        return f"{self.row} / {self.column} ({self.grid}, {self.model})"


@dataclass(frozen=True)
class Side:
    """One session. `settings` is flat, by column; `rows` holds the knobs of each row."""

    name: str
    machine: Mapping[str, Any]
    alpha: float
    cells: Mapping[FullKey, Cell]
    settings: Mapping[str, Mapping[str, str]]
    rows: Mapping[str, Mapping[str, str]]

    @property
    def machine_id(self) -> str:
        return fingerprint.machine_id(self.machine)


def side(session: Store) -> Side:
    """A store as one side."""
    grid, facts = session.session["grid"], session.session["fingerprint"]
    cells = {FullKey(c.grid, grid["model"], c.row, c.column): c for c in judge.judge(session)}
    shared = {f"grid.{k}": str(v) for k, v in grid.get("settings", {}).items()}
    shared |= {"grid.metric": grid.get("metric", "cpu"), "model_hash": str(session.session.get("model_hash"))}
    settings: dict[str, dict[str, str]] = {}
    for process in session.processes:
        settings.setdefault(process["column"], shared | _flat(process))
    return Side(
        name=str(session.path),
        machine={k: facts.get(k) for k in fingerprint.MACHINE},
        alpha=float(grid.get("alpha", 0.05)),
        cells=cells,
        settings=settings,
        rows={r: {k: str(v) for k, v in spec.items()} for r, spec in grid.get("rows", {}).items()},
    )


def _flat(process: Mapping[str, Any]) -> dict[str, str]:
    """A process's engine arguments, environment and versions, less what is under test and what is only a place."""
    flat = {}
    for group in ("settings", "env", "packages"):
        for name, value in (process.get(group) or {}).items():
            key = f"{group}.{name}"
            if not key.startswith(_NO_SETTING) and not (group == "packages" and name in UNDER_TEST):
                flat[key] = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return flat


def differences(before: Side, after: Side, key: FullKey) -> tuple[str, ...]:
    """Which settings of a cell differ, other than what it tests: the column's, its plain column's, the row's."""
    names = {key.column, *(s.cells[key].against or key.column for s in (before, after))}
    found = []
    for what, old, new in [
        *((c, before.settings.get(c, {}), after.settings.get(c, {})) for c in sorted(names)),
        (f"row {key.row}", before.rows.get(key.row, {}), after.rows.get(key.row, {})),
    ]:
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                found.append(f"{what}: {name} was {old.get(name, 'not set')}, is {new.get(name, 'not set')}")
    return tuple(found)


def export(session: Store) -> dict[str, Any]:
    """A baseline as plain data: everything that a later gate needs of this session."""
    made = side(session)
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "name": made.name,
        "machine": dict(made.machine),
        "alpha": made.alpha,
        "settings": {c: dict(s) for c, s in made.settings.items()},
        "rows": {r: dict(s) for r, s in made.rows.items()},
        "cells": [{"model": k.model} | judge.to_json(c) for k, c in made.cells.items()],
    }


def load(path: Path | str) -> Side:
    """The side in a baseline file or a store."""
    path = Path(path)
    if path.suffix != ".json":
        return side(stores.read(path))
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: no baseline ({error}); `tapgrid export` writes one from a store") from error
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise UsageError(f"{path}: not a baseline file; `tapgrid export` writes one from a store")
    if str(data.get("schema")).partition(".")[0] != SCHEMA.partition(".")[0]:
        raise UsageError(f"{path}: baseline schema {data.get('schema')}, this tapgrid reads {SCHEMA}; upgrade tapgrid")
    known = {f.name for f in fields(Cell)}
    cells = {}
    for line in data["cells"]:
        # A newer minor may know more of a cell than this version does.
        facts: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in line.items() if k in known}
        cell = Cell(**facts)
        cells[FullKey(cell.grid, line["model"], cell.row, cell.column)] = cell
    return Side(str(path), data["machine"], data["alpha"], cells, data["settings"], data["rows"])
