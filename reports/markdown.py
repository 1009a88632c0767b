"""`report.md`: the same report for a terminal or a pull request, as plain Markdown.

from reports import markdown
markdown.write(store, cells, Path("report.md"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reports import facts, findings
from reports.environment import by_key, flat, split
from reports.escape import code
from reports.escape import markdown as escape
from reports.files import replace
from reports.header import facts_line, warnings
from reports.matrix import brief, numbers, read_against, reasons
from reports.numbers import significant
from reports.peers import HEADS, issues, told, unlike
from reports.view import Panel, View, view
from reports.words import sentence, verdict

if TYPE_CHECKING:
    from harness.judge import Cell
    from harness.store import Store

_WEIGHT = {"FASTER": "**{}**", "SAME": "*{}*", "INVALID": "~~{}~~"}


def _row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]], right: int = 1) -> list[str]:
    """A table whose columns from `right` on are aligned to the right."""
    rule = ["---" if i < right else "---:" for i in range(len(heads))]
    return [_row(heads), f"|{'|'.join(rule)}|", *map(_row, lines), ""]


def _weighed(cell: Cell, shown: str) -> str:
    return _WEIGHT.get(cell.verdict, "{}").format(shown) if shown else ""


def _short(cell: Cell, note: int | None) -> str:
    parts = (_weighed(cell, escape(brief(cell))), escape(verdict(cell.verdict).sign), f"({note})" if note else "")
    return " ".join(part for part in parts if part)


def _grid(panel: Panel) -> list[str]:
    """Rows by columns, and the numbered reasons of what holds no claim."""
    found = reasons(panel)
    notes = numbers(found)
    body = []
    for row in panel.rows:
        held = [(panel.cells.get((row, c)), notes.get((row, c))) for c in panel.columns]
        body.append([escape(row), *(_short(cell[1], note) if cell else "" for cell, note in held)])
    lines = [f"## {escape(panel.grid)}", ""]
    heads = [" ".join(filter(None, (escape(c), escape(read_against(panel, c))))) for c in panel.columns]
    lines += _table(["row", *heads], body)
    signs = ", ".join(
        f"{escape(verdict(name).sign)} {verdict(name).short}"
        for name in ("FASTER", "SLOWER", "SAME", "UNCLEAR", "REFERENCE")
    )
    lines += [f"{signs}.", ""]
    for why in found:
        lines.append(f"{why.number}. {verdict(why.verdict).short}: {escape(why.sentence)} ({escape(why.where)})")
    return [*lines, ""] if found else lines


_FIELDS: tuple[tuple[str, Callable[[Cell], str]], ...] = (
    ("row", lambda c: escape(c.row)),
    ("column", lambda c: escape(c.column)),
    ("verdict", lambda c: c.verdict),
    ("against", lambda c: escape(c.against)),
    ("% of it", lambda c: _weighed(c, facts.share(c, ""))),
    ("95 %", lambda c: facts.bounds(c, "")),
    ("% of vanilla", lambda c: facts.side(c, "vanilla")),
    ("% of eager", lambda c: facts.side(c, "vanilla-eager")),
    ("value", lambda c: ("~~{}~~" if c.verdict == "INVALID" else "{}").format(escape(facts.with_unit(c)))),
    ("p", lambda c: facts.p(c.p)),
    ("adj. p", lambda c: facts.p(c.p_adjusted)),
    ("detects", facts.smallest),
    ("rounds / runs", facts.evidence),
    ("why", lambda c: escape(facts.remarks(c))),
)


def _cells(cells: Sequence[Cell]) -> list[str]:
    """Every cell that has a number; the others are in the reasons above."""
    body = [[shown(c) for _, shown in _FIELDS] for c in cells if c.verdict not in facts.NO_NUMBER]
    return ["## Cells with a number", "", *_table([name for name, _ in _FIELDS], body, right=4)] if body else []


def _validation(page: View) -> list[str]:
    found = findings.spots(page.store.validations)
    if not found:
        return ["## Activations", "", "Nothing was compared with a reference.", ""]
    lines = []
    for column in dict.fromkeys(s.column for s in found):
        own = [s for s in found if s.column == column]
        worst, tally = findings.worst(own, 1)[0], findings.tally(own)
        said = f"{escape(worst.place)}, ratio {significant(worst.ratio, 3) or 'none'}"
        lines.append(
            [escape(column), *(str(tally[v]) for v in findings.RANK), said, escape(worst.finding.get("reason"))]
        )
    return ["## Activations", "", *_table(["column", "PASS", "WARN", "FAIL", "worst", "why"], lines, right=6)]


def _known(page: View) -> list[str]:
    found = [[escape(text) for text in told(page, issue)] for issue in issues(page)]
    return ["## Known issues", "", *_table(list(HEADS), found, right=len(HEADS))] if found else []


def _texts(page: View) -> list[str]:
    said: dict[tuple[str, str, str], int] = {}
    for line in page.store.texts:
        key = (str(line.get("column")), str(line.get("prompt")), str(line.get("text")))
        said[key] = said.get(key, 0) + 1
    if not said:
        return []
    body = [[escape(c), f"{escape(p)} **{escape(t)}**", str(n)] for (c, p, t), n in said.items()]
    return ["## Texts", "", *_table(["column", "prompt and continuation", "processes"], body, right=2)]


def _failures(page: View) -> list[str]:
    if not page.failures:
        return []
    body = [
        [
            escape(f.get("column")),
            escape(f.get("row") or "the whole process"),
            escape(f.get("reason")),
            code(f.get("stderr")),
        ]
        for f in page.failures
    ]
    return ["## Failures", "", *_table(["column", "row", "reason", "log"], body, right=4)]


def _environment(page: View) -> list[str]:
    machine = page.session.get("fingerprint")
    lines = [
        f"- {escape(k)}: {escape(v)}"
        for k, v in flat({k: v for k, v in (machine or {}).items() if k != "packages"}).items()
    ]
    columns = [c for c in page.columns if any(p.get("column") == c for p in page.store.processes)]
    for title, kind in (("Engine settings", "settings"), ("Variables", "env"), ("Packages", "packages")):
        common, differ = split(by_key(page.store.processes, kind), columns)
        if common:
            lines += [
                "",
                f"{title}, in every column: "
                + ", ".join(f"{escape(k)} = {escape(v)}" for k, v in common.items())
                + ".",
            ]
        if differ:
            body = [[escape(k), *(escape(values.get(c, "")) for c in columns)] for k, values in differ.items()]
            lines += ["", *_table([title.lower(), *map(escape, columns)], body, right=len(columns) + 1)]
    return ["## Environment", "", *lines, ""] if lines else []


def render(store: Store, cells: Sequence[Cell]) -> str:
    """The whole report as Markdown."""
    page = view(store, cells)
    lines = [f"# {escape(page.name)}", "", escape(sentence(cells)), ""]
    lines += [f"> {escape(w)}  " for w in warnings(page)] + [""]
    lines += [f"- {escape(name)}: {escape(value)}" for name, value in facts_line(page)]
    lines += [f"- forced by a library: {escape(d)}" for d in unlike(page)] + [""]
    for panel in page.panels:
        lines += _grid(panel)
    lines += [*_cells(cells), *_validation(page), *_known(page), *_texts(page), *_failures(page), *_environment(page)]
    return "\n".join(lines).rstrip() + "\n"


def write(store: Store, cells: Sequence[Cell], path: Path) -> None:
    """Write the report to `path`, whole or not at all."""
    replace(path, render(store, cells))
