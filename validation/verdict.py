"""From errors to a verdict, by one rule (DESIGN.md, "Validating").

PASS at a point: the error is at most 2.5 times the yardstick's own error, on the median token, on the worst
token, over the tensor (Frobenius) and in slope. WARN up to 5 times, FAIL above. FAIL at once: wrong shape,
NaN, zeros or a constant where the reference has none, nearer to another layer's reference than to its own.
float32 has no yardstick: the bound is 1e-5 x sqrt(depth), and the same two multiples of 0.4 of it apply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from validation import errors as E

PASS_AT, WARN_AT = 2.5, 5.0
FLOAT32_BOUND = 1e-5


@dataclass(frozen=True)
class Verdict:
    """What one comparison says. `error` and `yardstick` are those of the median token; `ratio` is the worst
    of the four metrics' ratios, and `reason` names it."""

    verdict: str
    reason: str
    error: float | None = None
    yardstick: float | None = None
    ratio: float | None = None
    slope: float | None = None
    nearest_layer: int | None = None


def grade(ratio: float) -> str:
    """The word for a ratio to the yardstick.

    >>> [grade(r) for r in (2.5, 2.6, 5.1, float("nan"))]
    ['PASS', 'WARN', 'FAIL', 'FAIL']
    """
    if ratio <= PASS_AT:
        return "PASS"
    return "WARN" if ratio <= WARN_AT else "FAIL"


def float32_yardstick(depth: int, tokens: int) -> E.Errors:
    """The errors that a float32 engine is held against: PASS exactly up to 1e-5 x sqrt(depth).

    >>> round(float32_yardstick(4, 1).median * PASS_AT, 8)
    2e-05
    """
    bound = FLOAT32_BOUND * math.sqrt(max(depth, 1)) / PASS_AT
    return E.Errors(bound, bound, bound, 1.0 + bound, 0, tokens)


def judge(
    value: Any,
    reference: Any,
    held: E.Errors,
    *,
    dtype: str,
    layer: int | None = None,
    others: Mapping[int, Any] | None = None,
) -> Verdict:
    """The verdict on one captured tensor, held against the yardstick's errors `held`.

    `others` holds the references of other layers of the same point, by layer, for the identity check.

    >>> import numpy as np
    >>> r = np.random.default_rng(0).normal(size=(8, 16)); y = r + 0.01 * np.random.default_rng(1).normal(size=(8, 16))
    >>> held = E.measure(y, r)
    >>> judge(y, r, held, dtype="bfloat16").verdict, judge(1.1 * r, r, held, dtype="bfloat16").verdict
    ('PASS', 'FAIL')
    """
    r = E.as_array(reference)
    bad = E.trouble(value, r.shape, r)
    if bad:
        return Verdict("FAIL", bad)
    found = E.measure(value, r)
    nearest = _nearest(value, r, found.median, layer, others)
    if nearest != layer:
        ratio = max(E.ratios(found, held, dtype).values())
        reason = f"nearer to layer {nearest} than to its own layer {layer}"
        return Verdict("FAIL", reason, found.median, held.median, ratio, found.slope, nearest)
    return replace(compare(found, held, dtype), nearest_layer=nearest)


def compare(found: E.Errors, held: E.Errors, dtype: str) -> Verdict:
    """The verdict on errors already measured.

    >>> compare(E.Errors(.03, .03, .03, 1.0, 4, 9), E.Errors(.01, .02, .02, 1.0, 0, 9), "bfloat16").reason
    "median token error 3.00e-02 is 3.00 x the yardstick's"
    """
    ratio = E.ratios(found, held, dtype)
    # A metric that is not a number is worse than any that is.
    worst = max(ratio, key=lambda name: math.inf if math.isnan(ratio[name]) else ratio[name])
    reason = _sentence(worst, ratio[worst], found)
    return Verdict(grade(ratio[worst]), reason, found.median, held.median, ratio[worst], found.slope)


def _sentence(metric: str, ratio: float, found: E.Errors) -> str:
    where = {
        "median": f"median token error {found.median:.2e}",
        "worst": f"error of the worst token ({found.worst_token}) {found.worst:.2e}",
        "frobenius": f"Frobenius error {found.frobenius:.2e}",
        "slope": f"scale {found.slope:.5f}",
    }[metric]
    return f"{where} is {ratio:.2f} x the yardstick's"


def _nearest(
    value: Any, reference: E.Array, own: float, layer: int | None, others: Mapping[int, Any] | None
) -> int | None:
    if layer is None or others is None:
        return layer
    tried = {n: others[n] for n in E.candidate_layers(layer, list(others)) if n != layer}
    nearest, error = E.nearest_layer(value, {layer: reference, **tried})
    return nearest if error < own else layer  # a layer that changes nothing is as near as its neighbour
