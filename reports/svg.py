"""The pieces of SVG that several sections share: the marks, and a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from reports.escape import Safe, tag
from reports.marks import SHAPES, Mark
from reports.numbers import finite


def definitions(*parts: Safe) -> Safe:
    """Things that are drawn by reference, many times, from here."""
    return tag("svg", tag("defs", *parts), width="0", height="0", aria_hidden="true", class_="symbols")


def symbols(marks: Iterable[Mark]) -> Safe:
    """The mark of every column, defined once a page, and the signs of lines that have none."""
    extra = [
        tag("path", id="m-x", d="M-4-4 4 4M4-4-4 4"),
        tag("path", id="m-left", d="M5-4 0 0 5 4"),
        tag("path", id="m-right", d="M-5-4 0 0-5 4"),
    ]
    return definitions(*map(_symbol, marks), *extra)


def _symbol(of: Mark) -> Safe:
    fill = "full" if of.compiled else "hollow"
    parts = [tag("path", d=SHAPES[of.library.shape], class_=f"mk {fill} {of.hue}")]
    if of.transformers:
        parts.append(tag("circle", r="1.5", class_=f"mk {'bare' if of.compiled else 'full'} {of.hue}"))
    return tag("g", *parts, id=of.id)


def mark(of: Mark, x: str, y: str) -> Safe:
    """A column's mark at a place inside an SVG, which may be a percentage."""
    return tag("use", href=f"#{of.id}", x=x, y=y)


def mark_svg(of: Mark) -> Safe:
    """A column's mark on its own, for legends and table heads."""
    return tag("svg", mark(of, "8", "8"), class_="mark")


@dataclass(frozen=True)
class Axis:
    """Shares on a logarithmic axis: `at` gives the place in thousandths of the width."""

    low: float
    high: float
    id: str = ""

    def at(self, share: float) -> float:
        """
        >>> Axis(0.1, 10).at(1)
        500.0
        """
        part = math.log(share / self.low) / math.log(self.high / self.low)
        return round(1000 * min(1.0, max(0.0, part)), 1)

    def percent(self, share: float) -> str:
        return f"{self.at(share) / 10:g}%"

    def ticks(self, most: int = 7) -> list[float]:
        """Round shares inside the axis, 100 % always among them.

        >>> Axis(0.4, 1.6).ticks()
        [0.5, 0.75, 1.0, 1.5]
        """
        for steps in _STEPS:
            inside = [s for s in steps if self.low * 1.005 <= s <= self.high / 1.005]
            if len(inside) <= most:
                return inside
        return [1.0]


_STEPS: tuple[tuple[float, ...], ...] = (
    (0.90, 0.92, 0.94, 0.96, 0.98, 1.0, 1.02, 1.04, 1.06, 1.08, 1.1),
    (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3),
    (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0),
    (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0),
    (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0),
    (0.001, 0.01, 0.1, 1.0, 10.0, 100.0),
    (1e-6, 1e-4, 0.01, 1.0, 100.0, 1e4),
)


def axis(shares: Iterable[object], id: str = "", floor: float = 0.02) -> Axis:
    """An axis that holds 100 % and every share above `floor`, with air at both ends; what lies below is at the edge."""
    known = [s for s in map(finite, shares) if s is not None and s > 0]
    low, high = min([0.9, *known]), max([1.08, *known])
    pad = (high / max(low, floor)) ** 0.04
    return Axis(max(low, floor) / pad, high * pad, id)
