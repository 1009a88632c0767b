"""The record of a session: append-only JSON lines, one a fact, written as it happens and read back as tuples by kind.

Strict JSON (no NaN), a schema number on the session line, and no rewriting: a crash, a kill or a full disk costs
the line that was being written and nothing before it.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

SCHEMA = "1.0"
HOME = ".tapgrid"
FILE = "store.jsonl"

Line = Mapping[str, Any]


class StoreError(Exception):
    """A store that cannot be read or written; the message says what to do."""


@dataclass(frozen=True)
class Store:
    """One session, as read: a tuple of lines for every kind, in the order they were written.

    `runs` are those that count. Runs of a cell that was lost on the way (a crash or a kill in its second run, say)
    are in `lost`: the cell was measured again, or is missing, and half a cell is not evidence.
    """

    path: Path
    session: Line
    plans: tuple[Line, ...] = ()
    processes: tuple[Line, ...] = ()
    probes: tuple[Line, ...] = ()
    validations: tuple[Line, ...] = ()
    texts: tuple[Line, ...] = ()
    refusals: tuple[Line, ...] = ()
    runs: tuple[Line, ...] = ()
    failed: tuple[Line, ...] = ()
    process_ends: tuple[Line, ...] = ()
    other: tuple[Line, ...] = ()
    lost: tuple[Line, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    @property
    def plan(self) -> list[list[str]]:
        """The rounds as last planned: a budget tier re-plans once it has measured its first round."""
        latest: list[list[str]] = (self.plans[-1] if self.plans else self.session)["plan"]
        return latest

    @property
    def finished(self) -> bool:
        """Whether the last plan was carried out to its end, rounds that were added later included."""
        ends: int = sum(line["kind"] == "session_end" for line in self.other)
        return ends > sum(bool(p.get("added")) for p in self.plans)

    @property
    def added(self) -> int:
        """Rounds that were added after the session had ended and its verdicts could be seen."""
        return sum(int(p.get("added") or 0) for p in self.plans)


_KINDS = {
    "plan": "plans",
    "process": "processes",
    "probe": "probes",
    "validation": "validations",
    "text": "texts",
    "refusal": "refusals",
    "run": "runs",
    "failed": "failed",
    "process_end": "process_ends",
}


def clean(value: Any) -> tuple[Any, dict[str, str]]:
    """`value` as strict JSON, and what had to be left out of it: path -> why.

    >>> clean({"a": [1.5, float("nan")], "b": 2})
    ({'a': [1.5, None], 'b': 2}, {'a.1': 'nan is not a JSON number'})
    """
    lost: dict[str, str] = {}
    return _clean(value, "", lost), lost


def _clean(value: Any, at: str, lost: dict[str, str]) -> Any:
    if value is None or isinstance(value, bool | str | int):
        # A numpy or enum subclass of these is written as its plain self.
        return value if type(value) in (bool, str, int, type(None)) else _plain(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        lost[at] = f"{float(value)!r} is not a JSON number"
        return None
    if isinstance(value, Mapping):
        return {str(k): _clean(v, f"{at}.{k}".lstrip("."), lost) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean(v, f"{at}.{i}".lstrip("."), lost) for i, v in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    try:
        return _clean(value.item(), at, lost)  # numpy and torch scalars
    except Exception:
        lost[at] = f"a {type(value).__name__} is not JSON"
        return None


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else bool(value) if isinstance(value, bool) else int(value)


def dump(line: Line) -> bytes:
    """One line of the file. A value that is not JSON loses itself (null, and why under "lost"), not the line."""
    body, lost = clean(line)
    if lost:
        body["lost"] = lost
    return json.dumps(body, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


class Writer:
    """Appends lines to a store; every line is on the disk when `append` returns.

    A line that the disk had no room for is taken back, so that the file stays a list of whole lines.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._drop_torn_tail()

    def append(self, kind: str, **values: Any) -> dict[str, Any]:
        """Write one line and return it."""
        line = {"kind": kind, **values}
        data, before = dump(line), os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, before)
            raise StoreError(
                f"cannot write to {self.path}: {error.strerror}. What was written before is whole; "
                "make room and give the same command again to go on from there"
            ) from error
        except BaseException:  # a Ctrl-C in the middle: what follows must not be glued to half a line
            if data:
                os.ftruncate(self._fd, before)
            raise
        return line

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _drop_torn_tail(self) -> None:
        size = os.fstat(self._fd).st_size
        data = os.pread(self._fd, size, 0)
        whole = data.rfind(b"\n") + 1
        if whole < size:
            warnings.warn(f"{self.path}: its last line was torn off ({size - whole} bytes), dropped", stacklevel=3)
            os.ftruncate(self._fd, whole)


