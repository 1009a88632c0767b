"""The verdict table of `tapgrid show`: rows by columns, in a terminal's width, with the reasons below it.

print(terminal.render(cells))
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports.escape import clean
from reports.matrix import brief, numbers, read_against, reasons
from reports.view import Panel, arrange
from reports.words import VERDICTS, counts, sentence, verdict

if TYPE_CHECKING:
    from harness.judge import Cell

_STYLE = {
    "FASTER": "bold green", "SLOWER": "yellow", "SAME": "italic", "INVALID": "bold red", "MISSING": "magenta",
    "UNCLEAR": "dim", "REFERENCE": "dim", "UNSUPPORTED": "dim",
}  # fmt: skip


def _text(cell: Cell, note: int | None) -> Text:
    """A cell in a few characters: its share, else its value, its sign, and the number of its reason."""
    sign, style = verdict(cell.verdict).sign, _STYLE.get(cell.verdict, "")
    shown = clean(brief(cell))
    parts = [shown, sign, f"({note})" if note else ""]
    text = Text(" ".join(p for p in parts if p), style=style)
    if cell.verdict == "INVALID" and shown:
        text.stylize("strike", 0, len(shown))
    return text


def _table(panel: Panel, notes: Mapping[tuple[str, str], int]) -> Table:
    table = Table(
        title=Text(clean(panel.grid)),
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column("")
    for column in panel.columns:
        table.add_column(
            Text("\n".join(filter(None, (clean(column), clean(read_against(panel, column)))))),
            justify="right",
            vertical="top",
        )
    for row in panel.rows:
        held = [(panel.cells.get((row, c)), notes.get((row, c))) for c in panel.columns]
        texts = [_text(found[1], note) if found else Text() for found, note in held]
        table.add_row(Text(clean(row)), *texts)
    return table


def render(cells: Sequence[Cell], *, width: int = 120, color: bool = False) -> str:
    """The table of every grid among the cells, what the signs mean, the reasons, and the counts in one sentence.

    >>> print(render([]), end="")
    Nothing was measured: there are no cells.
    """
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=color, no_color=not color, highlight=False, emoji=False, markup=False
    )
    for panel in arrange(cells):
        found = reasons(panel)
        console.print(_table(panel, numbers(found)))
        console.print()
        for why in found:
            said = f"({why.number}) {verdict(why.verdict).short}: {clean(why.sentence)} [{clean(why.where)}]"
            console.print(Text(said))
    if cells:
        tally = counts(cells)
        console.print(Text("   ".join(f"{v.sign} {v.short}" for v in VERDICTS if tally[v.name]), style="dim"))
    console.print(Text(sentence(cells)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
