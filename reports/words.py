"""The words and signs of a report: what a verdict is called, what it means, and how the counts read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.judge import Cell


@dataclass(frozen=True)
class Verdict:
    """One verdict: its sign is readable without colour, `style` is its CSS class, `judged` says a claim was tested."""

    name: str
    sign: str
    style: str
    short: str
    meaning: str
    judged: bool = False


VERDICTS: tuple[Verdict, ...] = (
    Verdict("FASTER", "▲", "faster", "faster", "beyond the margin, and not by chance after correction", judged=True),
    Verdict("SLOWER", "▼", "slower", "slower", "beyond the margin, and not by chance after correction", judged=True),
    Verdict("SAME", "=", "same", "the same", "shown to lie within the margin", judged=True),
    Verdict("UNCLEAR", "~", "unclear", "unclear", "neither shown: this run could not tell", judged=True),
    Verdict("REFERENCE", "●", "reference", "reference", "what the others are compared with"),
    Verdict("UNSUPPORTED", "–", "unsupported", "unsupported", "the column refuses the row, with a reason"),
    Verdict("MISSING", "?", "missing", "missing", "no number: it crashed, hung, or was not run"),
    Verdict("INVALID", "✕", "invalid", "invalid", "fast or slow, it computed something else"),
)
_BY_NAME = {v.name: v for v in VERDICTS}


def verdict(name: str) -> Verdict:
    """The verdict of this name. One that is not known here is still shown, under its own name.

    >>> verdict("SAME").sign
    '='
    """
    return _BY_NAME.get(name) or Verdict(name, "?", "other", name.lower(), "a verdict that this report does not know")


def counts(cells: Iterable[Cell]) -> dict[str, int]:
    """How many cells have each verdict, in the order of `VERDICTS`; the sum is the number of cells."""
    found = {v.name: 0 for v in VERDICTS}
    for cell in cells:
        found[cell.verdict] = found.get(cell.verdict, 0) + 1
    return found


def _listed(tally: dict[str, int], judged: bool) -> tuple[int, str]:
    chosen = {name: n for name, n in tally.items() if verdict(name).judged is judged and n}
    return sum(chosen.values()), ", ".join(f"{n} {verdict(name).short}" for name, n in chosen.items())


def sentence(cells: Sequence[Cell]) -> str:
    """The whole grid in one sentence whose counts add up.

    >>> sentence([])
    'Nothing was measured: there are no cells.'
    """
    if not cells:
        return "Nothing was measured: there are no cells."
    tally = counts(cells)
    judged, claims = _listed(tally, True)
    rest, others = _listed(tally, False)
    parts = []
    if judged:
        against = sorted({c.against for c in cells if verdict(c.verdict).judged and c.against})
        beside = f" with {' or '.join(against)}" if against else ""
        parts.append(f"{judged} compared{beside} ({claims})")
    if rest:
        parts.append(f"{rest} not compared ({others})")
    return f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}: {'; '.join(parts)}."


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "round"), plural(3, "process")
    ('1 round', '3 processes')
    """
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending}"
