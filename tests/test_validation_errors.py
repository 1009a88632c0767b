"""The metrics: against arithmetic done by hand, and what each must and must not notice."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from validation import errors as E

RNG = np.random.default_rng(0)
R = RNG.normal(size=(40, 32)).astype(np.float32)


def noisy(r: E.Array, level: float, seed: int = 1) -> E.Array:
    return r + level * np.random.default_rng(seed).normal(size=r.shape)


def test_importing_the_metrics_imports_no_torch() -> None:
    code = "import sys, validation.errors, validation.inprocess, validation.faults; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_torch_dtype_comes_through_exactly(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.5, -0.25], [3.0, 1e-3]], dtype=dtype, requires_grad=True)
    assert E.as_array(x).tolist() == x.tolist()


def test_integers_stay_integers() -> None:
    assert E.as_array(torch.tensor([3, 70_000])).tolist() == [3, 70_000]


def test_per_token_is_relative_to_each_token() -> None:
    r = np.array([[3.0, 4.0], [300.0, 400.0], [0.0, 0.0]])
    v = r + np.array([[0.0, 0.5], [0.0, 50.0], [0.0, 0.0]])
    assert E.per_token(v, r).tolist() == pytest.approx([0.1, 0.1, 0.0])


def test_a_value_where_the_reference_is_zero_is_infinitely_wrong() -> None:
    assert E.per_token([[1e-9, 0.0]], [[0.0, 0.0]])[0] == np.inf


def test_heads_are_flattened_into_their_token() -> None:
    r = np.ones((3, 2, 4))
    v = r.copy()
    v[1, 1] *= 2
    assert E.per_token(v, r).tolist() == pytest.approx([0, np.sqrt(4 / 8), 0])


def test_measure_by_hand() -> None:
    r = np.array([[1.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    v = np.array([[1.1, 0.0], [0.0, 2.4], [2.0, 0.0]])
    e = E.measure(v, r)
    assert (e.median, e.worst, e.worst_token, e.tokens) == (pytest.approx(0.1), pytest.approx(0.2), 1, 3)
    assert e.frobenius == pytest.approx(np.sqrt(0.1**2 + 0.4**2) / 3)
    assert e.slope == pytest.approx(1.1)  # of 1.1, 1.2, 1.0


def test_the_median_ignores_a_few_bad_tokens_and_the_worst_does_not() -> None:
    v = noisy(R, 0.01)
    v[7] = -R[7]
    e = E.measure(v, R)
    assert e.median < 0.02
    assert e.worst == pytest.approx(2, abs=0.1)
    assert e.worst_token == 7


def test_one_token_of_massive_activations_hides_all_others_from_frobenius_only() -> None:
    r = R.copy()
    r[0] *= 1e4
    v = r.copy()
    v[1:] = r[1:] + 0.5 * np.random.default_rng(2).normal(size=r[1:].shape)  # every other token is garbage
    e = E.measure(v, r)
    assert e.frobenius < 1e-3
    assert e.median > 0.3


def test_the_slope_is_not_decided_by_the_token_of_massive_activations() -> None:
    r = R.copy()
    r[0] *= 1e4
    v = r * 1.01
    v[0] = r[0]
    assert E.measure(v, r).slope == pytest.approx(1.01)


@given(st.floats(0.5, 2.0), st.integers(2, 30))
def test_the_slope_is_the_scale_for_any_scale_and_length(scale: float, tokens: int) -> None:
    assert E.measure(R[:tokens] * scale, R[:tokens]).slope == pytest.approx(scale)


def test_shapes_that_differ_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match=r"\(40, 31\) and \(40, 32\)"):
        E.measure(R[:, 1:], R)


def test_ratios_are_floored_where_the_yardstick_is_exact() -> None:
    exact = E.measure(R, R)
    assert exact.worst == 0
    assert set(E.ratios(exact, exact, "bfloat16").values()) == {0.0}
    rounded = E.measure(torch.tensor(R).bfloat16(), R)  # rounding once is what any right engine may do
    assert max(E.ratios(rounded, exact, "bfloat16").values()) < 2.5
    assert E.ratios(E.measure(R * 1.02, R), exact, "bfloat16")["slope"] > 5


def test_the_floor_follows_the_dtype() -> None:
    off = E.measure(R * (1 + 2e-3), R)
    exact = E.measure(R, R)
    assert E.ratios(off, exact, "bfloat16")["median"] < 2.5 < E.ratios(off, exact, "float16")["median"]


def test_the_largest_takes_each_metric_from_wherever_it_is_largest() -> None:
    a, b = E.measure(noisy(R, 0.1), R), E.measure(R * 0.9, R)
    both = E.largest([a, b])
    assert both.median == max(a.median, b.median)
    assert both.worst == max(a.worst, b.worst)
    assert both.off_slope == pytest.approx(0.1)


def test_the_typical_is_the_median_over_groups_and_no_single_group_decides() -> None:
    groups = [E.measure(noisy(R, 0.01 * k), R) for k in (1, 2, 3, 4, 500)]
    assert E.typical(groups).median == groups[2].median


def test_logits_that_differ_by_a_constant_are_equal_after_log_softmax() -> None:
    shifted = R + np.arange(40)[:, None]
    assert E.measure(E.log_softmax(shifted), E.log_softmax(R)).worst < 1e-6
    assert E.offset(R + 3.5, R) == pytest.approx(3.5, abs=1e-6)
    assert np.exp(E.log_softmax(R)).sum(axis=1) == pytest.approx(np.ones(40))


def test_log_softmax_survives_large_logits() -> None:
    assert np.isfinite(E.log_softmax([[1e4, -1e4]])).all()


def test_projections_are_measured_in_units_of_what_a_direction_sees() -> None:
    size = np.full(40, 8.0)
    p = RNG.normal(size=40) * 8 / np.sqrt(64)
    e = E.measure_projection(p + 0.1, p, size, 64)
    assert e.median == pytest.approx(0.1)
    assert E.measure_projection(p * 1.05, p, size, 64).slope == pytest.approx(1.05)


def test_nearest_layer_is_the_one_it_came_from() -> None:
    layers = {n: noisy(R, 0.05 * n, seed=n) for n in range(5)}
    for n in range(5):
        assert E.nearest_layer(noisy(layers[n], 0.01, 9), layers)[0] == n


def test_of_many_layers_the_near_ones_are_all_tried() -> None:
    tried = E.candidate_layers(61, range(126))
    assert {58, 59, 60, 61, 62, 63, 64} <= set(tried)
    assert len(tried) < 30
    assert min(tried) == 0


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda v: v[:, :-1], r"shape \(40, 31\), expected \(40, 32\)"),
        (
            lambda v: np.where(np.arange(40)[:, None] == 3, np.nan, v),
            "1 of 40 tokens hold NaN or infinity, first at token 3",
        ),
        (lambda v: np.where(np.arange(40)[:, None] >= 38, np.inf, v), "2 of 40 tokens"),
        (lambda v: v * 0, "every token is zero"),
        (lambda v: np.where(np.arange(40)[:, None] == 5, 0, v), "token 5 is"),
        (lambda v: v * 0 + 2, "constant: every element is 2"),
        (lambda v: np.repeat(v[:1], 40, axis=0), "every row is the same"),
        (lambda v: v.astype(int), "not a float type"),
    ],
)
@pytest.mark.parametrize("with_reference", [True, False])
def test_trouble_is_named(spoil: object, says: str, with_reference: bool) -> None:
    import re

    found = E.trouble(spoil(R), (40, 32), R if with_reference else None)  # type: ignore[operator]
    assert found is not None
    assert re.search(says, found)


def test_no_trouble_where_there_is_none() -> None:
    assert E.trouble(noisy(R, 0.1), (40, 32), R) is None
    assert E.trouble(torch.tensor(R).bfloat16(), (40, 32)) is None


def test_zeros_that_the_reference_has_too_are_no_trouble() -> None:
    r = R.copy()
    r[-1] = 0  # the gradient at the last token
    assert E.trouble(r, (40, 32), r) is None
    assert E.trouble(np.zeros((4, 2)), (4, 2), np.zeros((4, 2))) is None
