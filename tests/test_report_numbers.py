"""Digits: as many as the interval supports, never more, and blank for what is no number."""

from __future__ import annotations

import math
import random

import pytest

from reports import numbers

NOTHING = (None, math.nan, math.inf, -math.inf, "12", True)


@pytest.mark.parametrize("value", NOTHING)
def test_what_is_no_number_is_blank(value: object) -> None:
    assert numbers.finite(value) is None
    assert (
        numbers.percent(value)
        == numbers.interval(value, 1.0)
        == numbers.measured(value)
        == numbers.significant(value)
        == ""
    )


@pytest.mark.parametrize(
    ("value", "low", "high", "shown"),
    [
        (0.87312, 0.861, 0.886, "87.3"),  # half width 1.25: a leading 1 keeps one digit more
        (0.87312, 0.85, 0.90, "87"),
        (0.30857, 0.3057, 0.3114, "30.9"),
        (0.01623, 0.0160, 0.0165, "1.62"),
        (1.0, 0.5, 2.0, "100"),  # never fewer than the units
        (0.5, 0.5, 0.5, "50.00"),  # no width at all: four significant digits
        (0.87312, None, None, "87"),  # no interval: two
        (0.004312, None, math.nan, "0.43"),
    ],
)
def test_a_share_has_the_digits_that_its_interval_supports(value: float, low: float, high: float, shown: str) -> None:
    assert numbers.percent(value, low, high, unit="") == shown


def test_the_last_digit_shown_is_never_finer_than_a_tenth_of_the_half_width_nor_coarser_than_it() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        half = 10 ** rng.uniform(-5, 0.9)
        step = 10.0 ** -numbers.decimals(50.0, half)
        assert step >= half / 20 or step == 1e-6
        assert step <= half * 1.0001 or step == 1.0


def test_rounding_is_within_half_of_the_last_digit() -> None:
    rng = random.Random(4)
    for _ in range(2000):
        value, half = rng.uniform(0.001, 3), 10 ** rng.uniform(-5, -0.5)
        shown = numbers.percent(value, value - half, value + half, unit="")
        places = len(shown.partition(".")[2])
        assert abs(float(shown) - 100 * value) <= 0.5000001 * 10.0**-places


def test_an_interval_shows_both_bounds_alike() -> None:
    assert numbers.interval(0.8612, 0.8863, unit="") == "86.1–88.6"
    assert numbers.interval(0.5, 2.0) == "50–200\u202f%"
    assert numbers.interval(None, 2.0) == ""


def test_values_take_their_digits_from_the_spread_of_their_processes() -> None:
    assert numbers.measured(17.2136, [17.31, 17.19, 16.68]) == "17.2"
    assert numbers.measured(0.827312, [0.83, 0.82]) == "0.827"
    assert numbers.measured(123.456) == "123"
    assert numbers.measured(0.0) == "0"
    assert numbers.measured(5.0, [5.0, math.nan]) == "5.00"


def test_signs_are_true_minus_signs_and_zero_has_none() -> None:
    assert numbers.fixed(-1.26, 1) == "−1.3"
    assert numbers.fixed(-0.001, 1) == "0.0"
    assert numbers.significant(-0.0312) == "−0.031"
