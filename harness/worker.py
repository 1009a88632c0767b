"""The child process: boots one adapter, checks its activations, times its rows, and reports every fact as a JSON line.

    python -m harness.worker        # first line of stdin: the spec; lines go to the file descriptor that it names

Started by `harness.child`, a fresh one for every column of every round. Engines print what they like on stdout and
stderr (a log file); the protocol has a pipe of its own. When stdin ends the parent is gone, and so is this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.columns import Column, make
from adapters.work import (
    BootRefused,
    Settings,
)
from harness import clock, engine_facts, fingerprint, workloads
from harness.bench import Bench, ask, measure, show_text, validate
from harness.models import info
from harness.store import dump
from harness.workloads import Row


@dataclass(frozen=True)
class Spec:
    """All that a worker is told."""

    fd: int
    column: Mapping[str, Any]
    model: str
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    runs: int
    seed: int
    validator: str
    cache: str
    metric: str = "cpu"
    timed: bool = True
    path: Sequence[str] = ()


def main() -> int:
    return speak(lambda given, send: serve(Spec(**given), send))


def speak(serve: Callable[[dict[str, Any], Callable[..., None]], None]) -> int:
    """Read the spec, put its `path` first on this process's, and let `serve` send lines; returns the exit code."""
    given = json.loads(_first_line())
    os.set_inheritable(given["fd"], False)  # an engine's own processes must not hold the pipe open
    threading.Thread(target=_die_with_parent, daemon=True).start()
    sys.path[:0] = [p for p in given["path"] if p not in sys.path]

    def send(kind: str, **values: Any) -> None:
        data = dump({"kind": kind, **values})
        while data:
            data = data[os.write(given["fd"], data) :]

    try:
        serve(given, send)
    except BaseException as error:
        _report(error, send)
        return 1
    return 0


def _report(error: BaseException, send: Callable[..., None]) -> None:
    traceback.print_exc()
    send("error", reason=f"{type(error).__name__}: {error}".strip()[:2000])


def _first_line() -> bytes:
    # Unbuffered: a thread goes on reading this descriptor, and a lock on sys.stdin would hang the exit.
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(0, 65536)
        if not more:
            raise SystemExit("harness.worker: no spec on stdin; it is started by `tapgrid run`, not by hand")
        data += more
    return data


def _die_with_parent() -> None:
    while os.read(0, 4096):
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgrp(), signal.SIGKILL)


def serve(spec: Spec, send: Callable[..., None]) -> None:
    """Boot, show the text, check, time every row, close."""
    model, settings = Path(spec.model), Settings(**spec.settings)
    facts = info(model)
    send("phase", phase="boot", row=None)
    started, before = fingerprint.now(), clock.start(settings.tensor_parallel > 1)
    try:
        adapter = make(Column(**spec.column))
        adapter.boot(model, settings)
    except BootRefused as no:
        for asked in spec.rows:
            send("refusal", row=asked["name"], code=no.code, reason=str(no))
        return
    bench = None
    try:
        took = clock.stop(before, settings.tensor_parallel > 1)
        send(
            "process",
            settings=dict(adapter.engine_settings()),
            packages=fingerprint.packages(),
            engine=engine_facts.facts(adapter),
            boot_wall_seconds=took.wall,
            boot_cpu_seconds=took.cpu,
            started=started,
        )
        ids, rows = workloads.ordinary_ids(model, facts), [Row(**r) for r in spec.rows]
        bench = Bench(send, adapter, settings, model, facts, ids, spec.runs, spec.seed, spec.metric)
        show_text(bench)
        validate(bench, rows, spec.validator, Path(spec.cache))
        for row in rows:
            if spec.timed:
                measure(bench, row)
            elif ask(bench, row) is not None:
                send("done", row=row.name, seconds=None)
        send("phase", phase="close", row=None)
    except BaseException as error:
        _report(error, send)  # before closing, which may hang after an error; the parent waits no longer
        raise
    finally:
        adapter.close()
        if bench is not None and hasattr(bench.validator, "close"):
            bench.validator.close()


if __name__ == "__main__":
    sys.exit(main())
