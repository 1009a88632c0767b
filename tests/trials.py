"""Whole sessions of the simulated engine in one process: the real plan, runner, worker, bench, store and judge.

What a child process costs (0.5 s) is what keeps a hundred sessions out of a test suite; everything else of a session is
kept, its store on disk too. The host drifts as the notes' does, from process to process.

    judged(folder, seed, columns=("vanilla", "fake-a"), rounds=6, shares={"fake-a": 0.95})   # -> list of Cell
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness import clock, fingerprint, grid, store, visit
from harness.grid import Limits
from harness.judge import Cell, judge
from harness.plan import rounds_of
from harness.progress import Quiet
from harness.run import Options, choose, execute, prepare
from harness.store import Store, dump, read
from harness.worker import Spec, serve
from tests import fake

ROWS = ("generate", "steer", "forward")
DRIFT, RHO, PROCESS, RUN = 0.05, 0.9, 0.015, 0.008  # the notes' host: sd of the log speed


class InThisProcess:
    """In the place of `harness.child.Worker`: serves the spec here, and hands the same lines back."""

    phase, cell = "close", None

    def __init__(self, python: str, spec: Mapping[str, Any], env: Mapping[str, str], log: Path, limits: Limits) -> None:
        self.spec, self.env = Spec(**spec, fd=-1), env

    def __iter__(self) -> Iterator[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        os.environ.update(self.env)  # of a test with `alone`, which puts it back
        serve(self.spec, lambda kind, **values: lines.append(json.loads(dump({"kind": kind, **values}))))
        yield from lines

    def kill(self) -> None:
        """Nothing runs elsewhere."""


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of this test run in its own process, and do not stop to look at the machine again for each."""
    for name in ("OMP_NUM_THREADS", "TAPGRID_PROCESS", fake.VARIABLE):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    facts, source = fingerprint.collect(), clock.SOURCE
    monkeypatch.setattr(clock, "SOURCE", source)
    monkeypatch.setattr(visit, "Worker", InThisProcess)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(grid, "every_column", functools.cache(grid.every_column))
    for name, value in (("collect", facts), ("packages", facts["packages"]), ("code_hash", "0" * 16)):
        monkeypatch.setattr(fingerprint, name, lambda *a, value=value, **k: value)
    loads = functools.lru_cache(1 << 12)(json.loads)  # a store is read anew at every step; a line is parsed once
    monkeypatch.setattr(store, "json", SimpleNamespace(loads=loads, dumps=json.dumps))
    monkeypatch.setattr(fingerprint, "probe", lambda: {"wall_seconds": 1.0, "cpu_seconds": 1.0})


def host(seed: int, slots: int) -> list[float]:
    """Log speed of the host at each process of a session: autoregressive, sd 5 %, rho .9."""
    rng = np.random.default_rng([seed, 5])
    level = [rng.normal(0, DRIFT)]
    for _ in range(slots - 1):
        level.append(RHO * level[-1] + rng.normal(0, DRIFT * math.sqrt(1 - RHO**2)))
    return level


def run(folder: Path, seed: int, columns: Sequence[str], rounds: int, shares: Mapping[str, float]) -> Store:
    """A session at 3 runs a process; `shares` of vanilla's speed, by column."""
    gc.freeze()  # a worker collects before every run; what is here by now is not garbage
    if not (folder / "fake.toml").exists():
        fake.grid_file(folder, columns, ROWS)
    order = rounds_of(columns, rounds)
    at = {f"r{n}-{place}": n * len(columns) + place for n, names in enumerate(order) for place in range(len(names))}
    level = host(seed, len(at))
    common = {
        "seed": seed,
        "process_noise": PROCESS,
        "noise": RUN,
        "host": {process: level[slot] for process, slot in at.items()},
    }
    os.environ[fake.VARIABLE] = json.dumps({c: common | {"speed": shares.get(c, 1.0)} for c in columns})
    options = Options(str(folder / "fake.toml"), tier="standard", rounds=rounds, store=str(folder / f"{seed}.jsonl"))
    return read(execute(prepare(choose(options)), Quiet()))


def judged(folder: Path, seed: int, columns: Sequence[str], rounds: int, shares: Mapping[str, float]) -> list[Cell]:
    return judge(run(folder, seed, columns, rounds, shares))