def read(path: Path | str) -> Store:
    """The session in `path`, a store file or the folder that holds one."""
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    if not file.exists():
        raise StoreError(
            f"no store at {path}; `tapgrid run GRID` makes one, and `tapgrid list stores` shows those here"
        )
    lines, notes = _lines(file)
    if not lines or lines[0].get("kind") != "session":
        raise StoreError(f"{file}: line 1 is not a session line, so this is not a tapgrid store")
    _check_schema(file, lines[0])
    found: dict[str, list[Line]] = {name: [] for name in [*_KINDS.values(), "other"]}
    for line in lines[1:]:
        found[_KINDS.get(line["kind"], "other")].append(line)
    gone = {(f["process"], f["row"]) for f in found["failed"] if f.get("process") and f.get("row")}
    runs = found.pop("runs")
    return Store(
        path=file,
        session=lines[0],
        runs=tuple(r for r in runs if (r["process"], r["row"]) not in gone),
        lost=tuple(r for r in runs if (r["process"], r["row"]) in gone),
        warnings=tuple(notes),
        **{k: tuple(v) for k, v in found.items()},
    )


def _lines(file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    raw = file.read_bytes().split(b"\n")
    notes: list[str] = []
    if raw[-1]:
        notes.append(f"{file}: its last line was torn off and is left out")
        warnings.warn(notes[0], stacklevel=3)
    lines = []
    for number, data in enumerate(raw[:-1], 1):
        try:
            line = json.loads(data, parse_constant=_not_json)
            if not isinstance(line, dict) or "kind" not in line:
                raise ValueError('not an object with a "kind"')
        except ValueError as error:
            raise StoreError(
                f"{file}: line {number} is not a line of a store ({error}); the file was edited or damaged"
            ) from error
        lines.append(line)
    return lines, notes


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_schema(file: Path, session: Line) -> None:
    schema = str(session.get("schema"))
    major = schema.partition(".")[0]
    if not major.isdigit():
        raise StoreError(f"{file}: its session line has no schema number ({schema!r})")
    if int(major) > int(SCHEMA.partition(".")[0]):
        raise StoreError(
            f"{file}: written with store schema {schema}, and this tapgrid reads up to {SCHEMA}; upgrade tapgrid"
        )


def home(start: Path | None = None) -> Path:
    """The `.tapgrid` folder in use: the working directory's or, inside a project, the nearest one above that exists."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / HOME).is_dir():
            return folder / HOME
        if (folder / ".git").exists() or (folder / "pyproject.toml").exists():
            break
    return here / HOME


def stores(folder: Path) -> list[Path]:
    """Every store file under a `.tapgrid` folder, newest first."""
    return sorted(folder.glob(f"*/{FILE}"), key=lambda f: f.stat().st_mtime, reverse=True)


def find(given: str | Path | None = None) -> Path:
    """The store file that a command means: the given file or folder, or else the newest here."""
    if given:
        path = Path(given)
        if path.is_dir() and not (path / FILE).exists():
            found = stores(path) or stores(path / HOME)
            if not found:
                raise StoreError(f"no store in {path}")
            return found[0]
        return path / FILE if path.is_dir() else path
    found = stores(home())
    if not found:
        raise StoreError(f"no store under {home()}: measure first, with `tapgrid run GRID` or `pytest --grid GRID`")
    return found[0]


def asdict(store: Store) -> dict[str, list[Line]]:
    """Kind -> lines, for whoever wants the raw record (the session line is a list of one)."""
    skip = {"path", "session", "warnings"}
    return {"session": [store.session]} | {
        f.name: list(getattr(store, f.name)) for f in fields(store) if f.name not in skip
    }


def write(path: Path, lines: Iterable[Line]) -> Path:
    """A store made of ready lines (imports and tests), all of it or none. Refuses to touch an existing file."""
    if path.exists():
        raise StoreError(f"{path} exists; a store is never rewritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_bytes(b"".join(dump(line) for line in lines))
    scratch.replace(path)
    return path
