"""After measuring: judge, write the reports, ask the gate, and turn all of it into one exit code."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.store import Store, home, read

if TYPE_CHECKING:
    from harness.aa import Floors
    from harness.gating import Confirm
    from harness.judge import Cell
    from harness.options import Asked

UNMEASURED = ("UNSUPPORTED", "MISSING")


@dataclass(frozen=True)
class Ending:
    """A session's outcome: 0 fine, 1 regression or failed validation, 3 cannot judge."""

    store: Store
    cells: Sequence[Cell]
    code: int
    reports: Sequence[Path] = ()
    notes: Sequence[str] = ()

    def to_json(self) -> list[dict[str, Any]]:
        from harness.judge import to_json

        return [to_json(c) for c in self.cells]

    def lines(self, quiet: bool = False) -> list[str]:
        """The verdicts and where everything is, for a terminal."""
        table = [] if quiet else [*table_of(self.cells), ""]
        logs = dict.fromkeys(f["stderr"] for f in self.store.failed if f.get("stderr"))
        return [
            *table,
            *self.notes,
            *(f"lost cells; the output of the worker: {path}" for path in logs),
            *(f"report: {path}" for path in self.reports),
            f"store:  {self.store.path}",
        ]


def floors_file(folder: Path, grid: str) -> Path:
    """Where `tapgrid aa` keeps this machine's floors of a grid."""
    return folder / f"floors-{grid}.json"


def floors_for(store: Store) -> Floors | None:
    """The floors beside a store, or in the working directory's `.tapgrid`, if they are of its machine and model."""
    from harness import aa

    for folder in (store.path.parent.parent, home()):
        file = floors_file(folder, store.session["grid"]["name"])
        if file.exists():
            floors = aa.read(file)
            return floors if floors.misfit(store) is None else None
    return None


def judged(store: Store, against: str | None = None) -> tuple[list[Cell], Floors | None]:
    """The cells of a store, with the margins that this machine's A/A floors demand, and those floors."""
    from harness.judge import judge

    floors = floors_for(store)
    return judge(store, floors=floors.margins(len(store.plan)) if floors else None, against=against), floors


def exit_code(cells: Sequence[Any]) -> int:
    """What the cells alone say. A validation failure outweighs a lost cell; nothing measured is never 0."""
    verdicts = [c.verdict for c in cells]
    if "INVALID" in verdicts:
        return 1
    return 3 if "MISSING" in verdicts or all(v in UNMEASURED for v in verdicts) else 0


def worst(*codes: int) -> int:
    """One exit code of several: a failure, then doubt, then fine.

    >>> worst(0, 3), worst(3, 1, 0), worst(0, 0)
    (3, 1, 0)
    """
    return 1 if 1 in codes else max(codes)


def finish(path: Path, report: str | None = None, asked: Asked | None = None, confirm: Confirm | None = None) -> Ending:
    """Judge the store at `path` and do what follows from the options."""
    store = read(path)
    cells, floors = judged(store)
    code, notes, reports = exit_code(cells), list(store.warnings), []
    if report:
        try:
            reports = write_reports(store, cells, Path(report), floors)
        except Exception as error:  # hours of measuring must not end in a traceback
            code = worst(code, 3)
            notes.append(f"the report could not be written ({type(error).__name__}: {error}); the store is whole")
    if asked is not None and (asked.baseline or asked.rule):
        from harness import gating

        result = gating.ask(asked, store, confirm)
        code, notes = worst(code, result.exit_code), [*notes, *gating.lines(result), ""]
    return Ending(store, cells, code, reports, notes)


def write_reports(store: Store, cells: Sequence[Cell], html: Path, floors: Floors | None = None) -> list[Path]:
    """report.html, and report.md beside it."""
    import reports.html
    import reports.markdown

    html.parent.mkdir(parents=True, exist_ok=True)
    markdown = html.with_suffix(".md")
    reports.html.write(store, cells, html, floors)
    reports.markdown.write(store, cells, markdown)
    return [html.resolve(), markdown.resolve()]


def table_of(cells: Sequence[Cell]) -> list[str]:
    """The verdicts, rows by columns, in this terminal's width."""
    from reports.terminal import render

    text = render(cells, width=shutil.get_terminal_size((120, 24)).columns)
    return text.replace("\xa0", " ").splitlines()  # a value and its unit, wrapped by now, as people type them
