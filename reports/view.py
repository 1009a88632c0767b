"""What every section of a report looks at: the cells in order, and the store's lines by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reports.marks import Mark, marks

if TYPE_CHECKING:
    from harness.judge import Cell
    from harness.store import Store

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Panel:
    """The cells of one grid (one model, one machine): rows x columns, in the order of the cells."""

    grid: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[str, str], tuple[int, Cell]]  # (row, column) -> place in the list, cell


@dataclass(frozen=True)
class View:
    """A store and its judged cells, arranged for reading."""

    store: Store
    cells: Sequence[Cell]
    sessions: tuple[Line, ...]
    failures: tuple[Line, ...]
    panels: tuple[Panel, ...]
    columns: tuple[str, ...]
    marks: Mapping[str, Mark]

    @property
    def session(self) -> Line:
        """The header of the newest session, empty for an empty store."""
        return self.sessions[-1] if self.sessions else {}

    @property
    def grid(self) -> Line:
        """The resolved grid of the newest session."""
        found = self.session.get("grid")
        return found if isinstance(found, Mapping) else {}

    @property
    def margin(self) -> float:
        return float(self.grid.get("margin") or 0.03)

    @property
    def metric(self) -> str:
        """ "cpu" or "wall": the time that is judged."""
        named = self.grid.get("metric") or (self.cells[0].metric if self.cells else None)
        return str(named or "cpu")

    @property
    def name(self) -> str:
        return ", ".join(p.grid for p in self.panels) or str(self.grid.get("name") or "empty store")


def arrange(cells: Sequence[Cell]) -> tuple[Panel, ...]:
    """The cells by grid, each in the order in which they come."""
    found: list[Panel] = []
    for grid in dict.fromkeys(c.grid for c in cells):
        own = [(i, c) for i, c in enumerate(cells) if c.grid == grid]
        rows = tuple(dict.fromkeys(c.row for _, c in own))
        columns = tuple(dict.fromkeys(c.column for _, c in own))
        found.append(Panel(grid, rows, columns, {(c.row, c.column): (i, c) for i, c in own}))
    return tuple(found)


def view(store: Store, cells: Sequence[Cell]) -> View:
    """Arrange a store and its cells. Columns keep the order of the cells; ones that only the store knows come last."""
    named = [c.column for c in cells]
    sessions = _some(store, "sessions", "session")
    for session in sessions:
        named += [str(c) for c in session.get("columns") or ()]
    named += [str(p["column"]) for p in store.processes if p.get("column")]
    columns = tuple(dict.fromkeys(named))
    booted = [p for p in store.processes if isinstance(p.get("settings"), Mapping)]
    settings = {str(p["column"]): {**p["settings"], **(p.get("engine") or {})} for p in booted}
    failures = _some(store, "failures", "failed")
    return View(store, cells, sessions, failures, arrange(cells), columns, marks(columns, settings))


def _some(store: Store, *names: str) -> tuple[Line, ...]:
    """A store holds one session, a merged one several; both read alike here."""
    for name in names:
        found = getattr(store, name, None)
        if isinstance(found, Mapping):
            return (found,) if found else ()
        if found is not None:
            return tuple(found)
    return ()


def column_lines(lines: Sequence[Line], column: str) -> list[Line]:
    """The lines of one column, in the order of the store."""
    return [line for line in lines if line.get("column") == column]
