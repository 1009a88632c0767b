"""The environments that columns run in: their pins, where each is built, and whether it is.

`grids/environments.toml` -> frozen dataclasses. Standard library only: `harness/install.py` reads the default one's
pins before anything is installed. Building is `harness.building`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from harness.usage import UsageError, nearest

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "grids" / "environments.toml"
LOCKS = ROOT / "grids" / "environments"
DEFAULT = "default"
STAMP = "tapgrid-environment.json"
VARIABLE = "TAPGRID_ENVIRONMENTS"
AT = "@"  # a column in an environment of its own: vanilla@vllm-0.32
RECIPE = 1  # raise it when the same pins would be built another way

NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[a-z,]+\])?==[0-9][A-Za-z0-9.+!]*")
VERSION = re.compile(r"[0-9]+(\.[0-9]+)+[a-z0-9.+]*")


@dataclass(frozen=True)
class Environment:
    """One set of pins. `line` is where the file says so; `gigabytes` is what it takes on disk, about."""

    name: str
    about: str = ""
    vllm: str = ""
    torch: str = ""
    packages: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    gigabytes: float = 4.0
    line: int = 0

    @property
    def columns_here(self) -> tuple[str, ...]:
        """The names under which grids ask for its columns.

        >>> Environment("vllm-0.32", columns=("vanilla",)).columns_here
        ('vanilla@vllm-0.32',)
        """
        return tuple(c + AT + self.name for c in self.columns)

    @property
    def digest(self) -> str:
        """Eight characters that change with any pin, and with what makes the same pins another environment."""
        cuda = has_cuda()
        lock = self.lock(cuda).read_text() if self.lock(cuda).exists() else ""
        pins = [self.vllm, self.torch, self.packages, self.apart, RECIPE, sys.version_info[:2], cuda, lock]
        return hashlib.sha256(json.dumps(pins).encode()).hexdigest()[:8]

    def lock(self, cuda: bool) -> Path:
        """The file, if there is one, that holds pip to the exact version of everything that the pins bring along.

        One for each Python and kind of machine, because what is brought along differs.
        """
        kind = f"cp{sys.version_info[0]}{sys.version_info[1]}-{'cuda' if cuda else 'cpu'}"
        return LOCKS / f"{self.name}.{kind}.txt"

    def constraints(self, cuda: bool) -> tuple[str, ...]:
        """pip's arguments for the lock."""
        lock = self.lock(cuda)
        return ("--constraint", str(lock)) if lock.exists() else ()

    @property
    def folder(self) -> Path:
        """Where it is built. Other pins lie elsewhere, so a built one is never changed under a running session."""
        return root() / f"{self.name}-{self.digest}"


def has_cuda() -> bool:
    """Whether this machine has an NVIDIA driver (nothing is imported to find out)."""
    return shutil.which("nvidia-smi") is not None and os.path.exists("/dev/nvidiactl")


def root() -> Path:
    """The folder of all environments: $TAPGRID_ENVIRONMENTS, or `environments` beside the model cache."""
    from harness.models import cache_folder

    own = os.environ.get(VARIABLE)
    return Path(own).expanduser().resolve() if own else cache_folder() / "environments"


def base_of(column: str) -> str:
    """A column's name without its environment.

    >>> base_of("vanilla@vllm-0.32"), base_of("hf")
    ('vanilla', 'hf')
    """
    return column.partition(AT)[0]


def beside(plain: str, column: str) -> str:
    """The plain column of the environment that `column` runs in.

    >>> beside("vanilla", "tapgrid-eager@vllm-0.32"), beside("hf", "tapgrid-hf")
    ('vanilla@vllm-0.32', 'hf')
    """
    return plain + column[len(base_of(column)) :]


def environments(file: Path = FILE) -> dict[str, Environment]:
    """Name -> Environment, in the file's order.

    >>> list(environments())[:2], environments()["default"].vllm
    (['default', 'vllm-0.28'], '0.27.1')
    """
    try:
        text = file.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not TOML: {error}") from error
    return {name: _environment(_Place(file, text.splitlines(), name), table) for name, table in tables.items()}


def named(name: str, file: Path = FILE) -> Environment:
    """The environment called `name`, or a UsageError with the near ones."""
    known = environments(file)
    if name not in known:
        raise UsageError(nearest("environment", name, known))
    return known[name]


