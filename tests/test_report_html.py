"""What report.html shows is what the store and the judge say, whatever they say."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from harness.judge import Cell, to_json
from reports import html, words
from tests.test_report_dom import Node, parse
from tests.test_report_sample import COLUMNS, page, rich


@functools.cache
def tree() -> Node:
    return parse(page())


def shown_number(text: str) -> tuple[float, float]:
    """A number as shown, and half of its last digit."""
    text = text.replace("−", "-").removesuffix("%").strip()
    return float(text), 0.5000001 * 10.0 ** -len(text.partition(".")[2])


def agrees(text: str, value: float | None) -> bool:
    if value is None:
        return text == ""
    number, half = shown_number(text)
    return abs(number - value) <= half


def nodes(parent: Node) -> list[Node]:
    return [n for n in parent.children if isinstance(n, Node)]


def body_rows(table: Node) -> list[Node]:
    return [row for body in table.all("tbody") for row in body.all("tr")]


def cell_of(node: Node) -> Cell:
    return rich().cells[int(node.attributes["data-i"])]


def table_rows(root: Node) -> list[dict[str, Node]]:
    """The table of all cells: head -> cell, a dictionary a line."""
    table = root.one("table", id="cells")
    heads = [h.words for h in table.one("thead").all("th")]
    return [dict(zip(heads, nodes(row), strict=True)) for row in body_rows(table)]


def agrees_p(text: str, p: float | None) -> bool:
    if p is None or text == "":
        return p is None and text == ""
    return p < 1e-4 if text == "<0.0001" else float(text) == pytest.approx(p, rel=0.05)


def embedded(root: Node) -> dict[str, Any]:
    def bare(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    found: dict[str, Any] = json.loads(root.one("script", id="embedded").text, parse_constant=bare)
    return found


# ---- the page as a file


def test_it_is_well_formed_down_to_every_svg() -> None:
    body = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page(), flags=re.S)
    closed = re.sub(r"<((?:meta|link|input|br)\b[^>]*)>", r"<\1/>", body.removeprefix("<!DOCTYPE html>"))
    root = ET.fromstring(closed)
    assert len(root.findall(".//svg")) > 100


def test_ids_are_unique_and_every_reference_has_its_target() -> None:
    ids = [n.attributes["id"] for n in tree().walk() if "id" in n.attributes]
    assert len(ids) == len(set(ids))
    targets = {n.attributes["href"] for n in tree().walk() if n.attributes.get("href", "").startswith("#")}
    assert {t[1:] for t in targets} <= set(ids)


def test_nothing_in_it_reaches_outside() -> None:
    assert not re.search(r"https?://|//cdn|@import|url\(|fetch\(|XMLHttpRequest|WebSocket", page())
    for node in tree().walk():
        assert not {"src", "srcset", "style", "action", "background"} & set(node.attributes)
        assert not [a for a in node.attributes if a.startswith("on")]
        assert node.attributes.get("href", "#").startswith(("#", "data:,"))


def test_the_policy_lets_nothing_run_but_the_pages_own_script() -> None:
    policy = tree().one("meta", http_equiv="Content-Security-Policy").attributes["content"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    running = [s for s in tree().all("script") if s.attributes.get("type") != "application/json"]
    for kind, nodes in (("script-src", running), ("style-src", tree().all("style"))):
        assert len(nodes) == 1
        digest = base64.b64encode(hashlib.sha256(nodes[0].text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy


def test_it_is_the_same_file_every_time() -> None:
    assert html.render(rich().store, rich().cells) == page()


def test_writing_replaces_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    html.write(rich().store, rich().cells, path)
    assert path.read_text(encoding="utf-8") == page()
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


# ---- what it says


def test_the_embedded_data_is_the_cells_exactly() -> None:
    held = embedded(tree())["cells"]
    back = [dict(zip(held["fields"], values, strict=True)) for values in held["values"]]
    assert back == [json.loads(json.dumps(to_json(c))) for c in rich().cells]


def test_every_line_of_the_table_says_what_its_cell_says() -> None:
    rows = table_rows(tree())
    assert len(rows) == len(rich().cells)
    for line, cell in zip(rows, rich().cells, strict=True):
        assert (line["row"].words, line["column"].words) == (cell.row, cell.column)
        assert line["verdict"].words.split()[-1] == cell.verdict
        vanilla = None if cell.share_vanilla is None else 100 * cell.share_vanilla
        assert agrees(line["% of vanilla"].words, vanilla), cell
        assert agrees(line["by CPU"].words, cell.value), cell
        assert agrees(line["by wall"].words, cell.value_other), cell
        low, _, high = line["95 % interval"].words.partition("–")
        assert agrees(low, None if cell.low is None else 100 * cell.low), cell
        assert agrees(high, None if cell.high is None else 100 * cell.high), cell
        assert agrees_p(line["p"].words, cell.p)
        assert agrees_p(line["adj. p"].words, cell.p_adjusted)
        assert cell.reason in line["reason"].words
        assert (cell.code or "") in line["reason"].words


NO_NUMBER = ("UNSUPPORTED", "MISSING")
WEIGHTS = {"FASTER": "b", "SAME": "i", "INVALID": "s"}


def test_bold_italic_and_struck_through_mean_one_verdict_each() -> None:
    matrix = tree().one("table", class_="matrix")
    links = matrix.all("a")
    assert len(links) == len(rich().cells)
    for link in links:
        cell = rich().cells[int(link.attributes["data-i"])]
        kinds = {n.name for n in link.walk()} & {"b", "i", "s"}
        assert kinds == {WEIGHTS[cell.verdict]} if cell.verdict in WEIGHTS else not kinds, cell
        assert words.verdict(cell.verdict).sign in link.text
    for line, cell in zip(table_rows(tree()), rich().cells, strict=True):
        judged = [line["% of vanilla"], line["% of hf"]]
        kinds = {n.name for td in judged for n in td.walk()} & {"b", "i"}
        assert kinds == ({WEIGHTS[cell.verdict]} if cell.verdict in ("FASTER", "SAME") else set()), cell
        if cell.verdict == "INVALID":
            assert line["by CPU"].one("s").text == line["by CPU"].words


def test_the_matrix_shows_the_judged_share_or_the_references_value() -> None:
    for link in tree().one("table", class_="matrix").all("a"):
        cell = cell_of(link)
        number = link.text.split(words.verdict(cell.verdict).sign)[0].strip()
        if cell.verdict in NO_NUMBER:
            assert number == ""
        elif cell.share is None:
            assert agrees(number.split()[0], cell.value)
        else:
            assert agrees(number, 100 * cell.share)


def test_every_cell_stands_once_among_the_dots_with_its_number_or_its_reason() -> None:
    dots = tree().one("table", class_="dots")
    assert sorted(int(a.attributes["data-i"]) for a in dots.all("a")) == list(range(len(rich().cells)))
    for row, link in [(line, link) for line in body_rows(dots) for link in line.all("a")]:
        cell, word = cell_of(link), words.verdict(cell_of(link).verdict).short
        if cell.verdict in (*NO_NUMBER, "INVALID"):
            assert cell.reason in row.words
            assert word in row.words
            continue
        assert row.one("td", class_="w").words.endswith(word)
        number = row.all("td", class_="n")[0].words.split()[0]
        assert agrees(number, 100 * cell.share if cell.share is not None else cell.value)


def near_plots() -> list[tuple[Cell, Node, float]]:
    """Every close-up whose mark is on its axis: cell, plot, and place of the mark in per cent of the width."""
    found = []
    for row in body_rows(tree().one("table", class_="dots")):
        for plot in (p for td in row.all("td", class_="near") for p in td.all("svg", class_="plot")):
            uses = [u for u in nodes(plot) if u.attributes.get("href", "").startswith("#k")]
            found += [(cell_of(row), plot, float(u.attributes["x"].removesuffix("%"))) for u in uses]
    return found


def test_marks_and_intervals_stand_where_their_numbers_are() -> None:
    """The reference stands at 100 %, and everything else as far from it as the logarithm of its share says."""
    placed = near_plots()
    middle = next(x for cell, _, x in placed if cell.verdict == "REFERENCE")
    shares = [(x - middle, math.log(c.share)) for c, _, x in placed if c.share]
    slope = max(dx / log for dx, log in shares if abs(log) > 0.05)
    assert all(dx == pytest.approx(slope * log, abs=0.2) for dx, log in shares)
    drawn = 0
    for cell, plot, _ in placed:
        for bar in plot.all("path", class_="ci"):
            left, right = (float(n) / 10 for n in re.findall(r"[\d.]+", bar.attributes["d"].replace(" 9H", " ")))
            bounds = [middle + slope * math.log(b) for b in (cell.low, cell.high) if b]
            assert [left, right] == pytest.approx([min(100.0, max(0.0, b)) for b in bounds], abs=0.2)
            drawn += 1
        for tick in plot.all("path", class_="tick"):
            assert tick.attributes["d"].count("M") <= len(cell.process_shares) == cell.rounds
    assert drawn > 20


def test_every_reason_is_beside_the_grid_once_and_numbered_in_its_cells() -> None:
    notes = tree().one("div", class_="notes").all("li")
    without = [c for c in rich().cells if c.verdict in (*NO_NUMBER, "INVALID")]
    assert len(notes) == len({(c.verdict, c.reason) for c in without})
    assert sum(int(n.words.rpartition("; ")[2].rstrip(")")) for n in notes) == len(without)
    links = {int(a.attributes["data-i"]): a for a in tree().one("table", class_="matrix").all("a")}
    for i, cell in enumerate(rich().cells):
        marks = links[i].all("sup")
        assert len(marks) == (cell in without)
        assert all(cell.reason in notes[int(m.text) - 1].words for m in marks)


def test_the_counts_add_up() -> None:
    tally = tree().one("ul", class_="tally").all("li")
    assert sum(int(li.words.split()[0]) for li in tally) == len(rich().cells)
    sentence = tree().one("p", id="sentence").words
    total, compared, rest = map(int, re.findall(r"(\d+) (?:cells|compared|not compared)", sentence))
    assert total == compared + rest == len(rich().cells)
    inside = [sum(map(int, re.findall(r"\d+", part))) for part in re.findall(r"\(([^)]*)\)", sentence)]
    assert inside == [compared, rest]
    for row in body_rows(tree().one("table", class_="legend-table")):
        numbers = [n.words for n in row.all("td", class_="n")]
        assert sum(int(n) for n in numbers[:8] if n != "·") == int(numbers[8])


def test_texts_failures_and_environment_are_there() -> None:
    texts = tree().one("section", id="texts")
    assert texts.text.count("The Eiffel Tower is in the city of") >= len(COLUMNS)
    assert "Paris, the capital of France." in texts.words
    failures = tree().one("section", id="failures")
    assert ".tapgrid/logs/0-nnsight-eager.err" in failures.words
    differing = tree().one("section", id="environment").all("table", class_="diff")
    assert any("enforce_eager" in t.words for t in differing)
    assert not any("HF_HUB_OFFLINE" in t.words for t in differing)


def test_the_page_names_no_folder_of_this_machine() -> None:
    assert str(rich().store.path.parent.parent) not in page()


def test_the_verdicts_are_the_judges() -> None:
    from harness import judge as judging

    assert {v.name for v in words.VERDICTS} == set(judging.VERDICTS)
