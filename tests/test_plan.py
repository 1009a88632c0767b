"""Plans: balanced, deterministic, and as long as they say."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from harness import costs as kept
from harness import plan
from harness.costs import Costs
from harness.grid import Tier, load
from harness.plan import fit, rounds_of, runs_worth, williams
from harness.store import Store

GRID = load("smollm2")
ROWS = GRID.rows
COLUMNS = GRID.columns


@pytest.mark.parametrize("n", range(1, 10))
def test_a_full_cycle_is_balanced_in_position_and_in_succession(n: int) -> None:
    orders = williams(n)
    assert all(sorted(o) == list(range(n)) for o in orders)
    places = Counter((i, c) for o in orders for i, c in enumerate(o))
    assert len(places) == n * n
    assert len(set(places.values())) == 1
    follows = Counter(pair for o in orders for pair in pairwise(o))
    assert len(follows) == n * (n - 1)
    assert len(set(follows.values())) <= 1


@pytest.mark.parametrize("n", range(2, 10))
def test_an_order_and_its_reverse_cancel_a_drift_within_the_round(n: int) -> None:
    orders = williams(n)
    for i, order in enumerate(orders[: len(orders) // 2]):
        mirror = orders[i + len(orders) // 2]
        assert [order.index(c) + mirror.index(c) for c in range(n)] == [n - 1] * n


def test_rounds_are_deterministic_and_hold_every_column_once() -> None:
    rounds = rounds_of(COLUMNS, 10)
    assert rounds == rounds_of(list(COLUMNS), 10)
    assert len(rounds) == 10
    assert all(sorted(r) == sorted(COLUMNS) for r in rounds)
    assert rounds[:3] == rounds_of(COLUMNS, 3)  # more rounds only append


@pytest.mark.parametrize(
    ("budget", "spent", "done", "a_round", "most", "wanted"),
    [
        (600, 0, 0, 100, 10, 6),
        (600, 0, 0, 100, 3, 3),
        (50, 0, 0, 100, 3, 1),
        (600, 400, 1, 100, 10, 3),
        (600, 900, 2, 100, 10, 2),
        (600, 0, 0, 0, 4, 4),
    ],
)
def test_a_budget_buys_whole_rounds(
    budget: float, spent: float, done: int, a_round: float, most: int, wanted: int
) -> None:
    assert fit(budget, spent, done, a_round, most) == wanted


def test_runs_follow_boot_cost_and_variance() -> None:
    assert runs_worth(70, 1.4, 1, 1) == 8
    assert runs_worth(70, 1.4, 1, 9) == 3
    assert runs_worth(1, 10, 1, 1) == 1
    assert runs_worth(70, 1.4, 1, 0) == 8
    assert runs_worth(70, 1.4, 0, 1) == 1


def make(tier: str | Tier, costs: Costs | None = None, **more: object) -> plan.Plan:
    chosen = tier if isinstance(tier, Tier) else GRID.tiers[tier]
    return plan.make(GRID, chosen, COLUMNS, ROWS, costs or Costs(), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "rounds", "runs"), [("quick", 3, 2), ("standard", 6, 3), ("publish", 10, 3)])
def test_tiers(name: str, rounds: int, runs: int) -> None:
    made = make(name)
    assert (len(made.rounds), made.runs, made.budget_seconds) == (rounds, runs, None)
    assert f"tier {name}: {rounds} rounds" in made.why


def test_what_is_asked_for_wins_over_the_tier() -> None:
    assert len(make("publish", rounds=2).rounds) == 2
    assert make("publish", runs=5).runs == 5
    assert make("publish", rounds=2, runs=1).why == "2 rounds, as asked"


def measured(boot: float, row: float) -> Costs:
    return Costs(
        dict.fromkeys(COLUMNS, boot), dict.fromkeys(COLUMNS, 0.0), {c: {r.name: row for r in ROWS} for c in COLUMNS}
    )


def test_a_budget_tier_chooses_rounds_from_what_was_measured() -> None:
    costs = measured(boot=17, row=1)  # 20 s a boot with closing, 13 rows of 3 runs: 59 s a column, 354 s a round
    assert costs.of_round(COLUMNS, ROWS, 2) == pytest.approx(6 * (20 + 39))
    made = make("first", costs)  # 960 s
    assert len(made.rounds) == 2
    assert made.budget_seconds == 960
    assert "measured 354 s a round" in made.why
    assert len(make("first", measured(1, 0.1)).rounds) == 3  # never more than max_rounds
    assert len(make("first", costs, budget_minutes=30).rounds) == 3
    assert len(make("first", costs, spent=800, done=1).rounds) == 1


def test_a_budget_too_small_for_one_round_thins_it_and_says_one() -> None:
    made = make("first", measured(boot=100, row=10))
    assert (len(made.rounds), made.runs) == (1, 1)
    assert make("first", measured(boot=100, row=10), runs=2).runs == 2


def test_without_measurements_the_estimates_serve_and_are_called_so() -> None:
    made = make("first")
    assert "estimated" in made.why
    assert made.seconds > 60
    text = plan.show(made, GRID, Costs())
    assert "nothing was measured here yet" in text
    assert "vanilla has nothing attached and refuses: capture-1" in text
    assert text.count("\nround ") == len(made.rounds)
    assert "sweep-installed" in text


def test_costs_are_learnt_kept_and_replaced_whole(tmp_path: Path) -> None:
    store = Store(
        tmp_path,
        {},
        processes=({"column": "hf", "boot_wall_seconds": 4.0}, {"column": "hf", "boot_wall_seconds": 6.0}),
        process_ends=(
            {"column": "hf", "seconds": {"validate": 2.0, "rows": {"steer": 1.5}}},
            {"column": "hf", "seconds": {}},
        ),
    )
    costs = kept.costs_of(store, Costs(boot={"vanilla": 9.0}, rows={"hf": {"lens": 7.0}}))
    assert costs.boot == {"vanilla": 9.0, "hf": 5.0}
    assert costs.validate == {"hf": 2.0}
    assert costs.rows == {"hf": {"lens": 7.0, "steer": 1.5}}
    kept.save_costs(tmp_path, "a", costs)
    kept.save_costs(tmp_path, "b", Costs())
    assert kept.load_costs(tmp_path, "a") == costs
    assert kept.load_costs(tmp_path, "none") == Costs()
    (tmp_path / kept.COSTS).write_text("{torn")
    assert kept.load_costs(tmp_path, "a") == Costs()
    kept.save_costs(tmp_path, "a", costs)
    assert kept.load_costs(tmp_path, "a") == costs


def test_a_plan_is_json() -> None:
    made = make("quick").to_json()
    assert made["columns"] == list(COLUMNS)
    assert len(made["rounds"]) == 3
    assert made["seconds"] > 0


def scattered(within: float, between: float) -> list[dict[str, object]]:
    """Runs of four processes of two cells whose log values scatter exactly so much."""
    runs = []
    for row in ("generate", "steer"):
        for p, offset in enumerate((-1, -1, 1, 1)):
            for sign in (-1, 1):
                # Two runs at +-d have variance 2 d^2; four means at +-m have variance 4 m^2 / 3.
                log = 3 + offset * (0.75 * between) ** 0.5 + sign * (within / 2) ** 0.5
                runs.append({"row": row, "column": "hf", "process": f"p{p}", "value_cpu": 2.718281828459045**log})
    return runs


def test_variances_within_and_between_processes_are_told_apart() -> None:
    within, between = kept.variances(scattered(0.0004, 0.01), "cpu")
    assert within == pytest.approx(0.0004)
    assert between == pytest.approx(0.01 - 0.0004 / 2)  # a mean of two runs carries half of their variance
    assert kept.variances(scattered(0.0004, 0.01), "wall") == (None, None)
    assert kept.variances(scattered(0.0004, 0.01)[:2], "cpu") == (pytest.approx(0.0004), None)


def test_a_budget_asked_for_chooses_runs_from_the_variances() -> None:
    from dataclasses import replace

    costs = replace(measured(boot=77, row=0.1), within=0.01, between=0.01)
    assert make("standard", costs, budget_minutes=60).runs == 8  # sqrt(80 / 1.3) runs, at most 8
    assert make("standard", replace(costs, between=0.1), budget_minutes=60).runs == 3
    assert make("standard", costs, budget_minutes=60, runs=2).runs == 2
    assert make("standard", costs).runs == 3  # a tier's runs are the tier's
    assert make("standard", replace(costs, within=None), budget_minutes=60).runs == 3
