"""What a measurement could have seen, and what more of it would show: planning, the other half of a p-value."""

from __future__ import annotations

import math

from scipy import stats as law

from harness.stats import rounds_for

MOST_ROUNDS = 200  # more than anybody will run; beyond it the answer is "no number of rounds"


def power(effect: float, se: float, df: float, alpha: float = 0.05, margin: float = 0.0) -> float:
    """Chance that a true log difference is called: two-sided t at alpha, and the estimate beyond the margin.

    Both have to happen; they nearly always do together, so it is the smaller of the two chances.

    >>> round(power(0.05, se=0.0132, df=5, margin=0.0296), 2)
    0.85
    """
    if se <= 0:
        return 1.0 if abs(effect) > margin else 0.0
    # Beyond 30 standard errors the chance is 1 and the noncentral law loses its digits.
    strength, edge = min(abs(effect) / se, 30.0), float(law.t.ppf(1 - alpha / 2, df))
    called = float(law.nct.sf(edge, df, strength) + law.nct.cdf(-edge, df, strength))
    return min(called, float(law.norm.cdf((abs(effect) - margin) / se))) if margin else called


def smallest_detectable(se: float, df: float, alpha: float = 0.05, margin: float = 0.0, wanted: float = 0.8) -> float:
    """The smallest true difference that would have been called with probability `wanted`, as a fraction (0.04 is 4 %).

    >>> round(smallest_detectable(se=0.0132, df=5, margin=0.0296), 3)
    0.047
    """
    low, high = margin, margin + max(se, 1e-9)
    while power(high, se, df, alpha, margin) < wanted:
        low, high = high, 2 * high
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
    for n in range(least or rounds_for(alpha), MOST_ROUNDS + 1):
        se = sd / math.sqrt(n)
        if abs(effect) > margin:
            chance = power(effect, se, n - 1, alpha, margin)
        else:
            chance = equivalence_power(effect, se, n - 1, margin, alpha)
        if chance >= wanted:
            return n
    return None


def equivalence_power(effect: float, se: float, df: float, margin: float, alpha: float = 0.05) -> float:
    """Chance that two one-sided t tests show a true log difference to be within the margin (a lower bound, close).

    >>> equivalence_power(0.0, se=0.001, df=5, margin=0.03) > 0.99
    True
    """
    if se <= 0:
        return 1.0 if abs(effect) < margin else 0.0
    edge = float(law.t.ppf(1 - alpha, df))
    above, below = (float(law.nct.sf(edge, df, min((margin + e) / se, 30.0))) for e in (effect, -effect))
    return max(0.0, above + below - 1)
