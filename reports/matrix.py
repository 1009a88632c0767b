"""The grid at a glance: rows down, columns across, and in each cell the share of the plain engine below it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reports import facts
from reports.escape import Safe, join, tag
from reports.numbers import finite
from reports.svg import mark_svg
from reports.view import Panel, View
from reports.words import verdict

if TYPE_CHECKING:
    from harness.judge import Cell


@dataclass(frozen=True)
class Why:
    """One reason, numbered as in the grid, and the cells that it stands for."""

    number: int
    verdict: str
    sentence: str
    cells: tuple[Cell, ...]

    @property
    def where(self) -> str:
        """The columns, and how many cells."""
        return f"{', '.join(dict.fromkeys(c.column for c in self.cells))}; {len(self.cells)}"


def tint(share: float | None) -> str | None:
    """The CSS class of a share's background: three steps to each side of 100 %, equal in the logarithm.

    >>> tint(1.0), tint(0.5), tint(1.3)
    (None, 'tint-m2', 'tint-p1')
    """
    number = finite(share)
    if number is None or number <= 0:
        return None
    steps = (0.07, 0.5, 1.5)  # octaves away from 100 %: about 5 %, 30 %, a factor of three
    octaves = math.log2(number)
    level = sum(abs(octaves) > step for step in steps)
    return f"tint-{'m' if octaves < 0 else 'p'}{level}" if level else None


def _anywhere(cell: Cell) -> str:
    """The cell's reason without the name of its row, so that the same refusal of many rows is one."""
    return re.sub(rf"(?<![\w-]){re.escape(cell.row)}(?![\w-])", "this row", facts.reason(cell))


def reasons(panel: Panel) -> list[Why]:
    """Why cells hold no claim: every reason once, in the order in which the grid is read, with its cells."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for row in panel.rows:
        for column in panel.columns:
            _, cell = panel.cells.get((row, column), (0, None))
            if cell and cell.verdict in facts.NO_CLAIM:
                found.setdefault((cell.verdict, _anywhere(cell)), []).append(cell)
    listed = []
    for n, ((name, shared), cells) in enumerate(found.items(), 1):
        said = {facts.reason(c) for c in cells}
        listed.append(Why(n, name, shared if len(said) > 1 else said.pop(), tuple(cells)))
    return listed


def numbers(whys: Sequence[Why]) -> dict[tuple[str, str], int]:
    """(row, column) -> the number of its reason."""
    return {(c.row, c.column): why.number for why in whys for c in why.cells}


def brief(cell: Cell) -> str:
    """The judged share, or the value where there is no share to show."""
    return "" if cell.verdict in facts.NO_NUMBER else facts.share(cell, unit="") or facts.with_unit(cell)


def _content(cell: Cell, note: int | None) -> Safe:
    sign, shown = verdict(cell.verdict), brief(cell)
    weight = {"FASTER": "b", "SAME": "i", "INVALID": "s"}.get(cell.verdict, "span")
    parts = [
        tag(weight, shown) if shown else "",
        tag("span", sign.sign, class_="sign"),
        tag("sup", str(note)) if note else "",
    ]
    return join(parts)


def _cell(i: int, cell: Cell, note: int | None) -> Safe:
    sign = verdict(cell.verdict)
    shade = tint(cell.share) if cell.verdict in ("FASTER", "SLOWER") else None  # no colour without a claim
    label = f"{cell.row}, {cell.column}: {sign.short} {brief(cell)}".strip()
    why = None if sign.judged else facts.remarks(cell) or None
    link = tag("a", _content(cell, note), href=f"#c{i}", data_i=i, aria_label=label, title=why)
    return tag("td", link, class_=" ".join(filter(None, ("v-" + sign.style, shade))))


def read_against(panel: Panel, column: str) -> str:
    """What a column's shares are of; blank for a plain engine that is itself the reference, and for one without any."""
    found = {c.against for (_, name), (_, c) in panel.cells.items() if name == column and c.against}
    return "" if found <= {column} else f"% of {' or '.join(sorted(found - {column}))}"


def _notes(found: Sequence[Why]) -> Safe:
    """The reasons, numbered as in the cells."""
    if not found:
        return Safe("")
    items = [
        tag(
            "li",
            tag("b", verdict(why.verdict).short, class_="v-" + verdict(why.verdict).style),
            f" {why.sentence} ",
            tag("span", f"({why.where})", class_="where"),
        )
        for why in found
    ]
    return tag("div", tag("h3", "Cells without a claim, and why"), tag("ol", *items), class_="notes")


def _row(row: str, panel: Panel, notes: Mapping[tuple[str, str], int]) -> Safe:
    cells = [
        _cell(*panel.cells[row, c], notes.get((row, c))) if (row, c) in panel.cells else tag("td")
        for c in panel.columns
    ]
    return tag("tr", tag("th", row, scope="row"), *cells)


def panel_matrix(panel: Panel, view: View) -> Safe:
    """One grid as a table of shares, in per cent of the plain engine that stands above each column."""
    found = reasons(panel)
    heads = [
        tag("th", mark_svg(view.marks[c]), c, tag("span", read_against(panel, c), class_="of"), scope="col")
        for c in panel.columns
    ]
    body = [_row(row, panel, numbers(found)) for row in panel.rows]
    head = tag("tr", tag("th", "", class_="corner"), *heads)
    table = tag("table", tag("thead", head), tag("tbody", *body), class_="matrix", data_rove=len(panel.columns))
    return tag("div", tag("div", table, class_="scroll"), _notes(found), class_="glance")


def matrix(view: View) -> Safe:
    """The matrix of every grid in the report."""
    many = len(view.panels) > 1
    return join(part for p in view.panels for part in (tag("h3", p.grid) if many else "", panel_matrix(p, view)))
