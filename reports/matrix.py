"""The grid at a glance: rows down, columns across, share of vanilla in each cell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from reports import facts
from reports.escape import Safe, join, tag
from reports.numbers import finite
from reports.svg import mark_svg
from reports.view import Panel, View
from reports.words import verdict

if TYPE_CHECKING:
    from harness.judge import Cell

Reason = tuple[str, str]  # verdict, sentence


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


def reasons(panel: Panel) -> dict[Reason, list[Cell]]:
    """Why cells hold no claim: every reason once, in the order in which the grid is read, with its cells."""
    found: dict[Reason, list[Cell]] = {}
    for row in panel.rows:
        for column in panel.columns:
            _, cell = panel.cells.get((row, column), (0, None))
            if cell and (cell.verdict in facts.NO_NUMBER or cell.verdict == "INVALID"):
                found.setdefault((cell.verdict, facts.reason(cell)), []).append(cell)
    return found


def _content(cell: Cell, note: int | None) -> Safe:
    sign = verdict(cell.verdict)
    shown = facts.share(cell, unit="")
    mark = tag("sup", str(note)) if note else ""
    if cell.verdict == "INVALID":
        return join([tag("s", shown) if shown else "", tag("b", sign.sign, class_="sign"), mark])
    if cell.verdict in facts.NO_NUMBER or not shown:
        return join([tag("span", sign.sign, class_="sign"), mark])
    weight = {"FASTER": "b", "SAME": "i"}.get(cell.verdict, "span")
    return join([tag(weight, shown), tag("span", sign.sign, class_="sign")])


def _cell(i: int, cell: Cell, notes: Mapping[Reason, int]) -> Safe:
    style, said = verdict(cell.verdict).style, facts.reason(cell)
    shade = tint(cell.share_vanilla) if verdict(cell.verdict).judged else None
    label = f"{cell.row}, {cell.column}: {verdict(cell.verdict).short} {facts.share(cell)} {said}".strip()
    content = _content(cell, notes.get((cell.verdict, said)))
    link = tag("a", content, href=f"#c{i}", data_i=i, aria_label=label, title=said or None)
    return tag("td", link, class_=" ".join(filter(None, ("v-" + style, shade))))


def _notes(found: Mapping[Reason, list[Cell]]) -> Safe:
    """The reasons, numbered as in the cells."""
    if not found:
        return Safe("")
    items = []
    for (name, said), cells in found.items():
        columns = ", ".join(dict.fromkeys(c.column for c in cells))
        word = tag("b", verdict(name).short, class_="v-" + verdict(name).style)
        items.append(tag("li", word, " ", said, " ", tag("span", f"({columns}; {len(cells)})", class_="where")))
    return tag("div", tag("h3", "Cells without a claim, and why"), tag("ol", *items), class_="notes")


def panel_matrix(panel: Panel, view: View) -> Safe:
    """One grid as a table of shares, in per cent of vanilla."""
    found = reasons(panel)
    notes = {reason: n for n, reason in enumerate(found, 1)}
    heads = [tag("th", mark_svg(view.marks[c]), tag("span", c), scope="col") for c in panel.columns]
    body = [
        tag(
            "tr",
            tag("th", row, scope="row"),
            *(_cell(*panel.cells[row, c], notes) if (row, c) in panel.cells else tag("td") for c in panel.columns),
        )
        for row in panel.rows
    ]
    head = tag("tr", tag("th", "% of vanilla", scope="col", class_="corner"), *heads)
    table = tag("table", tag("thead", head), tag("tbody", *body), class_="matrix", data_rove=len(panel.columns))
    return tag("div", tag("div", table, class_="scroll"), _notes(found), class_="glance")


def matrix(view: View) -> Safe:
    """The matrix of every grid in the report."""
    many = len(view.panels) > 1
    return join(part for p in view.panels for part in (tag("h3", p.grid) if many else "", panel_matrix(p, view)))
