"""What a session is before it runs: its settings, the hash of them all, its store, and what of it is already done."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import environments, fingerprint, models, plan, workloads
from harness import grid as grids
from harness.costs import Costs, costs_of, load_costs
from harness.grid import Grid, UsageError
from harness.plan import Plan
from harness.store import FILE, SCHEMA, Store, StoreError, Writer, home, read
from harness.workloads import TWIN, column_of

NOT_SELECTED = "not-selected"
Cell = tuple[str, str]  # row, column


@dataclass(frozen=True)
class Options:
    """What the user asked for; the same words on the command line and, with --grid- before them, in pytest."""

    grid: str
    tier: str = "quick"
    rows: str | None = None
    columns: str | None = None
    rounds: int | None = None
    runs: int | None = None
    budget_minutes: float | None = None
    store: str | None = None
    fresh: bool = False
    add: int | None = None


@dataclass(frozen=True)
class Choice:
    """The options, looked up: everything named exists."""

    grid: Grid
    tier: grids.Tier
    columns: tuple[str, ...]
    rows: tuple[workloads.Row, ...]
    options: Options

    @property
    def cells(self) -> list[Cell]:
        return [(r.name, c) for r in self.rows for c in self.columns]


def choose(options: Options) -> Choice:
    """Look every name up, import nothing heavy. Raises UsageError with the nearest names."""
    grid = grids.load(options.grid)
    columns = grids.pick("column", options.columns, grid.columns, grid.known_columns())
    rows = grids.pick("row", options.rows, [r.name for r in grid.rows])
    for name, least in (("rounds", options.rounds), ("runs", options.runs), ("budget", options.budget_minutes)):
        if least is not None and least <= 0:
            raise UsageError(f"{name} must be more than 0, not {least:g}")
    return Choice(grid, grids.tier(grid, options.tier), columns, tuple(grid.row(r) for r in rows), options)


def costs_key(grid: Grid) -> str:
    """Under which measured times are kept: they hold for this grid on this machine."""
    machine = fingerprint.machine_id(fingerprint.collect())
    return f"{grid.name} on {machine} {fingerprint.digest([asdict(r) for r in grid.rows])[:8]}"


def folder_of(options: Options) -> Path:
    """Where stores live: `.tapgrid`, or the folder that was asked for."""
    if options.store is None:
        return home()
    path = Path(options.store)
    return path.parent if path.suffix == ".jsonl" else path


def plan_for(choice: Choice, costs: Costs, *, spent: float = 0.0, done: int = 0) -> Plan:
    o = choice.options
    return plan.make(
        choice.grid, choice.tier, choice.columns, choice.rows, costs,
        rounds=o.rounds, runs=o.runs, budget_minutes=o.budget_minutes, spent=spent, done=done,
    )  # fmt: skip


@dataclass
class Session:
    """A session about to run, or about to be resumed."""

    choice: Choice
    plan: Plan
    costs: Costs
    model: Path
    path: Path
    line: Mapping[str, Any]
    writer: Writer
    before: Store | None = None
    done: set[tuple[int, str, str]] = field(default_factory=set)  # round, row, slot
    timed: bool = True

    @property
    def id(self) -> str:
        return str(self.line["session"])

    @property
    def folder(self) -> Path:
        return self.path.parent


def environments_of(choice: Choice) -> dict[str, Any]:
    """What is installed in every environment of the choice's columns but this one; None where it is not built."""
    known = choice.grid.known_columns()
    names = {known[column_of(c)].environment for c in choice.columns} - {environments.DEFAULT}
    pinned = environments.environments()
    stamps = {n: environments.stamp_of(pinned[n]) if n in pinned else None for n in sorted(names)}
    return {n: stamp and stamp["packages"] for n, stamp in stamps.items()}


