"""Numbers as a reader should see them: as many digits as the measurement supports, and blank where there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence

NARROW = "\u202f"  # narrow no-break space, between a number and its unit


def finite(value: object) -> float | None:
    """The number, or None for None, NaN, infinities and everything that is no number.

    >>> finite(float("nan")), finite(True), finite(2)
    (None, None, 2.0)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def decimals(value: float, half_width: float | None) -> int:
    """Places after the point: down to the first digit that the half width leaves in doubt, one more when
    that digit of the half width is a 1. Without a half width, two significant digits.

    >>> decimals(87.31, 1.2), decimals(87.31, 4.0), decimals(0.0312, None)
    (1, 0, 3)
    """
    if half_width is None or half_width <= 0:
        if value == 0:
            return 0
        keep = 2 if half_width is None else 4  # no spread at all among several: the digits repeat, show them
        return min(6, max(0, keep - 1 - math.floor(math.log10(abs(value)))))
    exponent = math.floor(math.log10(half_width))
    lead = half_width / 10.0**exponent
    return min(6, max(0, -exponent + (1 if lead < 2 else 0)))


def half_width(low: object, high: object) -> float | None:
    """Half of an interval, None where a bound is missing."""
    a, b = finite(low), finite(high)
    return None if a is None or b is None else abs(b - a) / 2


def fixed(value: float, places: int) -> str:
    """Fixed point with a true minus sign and no minus zero.

    >>> fixed(-0.04, 1), fixed(-1.26, 1)
    ('0.0', '−1.3')
    """
    shown = f"{value:.{places}f}"
    if float(shown) == 0:
        shown = shown.lstrip("-")
    return shown.replace("-", "−")


def percent(value: object, low: object = None, high: object = None, unit: str = NARROW + "%") -> str:
    """A share as a percentage, blank for none.

    >>> percent(0.87312, 0.861, 0.886, unit="")
    '87.3'
    """
    share = finite(value)
    if share is None:
        return ""
    half = half_width(low, high)
    return fixed(100 * share, decimals(100 * share, None if half is None else 100 * half)) + unit


def interval(low: object, high: object, unit: str = NARROW + "%") -> str:
    """Both bounds with the digits that their width supports.

    >>> interval(0.861, 0.886, unit="")
    '86.1–88.6'
    """
    a, b, half = finite(low), finite(high), half_width(low, high)
    if a is None or b is None or half is None:
        return ""
    places = decimals(100 * a, 100 * half)
    return f"{fixed(100 * a, places)}–{fixed(100 * b, places)}{unit}"


def measured(value: object, among: Sequence[float] = ()) -> str:
    """A value with the digits that the spread among its processes supports; three digits for a single one.

    >>> measured(123.456, [121.0, 125.0]), measured(0.0123456)
    ('123', '0.0123')
    """
    number = finite(value)
    if number is None:
        return ""
    spread = [v for v in map(finite, among) if v is not None]
    if len(spread) > 1:
        return fixed(number, decimals(number, (max(spread) - min(spread)) / 2))
    if number == 0:
        return "0"
    return fixed(number, min(6, max(0, 2 - math.floor(math.log10(abs(number))))))


def significant(value: object, digits: int = 2) -> str:
    """So many significant digits, without padding: for p values, errors and ratios.

    >>> significant(0.03125), significant(0.0000312), significant(12.4)
    ('0.031', '3.1e-05', '12')
    """
    number = finite(value)
    return "" if number is None else f"{number:.{digits}g}".replace("-", "−", 1 if number < 0 else 0)