def python_of(name: str) -> str | None:
    """The interpreter of environment `name`; None where it is not built here.

    `TAPGRID_PYTHON_<NAME>` names one that somebody else built.
    """
    if name == DEFAULT:
        return sys.executable
    if own := os.environ.get(_variable(name)):
        return own
    environment = environments().get(name)
    return str(interpreter_in(environment.folder)) if environment and stamp_of(environment) else None


def _variable(name: str) -> str:
    return "TAPGRID_PYTHON_" + re.sub(r"[^A-Z0-9]", "_", name.upper())


def interpreter_in(folder: Path) -> Path:
    return folder / "bin" / "python"


def stamp_of(environment: Environment) -> dict[str, Any] | None:
    """What was written when the environment was whole: packages, seconds, bytes. None: not built, or only in part."""
    try:
        stamp: dict[str, Any] = json.loads((environment.folder / STAMP).read_text())
    except (OSError, ValueError):
        return None
    return stamp if interpreter_in(environment.folder).exists() else None


def how_to_build(name: str) -> str:
    """The sentence that a cell carries where its environment is not built.

    >>> how_to_build("vllm-0.32")
    "its environment 'vllm-0.32' is not built here: run `tapgrid env build vllm-0.32` (about 4 GB)"
    """
    known = environments().get(name)
    if known is None:
        return f"its environment {name!r} is none of tapgrid's: set {_variable(name)} to its interpreter"
    return f"its environment {name!r} is not built here: run `tapgrid env build {name}` (about {known.gigabytes:g} GB)"


def source() -> Path:
    """A folder that holds tapgrid and nothing else, for the path of another environment's workers.

    A checkout is one. An installed tapgrid lies among the packages of its own environment, which must not be seen
    there: it is reached through links.
    """
    if (ROOT / "pyproject.toml").exists():
        return ROOT
    folder = root() / f"source-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("adapters", "harness", "validation", "reports", "grids", "tapgrid.py"):
        link = folder / part
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(ROOT / part)
    return folder


@dataclass(frozen=True)
class _Place:
    """Where in the file something wrong stands."""

    file: Path
    lines: Sequence[str]
    name: str

    def line(self, key: str = "") -> int:
        """The line of the table's header, or of a key under it."""
        header = re.compile(rf"\s*\[\s*[\"']?{re.escape(self.name)}[\"']?\s*\]")
        at = next((i for i, text in enumerate(self.lines) if header.match(text)), 0)
        if key:
            below = range(at + 1, len(self.lines))
            end = next((i for i in below if self.lines[i].lstrip().startswith("[")), len(self.lines))
            found = (i for i in range(at + 1, end) if re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", self.lines[i]))
            at = next(found, at)
        return at + 1

    def wrong(self, key: str, what: str) -> NoReturn:
        raise UsageError(f"{self.file}:{self.line(key)}: [{self.name}] {what}")


def _environment(place: _Place, table: Any) -> Environment:
    if not isinstance(table, Mapping):
        place.wrong("", f"is a {type(table).__name__}, not a table")
    if not NAME.fullmatch(place.name):
        place.wrong("", "an environment is named in lower-case letters, digits, dots and dashes")
    known = [f.name for f in fields(Environment) if f.name not in ("name", "line")]
    for key, value in table.items():
        if key not in known:
            place.wrong(key, nearest("setting", key, known))
        if key in ("packages", "apart", "columns"):
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                place.wrong(key, f"{key} is a list of strings, not {value!r}")
            if len(set(value)) < len(value):
                place.wrong(key, f"{key} names something twice: {value}")
        elif key == "gigabytes":
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                place.wrong(key, f"gigabytes = {value!r} is not a size")
        elif not isinstance(value, str):
            place.wrong(key, f"{key} = {value!r} is not a string")
        elif key in ("vllm", "torch") and not VERSION.fullmatch(value):
            place.wrong(key, f"{key} = {value!r} is not one exact version")
    for key in ("packages", "apart"):
        for pin in table.get(key, ()):
            if not PIN.fullmatch(pin):
                place.wrong(key, f"{pin!r} is not pinned: write name==version")
    for key in ("vllm", "torch"):
        if not table.get(key):
            place.wrong("", f"needs {key}, one exact version")
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    made = Environment(place.name, **given, line=place.line())
    if made.name != DEFAULT and not {"vanilla", "vanilla-eager"} & set(made.columns):
        place.wrong("columns", "needs vanilla or vanilla-eager among its columns: shares are of the same environment")
    return made