def key_of(
    choice: Choice, runs: int, rounds: int | None, cells: Collection[Cell], model: Path, facts: Mapping[str, Any]
) -> str:
    """The hash that a resumed session must share: settings, versions, measured code, weights, machine."""
    grid = grids.to_dict(choice.grid)
    for left_out in ("about", "path", "tiers", "gate", "margin", "alpha"):  # read by people and judges, not by workers
        grid.pop(left_out, None)
    targets = {c: choice.grid.known_columns()[column_of(c)].target for c in choice.columns}
    return fingerprint.digest(
        {
            "grid": grid,
            "tier": choice.tier.name,
            "rounds": rounds,
            "runs": runs,
            "budget": choice.options.budget_minutes,
            "cells": sorted(cells),
            "targets": targets,
            "packages": facts["packages"],
            "environments": environments_of(choice),
            "python": facts["python"],
            "machine": fingerprint.machine_id(facts),
            "model": fingerprint.model_hash(model),
            "code": fingerprint.code_hash([*targets.values(), choice.grid.validator], Path(choice.grid.path).parent),
        }
    )


def prepare(choice: Choice, cells: Collection[Cell] | None = None, *, timed: bool = True) -> Session:
    """Resolve the model, find a session to resume or open a new store.

    `cells`: measure only these. `timed=False`: check activations only; such stores lie apart, under `validations/`.
    """
    cells = choice.cells if cells is None else [c for c in choice.cells if c in set(cells)]
    if not cells:
        raise UsageError("no cell is selected, so there is nothing to measure")
    try:
        model = models.resolve(choice.grid.model)
    except models.UnknownModel as error:
        raise UsageError(str(error)) from error
    _check_work(choice, model)
    facts, folder = fingerprint.collect(), folder_of(choice.options)
    costs = load_costs(folder, costs_key(choice.grid))
    first = plan_for(choice, costs)
    fixed = None if first.budget_seconds else len(first.rounds)
    # A budget tier may settle for fewer runs; that is its doing and not a setting.
    runs = choice.tier.runs if first.budget_seconds and choice.options.runs is None else first.runs
    key = key_of(choice, runs, fixed, cells, model, facts)
    path, before = _place(choice, _shelf(choice, folder, timed), key)
    if choice.options.add:
        before = _more_rounds(choice, path, before)
    if before is not None:
        return replace(_resume(choice, costs, model, path, before), timed=timed)
    line = {
        "session": f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{key[:8]}",
        "schema": SCHEMA,
        "grid": grids.to_dict(choice.grid),
        "tier": choice.tier.name,
        "rounds": len(first.rounds),
        "runs": first.runs,
        "columns": list(dict.fromkeys(map(column_of, choice.columns))),
        "rows": [r.name for r in choice.rows],
        "plan": [list(r) for r in first.rounds],
        "key": key,
        "model_hash": fingerprint.model_hash(model),
        "started": fingerprint.now(),
        "fingerprint": facts,
        "environments": environments_of(choice),
    }
    session = Session(choice, first, costs, model, path, line, Writer(path), timed=timed)
    session.writer.append("session", **line)
    for row, column in choice.cells:
        if (row, column) not in set(cells):
            session.writer.append(
                "refusal", session=session.id, process=None, round=0, column=column, row=row,
                code=NOT_SELECTED, reason="left out of this session by the selection on the command line",
            )  # fmt: skip
    session.done = done_in(read(path))
    return session


def _shelf(choice: Choice, folder: Path, timed: bool) -> Path:
    """Checks without times, and columns against themselves, lie apart: neither is the newest store of a grid."""
    if not timed:
        return folder / "validations"
    return folder / "aa" if any(c.endswith(TWIN) for c in choice.columns) else folder


def _check_work(choice: Choice, model: Path) -> None:
    try:
        info = models.info(model)
        ids = workloads.ordinary_ids(model, info)
        for row in choice.rows:
            workloads.work_for(row, info, ids, plain=False)
            workloads.requests_for(row, info, ids, run=0)
    except ValueError as error:
        raise UsageError(f"{choice.grid.path}: {error}") from error


def _place(choice: Choice, folder: Path, key: str) -> tuple[Path, Store | None]:
    """Where the session's store is: an unfinished one with this key, or a path that is free."""
    given = choice.options.store
    if given and given.endswith(".jsonl"):
        path = Path(given)
        if not path.exists() or path.stat().st_size == 0:
            return path, None
        before = read(path)
        if before.session["key"] != key or not _goes_on(choice, before):
            why = "is a finished session" if before.finished else "holds a session with other settings"
            raise UsageError(f"{path} {why}, and a store is never rewritten; give another path or a folder")
        return path, before
    base = f"{choice.grid.name}-{choice.tier.name}-{key[:8]}"
    for number in range(1, 10_000):
        path = folder / (base if number == 1 else f"{base}-{number}") / FILE
        if not path.exists() or path.stat().st_size == 0:
            return path, None
        try:
            before = read(path)
        except StoreError:
            continue  # not ours to touch
        if before.session["key"] == key and _goes_on(choice, before):
            return path, before
    raise StoreError(f"{folder} holds ten thousand sessions of {base}; move some away")


