"""A grid file (TOML) -> frozen dataclasses: which rows, which columns, on which model, how hard.

No torch, no engine: a grid can be listed and planned on any machine. Every mistake in a file or a name is a
`UsageError` of one sentence with the nearest names.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from adapters.columns import Column, all_columns
from adapters.work import Settings
from harness import environments
from harness.usage import UsageError as UsageError
from harness.usage import nearest as nearest
from harness.workloads import KINDS, Row, row_from

VALIDATOR = "validation.inprocess:Validator"
COLUMN = re.compile(r"[\w.-]+")  # @, ~ and commas mean something beside a column's name


@dataclass(frozen=True)
class Tier:
    """How many rounds and runs: fixed, or as many rounds as fit `budget_minutes` (at most `max_rounds`)."""

    name: str
    runs: int = 3
    rounds: int | None = None
    budget_minutes: float | None = None
    max_rounds: int = 10


TIERS = {
    "quick": Tier("quick", rounds=3),
    "standard": Tier("standard", rounds=6),
    "publish": Tier("publish", rounds=10),
}


@dataclass(frozen=True)
class Limits:
    """Seconds after which a worker counts as hung: booting, checking activations, and all runs of one cell."""

    boot: float = 600
    validate: float = 900
    cell: float = 180


@dataclass(frozen=True)
class Grid:
    """Rows by columns on one model."""

    name: str
    model: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    about: str = ""
    metric: str = "cpu"
    margin: float = 0.03
    alpha: float = 0.05
    seed: int = 0
    settings: Settings = field(default_factory=Settings)
    limits: Limits = field(default_factory=Limits)
    tiers: Mapping[str, Tier] = field(default_factory=lambda: dict(TIERS))
    gate: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    validator: str = VALIDATOR
    path: str = ""

    def row(self, name: str) -> Row:
        return next(r for r in self.rows if r.name == name)

    def known_columns(self) -> dict[str, Column]:
        """Every column that can be named with this grid: tapgrid's, third parties', those of other environments, and
        the file's own."""
        own = {n: Column(n, target, f"declared in {Path(self.path).name}") for n, target in self.adapters.items()}
        return every_column() | own


def every_column() -> dict[str, Column]:
    """Every installed column, and after them those of other environments, named `column@environment`.

    >>> every_column()["vanilla@vllm-0.32"].environment
    'vllm-0.32'
    """
    try:
        columns = all_columns()
    except ValueError as error:  # two packages claim one name
        raise UsageError(str(error)) from error
    for name, column in columns.items():
        if not COLUMN.fullmatch(name):
            raise UsageError(f"column {name!r} ({column.about}): a name is of letters, digits, dots, dashes and _")
    found = dict(columns)
    for environment in environments.environments().values():
        for name, at in zip(environment.columns, environment.columns_here, strict=True):
            if name not in columns:
                where = f"{environments.FILE}:{environment.line}: [{environment.name}]"
                raise UsageError(f"{where} {nearest('column', name, columns)}")
            about = f"{columns[name].about}; vLLM {environment.vllm}"
            found[at] = dataclasses.replace(columns[name], name=at, about=about, environment=environment.name)
    return found


def names() -> list[str]:
    """The grids that come with tapgrid.

    >>> "smollm2" in names()
    True
    """
    files = (f.name for f in resources.files("grids").iterdir() if f.name.endswith(".toml"))
    return sorted(f.removesuffix(".toml") for f in files if f != environments.FILE.name)


def load(name: str) -> Grid:
    """The grid called `name`, or in the TOML file at that path."""
    path = Path(name)
    if name in names():
        path = Path(str(resources.files("grids") / f"{name}.toml"))
    elif not path.is_file():
        hint = "; a grid file of your own is given by its path, ending in .toml" if path.suffix == ".toml" else ""
        raise UsageError(nearest("grid", name, names()) + hint)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error
    return from_table(table, path)


def from_table(table: Mapping[str, Any], path: Path) -> Grid:
    """A parsed grid file -> Grid."""
    top = {f.name for f in dataclasses.fields(Grid)} - {"path"}
    _no_unknown(path, "", table, top)
    for key in ("model", "columns", "rows"):
        if not table.get(key):
            raise UsageError(f"{path}: {key!r} is missing or empty")
    tiers = {n: _make(Tier, path, f"tiers.{n}", {"name": n, **t}) for n, t in table.get("tiers", {}).items()}
    grid = Grid(
        **{k: v for k, v in table.items() if k not in {"columns", "rows", "settings", "limits", "tiers", "name"}},
        name=table.get("name", path.stem),
        columns=tuple(table["columns"]),
        rows=tuple(_rows(path, table["rows"])),
        settings=_make(Settings, path, "settings", table.get("settings", {})),
        limits=_make(Limits, path, "limits", table.get("limits", {})),
        tiers=TIERS | tiers,
        path=str(path.resolve()),
    )
    _check(grid, path)
    return grid


