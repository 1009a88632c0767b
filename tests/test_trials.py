"""A hundred sessions of the simulated engine on the notes' drifting host: what is found, and what is found falsely.

The whole way: plan, runner, worker, bench, store on disk, judge. `test_stats_simulated` asks the judge alone, of more
kinds of session: four columns, and hosts of other kinds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.judge import Cell
from harness.store import Store
from tests import fake, trials

TWO = ("vanilla", "fake-a")
THREE = ("vanilla", "vanilla-eager", "fake-a")
APART = {"vanilla-eager": 0.74}
SLOWER = {"fake-a": 0.95}
SEEDS = range(100)

Judge = Callable[..., list[list[Cell]]]


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    trials.alone(monkeypatch)

    def run(
        columns: Sequence[str], rounds: int, shares: Mapping[str, float], seeds: Sequence[int] = SEEDS
    ) -> list[list[Cell]]:
        return [trials.judged(tmp_path, seed, columns, rounds, shares) for seed in seeds]

    return run


def calls(cells: Sequence[Cell], column: str) -> list[str]:
    return [c.verdict for c in cells if c.column == column]


@pytest.mark.parametrize("columns", [TWO, THREE], ids=len)
@pytest.mark.parametrize(("rounds", "least"), [(6, 80), (10, 95)], ids=["standard", "publish"])
def test_a_column_five_percent_slower_is_found(judged: Judge, columns: Sequence[str], rounds: int, least: int) -> None:
    """In every row of it: 80 of 100 at standard tier, 95 at publish."""
    sessions = judged(columns, rounds, APART | SLOWER)
    found = sum(calls(cells, "fake-a") == ["SLOWER"] * len(trials.ROWS) for cells in sessions)
    print(f"found in {found} of {len(sessions)}")
    assert found >= least
    assert not any("FASTER" in calls(cells, "fake-a") for cells in sessions)


@pytest.mark.parametrize(("columns", "rounds"), [(THREE, 6), (TWO, 10)], ids=["standard", "publish"])
def test_columns_that_differ_in_nothing_raise_no_alarm(judged: Judge, columns: Sequence[str], rounds: int) -> None:
    """At most 5 of 100 sessions with any cell called, over all rows and columns."""
    sessions = judged(columns, rounds, {}, range(1000, 1100))
    alarms = [[c.verdict for c in cells if c.verdict in ("FASTER", "SLOWER")] for cells in sessions]
    print(f"alarms in {sum(map(bool, alarms))} of {len(sessions)}")
    assert sum(map(bool, alarms)) <= 5
    assert all(c.verdict != "INVALID" for cells in sessions for c in cells)


def test_a_session_in_this_process_is_the_session_of_child_processes(
    judged: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: Callable[..., Store]
) -> None:
    """The shortcut of these trials is none: the same seeds give the same values as real workers."""
    here = trials.run(tmp_path / "a", 7, TWO, 2, SLOWER)
    monkeypatch.undo()
    there = trials.run(tmp_path / "b", 7, TWO, 2, SLOWER)
    assert [_where(r) for r in here.runs] == [_where(r) for r in there.runs]
    assert len(here.runs) == 2 * (3 * 2 + 3 * 3)  # rounds x runs: two rows of vanilla, three of fake-a
    for ours, theirs in zip(here.runs, there.runs, strict=True):
        assert ours["value_cpu"] == pytest.approx(theirs["value_cpu"], rel=1e-6)
        assert ours["validated"]
        assert theirs["validated"]


def _where(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return run["round"], run["column"], run["row"], run["run"], run["sequence"]


def test_the_host_drifts_as_the_notes_say() -> None:
    hosts = [trials.host(seed, 12) for seed in range(2000)]
    assert statistics.pstdev(h[0] for h in hosts) == pytest.approx(0.05, abs=0.004)
    assert statistics.pstdev(h[11] for h in hosts) == pytest.approx(0.05, abs=0.004)
    assert statistics.correlation([h[4] for h in hosts], [h[5] for h in hosts]) == pytest.approx(0.9, abs=0.02)
    assert trials.host(3, 12) == trials.host(3, 12) != trials.host(4, 12)


def test_a_planted_host_is_in_the_fake_engines_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = {}
    for host in (0.0, 0.5):
        monkeypatch.setenv("TAPGRID_PROCESS", "r3-1-fake-a-0")
        monkeypatch.setenv(fake.VARIABLE, f'{{"fake-a": {{"host": {{"r3-1": {host}, "r3-10": 9}}}}}}')
        pace[host] = fake.A().pace
    assert pace[0.0] / pace[0.5] == pytest.approx(2.718281828**0.5)
