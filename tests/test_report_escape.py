"""A string from a store is text, wherever it ends up."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET

import pytest

from reports import escape
from reports.escape import Safe, tag
from tests.test_report_dom import parse

HOSTILE = (
    "<img src=x onerror=1>",
    "</script><script>alert(1)</script>",
    "</title></style><b>",
    '" onmouseover="1" x=\'',
    "<!--<script>",
    "a & b &lt; c",
    "]]>",
    "javascript:1",
    "line\nbreak\ttab",
    "\u2028\u2029",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_text_and_attributes_come_back_as_they_were(text: str) -> None:
    root = parse(tag("td", text, title=text))
    cell = root.one("td")
    assert cell.text == text
    assert cell.attributes["title"] == text
    assert len(list(root.walk())) == 2  # nothing was made of it


@pytest.mark.parametrize("text", HOSTILE)
def test_svg_is_well_formed_with_any_text(text: str) -> None:
    made = tag("svg", tag("title", text), tag("path", d=text), tag("text", text, x="1"))
    root = ET.fromstring(made)
    assert (root[0].text or "").replace("\r", "") == text
    assert root[2].text == text


@pytest.mark.parametrize("text", HOSTILE)
def test_json_cannot_end_its_script_and_reads_back(text: str) -> None:
    block = escape.json_block({text: [text]})
    assert "<" not in block
    assert "\u2028" not in block
    assert json.loads(block) == {text: [text]}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_markdown_cell_stays_one_cell(text: str) -> None:
    shown = escape.markdown(text)
    assert "\n" not in shown
    assert "<" not in shown.replace("\\<", "")
    assert "|" not in shown.replace("\\|", "")


def test_control_characters_and_lone_surrogates_are_replaced_and_directions_shown() -> None:
    shown = escape.clean("a\x00\x1b[31m\ud800\u202eb")
    assert shown == "a\ufffd\ufffd[31m\ufffd\\u202eb"
    shown.encode("utf-8")


def test_only_what_this_module_made_passes_unescaped() -> None:
    assert tag("p", tag("b", "x"), "<b>") == "<p><b>x</b>&lt;b&gt;</p>"
    assert not isinstance(tag("p") + "<b>", Safe)  # adding a string makes it a plain string again
    assert tag("p", tag("p") + "<b>") == "<p>&lt;p&gt;&lt;/p&gt;&lt;b&gt;</p>"


def test_json_is_strict() -> None:
    data = {"nan": math.nan, "inf": [-math.inf, 1.5], 3: object, "deep": ({"x": math.nan},), "yes": True, "none": None}
    back = json.loads(escape.json_block(data), parse_constant=lambda name: pytest.fail(f"a bare {name}"))
    assert back["nan"] is None
    assert back["inf"] == [None, 1.5]
    assert back["deep"] == [{"x": None}]
    assert back["yes"] is True
    assert "object" in back["3"]


def test_attributes_that_are_none_or_false_are_left_out() -> None:
    assert tag("td", "x", title=None, hidden=False, class_="n") == '<td class="n">x</td>'
    assert tag("input", checked=True, data_i=0) == '<input checked="" data-i="0">'


@pytest.mark.parametrize(
    ("text", "shown"), [("a", "`a`"), ("a`b", "`` a`b ``"), ("a``b", "``` a``b ```"), ("", ""), (None, "")]
)
def test_code_spans_hold_their_backticks(text: str | None, shown: str) -> None:
    assert escape.code(text) == shown
