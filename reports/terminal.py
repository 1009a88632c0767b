"""The verdict table of `tapgrid show`: rows by columns, in a terminal's width, with the reasons below it.

print(terminal.render(cells))
"""

from __future__ import annotations

import io
import textwrap
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

# Between two columns, and where a column's name is broken at its hyphens.
_GAP, _HEAD = 2, 12
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


def _head(panel: Panel, column: str) -> str:
    """A column's name and what its shares are of, in lines as narrow as their words allow."""
    said = filter(None, (clean(column), clean(read_against(panel, column))))
    return "\n".join("\n".join(textwrap.wrap(words, _HEAD, break_long_words=False)) for words in said)


def _tables(panel: Panel, notes: Mapping[tuple[str, str], int], width: int) -> list[Table]:
    """The panel's columns, side by side as far as `width` holds them, and the others below."""
    names = [Text(clean(row)) for row in panel.rows]
    left = width - max((name.cell_len for name in names), default=0) - _GAP
    blocks: list[list[list[Text]]] = []
    room = 0
    for column in panel.columns:
        held = [(panel.cells.get((row, column)), notes.get((row, column))) for row in panel.rows]
        texts = [Text(_head(panel, column)), *(_text(found[1], note) if found else Text() for found, note in held)]
        wide = max(line.cell_len for text in texts for line in text.split()) + _GAP
        if not blocks or wide > room:
            blocks.append([])
            room = left
        room -= wide
        blocks[-1].append(texts)
    return [_table(names, block, "" if i else clean(panel.grid)) for i, block in enumerate(blocks)]


def _table(names: Sequence[Text], block: Sequence[Sequence[Text]], title: str) -> Table:
    table = Table(
        title=Text(title) if title else None, title_justify="left", box=None, pad_edge=False, padding=(0, _GAP, 0, 0)
    )
    table.add_column("")
    for head, *_ in block:
        table.add_column(head, justify="right", vertical="top")
    for name, texts in zip(names, zip(*(rest for _, *rest in block), strict=True), strict=True):
        table.add_row(name, *texts)
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
        for table in _tables(panel, numbers(found), width):
            console.print(table)
            console.print()
        for why in found:
            said = f"({why.number}) {verdict(why.verdict).short}: {clean(why.sentence)} [{clean(why.where)}]"
            console.print(Text(said))
    if cells:
        tally = counts(cells)
        console.print(Text("   ".join(f"{v.sign} {v.short}" for v in VERDICTS if tally[v.name]), style="dim"))
    console.print(Text(sentence(cells)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