def _make(cls: type[Any], path: Path, where: str, table: Any) -> Any:
    if not isinstance(table, Mapping):
        raise UsageError(f"{path}: [{where}] is a {type(table).__name__}, not a table")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    _no_unknown(path, where, table, fields)
    made = cls(**table)
    for f in fields.values():
        value, allowed = getattr(made, f.name), str(f.type).split(" | ")
        kinds = {"int": int, "float": (int, float), "str": str, "bool": bool, "None": type(None)}
        if not any(isinstance(value, kinds[k]) and (k == "bool" or not isinstance(value, bool)) for k in allowed):  # type: ignore[arg-type]
            raise UsageError(f"{path}: [{where}] {f.name} = {value!r} is not {f.type}")
    return made


def _rows(path: Path, table: Mapping[str, Any]) -> list[Row]:
    for name in table:
        if name not in KINDS:
            raise UsageError(f"{path}: " + nearest("row", name, KINDS))
    made = []
    for name in KINDS:
        if name in table:
            row = row_from(name, _make(Row, path, f"rows.{name}", {"name": name, **table[name]}))
            for knob in ("prompt_tokens", "new_tokens", "requests"):
                if getattr(row, knob) < 1:
                    raise UsageError(f"{path}: [rows.{name}] {knob} must be at least 1, not {getattr(row, knob)}")
            made.append(row)
    return made


def _no_unknown(path: Path, where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in table:
        if key not in set(known):
            raise UsageError(f"{path}: {f'[{where}] ' if where else ''}" + nearest("setting", key, sorted(known)))


def _check(grid: Grid, path: Path) -> None:
    columns = grid.known_columns()
    for name in grid.columns:
        if name not in columns:
            raise UsageError(f"{path}: " + nearest("column", name, columns))
    if len(set(grid.columns)) < len(grid.columns):
        raise UsageError(f"{path}: a column is named twice in {list(grid.columns)}")
    if grid.metric not in ("cpu", "wall"):
        raise UsageError(f"{path}: metric = {grid.metric!r} is neither 'cpu' nor 'wall'")
    for row in grid.rows:
        length = row.prompt_tokens + row.new_tokens
        if length > grid.settings.max_model_len:
            raise UsageError(
                f"{path}: row {row.name} needs {length} tokens, more than max_model_len = {grid.settings.max_model_len}"
            )
        # A sweep queues; the -x rows claim a concurrency, and must have it.
        if row.concurrent and not row.name.startswith("sweep") and row.requests > grid.settings.max_concurrent:
            raise UsageError(
                f"{path}: row {row.name} has {row.requests} requests, "
                f"more than max_concurrent = {grid.settings.max_concurrent}"
            )


def pick(what: str, wanted: str | None, all_names: Sequence[str], also: Iterable[str] = ()) -> tuple[str, ...]:
    """The names that a comma-separated option selects (globs allowed), in canonical order; None selects all.

    `also` may be named though the grid leaves them off. "all" is everything that is known, but for the columns of
    other environments: those are named, or "*@*".

    >>> pick("row", "capture-*,steer", ["generate", "capture-1", "capture-all", "steer"])
    ('capture-1', 'capture-all', 'steer')
    """
    if wanted is None:
        return tuple(all_names)
    known = list(dict.fromkeys([*all_names, *also]))
    chosen: set[str] = set()
    for part in filter(None, (p.strip() for p in wanted.split(","))):
        hits = [part] if part in known else fnmatch.filter(all_names, part) or fnmatch.filter(known, part)
        if part == "all":
            hits = [n for n in known if environments.AT not in n]
        if not hits:
            raise UsageError(nearest(what, part, known))
        chosen.update(hits)
    if not chosen:
        raise UsageError(f"no {what} selected by {wanted!r}; known: {', '.join(known)}")
    return tuple(n for n in known if n in chosen)


def tier(grid: Grid, name: str) -> Tier:
    """The tier called `name`."""
    if name not in grid.tiers:
        raise UsageError(nearest("tier", name, grid.tiers))
    return grid.tiers[name]


def to_dict(grid: Grid) -> dict[str, Any]:
    """The resolved grid as plain data, as the session line holds it."""
    plain = dataclasses.asdict(dataclasses.replace(grid, tiers={}))
    plain["tiers"] = {n: dataclasses.asdict(t) for n, t in grid.tiers.items()}
    plain["rows"] = {
        r.name: dataclasses.asdict(r) | {"unit": KINDS[r.name].unit, "plain": KINDS[r.name].plain} for r in grid.rows
    }
    plain["columns"] = list(grid.columns)
    return plain
