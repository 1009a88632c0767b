"""Error metrics between a captured tensor and its reference: numbers only, no opinion (that is `verdict.py`).

A capture is [tokens, ...]. Errors are taken token by token, relative to that token's own norm: one token of
SmolLM2 is 200 times larger than its neighbours, so that anything averaged over the whole tensor sees that
token and no other (its cosine stays at .9999 when every other row is wrong).

    errors = measure(captured, reference)      # median and worst token, Frobenius, slope
    ratios(errors, measure(yardstick, reference), dtype="bfloat16")
    trouble(captured, reference)               # shape, NaN, one-sided zeros, constant: a sentence or None

Needs numpy only; torch tensors are accepted and never imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# The relative error of rounding one value to nearest. A point that the yardstick reproduces exactly (an
# embedding) would otherwise divide by zero.
UNIT_ROUNDOFF = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-25, "float64": 2.0**-54}
METRICS = ("median", "worst", "frobenius", "slope")
_MANY_LAYERS = 40


@dataclass(frozen=True)
class Errors:
    """How far a tensor is from its reference. `slope` is the least-squares scale, 1 where nothing is scaled."""

    median: float
    worst: float
    frobenius: float
    slope: float
    worst_token: int
    tokens: int

    @property
    def off_slope(self) -> float:
        """How far the scale is from 1."""
        return abs(self.slope - 1.0)


def as_array(value: Any) -> Array:
    """A numpy array of `value`: a torch tensor of any float type (bfloat16 too), or anything numpy takes.

    >>> as_array([1, 2]).tolist()
    [1, 2]
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if value.is_floating_point() and value.element_size() < 4:
            value = value.float()
        value = value.numpy()
    return np.asarray(value)


def rows(value: Any) -> Array:
    """[tokens, everything else] in float64, so that sums over a vocabulary lose nothing.

    >>> rows(np.zeros((5, 3, 2))).shape
    (5, 6)
    """
    array = as_array(value).astype(np.float64)
    return array.reshape(array.shape[0], -1) if array.ndim else array.reshape(1, 1)


def per_token(value: Any, reference: Any) -> Array:
    """|value - reference| / |reference| for each token; 0 where both are zero, infinite where only one is.

    >>> per_token([[3.0, 4.4], [0.0, 0.0]], [[3.0, 4.0], [0.0, 0.0]]).round(3).tolist()
    [0.08, 0.0]
    """
    v, r = rows(value), rows(reference)
    gap, size = np.linalg.norm(v - r, axis=1), np.linalg.norm(r, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(gap == 0, 0.0, gap / size)


def slopes(value: Any, reference: Any) -> Array:
    """The least-squares scale of each token; their median is a tensor's slope.

    One scale for the whole tensor would be that of the one token with massive activations.

    >>> slopes([[2.2, 0.0], [0.0, 1.1]], [[2.0, 0.0], [0.0, 1.0]]).round(3).tolist()
    [1.1, 1.1]
    """
    v, r = rows(value), rows(reference)
    square = np.einsum("td,td->t", r, r)
    some = square > 0
    return np.asarray(np.einsum("td,td->t", v, r)[some] / square[some]) if some.any() else np.ones(1)


def measure(value: Any, reference: Any) -> Errors:
    """Every metric of one captured tensor against its reference.

    >>> e = measure([[1.0, 0.0], [0.0, 2.2]], [[1.0, 0.0], [0.0, 2.0]])
    >>> round(e.worst, 3), e.worst_token, round(e.median, 3), round(e.slope, 3)
    (0.1, 1, 0.05, 1.05)
    """
    v, r = rows(value), rows(reference)
    if v.shape != r.shape:
        raise ValueError(f"cannot compare shapes {as_array(value).shape} and {as_array(reference).shape}")
    each = per_token(v, r)
    size = float(np.linalg.norm(r))
    gap = float(np.linalg.norm(v - r))
    frobenius = gap / size if size else (0.0 if gap == 0 else float("inf"))
    slope = float(np.median(slopes(v, r)))
    return Errors(float(np.median(each)), float(each.max()), frobenius, slope, int(each.argmax()), len(each))


def measure_projection(value: Any, reference: Any, size: Any, width: int) -> Errors:
    """As `measure`, for one number a token: a vector of norm `size` (times the direction's), projected.

    A projection near zero has a large error relative to itself and means nothing by it: the unit is the
    projection that a vector of that size has on a random direction, size / sqrt(width).

    >>> measure_projection([1.1, 2.0], [1.0, 2.0], [2.0, 4.0], 4).worst.__round__(3)
    0.1
    """
    unit = as_array(size).astype(np.float64).ravel() / np.sqrt(width)
    v, r = rows(value)[:, 0] / unit, rows(reference)[:, 0] / unit
    gap, square = v - r, float(r @ r)
    each = np.abs(gap)
    frobenius = float(np.linalg.norm(gap) / np.sqrt(len(gap)))
    scale = float(v @ r) / square if square else 1.0
    return Errors(float(np.median(each)), float(each.max()), frobenius, scale, int(each.argmax()), len(each))


def largest(several: Iterable[Errors]) -> Errors:
    """Metric by metric the largest: one yardstick out of several honest computations.

    >>> largest([Errors(.1, .2, .3, 1.0, 0, 5), Errors(.2, .1, .1, 0.9, 1, 5)])
    Errors(median=0.2, worst=0.2, frobenius=0.3, slope=1.1, worst_token=0, tokens=5)
    """
    every = list(several)
    far = max(every, key=lambda e: e.worst)
    slope = 1.0 + max(e.off_slope for e in every)
    return Errors(
        max(e.median for e in every), far.worst, max(e.frobenius for e in every), slope, far.worst_token, far.tokens
    )


def typical(several: Sequence[Errors]) -> Errors:
    """Metric by metric the median over groups of tokens.

    >>> typical([Errors(.1, .2, .3, 1.0, 0, 5), Errors(.2, .2, .3, .9, 0, 5), Errors(.3, .4, .3, 1.3, 0, 5)]).median
    0.2
    """
    middle = {
        name: float(np.median([getattr(e, name) for e in several]))
        for name in ("median", "worst", "frobenius", "off_slope")
    }
    return Errors(
        middle["median"], middle["worst"], middle["frobenius"], 1.0 + middle["off_slope"], 0, several[0].tokens
    )


def ratios(errors: Errors, yardstick: Errors, dtype: str) -> dict[str, float]:
    """Each metric as a multiple of the yardstick's own, which is floored where the yardstick is exact.

    >>> e, y = Errors(.02, .04, .02, 1.0, 0, 9), Errors(.01, .04, .02, 1.0, 0, 9)
    >>> ratios(e, y, "bfloat16")["median"]
    2.0
    """
    floor = UNIT_ROUNDOFF[dtype]
    return {
        "median": errors.median / max(yardstick.median, floor),
        "worst": errors.worst / max(yardstick.worst, floor),
        "frobenius": errors.frobenius / max(yardstick.frobenius, floor),
        "slope": errors.off_slope / max(yardstick.off_slope, floor),
    }


def log_softmax(logits: Any) -> Array:
    """Logits with what softmax ignores taken out: a constant per token.

    >>> log_softmax([[0.0, 0.0]]).round(4).tolist()
    [[-0.6931, -0.6931]]
    """
    x = rows(logits)
    x = x - x.max(axis=1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=1, keepdims=True)))


