"""A cell's numbers as the reader sees them: the same words in the matrix, the dots, the table and Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reports.numbers import NARROW, finite, fixed, half_width, interval, measured, percent, significant
from reports.words import plural, verdict

if TYPE_CHECKING:
    from harness.judge import Cell

NO_NUMBER = frozenset({"UNSUPPORTED", "MISSING"})


def share(cell: Cell, unit: str = NARROW + "%") -> str:
    """The share of vanilla with the digits that its interval supports; blank for none."""
    return percent(cell.share_vanilla, cell.low, cell.high, unit)


def bounds(cell: Cell, unit: str = NARROW + "%") -> str:
    return interval(cell.low, cell.high, unit)


def side_share(cell: Cell, value: float | None) -> str:
    """Another share of the same cell: it has no interval of its own, so it borrows the relative one of the main share."""
    main, half, number = finite(cell.share_vanilla), half_width(cell.low, cell.high), finite(value)
    if main is None or half is None or number is None or main <= 0:
        return percent(value, unit="")
    relative = half / main * number
    return percent(number, number - relative, number + relative, unit="")


def value(cell: Cell) -> str:
    return measured(cell.value, cell.process_values)


def other(cell: Cell) -> str:
    """The value by the time that is not judged."""
    return measured(cell.value_other, cell.process_values)


def p(number: float | None) -> str:
    return significant(number, 2)


def smallest(cell: Cell) -> str:
    """The smallest difference from 100 % that this run could have seen."""
    number = finite(cell.smallest_detectable)
    return "" if number is None else f"±{fixed(100 * number, 1 if number < 0.1 else 0)}{NARROW}%"


def evidence(cell: Cell) -> str:
    """Rounds times runs, blank where nothing ran."""
    return f"{cell.rounds}×{cell.runs}" if cell.rounds else ""


def validation(cell: Cell) -> str:
    """Whether the same processes showed the right activations."""
    if cell.verdict in NO_NUMBER or not cell.rounds:
        return ""
    return "right" if cell.validated else "wrong" if cell.verdict == "INVALID" else "not checked"


def reason(cell: Cell) -> str:
    """Why the verdict is what it is, with the refusal's code and the rounds that would settle it."""
    parts = [f"[{cell.code}]" if cell.code else "", cell.reason or ""]
    if cell.verdict == "UNCLEAR" and cell.rounds_needed and str(cell.rounds_needed) not in (cell.reason or ""):
        parts.append(f"({plural(cell.rounds_needed, 'round')} would settle it)")
    said = " ".join(part for part in parts if part)
    return said or ("no reason was given" if cell.verdict in NO_NUMBER | {"INVALID"} else "")


def why_blank(cell: Cell) -> str:
    """Why a field of this cell holds no number."""
    if cell.verdict in NO_NUMBER:
        return f"{verdict(cell.verdict).short}: {reason(cell)}"
    if cell.verdict == "REFERENCE":
        return "the reference is not compared with itself"
    if cell.rounds < 2:
        return f"{plural(cell.rounds, 'round')}: an interval or a test needs at least two"
    return reason(cell) or "not a finite number in this store"
