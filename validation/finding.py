"""One line of a validation: what was compared, where, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from adapters.work import split
from validation.verdict import Verdict

What = Literal["read", "write", "value"]
Word = Literal["PASS", "WARN", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """`what` is a read before timing, a write before timing, or a value that a timed run handed back."""

    what: What
    point: str
    layer: int | None
    error: float | None
    yardstick: float | None
    ratio: float | None
    slope: float | None
    nearest_layer: int | None
    verdict: Word
    reason: str
    row: str | None = None


def finding(what: What, point: str, verdict: Verdict, *, note: str = "") -> Finding:
    """A verdict at a point, as a finding; `note` is said after its reason.

    >>> finding("read", "z.3", Verdict("FAIL", "zero")).layer
    3
    """
    name, layer = split(point)
    v = verdict
    reason = f"{v.reason}; {note}" if note else v.reason
    error, yardstick, ratio, slope = (_finite(n) for n in (v.error, v.yardstick, v.ratio, v.slope))
    return Finding(what, name, layer, error, yardstick, ratio, slope, v.nearest_layer, _word(v.verdict), reason)


def failed(what: What, point: str, reason: str) -> Finding:
    """A failure that no number describes: a value that is missing, of another shape, not finite.

    >>> failed("value", "tokens", "7 of 8 tokens").verdict
    'FAIL'
    """
    return finding(what, point, Verdict("FAIL", reason))


def noted(found: Finding, note: str) -> Finding:
    """The finding with something more in its reason; itself where there is nothing to say."""
    return replace(found, reason=f"{found.reason}; {note}") if note else found


def _finite(number: float | None) -> float | None:
    # Findings are stored as strict JSON, which has no infinity.
    return number if number is None or abs(number) < float("inf") else None


def _word(verdict: str) -> Word:
    words: dict[str, Word] = {"PASS": "PASS", "WARN": "WARN", "FAIL": "FAIL"}
    return words[verdict]
