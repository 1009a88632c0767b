"""`report.html`: one file that needs nothing else. No network, no fonts, no server; readable without its script.

    from reports import html
    html.write(store, cells, Path("report.html"))

A content security policy with the hashes of the page's own style and script proves both that nothing is
fetched and that no string from a store can ever run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from reports.data import data
from reports.environment import environment
from reports.escape import Safe, tag
from reports.evidence import failures, texts
from reports.files import replace
from reports.floors import floors
from reports.header import columns, header
from reports.heatmap import validation
from reports.matrix import matrix
from reports.panels import panels
from reports.peers import known
from reports.reading import reading
from reports.runs import runs
from reports.svg import symbols
from reports.table import table
from reports.view import View, view
from reports.words import plural

if TYPE_CHECKING:
    from harness.aa import Floors
    from harness.judge import Cell
    from harness.store import Store


def _asset(name: str) -> Safe:
    return Safe(resources.files("reports").joinpath(name).read_text(encoding="utf-8"))


def _hash(content: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


def _head(title: str, style: Safe, script: Safe) -> Safe:
    own = f"style-src {_hash(style)}; script-src {_hash(script)}"
    policy = f"default-src 'none'; {own}; img-src data:; base-uri 'none'; form-action 'none'"
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


# id, name, and one line on what the section shows.
SECTIONS: tuple[tuple[str, str, str], ...] = (
    ("columns", "Columns", "Marks, versions, and how often each verdict fell."),
    ("grid", "Grid", "Speed as a share of the plain engine named above each column. Click a number for all behind it."),
    ("dots", "Shares", "Left, against vanilla over the whole range. Right, against the column's own plain engine, "
     "where verdicts are decided; an arrow lies beyond the axis."),
    ("table", "All cells", ""),
    ("validation", "Activations", "Error against float32, relative to what the dtype alone costs."),
    ("runs", "Runs in time", ""),
    ("known", "Known issues", "What is wrong in the libraries measured here, and what their columns do about it."),
    ("texts", "Texts", "Greedy continuation, the same prompt everywhere."),
    ("environment", "Environment", ""),
    ("failures", "Failures", ""),
    ("floors", "A/A floors", ""),
    ("data", "Data", ""),
)  # fmt: skip


def _contents(page: View, aa: Floors | None) -> dict[str, Safe]:
    """Section id -> content; one without content is left out of the page."""
    return {
        "columns": columns(page),
        "grid": matrix(page),
        "dots": panels(page),
        "table": table(page),
        "validation": validation(page),
        "runs": runs(page),
        "known": known(page),
        "texts": texts(page),
        "environment": environment(page),
        "failures": failures(page),
        "floors": floors(page, aa),
        "data": data(page),
    }


def render(store: Store, cells: Sequence[Cell], aa: Floors | None = None) -> str:
    """The whole page. `aa` are the floors of an A/A session, and add their section."""
    page = view(store, cells)
    style, script = _asset("report.css"), _asset("report.js")
    contents = _contents(page, aa)
    shown = [(anchor, name, about) for anchor, name, about in SECTIONS if contents[anchor]]
    links = [tag("a", name, href=f"#{anchor}") for anchor, name, _ in shown]
    body = [
        tag("section", tag("h2", name), tag("p", about, class_="about") if about else "", contents[anchor], id=anchor)
        for anchor, name, about in shown
    ]
    title = f"{page.name}: {plural(len(page.cells), 'cell')} · tapgrid"
    main = tag("main", header(page), reading(page), *body, id="main")
    whole = tag(
        "body",
        tag("a", "Skip to the grid", href="#grid", class_="skip"),
        symbols(page.marks.values()),
        tag("nav", *links, aria_label="sections"),
        main,
        tag("div", id="card", role="tooltip", hidden=True),
        tag("script", script),
    )
    return "<!DOCTYPE html>\n" + tag("html", _head(title, style, script), whole, lang="en") + "\n"


def write(store: Store, cells: Sequence[Cell], path: Path, aa: Floors | None = None) -> None:
    """Write the page to `path`, whole or not at all."""
    replace(path, render(store, cells, aa))