def offset(logits: Any, reference: Any) -> float:
    """The constant by which logits differ from the reference's (median over tokens): a centred unembedding, say.

    >>> offset([[3.0, 4.0]], [[1.0, 2.0]])
    2.0
    """
    return float(np.median((rows(logits) - rows(reference)).mean(axis=1)))


def candidate_layers(own: int, layers: Sequence[int]) -> list[int]:
    """The layers that a capture is compared with to find the nearest: all, or the near ones and a sample.

    >>> candidate_layers(3, range(6))
    [0, 1, 2, 3, 4, 5]
    >>> len(candidate_layers(60, range(120))) < 40
    True
    """
    every = sorted(layers)
    if len(every) <= _MANY_LAYERS:
        return every
    step = -(-len(every) // (_MANY_LAYERS // 2))
    return sorted(set(every[::step]) | {n for n in every if abs(n - own) <= 3})


def nearest_layer(value: Any, references: Mapping[int, Any]) -> tuple[int, float]:
    """The layer whose reference is closest by median per-token error, and that error.

    >>> nearest_layer([[1.0, 0.1]], {0: [[0.0, 1.0]], 1: [[1.0, 0.0]]})[0]
    1
    """
    v = rows(value)
    found = {layer: float(np.median(per_token(v, reference))) for layer, reference in references.items()}
    best = min(found, key=lambda layer: found[layer])
    return best, found[best]


def trouble(value: Any, shape: tuple[int, ...], reference: Any = None) -> str | None:
    """What is wrong with a capture before any error is measured, or None. Needs no reference, says more with one.

    >>> trouble(np.ones((2, 3)), (2, 4))
    'shape (2, 3), expected (2, 4)'
    """
    v = as_array(value)
    if v.shape != tuple(shape):
        return f"shape {v.shape}, expected {tuple(shape)}"
    if not np.issubdtype(v.dtype, np.floating):
        return f"dtype {v.dtype} is not a float type"
    bad = np.logical_not(np.isfinite(v).reshape(v.shape[0], -1).all(axis=1))
    if bad.any():
        return f"{int(bad.sum())} of {len(bad)} tokens hold NaN or infinity, first at token {int(bad.argmax())}"
    r = None if reference is None else as_array(reference)
    return _one_sided_zero(v, r) or _constant(v, r)


def _one_sided_zero(v: Array, r: Array | None) -> str | None:
    flat = v.reshape(v.shape[0], -1)
    zero = np.logical_not(flat.any(axis=1))
    if r is not None:
        zero &= r.reshape(r.shape[0], -1).any(axis=1)
    if zero.any():
        what = "every token is" if zero.all() else f"token {int(zero.argmax())} is ({int(zero.sum())} of {len(zero)})"
        return f"{what} zero where the reference is not" if r is not None else f"{what} zero"
    return None


def _constant(v: Array, r: Array | None) -> str | None:
    if v.size < 2 or (r is not None and np.ptp(r) == 0):
        return None
    if np.ptp(v) == 0:
        return f"constant: every element is {float(v.flat[0]):g}"
    if len(v) > 2 and (v == v[:1]).all() and (r is None or not (r == r[:1]).all()):
        return "constant over tokens: every row is the same"
    return None
