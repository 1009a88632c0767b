"""Dots with whiskers: for every row one line a column, against vanilla over the whole range, and against its own
plain engine close to 100 %, which is where a verdict is decided.

Names and numbers are HTML, so they keep their size and can be selected; only the marks between them are SVG,
whose inner part stretches with the page (`preserveAspectRatio="none"` and strokes that do not scale).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reports import facts
from reports.escape import Safe, join, tag
from reports.numbers import finite
from reports.svg import Axis, axis, definitions, mark, mark_svg
from reports.view import Panel, View
from reports.words import verdict

if TYPE_CHECKING:
    from harness.judge import Cell

HEIGHT = 18
MIDDLE = str(HEIGHT // 2)


@dataclass(frozen=True)
class Scales:
    """What the lines of one grid share: the plain engine of the left plot, and both axes."""

    base: str
    wide: Axis
    near: Axis

    def on_base(self, cell: Cell) -> float | None:
        """The share of the left plot's engine, which itself stands at 100 %."""
        if cell.verdict == "REFERENCE" and cell.column == self.base:
            return 1.0
        return finite(cell.share_vanilla) if self.base == "vanilla" else finite(cell.share)


def judged(cell: Cell) -> float | None:
    """The share of the cell's own plain engine, which itself stands at 100 %."""
    return 1.0 if cell.verdict == "REFERENCE" and cell.column == cell.against else finite(cell.share)


def scales(panel: Panel, margin: float, at: int) -> Scales:
    """The axes of the grid that is number `at` on the page. The left one is of vanilla where the grid has it."""
    cells = [c for _, c in panel.cells.values()]
    vanilla = "vanilla" in panel.columns or any(c.share_vanilla is not None for c in cells)
    base = "vanilla" if vanilla else next((c.against for c in cells if c.against), "vanilla")
    shares: list[object] = [c.share_vanilla if vanilla else c.share for c in cells]
    shares += [s for c in cells if c.against == base for s in (c.low, c.high, *c.process_shares)]
    return Scales(base, axis(shares, id=f"w{at}"), _close(margin, id=f"n{at}"))


def _close(margin: float, id: str) -> Axis:
    """The axis of the close-up: four margins, and at least a tenth, to each side."""
    reach = 1 + max(0.1, 4 * margin)
    return Axis(1 / reach, reach, id)


def _span(scale: Axis, low: float, high: float, style: str) -> Safe:
    """A horizontal bar; nothing when it lies outside."""
    if high < scale.low or low > scale.high:
        return Safe("")
    return tag("path", d=f"M{scale.at(low):g} 9H{scale.at(high):g}", class_=style)


def _band(scale: Axis, margin: float) -> Safe:
    left, right = scale.at(1 / (1 + margin)), scale.at(1 + margin)
    return tag("path", d=f"M{left:g} 0H{right:g}V{HEIGHT}H{left:g}z", class_="band")


def _ground(scale: Axis, margin: float) -> Safe:
    """What lies under the marks of every line: the margin's band, grid lines, the 100 % line."""
    lines = "".join(f"M{scale.at(t):g} 0V{HEIGHT}" for t in scale.ticks() if t != 1.0)
    rules = tag("path", d=lines, class_="rule") if lines else ""
    return tag(
        "g", _band(scale, margin), rules, tag("path", d=f"M{scale.at(1):g} 0V{HEIGHT}", class_="one"), id=scale.id
    )


def _stretched(cell: Cell, scale: Axis, view: View, spread: bool) -> Safe:
    """Everything that may stretch: the ground, and with `spread` the whisker, the interval and one tick a process."""
    parts = [tag("use", href=f"#{scale.id}")]
    if cell.margin and cell.margin != view.margin:
        parts.append(_band(scale, cell.margin))  # wider than the grid's: this cell's A/A spread
    each = [s for s in map(finite, cell.process_shares) if s is not None and s > 0] if spread else []
    if len(each) > 1:
        parts.append(_span(scale, min(each), max(each), "whisker"))
    low, high = finite(cell.low), finite(cell.high)
    if spread and low is not None and high is not None and 0 < low <= high:
        parts.append(_span(scale, low, high, "ci"))
    ticks = "".join(f"M{scale.at(s):g} 4V14" for s in each if scale.low <= s <= scale.high)
    if ticks:
        parts.append(tag("path", d=ticks, class_="tick"))
    hue = view.marks[cell.column].hue
    return tag("svg", *parts, viewBox=f"0 0 1000 {HEIGHT}", preserveAspectRatio="none", class_=hue)


def _drawn(cell: Cell, share: float | None, scale: Axis, view: View, spread: bool) -> Safe:
    """One plot of one line; an estimate beyond the axis is an arrow at its edge."""
    own, over = view.marks[cell.column], Safe("")
    if share is not None and share > 0:
        x = scale.percent(share)
        if scale.low <= share <= scale.high:
            over = mark(own, x, MIDDLE)
        else:
            over = tag("use", href="#m-left" if share < 1 else "#m-right", x=x, y=MIDDLE, class_=f"edge {own.hue}")
    return tag("svg", _stretched(cell, scale, view, spread), over, class_="plot")


def _name(i: int, cell: Cell, view: View) -> Safe:
    return tag("a", mark_svg(view.marks[cell.column]), tag("span", cell.column), href=f"#c{i}", data_i=i)


