"""The pieces of SVG that several sections share: the marks, and a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from reports.escape import Safe, join, tag
from reports.marks import SHAPES, Mark
from reports.numbers import finite


def symbols() -> Safe:
    """The marks, defined once a page and drawn by reference."""
    shapes = [tag("path", id=f"m-{name}", d=d) for name, d in SHAPES.items()]
    extra = [
        tag("circle", id="m-dot", r="1.5"),
        tag("path", id="m-x", d="M-4-4 4 4M4-4-4 4"),
        tag("path", id="m-strike", d="M-9 0H9"),
        tag("path", id="m-left", d="M5-4 0 0 5 4"),
        tag("path", id="m-right", d="M-5-4 0 0-5 4"),
    ]
    return tag("svg", tag("defs", *shapes, *extra), width="0", height="0", aria_hidden="true", class_="symbols")


def mark(of: Mark, x: str, y: str) -> Safe:
    """A column's mark at a place inside an SVG, which may be a percentage."""
    fill = "full" if of.compiled else "hollow"
    shape = tag("use", href=f"#m-{of.library.shape}", x=x, y=y, class_=f"mk {fill} {of.hue}")
    if not of.transformers:
        return shape
    return join([shape, tag("use", href="#m-dot", x=x, y=y, class_=f"mk {'bare' if of.compiled else 'full'} {of.hue}")])


def mark_svg(of: Mark) -> Safe:
    """A column's mark on its own, for legends and table heads."""
    return tag("svg", mark(of, "8", "8"), width="16", height="16", aria_hidden="true", class_="mark")


@dataclass(frozen=True)
class Axis:
    """Shares on a logarithmic axis: `at` gives the place in thousandths of the width."""

    low: float
    high: float

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


def axis(shares: Iterable[object], floor: float = 0.02) -> Axis:
    """An axis that holds 100 % and every share above `floor`, with air at both ends; what lies below is at the edge."""
    known = [s for s in map(finite, shares) if s is not None and s > 0]
    low, high = min([0.9, *known]), max([1.08, *known])
    pad = (high / max(low, floor)) ** 0.04
    return Axis(max(low, floor) / pad, high * pad)