def _goes_on(choice: Choice, before: Store) -> bool:
    """Whether a session of these settings is the one to go on with: the unfinished one, or the one to add rounds to."""
    if choice.options.fresh:
        return False
    return before.finished or before.added > 0 if choice.options.add else not before.finished


def _more_rounds(choice: Choice, path: Path, before: Store | None) -> Store:
    """Rounds on top of a finished session, marked in the store as asked for after a look at its verdicts."""
    more = choice.options.add or 0
    if before is None:
        raise UsageError(
            f"there is no finished session of these settings to add {more} rounds to; run it without that first"
        )
    if not before.finished:
        return before  # adding was interrupted: the rounds are in the plan already
    longer = replace(choice, options=replace(choice.options, rounds=len(before.plan) + more, budget_minutes=None))
    rounds = [*before.plan, *(list(r) for r in plan_for(longer, Costs()).rounds[len(before.plan) :])]
    writer = Writer(path)
    reason = f"{more} rounds added after {len(before.plan)} had been seen"
    writer.append("plan", session=before.session["session"], plan=rounds, reason=reason, added=more)
    writer.close()
    return read(path)


def _resume(choice: Choice, costs: Costs, model: Path, path: Path, before: Store) -> Session:
    writer = Writer(path)
    for line in half_done(before):
        writer.append(**line)
    before = read(path)
    done = done_in(before)
    costs = costs_of(before, costs)
    rounds = tuple(tuple(r) for r in before.plan)
    made = plan_for(choice, costs)
    seconds = len(rounds) * costs.of_round(choice.columns, choice.rows, before.session["runs"])
    made = Plan(
        choice.columns,
        choice.rows,
        rounds,
        before.session["runs"],
        seconds,
        "resumed",
        None if before.added else made.budget_seconds,
        made.max_rounds,
    )
    return Session(choice, made, costs, model, path, before.session, writer, before, done)


def half_done(store: Store) -> list[dict[str, Any]]:
    """`failed` lines for cells that a dead parent left half measured: they will be measured again, whole."""
    runs: dict[tuple[int, str, str, str, str | None], int] = {}
    for r in store.runs:
        at = (r["round"], r["column"], r["row"], r["process"], r.get("arm"))
        runs[at] = runs.get(at, 0) + 1
    return [
        {
            "kind": "failed", "session": store.session["session"],
            "process": process, "round": round, "column": column, "row": row, **({"arm": arm} if arm else {}),
            "reason": f"interrupted after {n} of {store.session['runs']} runs", "stderr": None, "retry": True,
        }
        for (round, column, row, process, arm), n in runs.items()
        if n < store.session["runs"]
    ]  # fmt: skip


def slot_of(line: Mapping[str, Any]) -> str:
    """The place in the plan that a line belongs to: its column, or the column's second arm."""
    return f"{line['column']}{TWIN}" if line.get("arm") == "b" else str(line["column"])


def twinned(choice: Choice) -> Choice:
    """The choice with every column beside itself, for an A/A session."""
    return replace(choice, columns=tuple(s for c in choice.columns for s in (c, c + TWIN)))


def done_in(store: Store) -> set[tuple[int, str, str]]:
    """(round, row, slot) that need no more measuring: all runs there, refused, or lost to a crash or a hang."""
    rows, rounds = store.session["rows"], range(max(len(store.plan), 1))
    done = {(r["round"], r["row"], slot_of(r)) for r in (*store.runs, *store.refusals) if r.get("code") != NOT_SELECTED}
    done |= {(i, r["row"], r["column"]) for i in rounds for r in store.refusals if r.get("code") == NOT_SELECTED}
    for f in store.failed:
        if not f.get("retry"):
            done |= {(f["round"], row, slot_of(f)) for row in ([f["row"]] if f["row"] else rows)}
    return done
