"""Carries a plan out: one worker at a time, every line stored as it comes, and at most one cell lost to anything.

session = prepare(choose(Options("smollm2")))
execute(session)                        # -> the store's path; the same call resumes an interrupted one
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adapters.engines.settings import environment
from harness import child, fingerprint, plan
from harness.child import Died, Hang, Worker
from harness.grid import UsageError
from harness.progress import Quiet
from harness.progress import make as make_progress
from harness.session import Choice, Options, Session, choose, costs_key, folder_of, plan_for, prepare
from harness.store import read
from harness.workloads import Row

__all__ = ["Choice", "Interrupted", "Options", "Session", "choose", "execute", "prepare"]

# What a user may have set that changes an engine; stored beside what the harness itself sets.
_TELLING = ("VLLM_", "OMP_", "MKL_", "TORCH", "PYTORCH_", "CUDA_VISIBLE", "NCCL_", "HF_HUB_OFFLINE", "TAPGRID_")
GIVE_UP = 2  # rounds in a row in which a column failed to boot, or a cell failed, before it is no longer tried


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the running cell was given up and the store closed."""


@dataclass
class _Visit:
    """One column in one round, while it runs."""

    round: int
    order: int
    column: str
    rows: list[Row]
    process: str = ""
    log: Path = Path()
    begin: float = 0.0
    booted: float | None = None
    seconds: dict[str, Any] = field(default_factory=dict)

    def start(self, process: str, logs: Path) -> None:
        self.process, self.log, self.begin = process, logs / f"{process}.log", time.monotonic()
        self.booted, self.seconds = None, {}


def execute(session: Session, progress: Quiet | None = None) -> Path:
    """Run everything that the session's plan still lacks."""
    progress = progress or make_progress()
    how = "going on with" if session.before else "measuring"
    progress.start(f"{how} {session.choice.grid.name} ({session.plan.why}); store {session.path}")
    try:
        with _alone(folder_of(session.choice.options)):
            _rounds(session, progress)
    except KeyboardInterrupt as stop:
        where = f" in {stop}" if str(stop) else ""
        raise Interrupted(
            f"interrupted{where}. Everything measured before is in {session.path}; "
            "give the same command again to go on from there"
        ) from None
    finally:
        session.writer.close()
        progress.stop()
    return session.path


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Two engines alive at once falsify both, so two sessions may not run from one folder at once."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "running").open("a+") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            f.seek(0)
            raise UsageError(
                f"another session is running from {home} (process {f.read().strip() or '?'}); wait for it or end it"
            ) from None
        f.truncate(0)
        f.write(str(os.getpid()))
        f.flush()
        yield


def _rounds(session: Session, progress: Quiet) -> None:
    choice, number = session.choice, 0
    while number < len(session.plan.rounds):
        for order, column in enumerate(session.plan.rounds[number]):
            rows = [r for r in choice.rows if (number, r.name, column) not in session.done]
            if rows:
                _host_probe(session, number, order)
                _column(session, _Visit(number, order, column, _worth_trying(session, number, column, rows)), progress)
        _learn(session)
        if session.plan.budget_seconds:
            _replan(session, number + 1, progress)
        number += 1
    session.writer.append("session_end", session=session.id, ended=fingerprint.now())


def _host_probe(session: Session, number: int, order: int) -> None:
    if not any(p["round"] == number for p in read(session.path).probes):
        session.writer.append("probe", session=session.id, round=number, order=order, **fingerprint.probe())


def _learn(session: Session) -> None:
    store = read(session.path)
    session.costs = plan.costs_of(store, session.costs)
    plan.save_costs(folder_of(session.choice.options), costs_key(session.choice.grid), session.costs)


def _replan(session: Session, done: int, progress: Quiet) -> None:
    """A budget chooses its rounds again once it knows what they cost. Runs stay: all rounds must be alike."""
    store = read(session.path)
    spent = sum(e.get("wall_seconds") or 0.0 for e in store.process_ends)
    choice = dataclasses.replace(
        session.choice, options=dataclasses.replace(session.choice.options, runs=session.plan.runs)
    )
    made = plan_for(choice, session.costs, spent=spent, done=done)
    if len(made.rounds) != len(session.plan.rounds):
        progress.say(f"re-planned: {made.why}")
        session.writer.append("plan", session=session.id, plan=[list(r) for r in made.rounds], reason=made.why)
    session.plan = made


def _worth_trying(session: Session, number: int, column: str, rows: list[Row]) -> list[Row]:
    """The rows less those that failed in each of the last rounds, and those of a column without its library."""
    store = read(session.path)
    keep = []
    for row in rows:
        refused = next(
            (r for r in store.refusals if r["column"] == column and r["row"] == row.name and r["code"] == "no-library"),
            None,
        )
        failed = [
            f for f in store.failed if f["column"] == column and f["row"] in (None, row.name) and not f.get("retry")
        ]
        last = {f["round"] for f in failed}
        at = {"session": session.id, "process": None, "round": number, "column": column, "row": row.name}
        if refused:
            session.writer.append("refusal", **at, code=refused["code"], reason=refused["reason"])
        elif number >= GIVE_UP and all(number - i in last for i in range(1, GIVE_UP + 1)):
            why = f"not tried again: it failed in the {GIVE_UP} rounds before ({failed[-1]['reason']})"
            session.writer.append("failed", **at, reason=why, stderr=failed[-1]["stderr"])
        else:
            keep.append(row)
            continue
        session.done.add((number, row.name, column))
    return keep