def _number(cell: Cell, base: str) -> Safe:
    """The judged share, and what it is of where that is not the left plot's engine; the reference shows its value,
    which is what 100 % means."""
    shown = facts.share(cell, unit="")
    if not shown:
        return tag("td", facts.with_unit(cell), class_="n", title=facts.why_blank(cell))
    of = tag("span", f" of {cell.against}", class_="of") if cell.against not in (base, None) else ""
    return tag("td", tag({"FASTER": "b", "SAME": "i"}.get(cell.verdict, "span"), shown), of, class_="n")


def _line(i: int, cell: Cell, on: Scales, view: View) -> list[Safe]:
    """A column that has a share, or is the reference."""
    sign, bounds = verdict(cell.verdict), facts.bounds(cell, unit="")
    share = judged(cell)
    # What the close-up shows is not drawn again where it would be too small to see.
    outside = share is not None and not on.near.low <= share <= on.near.high
    word = [tag("span", sign.sign, class_="sign"), tag("span", " ", sign.short, class_="word")]
    left = _drawn(cell, on.on_base(cell), on.wide, view, spread=outside and cell.against == on.base)
    return [
        tag("th", _name(i, cell, view), scope="row", class_="col"),
        tag("td", left, class_="p"),
        tag("td", _drawn(cell, share, on.near, view, spread=True), class_="p near"),
        _number(cell, on.base),
        tag("td", bounds, class_="n ci-text", title=None if bounds else facts.why_blank(cell)),
        tag("td", *word, class_="w"),
    ]


def _blank(cells: Sequence[tuple[int, Cell]], view: View) -> list[Safe]:
    """Columns without a number that share a reason, on one line: a cross, their names, and why."""
    sign = verdict(cells[0][1].verdict)
    cross = tag(
        "svg",
        tag("use", href="#m-x", x="8", y="8", class_="none"),
        width="16",
        height="16",
        aria_hidden="true",
        class_="mark",
    )
    links = [_name(i, c, view) for i, c in cells]
    names = join([tag("s", link) if sign.name == "INVALID" else link for link in links], " ")
    why = tag("span", f"{sign.short}: {facts.reason(cells[0][1])}", class_="why")
    return [tag("td", cross, names, " ", why, colspan=6, class_="blanks")]


def _group(row: str, panel: Panel, on: Scales, view: View) -> Safe:
    """All columns of one row: those with a number, then those without, by reason."""
    own = [panel.cells[row, c] for c in panel.columns if (row, c) in panel.cells]
    lines: list[tuple[int | None, str, list[Safe]]] = []
    without: dict[tuple[str, str], list[tuple[int, Cell]]] = {}
    for i, cell in own:
        if cell.verdict in facts.NO_CLAIM or (on.on_base(cell) is None and judged(cell) is None):
            without.setdefault((cell.verdict, facts.reason(cell)), []).append((i, cell))
        else:
            lines.append((i, verdict(cell.verdict).style, _line(i, cell, on, view)))
    lines += [(None, verdict(name).style, _blank(cells, view)) for (name, _), cells in without.items()]
    unit = next((c.unit for _, c in own if c.unit), "")
    head = tag(
        "th", tag("b", row), tag("span", unit, class_="unit"), rowspan=len(lines), scope="rowgroup", class_="row"
    )
    return tag(
        "tbody",
        *(
            tag("tr", head if n == 0 else "", *parts, class_=f"v-{style}", data_i=i)
            for n, (i, style, parts) in enumerate(lines)
        ),
    )  # fmt: skip


def _scale(scale: Axis) -> Safe:
    """The ticks of an axis with their percentages."""
    # Where the axis is narrow, labels that would touch "100" go.
    crowded = {t: abs(scale.at(t) - scale.at(1)) < 170 for t in scale.ticks()}
    style = {t: "base" if t == 1.0 else "crowded" if near else None for t, near in crowded.items()}
    labels = [
        tag("text", f"{100 * t:g}", x=scale.percent(t), y="11", text_anchor="middle", class_=style[t]) for t in style
    ]
    return tag("svg", *labels, width="100%", height="14", aria_hidden="true", class_="axis")


def _plot_head(name: str, scale: Axis, style: str) -> Safe:
    return tag("th", tag("span", name, class_="unit"), _scale(scale), scope="col", class_=style)


def _table(at: int, panel: Panel, view: View) -> Safe:
    """One grid: its axes, what lies under every line, and the lines. `at` numbers the grids of a page."""
    on = scales(panel, view.margin, at)
    head = tag(
        "tr",
        tag("th", "row", scope="col", class_="row"),
        tag("th", "column", scope="col", class_="col"),
        _plot_head(f"of {on.base}, log scale", on.wide, "p"),
        _plot_head("of its own plain engine, near 100 %", on.near, "p near"),
        tag("th", "% of plain", scope="col", class_="n"),
        tag("th", "95 % interval", scope="col", class_="n ci-text"),
        tag("th", tag("span", "verdict", class_="word"), scope="col", class_="w"),
    )
    groups = join(_group(row, panel, on, view) for row in panel.rows)
    ground = definitions(*(_ground(scale, view.margin) for scale in (on.wide, on.near)))
    return join([ground, tag("table", tag("thead", head), groups, class_="dots", data_rove=1)])


def panels(view: View) -> Safe:
    """One table of dots a grid; all its rows share their axes."""
    many = len(view.panels) > 1
    return join(
        part for i, p in enumerate(view.panels) for part in (tag("h3", p.grid) if many else "", _table(i, p, view))
    )
