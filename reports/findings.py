"""The validator's findings, gathered: the worst of every (column, point, layer) over rounds and processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reports.numbers import finite
from reports.view import Line

RANK = {"PASS": 0, "WARN": 1, "FAIL": 2}

# What the letter on a failed square says, by the first word that the reason holds.
KINDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("L", "nearer to another layer", ("nearer to layer", "closer to", "another layer", "wrong layer")),
    ("S", "shape", ("shape",)),
    ("N", "NaN or infinite", ("nan", "infinit", "not finite", "non-finite")),
    ("Z", "zeros where the reference has none", ("zero",)),
    ("C", "constant", ("constant",)),
    ("T", "token ids or count", ("token id", "token count", "tokens came back", "new tokens")),
    ("E", "error beyond the yardstick's", ()),
)


@dataclass(frozen=True)
class Spot:
    """One square of the heatmap: the worst finding there, and how many stand behind it."""

    column: str
    label: str
    layer: int | None
    finding: Line
    found: int

    @property
    def verdict(self) -> str:
        return str(self.finding.get("verdict"))

    @property
    def ratio(self) -> float | None:
        return finite(self.finding.get("ratio"))

    @property
    def place(self) -> str:
        return self.label if self.layer is None else f"{self.label}.{self.layer}"


def kind(finding: Line) -> str:
    """The letter of a failure's kind.

    >>> kind({"reason": "nearer to layer 4 than to its own layer 5", "layer": 5, "nearest_layer": 4})
    'L'
    """
    nearest, layer = finding.get("nearest_layer"), finding.get("layer")
    if nearest is not None and layer is not None and nearest != layer:
        return "L"
    said = str(finding.get("reason") or "").lower()
    return next((letter for letter, _, words in KINDS if any(w in said for w in words)), "E")


def step(ratio: float | None, verdict: str = "FAIL") -> int:
    """The colour step of a ratio error / yardstick: 0 to 3 below it, 4 at it, 5 to 8 above it. What has no ratio
    (a head that is exactly zero, a token that is the forced one) is coloured by its verdict.

    >>> [step(r) for r in (0.1, 0.7, 1.0, 2.5, 5.1)], step(None, "PASS")
    ([0, 3, 4, 6, 8], 4)
    """
    if ratio is None:
        return {"PASS": 4, "WARN": 7}.get(verdict, 8)
    edges = (0.25, 0.4, 0.57, 0.8, 1.25, 1.75, 2.5, 5.0)
    return sum(ratio > edge for edge in edges)


def _badness(finding: Line) -> tuple[int, float]:
    """Failures first; among equals the largest ratio. A failure without one could not even be measured."""
    rank, ratio = RANK.get(str(finding.get("verdict")), 2), finite(finding.get("ratio"))
    return rank, ratio if ratio is not None else math.inf if rank else -1.0


def _label(finding: Line) -> tuple[str, int | None]:
    point, layer = str(finding.get("point")), finding.get("layer")
    base, _, number = point.rpartition(".")
    if base and number.isdecimal() and layer in (None, int(number)):
        point, layer = base, int(number)
    what = str(finding.get("what") or "read")
    row = finding.get("row")
    before = f"{row} → " if row else "write → " if what == "write" else ""
    return before + point, layer if isinstance(layer, int) and not isinstance(layer, bool) else None


def spots(findings: Iterable[Line]) -> list[Spot]:
    """The worst finding of each place, in the order in which places were first checked."""
    grouped: dict[tuple[str, str, int | None], list[Line]] = {}
    for finding in findings:
        label, layer = _label(finding)
        grouped.setdefault((str(finding.get("column")), label, layer), []).append(finding)
    return [Spot(*key, max(lines, key=_badness), len(lines)) for key, lines in grouped.items()]


def worst(among: Sequence[Spot], most: int = 12) -> list[Spot]:
    """The places to look at first: what failed or warned, then the largest ratios."""
    return sorted(among, key=lambda s: _badness(s.finding), reverse=True)[:most]


def tally(among: Iterable[Spot]) -> dict[str, int]:
    """How many places have each verdict; they add up."""
    found = dict.fromkeys(RANK, 0)
    for spot in among:
        found[spot.verdict] = found.get(spot.verdict, 0) + 1
    return found