def _column(session: Session, visit: _Visit, progress: Quiet) -> None:
    """Measure a column's rows, with a fresh worker after each one that a row has cost its life."""
    while visit.rows:
        before = len(visit.rows)
        _process(session, visit, progress)
        visit.rows = [r for r in visit.rows if (visit.round, r.name, visit.column) not in session.done]
        if len(visit.rows) == before:  # cannot be; and if it is, it must not go on for ever
            _fail(session, visit, None, "the worker ended without measuring anything", progress)
            return


def _process(session: Session, visit: _Visit, progress: Quiet) -> None:
    store = read(session.path)
    count = len(
        {
            p["process"]
            for p in (*store.processes, *store.failed)
            if p["round"] == visit.round and p["column"] == visit.column
        }
    )
    visit.start(f"r{visit.round}-{visit.order}-{visit.column}-{count}", session.folder / "logs")
    column = session.choice.grid.known_columns()[visit.column]
    python = child.interpreter(column.environment)
    if python is None:
        name = f"TAPGRID_PYTHON_{column.environment.upper().replace('-', '_')}"
        for row in visit.rows:
            _refuse(
                session,
                visit,
                row.name,
                "no-library",
                f"needs the environment {column.environment!r}: set {name} to its interpreter",
            )
        return
    env = _environment(session, visit)
    worker = Worker(python, _spec(session, visit), env, visit.log, session.choice.grid.limits)
    clean, lost = False, ""
    try:
        for line in worker:
            _take(session, visit, worker, line, env, progress)
        clean = True
    except (Hang, Died) as error:
        lost = str(error)
    except KeyboardInterrupt:
        worker.kill()
        _write(session, visit, "failed", row=worker.cell, reason="interrupted by Ctrl-C", stderr=None, retry=True)
        raise KeyboardInterrupt(f"round {visit.round + 1}, {visit.column}, {worker.cell or worker.phase}") from None
    finally:
        worker.kill()
    if lost and worker.phase != "close":
        _fail(session, visit, worker.cell, lost if worker.cell else f"{worker.phase}: {lost}", progress)
    if visit.booted is not None:
        took = time.monotonic() - visit.begin
        _write(session, visit, "process_end", clean=clean, wall_seconds=took, seconds=visit.seconds)


def _take(
    session: Session, visit: _Visit, worker: Worker, line: dict[str, Any], env: Mapping[str, str], progress: Quiet
) -> None:
    """Store one line of a worker, or act on it."""
    kind = line.pop("kind")
    if kind == "phase":
        where = f"round {visit.round + 1}/{len(session.plan.rounds)}  {visit.column}  {line['row'] or line['phase']}"
        progress.at(where, _left(session, visit))
    elif kind == "done":
        if line["row"] is None:
            visit.seconds["validate"] = line["seconds"]
            return
        if line["seconds"] is not None:
            visit.seconds.setdefault("rows", {})[line["row"]] = line["seconds"]
        session.done.add((visit.round, line["row"], visit.column))
    elif kind == "process":
        visit.booted = line["boot_wall_seconds"]
        telling = {k: v for k, v in os.environ.items() if k.startswith(_TELLING)}
        _write(session, visit, kind, order=visit.order, env=telling | dict(env), log=str(visit.log), **line)
    elif kind == "refusal":
        _refuse(session, visit, line["row"], line["code"], line["reason"])
    else:
        _write(session, visit, kind, **line)


def _write(session: Session, visit: _Visit, kind: str, **values: Any) -> None:
    session.writer.append(
        kind, session=session.id, process=visit.process, round=visit.round, column=visit.column, **values
    )


def _refuse(session: Session, visit: _Visit, row: str, code: str, reason: str) -> None:
    _write(session, visit, "refusal", row=row, code=code, reason=reason)
    session.done.add((visit.round, row, visit.column))


def _fail(session: Session, visit: _Visit, row: str | None, reason: str, progress: Quiet) -> None:
    """One cell is lost, or, where the process never came to its rows, the column in this round."""
    _write(session, visit, "failed", row=row, reason=reason, stderr=str(visit.log), last_lines=child.tail(visit.log))
    session.done |= {(visit.round, r, visit.column) for r in ([row] if row else [r.name for r in visit.rows])}
    progress.say(
        f"lost: {row or 'every row'} of {visit.column} in round {visit.round + 1}: {reason}\n"
        f"      its output: {visit.log}"
    )


def _spec(session: Session, visit: _Visit) -> dict[str, Any]:
    grid = session.choice.grid
    return {
        "column": asdict(grid.known_columns()[visit.column]),
        "model": str(session.model),
        "settings": asdict(grid.settings),
        "rows": [asdict(r) for r in visit.rows],
        "runs": session.plan.runs,
        "timed": session.timed,
        "seed": grid.seed,
        "validator": grid.validator,
        "cache": str((folder_of(session.choice.options) / "references").resolve()),
        "path": [str(Path(grid.path).parent), os.getcwd()] if grid.adapters else [],
    }


def _environment(session: Session, visit: _Visit) -> dict[str, str]:
    cuda = session.line["fingerprint"].get("gpu") is not None
    return environment(session.choice.grid.settings, cuda=cuda) | {"TAPGRID_PROCESS": visit.process}


def _left(session: Session, visit: _Visit) -> float:
    """Seconds still to go, by what is known of the costs."""
    costs, runs, total = session.costs, session.plan.runs, 0.0
    for number, columns in enumerate(session.plan.rounds):
        for column in columns:
            rows = [r for r in session.choice.rows if (number, r.name, column) not in session.done]
            running = (number, column) == (visit.round, visit.column) and visit.booted is not None
            if rows:
                total += (0.0 if running else costs.of_boot(column)) + sum(costs.of_row(column, r, runs) for r in rows)
    return total
