"""A cell's numbers as the reader sees them: the same words in the matrix, the dots, the table and Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.environments import base_of
from reports.numbers import NARROW, finite, fixed, half_width, interval, measured, percent, significant
from reports.words import plural, verdict

if TYPE_CHECKING:
    from harness.judge import Cell

NO_NUMBER = frozenset({"UNSUPPORTED", "MISSING"})
NO_CLAIM = NO_NUMBER | {"INVALID"}


def share(cell: Cell, unit: str = NARROW + "%") -> str:
    """The judged share, of the plain engine `against`, with the digits that its interval supports; blank for none."""
    return percent(cell.share, cell.low, cell.high, unit)


def bounds(cell: Cell, unit: str = NARROW + "%") -> str:
    """The 95 % interval of the judged share."""
    return interval(cell.low, cell.high, unit)


def side(cell: Cell, of: str) -> str:
    """The share of vanilla, vanilla-eager or hf. One that was not judged has no interval of its own, and borrows
    the relative width of the judged one for its digits."""
    plain = base_of(cell.against or "")
    if of == "hf" and plain != "hf":
        return ""  # how much faster vLLM is than transformers is no finding about a column
    number = finite({"vanilla": cell.share_vanilla, "vanilla-eager": cell.share_eager, "hf": cell.share_hf}[of])
    main, half = finite(cell.share), half_width(cell.low, cell.high)
    if plain == of:
        return share(cell, unit="")
    if main is None or half is None or number is None or main <= 0:
        return percent(number, unit="")
    relative = half / main * number
    return percent(number, number - relative, number + relative, unit="")


def value(cell: Cell) -> str:
    """The value by the judged time."""
    return measured(cell.value, cell.process_values)


def with_unit(cell: Cell) -> str:
    """The value and its unit, blank for none."""
    return f"{value(cell)}\u00a0{cell.unit}" if value(cell) else ""


def other(cell: Cell) -> str:
    """The value by the time that is not judged."""
    return measured(cell.value_other, cell.process_values)


def p(number: float | None) -> str:
    """A p value; below one in ten thousand no digit of it means anything."""
    return "<0.0001" if number is not None and number < 1e-4 else significant(number, 2)


def smallest(cell: Cell) -> str:
    """The smallest difference from 100 % that this run could have seen."""
    number = finite(cell.smallest_detectable)
    return "" if number is None else f"±{fixed(100 * number, 1 if number < 0.1 else 0)}{NARROW}%"


def evidence(cell: Cell) -> str:
    """Rounds that count, and runs over all processes; blank where nothing ran."""
    return f"{cell.rounds} / {cell.runs}" if cell.runs else ""


def validation(cell: Cell) -> str:
    """Whether the same processes showed the right activations."""
    if cell.verdict in NO_NUMBER or not cell.runs:
        return ""
    return "right" if cell.validated else "wrong" if cell.verdict == "INVALID" else "not checked"


def reason(cell: Cell) -> str:
    """Why the verdict is what it is; a refusal's code comes first."""
    said = cell.reason or ("no reason was given" if cell.verdict in NO_CLAIM else "")
    return f"[{cell.code}] {said}" if cell.code else said


def remarks(cell: Cell) -> str:
    """The reason, and what to be wary of."""
    return ". ".join(part for part in (reason(cell), *(f"Note: {w}" for w in cell.warnings)) if part)


def why_blank(cell: Cell) -> str:
    """Why a field of this cell holds no number."""
    if cell.verdict in NO_CLAIM:
        return f"{verdict(cell.verdict).short}: {reason(cell)}"
    if cell.verdict == "REFERENCE":
        return "the reference is not compared with itself"
    if cell.rounds < 2:
        return f"{plural(cell.rounds, 'round')}: an interval or a test needs at least two"
    return reason(cell) or "not a finite number in this store"
