"""Markdown and terminal: the same cells, the same numbers, the same reasons as the page."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from reports import facts, markdown, terminal, words
from reports.matrix import brief
from tests.test_report_sample import COLUMNS, ROWS, rich


def report() -> str:
    return markdown.render(rich().store, rich().cells)


def table(text: str, first: str) -> list[list[str]]:
    """The Markdown table whose head starts with `first`, as rows of cells."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} "))
    body = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        body.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return body


def plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def test_the_grid_has_every_cell_weighed_by_its_verdict() -> None:
    head, rule, *rows = table(report(), "row")
    assert len(head) == len(rule) == len(COLUMNS) + 1
    assert [r[0] for r in rows] == list(ROWS)
    by_place = {(c.row, c.column): c for c in rich().cells}
    for line in rows:
        for column, said in zip(COLUMNS, line[1:], strict=True):
            cell = by_place[line[0], column]
            assert words.verdict(cell.verdict).sign in plain(said)
            assert " ".join(brief(cell).split()) in plain(said).replace("*", "").replace("~~", "")
            assert ("**" in said) == (cell.verdict == "FASTER")
            assert ("~~" in said) == (cell.verdict == "INVALID")


def test_every_cell_with_a_number_has_a_line_with_its_interval() -> None:
    text = report()
    start = text.index("## Cells with a number")
    rows = table(text[start:], "row")[2:]
    wanted = [c for c in rich().cells if c.verdict not in facts.NO_NUMBER]
    assert len(rows) == len(wanted)
    for line, cell in zip(rows, wanted, strict=True):
        assert (line[0], line[1], line[2]) == (cell.row, cell.column, cell.verdict)
        assert line[5] == facts.bounds(cell, "")
        assert cell.reason in plain(line[-1])


def test_reasons_counts_texts_failures_and_environment_are_there() -> None:
    text = plain(report())
    assert words.sentence(rich().cells) in text
    for cell in rich().cells:
        if cell.verdict in facts.NO_CLAIM:
            assert cell.reason in text
    for said in ("Paris, the capital of France.", ".tapgrid/logs/0-nnsight-eager.err", "enforce_eager", "Example CPU"):
        assert said in text


def test_tables_are_rectangular() -> None:
    width = 0
    for line in report().splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not (width and cells) or cells == width, line
        width = cells


def test_writing_leaves_one_whole_file(tmp_path: Path) -> None:
    markdown.write(rich().store, rich().cells, tmp_path / "report.md")
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == report()
    assert len(list(tmp_path.iterdir())) == 1


def test_the_terminal_shows_every_cell_and_every_reason() -> None:
    shown = terminal.render(rich().cells, width=160)
    lines = shown.splitlines()
    for row in ROWS:
        line = next(x for x in lines if x.split()[:1] == [row])
        for cell in (c for c in rich().cells if c.row == row):
            assert words.verdict(cell.verdict).sign in line
            assert brief(cell) in line
    for cell in rich().cells:
        if cell.verdict in facts.NO_CLAIM:
            assert cell.reason in shown
    assert words.sentence(rich().cells) in shown


@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_terminal_keeps_its_width_and_is_plain_unless_asked(width: int) -> None:
    shown = terminal.render(rich().cells, width=width)
    assert max(map(len, shown.splitlines())) <= width
    assert "\x1b" not in shown
    assert "\x1b" in terminal.render(rich().cells, width=width, color=True)


def test_columns_that_the_width_does_not_hold_go_below_with_nothing_cut_off() -> None:
    cells = rich().cells
    columns = list(dict.fromkeys(c.column for c in cells))
    names = {c: [f"{c}-{i}" for i in range(4)] for c in columns}
    many = [dataclasses.replace(c, column=name) for c in cells for name in names[c.column]]
    shown = terminal.render(many, width=100)
    assert max(map(len, shown.splitlines())) <= 100
    table = shown.split("\n(1)")[0]
    assert "…" not in table
    blocks = table.strip().split("\n\n")
    assert len(blocks) > 2
    assert shown.count(next(c.grid for c in cells)) == 1
    for row in ROWS:
        lines = [line.split() for line in table.splitlines() if line.split()[:1] == [row]]
        assert len(lines) == len(blocks)
        signs = [w for line in lines for w in line if w in {v.sign for v in words.VERDICTS}]
        assert sorted(signs) == sorted(words.verdict(c.verdict).sign for c in many if c.row == row)
    for name in (n for made in names.values() for n in made):
        assert all(part in table for part in name.split("-"))


def test_markup_in_a_name_is_a_name() -> None:
    odd = dataclasses.replace(rich().cells[0], column="[red]x[/red]", row="[link=x]:smile:")
    shown = terminal.render([odd])
    assert "[red]x[/red]" in shown
    assert "[link=x]:smile:" in shown
