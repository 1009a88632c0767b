"""Every cell with every number, sortable and filterable; a plain table to whoever runs no script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.environments import base_of
from reports import facts
from reports.escape import Safe, join, tag
from reports.svg import mark_svg
from reports.view import View
from reports.words import counts, verdict

if TYPE_CHECKING:
    from harness.judge import Cell


@dataclass(frozen=True)
class Field:
    """A column of the table: its head, what it shows, and the key of the cell that it sorts by."""

    head: str
    key: str
    shown: Callable[[Cell], str]
    title: str = ""
    number: bool = True


FIELDS: tuple[Field, ...] = (
    Field(
        "% of vanilla",
        "share_vanilla",
        lambda c: facts.side(c, "vanilla"),
        "of vanilla in the same round; more is faster",
    ),
    Field("% of eager", "share_eager", lambda c: facts.side(c, "vanilla-eager"), "of vanilla-eager in the same round"),
    Field("% of hf", "share_hf", lambda c: facts.side(c, "hf"), "of plain transformers in the same round"),
    Field("95 % interval", "low", lambda c: facts.bounds(c, ""), "of the share that was judged, paired over rounds"),
    Field(
        "against",
        "against",
        lambda c: c.against or "" if c.runs else "",
        "the plain engine that the verdict is about",
        number=False,
    ),
    Field("value", "value", facts.value, "geometric mean over processes, by the time that is judged"),
    Field("other", "value_other", facts.other, "the value by the time that is not judged"),
    Field("unit", "unit", lambda c: c.unit if facts.value(c) else "", number=False),
    Field("p", "p", lambda c: facts.p(c.p), "over rounds; the test's name is on each number"),
    Field("adj. p", "p_adjusted", lambda c: facts.p(c.p_adjusted), "adjusted for the number of cells in the report"),
    Field("detects", "smallest_detectable", facts.smallest, "the smallest difference that this run could have seen"),
    Field("rounds/runs", "rounds", facts.evidence, "rounds that count / runs over all processes"),
    Field(
        "activations", "validated", facts.validation, "compared with the reference in the same process", number=False
    ),
    Field("reason", "reason", facts.remarks, number=False),
)
JUDGED = {"vanilla": "share_vanilla", "vanilla-eager": "share_eager", "hf": "share_hf"}
_OPTIONAL = ("share_hf", "share_eager", "p", "p_adjusted", "smallest_detectable", "value_other")


def fields(view: View) -> list[Field]:
    """The columns worth showing: a whole column of blanks is left out, and said so under the table."""
    times = {"cpu": ("by CPU", "by wall"), "wall": ("by wall", "by CPU")}.get(view.metric, ("value", "other"))
    heads = {"value": times[0], "value_other": times[1]}
    named = [replace(f, head=heads.get(f.key, f.head)) for f in FIELDS]
    return [f for f in named if f.key not in _OPTIONAL or any(f.shown(c) for c in view.cells)]


def _number(field: Field, cell: Cell) -> Safe:
    shown = field.shown(cell)
    if field.key == "reason":
        return tag("td", shown, class_="reason")
    if field.key == "validated":
        return tag("td", shown, class_={"right": "ok", "": "blank"}.get(shown, "bad"))
    if not shown:  # why is in the reason; where a share is blank, also on the spot
        return tag("td", class_="blank", title=facts.why_blank(cell) if field.key == "share_vanilla" else None)
    if cell.verdict == "INVALID" and field.number and field.key != "rounds":
        return tag("td", tag("s", shown), class_="n")
    # The share that the verdict is about carries its weight.
    weight = (
        {"FASTER": "b", "SAME": "i"}.get(cell.verdict) if field.key == JUDGED.get(base_of(cell.against or "")) else None
    )
    title = _tests(cell) if field.key == "p" else None
    return tag("td", tag(weight, shown) if weight else shown, class_="n" if field.number else None, title=title)


def _tests(cell: Cell) -> str:
    """What p is, and what other tests would have said."""
    others = (("sign flip", cell.p_exact), ("Mann-Whitney", cell.p_unpaired))
    return "; ".join([cell.test or "test", *(f"{name} {facts.p(p)}" for name, p in others if p is not None)])


def _line(i: int, cell: Cell, chosen: list[Field], view: View) -> Safe:
    sign = verdict(cell.verdict)
    word = {"FASTER": "b", "SAME": "i"}.get(cell.verdict)
    many = [tag("td", cell.grid)] if len(view.panels) > 1 else []
    return tag(
        "tr",
        *many,
        tag("th", cell.row, scope="row"),
        tag("td", mark_svg(view.marks[cell.column]), cell.column, class_="c"),
        tag(
            "td",
            tag("span", sign.sign, class_="sign"),
            " ",
            tag(word, cell.verdict) if word else cell.verdict,
            class_=f"v v-{sign.style}",
        ),
        *(_number(f, cell) for f in chosen),
        id=f"c{i}",
    )


def _head(label: str, key: str, title: str = "", number: bool = False) -> Safe:
    """Without a script the button does nothing, and looks like the label that it is."""
    button = tag("button", label, type="button", data_key=key, title=title or None)
    return tag("th", button, scope="col", class_="n" if number else None, aria_sort="none")


def _controls(view: View) -> Safe:
    tally = counts(view.cells)
    chips = [
        tag(
            "label",
            tag("input", type="checkbox", value=name, checked=True, name="verdict"),
            tag("span", verdict(name).sign, class_="sign"), " ", verdict(name).short, " ", tag("b", str(n)),
            class_="chip v-" + verdict(name).style,
        )
        for name, n in tally.items() if n
    ]  # fmt: skip
    libraries = dict.fromkeys(m.library.name for m in view.marks.values())
    choose = tag(
        "select",
        tag("option", "all libraries", value=""),
        *(tag("option", n, value=n) for n in libraries),
        id="library",
        aria_label="library",
    )
    find = tag(
        "input", type="search", id="find", placeholder="filter by row, column, reason", aria_label="filter the table"
    )
    buttons = [
        tag("button", label, type="button", data_do=do)
        for label, do in (("copy Markdown", "markdown"), ("copy CSV", "csv"))
    ]
    shown = tag("output", f"{len(view.cells)} of {len(view.cells)}", id="shown", aria_live="polite")
    return tag(
        "div",
        find,
        choose,
        tag("span", *chips, class_="chips", role="group", aria_label="verdicts"),
        shown,
        *buttons,
        class_="controls js-only",
    )


def table(view: View) -> Safe:
    """The table of all cells, in the order of the grid."""
    chosen = fields(view)
    grid = [_head("grid", "grid")] if len(view.panels) > 1 else []
    head = tag(
        "tr", *grid, _head("row", "row"), _head("column", "column"), _head("verdict", "verdict"),
        *(_head(f.head, f.key, f.title, f.number) for f in chosen),
    )  # fmt: skip
    body = join(_line(i, c, chosen, view) for i, c in enumerate(view.cells))
    whole = tag("table", tag("thead", head), tag("tbody", body), class_="cells", id="cells")
    left_out = [f.head for f in FIELDS if f.key not in {c.key for c in chosen}]
    note = tag("p", f"Blank for every cell, so not shown: {', '.join(left_out)}.", class_="note") if left_out else ""
    return join(
        [_controls(view), tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label="all cells"), note]
    )
