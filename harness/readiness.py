"""Which columns run on this machine, and what to install for those that do not. Nothing is imported to find out."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from adapters.columns import Column
from harness import environments
from harness.doctor import Finding
from harness.environments import DEFAULT, base_of
from harness.grid import every_column
from harness.install import NO_COMPILER, apart_folder

INSTALL = "`make install` brings it"


def columns() -> list[Finding]:
    """A finding for every column: `good` is None where its cells would carry a refusal instead of a number."""
    return [_look(column) for column in every_column().values()]


def _look(column: Column) -> Finding:
    what = f"column {column.name}"
    if column.gpu and not environments.has_cuda():
        return Finding(what, None, "no CUDA GPU here", "it runs on no CPU: its cells are refused with that reason")
    if column.environment != DEFAULT:
        python = environments.python_of(column.environment)
        if python is None:
            return Finding(what, None, "no environment", environments.how_to_build(column.environment))
        found = f"runs under {python}"
    else:
        missing = [m for m in _needs(column) if not _importable(m)]
        if missing:
            return Finding(what, None, f"without {', '.join(missing)}", _advice(column))
        if away := [f for f in _apart(column) if not f.is_dir()]:
            return Finding(what, None, f"nothing in {away[0]}", INSTALL)
        found = "runs here"
    if column.compiled and shutil.which(os.environ.get("CXX", "g++")) is None:
        return Finding(what, None, found, NO_COMPILER.removeprefix("note: "))
    return Finding(what, True, found)


def _needs(column: Column) -> tuple[str, ...]:
    return column.needs or (column.target.partition(":")[0],)


def _advice(column: Column) -> str:
    ours = column.target.startswith("adapters.")
    return INSTALL if ours else f"{column.target} ({column.about}) is not found: install that package again"


def _importable(module: str) -> bool:
    """By its top package alone: finding a submodule would import what is above it."""
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _apart(column: Column) -> list[Path]:
    """The folders out of sight in which the column's plugin must lie."""
    pins = environments.named(column.environment).apart
    mine = [p for p in pins if base_of(column.name) == p.partition("==")[0]]
    return [apart_folder(Path(sys.prefix), p) for p in mine]
