"""One column in one round: a worker started, its lines stored, a fresh worker after each row that cost one its life."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adapters.columns import Column
from adapters.engines.settings import environment
from harness import child, environments
from harness.child import Died, Hang, Worker
from harness.progress import Quiet
from harness.session import Session, folder_of, slot_of
from harness.store import read
from harness.workloads import TWIN, Row, column_of

# What a user may have set that changes an engine; stored beside what the harness itself sets.
_TELLING = ("VLLM_", "OMP_", "MKL_", "TORCH", "PYTORCH_", "CUDA_VISIBLE", "NCCL_", "HF_HUB_OFFLINE", "TAPGRID_")


@dataclass
class Visit:
    """A place in the plan while it runs. `slot` is the column, or its second arm in an A/A session."""

    session: Session
    progress: Quiet
    left: Callable[[Visit], float]
    round: int
    order: int
    slot: str
    rows: list[Row]
    process: str = ""
    log: Path = Path()
    begin: float = 0.0
    booted: float | None = None
    seconds: dict[str, Any] = field(default_factory=dict)

    @property
    def column(self) -> str:
        return column_of(self.slot)

    @property
    def at(self) -> dict[str, Any]:
        """What every line of this visit says of its place."""
        columns = self.session.choice.columns
        twins = any(c.endswith(TWIN) for c in columns)
        arm = {"arm": "b" if self.slot.endswith(TWIN) else "a"} if twins else {}
        return {"session": self.session.id, "round": self.round, "column": self.column, **arm}

    def start(self, process: str, logs: Path) -> None:
        self.process, self.log, self.begin = process, logs / f"{process}.log", time.monotonic()
        self.booted, self.seconds = None, {}

    def write(self, kind: str, **values: Any) -> None:
        self.session.writer.append(kind, process=self.process, **self.at, **values)

    def is_done(self, row: Row) -> bool:
        return (self.round, row.name, self.slot) in self.session.done

    def refuse(self, row: str, code: str, reason: str) -> None:
        self.write("refusal", row=row, code=code, reason=reason)
        self.session.done.add((self.round, row, self.slot))

    def fail(self, row: str | None, reason: str) -> None:
        """One cell is lost, or, where the process never came to its rows, the column in this round."""
        self.write("failed", row=row, reason=reason, stderr=str(self.log), last_lines=child.tail(self.log))
        self.session.done |= {(self.round, r, self.slot) for r in ([row] if row else [r.name for r in self.rows])}
        self.progress.say(
            f"lost: {row or 'every row'} of {self.slot} in round {self.round + 1}: {reason}\n"
            f"      its output: {self.log}"
        )


def measure(visit: Visit) -> None:
    """Measure the column's rows, with as many workers as it takes."""
    while visit.rows:
        before = len(visit.rows)
        _process(visit)
        visit.rows = [r for r in visit.rows if not visit.is_done(r)]
        if len(visit.rows) == before:  # cannot be; and if it is, it must not go on for ever
            visit.fail(None, "the worker ended without measuring anything")
            return


def _process(visit: Visit) -> None:
    session = visit.session
    store = read(session.path)
    mine = (p for p in (*store.processes, *store.failed) if p["round"] == visit.round and slot_of(p) == visit.slot)
    count = len({p["process"] for p in mine if p["process"]})
    visit.start(f"r{visit.round}-{visit.order}-{visit.slot}-{count}", session.folder / "logs")
    column = session.choice.grid.known_columns()[visit.column]
    python = environments.python_of(column.environment)
    if python is None:
        for row in visit.rows:
            visit.refuse(row.name, "no-library", environments.how_to_build(column.environment))
        return
    env = _environment(visit) | plugins(column)
    worker = Worker(python, _spec(visit), env, visit.log, session.choice.grid.limits)
    clean, lost = False, ""
    try:
        for line in worker:
            _take(visit, line, env)
        clean = True
    except (Hang, Died) as error:
        lost = str(error)
    except KeyboardInterrupt:
        worker.kill()
        visit.write("failed", row=worker.cell, reason="interrupted by Ctrl-C", stderr=None, retry=True)
        raise KeyboardInterrupt(f"round {visit.round + 1}, {visit.slot}, {worker.cell or worker.phase}") from None
    finally:
        worker.kill()
    if lost and worker.phase != "close":
        visit.fail(worker.cell, lost if worker.cell else f"{worker.phase}: {lost}")
    if visit.booted is not None:
        took = time.monotonic() - visit.begin
        visit.write("process_end", clean=clean, wall_seconds=took, seconds=visit.seconds)


def _take(visit: Visit, line: dict[str, Any], env: Mapping[str, str]) -> None:
    """Store one line of a worker, or act on it."""
    kind = line.pop("kind")
    if kind == "phase":
        rounds = len(visit.session.plan.rounds)
        where = f"round {visit.round + 1}/{rounds}  {visit.slot}  {line['row'] or line['phase']}"
        visit.progress.at(where, visit.left(visit))
    elif kind == "done":
        if line["row"] is None:
            visit.seconds["validate"] = line["seconds"]
            return
        if line["seconds"] is not None:
            visit.seconds.setdefault("rows", {})[line["row"]] = line["seconds"]
        visit.session.done.add((visit.round, line["row"], visit.slot))
    elif kind == "process":
        visit.booted = line["boot_wall_seconds"]
        telling = {k: v for k, v in os.environ.items() if k.startswith(_TELLING)}
        visit.write(kind, order=visit.order, env=telling | dict(env), log=str(visit.log), **line)
    elif kind == "refusal":
        visit.refuse(line["row"], line["code"], line["reason"])
    else:
        visit.write(kind, **line)


def _spec(visit: Visit) -> dict[str, Any]:
    session, grid = visit.session, visit.session.choice.grid
    return {
        "column": asdict(grid.known_columns()[visit.column]),
        "model": str(session.model),
        "settings": asdict(grid.settings),
        "rows": [asdict(r) for r in visit.rows],
        "runs": session.plan.runs,
        "timed": session.timed,
        "seed": grid.seed,
        "metric": grid.metric,
        "validator": grid.validator,
        "cache": str((folder_of(session.choice.options) / "references").resolve()),
        "path": [str(Path(grid.path).parent), os.getcwd()] if grid.adapters else [],
    }


def plugins(column: Column) -> dict[str, str]:
    """The variable that lets a worker's vLLM load the column's own plugins, those that the user names, and no others.

    >>> plugins(Column("vanilla", "a:B", "", plugins=()))
    {'VLLM_PLUGINS': ''}
    """
    if column.plugins is None:
        return {}
    names = [*os.environ.get("VLLM_PLUGINS", "").split(","), *column.plugins]
    return {"VLLM_PLUGINS": ",".join(dict.fromkeys(filter(None, names)))}


def _environment(visit: Visit) -> dict[str, str]:
    cuda = visit.session.line["fingerprint"].get("gpu") is not None
    grid = visit.session.choice.grid
    shared = environment(grid.settings, cuda=cuda, ahead=grid.known_columns()[visit.column].ahead)
    return shared | {"TAPGRID_PROCESS": visit.process}
