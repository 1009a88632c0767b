"""Trends: a step is found where it is, noise is no step, and another machine is another series."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from harness.store import Store
from harness.trend import _potts, steps, trend
from tests.fake_sessions import check, session
from tests.test_judge import steady


def days(effects: list[float], **options: Any) -> list[Store]:
    """One session a day, tapgrid-eager at these log shares."""
    made = []
    for i, effect in enumerate(effects):
        started = f"2025-01-{i + 1:02d}T00:00:00Z"
        made.append(session(steady({"tapgrid-eager": effect}, seed=i), rounds=3, started=started, **options))
    return made


def series(stores: list[Store], machine: int = 0, column: str = "tapgrid-eager") -> Any:
    return [t for t in trend(stores) if t.key.column == column][machine]


# ------------------------------------------------------------------------------------------------------- steps


def _cost(y: np.ndarray, bounds: tuple[int, ...], price: float) -> float:
    parts = [np.abs(y[a:b] - np.median(y[a:b])).sum() for a, b in itertools.pairwise(bounds)]
    return float(sum(parts) + price * (len(bounds) - 2))


@pytest.mark.parametrize("seed", range(12))
def test_the_potts_fit_is_the_best_of_all_cuts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    y = rng.normal(0, 1, 9) + np.repeat(rng.normal(0, 3, 3), 3)
    price = float(rng.uniform(0.5, 4))
    cuts = [c for n in range(5) for c in itertools.combinations(range(1, 9), n)]
    all_bounds = [(0, *c, 9) for c in cuts if all(b - a >= 2 for a, b in itertools.pairwise((0, *c, 9)))]
    best = min(_cost(y, b, price) for b in all_bounds)
    assert _cost(y, tuple(_potts(y, price)), price) == pytest.approx(best)


def test_a_step_has_its_place_and_size() -> None:
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(0, 0.01, 20) + np.where(np.arange(20) < 12, 0.0, -0.1))
    (step,) = steps(values)
    assert step.index == 12
    assert step.change == pytest.approx(math.exp(-0.1) - 1, abs=0.01)
    assert step.after / step.before - 1 == pytest.approx(step.change)


def test_there_and_back_are_two_steps() -> None:
    values = [1.0, 1.01, 1.0, 0.99, 0.8, 0.81, 0.8, 0.79, 1.0, 1.01, 0.99, 1.0]
    assert [s.index for s in steps(values)] == [4, 8]
    assert [s.change < 0 for s in steps(values)] == [True, False]


def test_one_odd_session_is_no_step() -> None:
    assert steps([1.0, 1.01, 0.99, 0.5, 1.0, 1.01, 0.99]) == []
    assert steps([1.0, 1.01, 0.99, 1.0, 0.5]) == []  # the newest, which may be an accident


def test_a_step_within_the_margin_is_none_and_too_short_a_series_has_none() -> None:
    values = [1.0] * 6 + [0.98] * 6
    assert steps(values, margin=0.03) == []
    assert [s.index for s in steps(values, margin=0.01)] == [6]
    assert steps([1.0, 1.0, 0.5]) == []
    assert steps([]) == []


@pytest.mark.parametrize("n", [6, 10, 20, 40])
def test_noise_is_no_step(n: int) -> None:
    rng = np.random.default_rng(n)
    false = sum(bool(steps(np.exp(rng.normal(0, 0.03, n)))) for _ in range(200))
    assert false / 200 <= 0.07


def test_a_step_of_three_times_the_noise_is_found() -> None:
    rng, found = np.random.default_rng(1), 0
    for _ in range(100):
        y = rng.normal(0, 0.03, 20)
        y[10:] -= 0.1
        found += any(abs(s.index - 10) <= 1 for s in steps(np.exp(y)))
    assert found >= 85


def test_the_same_series_gives_the_same_steps() -> None:
    values = np.exp(np.random.default_rng(2).normal(0, 0.05, 30))
    assert steps(values, 0.0) == steps(list(values), 0.0)


# ------------------------------------------------------------------------------------------------------ history


def test_sessions_are_put_in_order_and_their_step_is_found() -> None:
    stores = days([-0.1] * 5 + [-0.25] * 4)
    found = series(stores[::-1])
    assert [p.started for p in found.points] == sorted(p.started for p in found.points)
    assert [s.index for s in found.steps] == [5]
    assert found.points[5].share == pytest.approx(math.exp(-0.25), abs=0.01)
    assert found.points[0].low < found.points[0].share < found.points[0].high


def test_another_machine_starts_another_series() -> None:
    """A fingerprint change is never a regression, and coming back goes on where the machine was left."""
    stores = days([-0.1] * 4) + days([-0.5] * 4, machine={"cpu": "b"}) + days([-0.1] * 4)
    first, second = (series(stores, i) for i in (0, 1))
    assert (len(first.points), len(second.points)) == (8, 4)
    assert first.steps == second.steps == ()
    assert first.machine != second.machine
    jitter = days([-0.1] * 2, machine={"load": 3.0, "kernel": "b"})
    assert len(series(days([-0.1] * 2) + jitter).points) == 4


def test_cells_are_told_apart_by_their_full_key() -> None:
    stores = days([-0.1] * 3, rows=("generate", "steer")) + days([-0.4] * 3, rows=("generate",), grid={"model": "n"})
    found = [t for t in trend(stores) if t.key.column == "tapgrid-eager"]
    assert [(t.key.model, t.key.row, len(t.points)) for t in found] == [
        ("m", "generate", 3), ("m", "steer", 3), ("n", "generate", 3),
    ]  # fmt: skip


def test_what_may_not_be_believed_or_has_no_share_is_no_point() -> None:
    bad = session(
        steady({"tapgrid-eager": 1.0}), rounds=3, started="2025-02-01T00:00:00Z",
        extra=[check(0, 1, "tapgrid-eager", verdict="FAIL", reason="r")],
    )  # fmt: skip
    found = trend([*days([-0.1] * 3), bad])
    assert [(t.key.column, len(t.points)) for t in found] == [("tapgrid-eager", 3)]
    assert trend([]) == []
