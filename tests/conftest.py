"""Fixtures that need no model: a working directory of one's own, and sessions of the simulated engine."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from harness.progress import Quiet
from harness.store import Store
from tests import fake

pytest_plugins = "pytester"
# Before torch is imported (nothing above does): the engines' kernels count on every thread of a process having the same
# number of OpenMP threads, and two files of tests share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)  # xdist's
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Say how a test process died: "Not properly terminated" leaves open whether it crashed, was killed or left."""
    if error:
        process = node.gateway._io.popen
        try:
            ended = f"status {process.wait(timeout=10)} (negative: a signal)"
        except subprocess.TimeoutExpired:
            ended = "no status: it is still alive"
        print(f"\n{node.gateway.id}, process {process.pid}, ended with {ended}", file=sys.__stderr__)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that runs pytest in this process leaves the traceback of a later crash to a file that nobody reads."""
    if (stderr := item.config.stash.get(fault_handler_stderr_fd_key, None)) is not None:
        faulthandler.enable(stderr)


class Heard(Quiet):
    """A progress that remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.places: list[str] = []

    def at(self, where: str, left: float) -> None:
        assert left >= 0
        self.places.append(where)

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def measure(here: Path, monkeypatch: pytest.MonkeyPatch, heard: Heard) -> Callable[..., Store]:
    """Run a session of the simulated engine in a temporary folder and read its store.

    Keyword arguments: `columns`, `rows`, `limit`, `top` of the grid file; `plant` by column; `cells`; else Options.
    """
    from harness.run import Options, choose, execute, prepare
    from harness.store import read

    def run(plant: dict[str, Any] | None = None, cells: Any = None, timed: bool = True, **given: Any) -> Store:
        grid = {k: given.pop(k) for k in ("columns", "rows", "limit", "top") if k in given}
        path = fake.grid_file(here, **grid)
        monkeypatch.setenv(fake.VARIABLE, json.dumps(plant or {}))
        options = Options(str(path), **({"rounds": 1, "runs": 1} | given))
        return read(execute(prepare(choose(options), cells, timed=timed), heard))

    return run
