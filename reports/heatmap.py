"""Validation as a picture: for every column, layers across, points down, coloured by error over yardstick."""

from __future__ import annotations

from collections.abc import Sequence

from reports import findings
from reports.escape import Safe, join, tag
from reports.findings import Spot
from reports.numbers import significant
from reports.svg import mark_svg
from reports.view import View

SIDE, GAP, ROW = 11, 1, 13


def _told(spot: Spot) -> str:
    ratio = f"{significant(spot.ratio, 3)} x the yardstick's error" if spot.ratio is not None else "no ratio"
    return f"{spot.place}: {spot.verdict}, {ratio}" + (
        "" if spot.verdict == "PASS" else f". {spot.finding.get('reason') or ''}"
    )


def _square(spot: Spot, x: int, y: int) -> Safe:
    style = f"h{findings.step(spot.ratio, spot.verdict)}" + (
        "" if spot.verdict == "PASS" else f" {spot.verdict.lower()}"
    )
    square = tag("rect", tag("title", _told(spot)), x=x, y=y, class_=style)
    if spot.verdict == "PASS":
        return square
    letter = "w" if spot.verdict == "WARN" else findings.kind(spot.finding)
    return join([square, tag("text", letter, x=x + SIDE / 2, y=y + 8.6, class_="letter")])


def _unchecked(x: int, y: int) -> Safe:
    return tag("path", d=f"M{x} {y + SIDE}l{SIDE}-{SIDE}", class_="unchecked")


def _map(own: Sequence[Spot]) -> Safe:
    """Points as rows, layers as columns; what has no layer sits in a column of its own, before layer 0."""
    labels = list(dict.fromkeys(s.label for s in own))
    layers = sorted({s.layer for s in own if s.layer is not None})
    at = {(s.label, s.layer): s for s in own}
    left = 8 + round(max(len(label) for label in labels) * 5.4)
    first = left + (SIDE + 7 if any(s.layer is None for s in own) else 0)
    parts: list[Safe] = []
    for r, label in enumerate(labels):
        y = 12 + r * ROW
        parts.append(tag("text", label or "no point", x=left - 6, y=y + 9, text_anchor="end", class_="label"))
        if (label, None) in at:
            parts.append(_square(at[label, None], left, y))
        # A point that was meant for every layer shows its gaps; one that was checked at a few does not have any.
        swept = sum((label, n) in at for n in layers) * 2 > len(layers)
        for c, n in enumerate(layers):
            x = first + c * (SIDE + GAP)
            if (label, n) in at:
                parts.append(_square(at[label, n], x, y))
            elif swept:
                parts.append(_unchecked(x, y))
    parts += _layers(layers, first)
    width, height = first + max(1, len(layers)) * (SIDE + GAP) + 2, 14 + len(labels) * ROW
    return tag("svg", *parts, viewBox=f"0 0 {width} {height}", width=width, height=height, role="img", class_="heat")


def _layers(layers: Sequence[int], first: int) -> list[Safe]:
    """The numbers above the columns, every fifth, or every tenth of a deep model."""
    every = 5 if len(layers) <= 60 else 10
    return [
        tag("text", str(n), x=first + c * (SIDE + GAP) + SIDE / 2, y=8, text_anchor="middle", class_="label")
        for c, n in enumerate(layers)
        if n % every == 0
    ]


def _column(column: str, own: Sequence[Spot], view: View) -> Safe:
    counted = ", ".join(f"{n} {name}" for name, n in findings.tally(own).items() if n)
    head = tag("figcaption", mark_svg(view.marks[column]), tag("b", column), " ", tag("span", counted, class_="unit"))
    return tag("figure", head, tag("div", _map(own), class_="scroll"))


def _legend() -> Safe:
    steps = [
        tag("svg", tag("rect", x=0, y=0, class_=f"h{i}"), width=SIDE, height=SIDE, class_="heat") for i in range(9)
    ]
    letters = "; ".join(f"{letter} {meaning}" for letter, meaning, _ in findings.KINDS)
    return tag(
        "p", "error / yardstick: 0.25 ", *steps[:4], " ", steps[4], " 1 ", *steps[5:], " 5 and more. ",
        f"Up to 2.5 passes, above 5 fails, between it warns (w). Failures: {letters}. ",
        "A stroke was not checked; what stands before layer 0 has no layer.",
        class_="note legend",
    )  # fmt: skip


def _list(chosen: Sequence[Spot]) -> Safe:
    heads = ("column", "place", "verdict", "ratio", "error", "yardstick", "slope", "nearest layer", "checks", "reason")
    lines = [
        tag(
            "tr",
            tag("th", s.column, scope="row"),
            tag("td", s.place),
            tag("td", s.verdict, class_="bad" if s.verdict != "PASS" else None),
            *(tag("td", significant(s.finding.get(k), 3), class_="n") for k in ("ratio", "error", "yardstick")),
            tag("td", significant(s.finding.get("slope"), 5), class_="n"),
            tag("td", s.finding.get("nearest_layer"), class_="n"),
            tag("td", str(s.found), class_="n"),
            tag("td", s.finding.get("reason"), class_="reason"),
        )
        for s in chosen
    ]
    head = tag("tr", *(tag("th", h, scope="col") for h in heads))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *lines), class_="plain"), class_="scroll")


def validation(view: View) -> Safe:
    """The maps of all columns that were validated, and the places to look at first."""
    found = findings.spots(view.store.validations)
    if not found:
        return tag(
            "p",
            "No activation was compared with a reference in this store, so no speed in it is eligible.",
            class_="warn",
        )
    by_column = {c: [s for s in found if s.column == c] for c in dict.fromkeys(s.column for s in found)}
    maps = [_column(c, own, view) for c, own in by_column.items() if c in view.marks]
    silent = [c for c in view.columns if c not in by_column]
    note = tag("p", f"Not validated: {', '.join(silent)}.", class_="note") if silent else ""
    return join(
        [_legend(), tag("div", *maps, class_="maps"), note, tag("h3", "Look here first"), _list(findings.worst(found))]
    )
