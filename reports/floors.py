"""The A/A page: each cell against itself. What differs there is the machine, and nothing smaller is a finding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reports import facts
from reports.escape import Safe, join, tag
from reports.numbers import NARROW, decimals, finite, fixed
from reports.view import View
from reports.words import plural

if TYPE_CHECKING:
    from harness.aa import Floor, Floors

WIDTH, HEIGHT = 220, 14


def _percent(fraction: float, signed: bool = False) -> str:
    """A small fraction in per cent with two significant digits."""
    shown = fixed(100 * fraction, min(2, decimals(100 * fraction, None)))
    return f"{'+' if signed and fraction > 0 else ''}{shown}{NARROW}%"


def _strip(floor: Floor, reach: float, margin: float) -> Safe:
    """The ratios of arm a to arm b, one tick a round, on the axis that all strips share; the band is the margin."""

    def x(ratio: float) -> float:
        part = math.log(ratio) / math.log1p(reach)
        return round(WIDTH / 2 * (1 + min(1.0, max(-1.0, part))), 1)

    left, right = x(1 / (1 + margin)), x(1 + margin)
    ratios = [r for r in map(finite, floor.ratios) if r is not None and r > 0]
    parts = [
        tag("rect", x=left, y="0", width=round(right - left, 1), height=HEIGHT, class_="round"),
        tag("path", d=f"M{WIDTH / 2:g} 0V{HEIGHT}", class_="one"),
        tag("path", d=f"M{x(1 / (1 + floor.floor))} 7H{x(1 + floor.floor)}", class_="ci"),
        tag("path", d="".join(f"M{x(r)} 2V12" for r in ratios), class_="tick"),
    ]
    name = f"{floor.row}, {floor.column}: {plural(len(ratios), 'ratio')} of one arm to the other"
    return tag("svg", tag("title", name), *parts, width=WIDTH, height=HEIGHT, role="img", class_="hue-vllm")


def _line(floor: Floor, reach: float, margin: float) -> Safe:
    wider = floor.floor > margin
    late = finite(floor.first_p) is not None and floor.first_p < 0.05
    return tag(
        "tr",
        tag("th", floor.row, scope="row"),
        tag("td", floor.column),
        tag("td", str(floor.rounds), class_="n"),
        tag("td", _strip(floor, reach, margin)),
        tag("td", tag("b", _percent(floor.floor)) if wider else _percent(floor.floor), class_="n"),
        tag("td", _percent(floor.spread), class_="n"),
        tag("td", _percent(floor.first, signed=True), class_="n" + (" bad" if late else "")),
        tag("td", facts.p(floor.first_p), class_="n"),
    )


def floors(view: View, given: Floors | None) -> Safe:
    """Every cell's null distribution and floor, and how often the whole pipeline cried wolf."""
    if given is None or not given.cells:
        return Safe("")
    reach = max([2 * view.margin, *(abs(math.log(r)) * 1.05 for f in given.cells for r in f.ratios if r > 0)])
    said = tag(
        "p",
        "Each column was booted as both arms of its own comparison. Over "
        f"{plural(given.relabellings, 'relabelling')} of the arms the whole pipeline (tests, correction, margin) "
        f"called some cell faster or slower in {100 * given.alarm_rate:.1f}{NARROW}%, {given.alarms:.2g} cells on "
        f"average. A cell's margin is the larger of {100 * view.margin:g}{NARROW}% and its own floor: the 95th "
        "percentile of the mean log ratio of its arms. In each strip: the margin's band, the floor's bar, one tick a "
        "round.",
        class_="note",
    )
    heads = (
        "row",
        "column",
        "rounds",
        f"arm a / arm b, ±{_percent(reach)}",
        "floor",
        "one round",
        "first arm",
        "p of that",
    )
    head = tag("tr", *(tag("th", h, scope="col") for h in heads))
    lines = [_line(f, reach, view.margin) for f in given.cells]
    return join(
        [said, tag("div", tag("table", tag("thead", head), tag("tbody", *lines), class_="plain"), class_="scroll")]
    )
