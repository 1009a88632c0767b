"""Which column boots when, and how long it will take.

Every round boots every column once. The order is a Williams design: over a full cycle every column stands at every
position and follows every other column equally often, so what one engine leaves behind (memory, clocks, caches)
falls on all alike. Deterministic: the same columns give the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.costs import Costs
from harness.grid import Grid, Tier
from harness.workloads import KINDS, Row, is_plain


def williams(n: int) -> list[list[int]]:
    """Balanced orders of n things (Williams 1949): with n even n of them, with n odd their reverses too.

    A reverse comes half a cycle later, not next: six rounds find more so (measured, `stats_drift`).

    >>> williams(4)
    [[0, 1, 3, 2], [1, 2, 0, 3], [2, 3, 1, 0], [3, 0, 2, 1]]
    """
    zigzag = [0]
    for step in range(1, n):
        zigzag.append((zigzag[-1] + (step if step % 2 else -step)) % n)
    cycle = [[(z + shift) % n for z in zigzag] for shift in range(n)]
    return cycle if n % 2 == 0 or n == 1 else cycle + [order[::-1] for order in cycle]


def rounds_of(columns: Sequence[str], rounds: int) -> list[list[str]]:
    """The order of columns in each round.

    >>> rounds_of(["vanilla", "hf"], 3)
    [['vanilla', 'hf'], ['hf', 'vanilla'], ['vanilla', 'hf']]
    """
    orders = williams(len(columns))
    return [[columns[i] for i in orders[r % len(orders)]] for r in range(rounds)]


@dataclass(frozen=True)
class Plan:
    """What will be run, in order, and why so many rounds."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    rounds: tuple[tuple[str, ...], ...]
    runs: int
    seconds: float
    why: str
    budget_seconds: float | None = None
    max_rounds: int = 10

    def to_json(self) -> dict[str, Any]:
        return {
            "columns": list(self.columns),
            "rows": [r.name for r in self.rows],
            "rounds": [list(r) for r in self.rounds],
            "runs": self.runs,
            "seconds": self.seconds,
            "why": self.why,
            "budget_seconds": self.budget_seconds,
        }


def fit(budget: float, spent: float, done: int, a_round: float, most: int) -> int:
    """How many rounds in all fit the budget, when `done` of them took `spent`; never fewer than one, or than are done.

    >>> fit(budget=900, spent=250, done=1, a_round=250, most=10), fit(100, 0, 0, 250, 10)
    (3, 1)
    """
    more = math.floor((budget - spent) / a_round) if a_round > 0 else most
    return max(1, done, min(most, done + max(0, more)))


def runs_worth(boot: float, run: float, within: float, between: float, most: int = 8) -> int:
    """Runs a process that buy the most evidence for the time (Kalibera and Jones): the dearer the boot and the noisier
    the runs against the processes, the more.

    >>> runs_worth(boot=70, run=1.4, within=1.0, between=1.0), runs_worth(70, 1.4, within=1.0, between=9.0)
    (8, 3)
    """
    if min(boot, run, within) <= 0:
        return 1
    if between <= 0:
        return most
    return max(1, min(most, math.ceil(math.sqrt(boot / run * within / between))))


def make(
    grid: Grid,
    tier: Tier,
    columns: Sequence[str],
    rows: Sequence[Row],
    costs: Costs,
    *,
    rounds: int | None = None,
    runs: int | None = None,
    budget_minutes: float | None = None,
    spent: float = 0.0,
    done: int = 0,
) -> Plan:
    """The plan of a session. What is given explicitly wins over the tier; a budget only chooses what nobody fixed."""
    known = "measured" if costs.measured(columns) else "estimated"
    rounds = tier.rounds if rounds is None and budget_minutes is None else rounds
    minutes = budget_minutes if budget_minutes is not None else tier.budget_minutes
    fixed_runs = tier.runs if runs is None else runs
    budget = None
    if budget_minutes is not None and runs is None:
        fixed_runs = _worth(costs, columns, rows) or fixed_runs
    if rounds is None:
        minutes = 20.0 if minutes is None else minutes
        budget = minutes * 60
        a_round = costs.of_round(columns, rows, fixed_runs)
        if runs is None and done == 0 and budget < a_round:
            fixed_runs = 1  # one thin round beats none
            a_round = costs.of_round(columns, rows, 1)
        rounds = fit(budget, spent, done, a_round, tier.max_rounds)
        why = (
            f"{rounds} of at most {tier.max_rounds} rounds fit {minutes:g} minutes, at {known} {a_round:.0f} s a round"
        )
    else:
        why = f"tier {tier.name}: {rounds} rounds" if rounds == tier.rounds else f"{rounds} rounds, as asked"
    order = tuple(tuple(r) for r in rounds_of(columns, rounds))
    seconds = rounds * costs.of_round(columns, rows, fixed_runs)
    return Plan(tuple(columns), tuple(rows), order, fixed_runs, seconds, why, budget, tier.max_rounds)


def _worth(costs: Costs, columns: Sequence[str], rows: Sequence[Row]) -> int | None:
    """Runs a process that the measured costs and variances call for; None where they were not measured."""
    if costs.within is None or costs.between is None or not costs.measured(columns):
        return None
    boot = sum(costs.of_boot(c) for c in columns)
    run = sum(costs.of_row(c, r, 1) / 2 for c in columns for r in rows)
    return runs_worth(boot, run, costs.within, costs.between)


def show(plan: Plan, grid: Grid, costs: Costs) -> str:
    """The plan in words, for a dry run."""
    lines = [
        f"grid {grid.name} on {grid.model}: {len(plan.rows)} rows x {len(plan.columns)} columns, "
        f"{plan.runs} runs a process",
        plan.why,
        "",
    ]
    wide = max(len(c) for c in plan.columns)
    lines += [f"round {i + 1:>2}:  {'  '.join(c.ljust(wide) for c in r)}".rstrip() for i, r in enumerate(plan.rounds)]
    lines += ["", f"rows: {', '.join(r.name for r in plan.rows)}"]
    for column in filter(is_plain, plan.columns):
        refused = [r.name for r in plan.rows if KINDS[r.name].plain != r.name]
        if refused:
            lines.append(f"{column} has nothing attached and refuses: {', '.join(refused)}")
    known = (
        "measured by earlier sessions" if costs.measured(plan.columns) else "estimated; nothing was measured here yet"
    )
    lines += ["", f"time: about {duration(plan.seconds)} ({known})"]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(42), duration(700), duration(7800)
    ('42 s', '12 min', '2 h 10 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
