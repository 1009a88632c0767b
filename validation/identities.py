"""What must hold between an engine's own values, with no reference at all: the residual stream adds up.

    found = check(outcome.values, layers=[0, 15], dtype="bfloat16")      # values captured at `points(layers)`

An engine may be wrong about a point in a way that its reference would share (a family whose sublayers already
contain the residual, a norm after the sublayer). The sums then do not come out, whatever the reference says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from validation import errors as E
from validation.finding import Finding, failed, finding
from validation.verdict import compare

# sum of the first two = the third
SUMS = (("resid_pre", "attn_out", "resid_mid"), ("resid_mid", "mlp_out", "resid_post"))
_EXACT = E.Errors(0.0, 0.0, 0.0, 1.0, 0, 0)


def points(layers: Sequence[int]) -> tuple[str, ...]:
    """The points that the identities of these layers need, in the model's order.

    >>> points([3])
    ('resid_pre.3', 'attn_out.3', 'resid_mid.3', 'mlp_out.3', 'resid_post.3')
    """
    return tuple(
        f"{name}.{n}" for n in layers for name in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    )


def check(values: Mapping[str, Any], layers: Sequence[int], dtype: str) -> list[Finding]:
    """A finding for each sum of each layer: right to within the rounding of one addition in `dtype`."""
    return [_sum(values, names, n, dtype) for n in layers for names in SUMS]


def _sum(values: Mapping[str, Any], names: tuple[str, str, str], layer: int, dtype: str) -> Finding:
    one, other, total = (f"{name}.{layer}" for name in names)
    missing = [p for p in (one, other, total) if p not in values]
    if missing:
        return failed("read", total, f"{one} + {other} cannot be checked without {', '.join(missing)}")
    a, b, c = (E.as_array(values[p]) for p in (one, other, total))
    bad = E.trouble(c, a.shape) or E.trouble(b, a.shape)
    if bad:
        return failed("read", total, f"{one} + {other} = {total}: {bad}")
    verdict = compare(E.measure(a.astype("float64") + b.astype("float64"), c), _EXACT, dtype)
    return finding("read", total, verdict, note=f"{one} + {other} against {total}, held to one rounding")
