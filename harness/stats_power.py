"""What a measurement could have seen, and what more of it would show: planning, the other half of a p-value."""

from __future__ import annotations

import bisect
import functools
import math

import numpy as np
from scipy import special  # its functions answer in microseconds, scipy.stats' in fractions of a millisecond

from harness.stats import Array, rounds_for

MOST_ROUNDS = 200  # more than anybody will run; beyond it the answer is "no number of rounds"


@functools.lru_cache(maxsize=512)
def _noise(df: float) -> Array:
    """Equally likely values of (estimated / true standard error). Averaging over them replaces the noncentral t law,
    which scipy computes as NaN for some fractional degrees of freedom."""
    found: Array = np.sqrt(special.chdtri(df, (np.arange(400) + 0.5) / 400) / df)
    return found


def power(effect: float, se: float, df: float, alpha: float = 0.05, margin: float = 0.0) -> float:
    """Chance that a true log difference is called: two-sided t at alpha, and the estimate beyond the margin.

    >>> round(power(0.05, se=0.0132, df=5, margin=0.0296), 2)
    0.84
    """
    if se <= 0:
        return 1.0 if abs(effect) > margin else 0.0
    edge = np.maximum(float(special.stdtrit(df, 1 - alpha / 2)) * _noise(df), margin / se)
    return float((special.ndtr(abs(effect) / se - edge) + special.ndtr(-abs(effect) / se - edge)).mean())


def equivalence_power(effect: float, se: float, df: float, margin: float, alpha: float = 0.05) -> float:
    """Chance that two one-sided t tests show a true log difference to be within the margin.

    >>> equivalence_power(0.0, se=0.001, df=5, margin=0.03) > 0.99
    True
    """
    if se <= 0:
        return 1.0 if abs(effect) < margin else 0.0
    room = margin / se - float(special.stdtrit(df, 1 - alpha)) * _noise(df)
    return float(np.maximum(special.ndtr(room - effect / se) - special.ndtr(-room - effect / se), 0).mean())


def smallest_detectable(
    se: float, df: float, alpha: float = 0.05, margin: float = 0.0, wanted: float = 0.8
) -> float | None:
    """The smallest true difference that would have been called with probability `wanted`, as a fraction (0.04 is 4 %).
    None where even a factor of 100 would have been missed.

    >>> round(smallest_detectable(se=0.0132, df=5, margin=0.0296), 3)
    0.049
    """
    low, high = margin, math.log(100)
    if power(high, se, df, alpha, margin) < wanted:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle, se, df, alpha, margin) >= wanted else (middle, high)
    return math.expm1(high)


def rounds_needed(
    effect: float, sd: float, margin: float, alpha: float = 0.05, wanted: float = 0.8, least: int | None = None
) -> int | None:
    """How many rounds settle a true log difference with probability `wanted`: called if it is beyond the margin,
    shown equivalent if it is within. `sd` is that of one round's difference. None where it sits on the margin.

    >>> rounds_needed(0.05, sd=0.032, margin=0.0296), rounds_needed(0.0, sd=0.032, margin=0.0296)
    (6, 12)
    >>> rounds_needed(0.03, sd=0.032, margin=0.0296) is None
    True
    """

    def settles(n: int) -> bool:
        se = sd / math.sqrt(n)
        if abs(effect) > margin:
            return power(effect, se, n - 1, alpha, margin) >= wanted
        return equivalence_power(effect, se, n - 1, margin, alpha) >= wanted

    choices = range(least or rounds_for(alpha), MOST_ROUNDS + 1)
    at = bisect.bisect_left(choices, True, key=settles)
    return choices[at] if at < len(choices) else None
