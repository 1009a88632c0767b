"""Carries a plan out: one worker at a time, every line stored as it comes, and at most one cell lost to anything.

session = prepare(choose(Options("smollm2")))
execute(session)                        # -> the store's path; the same call resumes an interrupted one
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from adapters.work import MissingDevice, MissingLibrary
from harness import contamination, fingerprint, visit
from harness.costs import costs_of, save_costs
from harness.grid import UsageError
from harness.progress import Quiet
from harness.progress import make as make_progress
from harness.session import Choice, Options, Session, choose, costs_key, folder_of, plan_for, prepare, slot_of
from harness.store import read
from harness.visit import Visit
from harness.workloads import Row, column_of

__all__ = ["Choice", "Interrupted", "Options", "Session", "choose", "execute", "prepare"]

GIVE_UP = 2  # rounds in a row in which a column failed to boot, or a cell failed, before it is no longer tried


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the running cell was given up and the store closed."""


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
            other = f.read().strip() or "?"
            raise UsageError(
                f"another session is running from {home} (process {other}); wait for it or end it"
            ) from None
        f.truncate(0)
        f.write(str(os.getpid()))
        f.flush()
        yield


def _rounds(session: Session, progress: Quiet) -> None:
    number = 0
    while number < len(session.plan.rounds):
        _round(session, number, progress)
        _learn(session)
        number += 1
        if session.plan.budget_seconds:
            _replan(session, number, progress)
    session.writer.append("session_end", session=session.id, ended=fingerprint.now())


def _round(session: Session, number: int, progress: Quiet) -> None:
    seen: list[str] = []
    measured = False
    for order, slot in enumerate(session.plan.rounds[number]):
        rows = [r for r in session.choice.rows if (number, r.name, slot) not in session.done]
        if not rows:
            continue
        if not measured:
            _host_probe(session, number, order)
        measured = True
        seen += contamination.device_strangers()
        left = _worth_trying(session, number, slot, rows)
        visit.measure(Visit(session, progress, lambda v: _left(session, v), number, order, slot, left))
        seen += contamination.throttled()
    if measured:
        limit = contamination.load_limit(session.choice.grid, session.line["fingerprint"]["cores"])
        seen += contamination.by_load((r for r in read(session.path).runs if r["round"] == number), limit)
    if seen:
        reason = "; ".join(dict.fromkeys(seen))
        session.writer.append("contaminated", session=session.id, round=number, reason=reason)
        progress.say(f"round {number + 1} will not count: {reason}")


def _host_probe(session: Session, number: int, order: int) -> None:
    if not any(p["round"] == number for p in read(session.path).probes):
        session.writer.append("probe", session=session.id, round=number, order=order, **fingerprint.probe())


def _learn(session: Session) -> None:
    store = read(session.path)
    session.costs = costs_of(store, session.costs)
    save_costs(folder_of(session.choice.options), costs_key(session.choice.grid), session.costs)


def _replan(session: Session, done: int, progress: Quiet) -> None:
    """A budget chooses its rounds again once it knows what they cost. Runs stay: all rounds must be alike."""
    store = read(session.path)
    spent = sum(e.get("wall_seconds") or 0.0 for e in store.process_ends)
    options = dataclasses.replace(session.choice.options, runs=session.plan.runs)
    made = plan_for(dataclasses.replace(session.choice, options=options), session.costs, spent=spent, done=done)
    if len(made.rounds) != len(session.plan.rounds):
        progress.say(f"re-planned: {made.why}")
        session.writer.append("plan", session=session.id, plan=[list(r) for r in made.rounds], reason=made.why)
    session.plan = made


def _worth_trying(session: Session, number: int, slot: str, rows: list[Row]) -> list[Row]:
    """The rows less those that failed in each of the last rounds, and those of a column that cannot boot here."""
    store = read(session.path)
    never = (MissingLibrary.code, MissingDevice.code)
    refusals = {r["row"]: r for r in store.refusals if r["code"] in never and slot_of(r) == slot}
    failed = [f for f in store.failed if slot_of(f) == slot and not f.get("retry")]
    keep = []
    for row in rows:
        here = Visit(session, Quiet(), lambda v: 0.0, number, 0, slot, [row])
        mine = [f for f in failed if f["row"] in (None, row.name)]
        last = {f["round"] for f in mine}
        if row.name in refusals:
            code, reason = refusals[row.name]["code"], refusals[row.name]["reason"]
            session.writer.append("refusal", process=None, **here.at, row=row.name, code=code, reason=reason)
        elif number >= GIVE_UP and all(number - i in last for i in range(1, GIVE_UP + 1)):
            why = f"not tried again: it failed in the {GIVE_UP} rounds before ({mine[-1]['reason']})"
            session.writer.append(
                "failed", process=None, **here.at, row=row.name, reason=why, stderr=mine[-1]["stderr"]
            )
        else:
            keep.append(row)
            continue
        session.done.add((number, row.name, slot))
    return keep


def _left(session: Session, now: Visit) -> float:
    """Seconds still to go, by what is known of the costs."""
    costs, runs, total = session.costs, session.plan.runs, 0.0
    for number, slots in enumerate(session.plan.rounds):
        for slot in slots:
            rows = [r for r in session.choice.rows if (number, r.name, slot) not in session.done]
            running = (number, slot) == (now.round, now.slot) and now.booted is not None
            if rows:
                boot = 0.0 if running else costs.of_boot(slot)
                total += boot + sum(costs.of_row(column_of(slot), r, runs) for r in rows)
    return total
