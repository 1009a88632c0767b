"""`report.html`: one file that needs nothing else. No network, no fonts, no server; readable without its script.

    from reports import html
    html.write(store, cells, Path("report.html"))

A content security policy with the hashes of the page's own style and script proves both that nothing is
fetched and that no string from a store can ever run.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.data import data
from reports.environment import environment
from reports.escape import Safe, tag
from reports.evidence import failures, floors, texts
from reports.header import columns, header
from reports.heatmap import validation
from reports.matrix import matrix
from reports.panels import panels
from reports.reading import reading
from reports.runs import runs
from reports.svg import symbols
from reports.table import table
from reports.view import View, view
from reports.words import plural

if TYPE_CHECKING:
    from harness.judge import Cell

    from harness.store import Store


def _asset(name: str) -> Safe:
    return Safe(resources.files("reports").joinpath(name).read_text(encoding="utf-8"))


def _hash(content: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


def _head(title: str, style: Safe, script: Safe) -> Safe:
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; base-uri 'none'; form-action 'none'"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", style),
    )


def _sections(page: View, aa: Mapping[str, Any] | None) -> list[tuple[str, str, str, Safe]]:
    """(id, name in the navigation, one line of what it shows, content); a section without content is left out."""
    found = [
        ("columns", "Columns", "Marks, versions, and how often each verdict fell.", columns(page)),
        ("grid", "Grid", "Share of vanilla, in per cent. Click a number for everything behind it.", matrix(page)),
        (
            "dots",
            "Shares",
            "Every row and column: once over the whole range, once close to 100 %. An arrow lies beyond the axis.",
            panels(page),
        ),
        ("table", "All cells", "", table(page)),
        (
            "validation",
            "Activations",
            "Error against float32, relative to what the dtype alone costs.",
            validation(page),
        ),
        ("runs", "Runs in time", "", runs(page)),
        ("texts", "Texts", "Greedy continuation, the same prompt everywhere.", texts(page)),
        ("environment", "Environment", "", environment(page)),
        ("failures", f"Failures ({len(page.failures)})" if page.failures else "Failures", "", failures(page)),
        ("floors", "A/A floors", "", floors(page, aa)),
        ("data", "Data", "", data(page)),
    ]
    return [s for s in found if s[3]]


def render(store: Store, cells: Sequence[Cell], floors: Mapping[str, Any] | None = None) -> str:
    """The whole page. `floors` maps a cell's name to its A/A spread, and adds their section."""
    page = view(store, cells)
    style, script = _asset("report.css"), _asset("report.js")
    sections = _sections(page, floors)
    links = [tag("a", name, href=f"#{anchor}") for anchor, name, _, _ in sections]
    body = [
        tag("section", tag("h2", name), tag("p", about, class_="about") if about else "", content, id=anchor)
        for anchor, name, about, content in sections
    ]
    title = f"{page.name}: {plural(len(page.cells), 'cell')} · tapgrid"
    main = tag("main", header(page), reading(page), *body, id="main")
    skip = tag("a", "Skip to the grid", href="#grid", class_="skip")
    card = tag("div", id="card", role="tooltip", hidden=True)
    whole = tag("body", skip, symbols(), tag("nav", *links, aria_label="sections"), main, card, tag("script", script))
    return "<!DOCTYPE html>\n" + tag("html", _head(title, style, script), whole, lang="en") + "\n"


def write(store: Store, cells: Sequence[Cell], path: Path, floors: Mapping[str, Any] | None = None) -> None:
    """Write the page to `path`, whole or not at all."""
    replace(path, render(store, cells, floors))


def replace(path: Path, content: str) -> None:
    """A file that is either the old one or the new one, also when the disk is full."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(content, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
