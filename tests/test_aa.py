"""A/A floors: what a machine's own noise is, and how often the pipeline cries wolf on it."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import aa
from harness.grid import UsageError
from harness.judge import judge
from harness.store import Store
from tests.fake_sessions import check, drifting_host, session
from tests.test_judge import steady

ROWS = ("generate", "forward")


def arms(columns: tuple[str, ...] = ("vanilla-eager",), rounds: int = 6, seed: int = 0, **noise: Any) -> Store:
    """An A/A session on the drifting host, the order of arms turned from round to round."""
    plan = [list(columns * 2) if r % 2 == 0 else list(columns * 2)[::-1] for r in range(rounds)]
    host = drifting_host(seed, columns, rounds, {}, plan=plan, **noise)
    return session(host, columns=columns, rows=ROWS, rounds=rounds, plan=plan, arms=True)


def test_a_floor_is_the_95th_percentile_over_all_relabellings() -> None:
    floors = aa.measure(arms())
    (cell,) = [f for f in floors.cells if f.row == "generate"]
    d = np.log(cell.ratios)
    means = [abs(np.mean(np.array(s) * d)) for s in itertools.product((1, -1), repeat=6)]
    assert cell.rounds == len(cell.ratios) == 6
    assert math.log1p(cell.floor) == pytest.approx(np.quantile(means, 0.95), abs=1e-3)
    assert cell.spread >= cell.floor
    assert max(abs(d)) >= math.log1p(cell.spread)


def test_floors_follow_the_noise_and_the_rounds() -> None:
    quiet, noisy = (
        np.mean([aa.measure(arms(seed=s, drift=0.0, process=p, run=0.0)).cells[0].floor for s in range(12)])
        for p in (0.005, 0.03)
    )
    assert noisy / quiet == pytest.approx(6, rel=0.5)
    # Two means of 6 processes, 1.96 standard errors: .03 x sqrt(2/6) x 1.96.
    assert noisy == pytest.approx(0.034, rel=0.3)
    cell = aa.measure(arms()).cells[0]
    assert cell.at(6) == pytest.approx(cell.floor)
    assert cell.at(24) == pytest.approx(cell.floor / 2, rel=0.05)


def test_the_pipelines_own_false_alarm_rate_is_small_on_every_kind_of_host() -> None:
    for noise in ({}, {"drift": 0.0}, {"drift": 0.15, "process": 0.045}):
        rates = [aa.measure(arms(seed=s, **noise)).alarm_rate for s in range(10)]
        assert np.mean(rates) <= 0.07  # each is told to 1/32
    several = aa.measure(arms(("vanilla-eager", "tapgrid-eager"), seed=3))
    assert len(several.cells) == 4
    assert several.relabellings == 32
    assert several.alarm_rate <= several.alarms


def test_alarms_are_counted_where_there_are_some() -> None:
    """A relabelling that undoes the order turns a position effect into a difference: the rate must show it."""

    def first_is_slow(number: int, column: str, row: str, run: int) -> float:
        slow = column.endswith("/a") == (number % 2 == 0)
        return 3.0 - 0.2 * slow + 0.001 * ((7 * number + run) % 5)

    plan = [["vanilla-eager"] * 2] * 8
    store = session(first_is_slow, columns=("vanilla-eager",), rows=ROWS, rounds=8, plan=plan, arms=True)
    floors = aa.measure(store)
    assert floors.alarm_rate == pytest.approx(1 / floors.relabellings, abs=0.2)
    assert floors.alarm_rate > 0
    assert floors.alarms == pytest.approx(2 * floors.alarm_rate)


def test_being_first_in_a_round_is_looked_at() -> None:
    """Notes 2.7: the engine booted first was the slow one, whichever it was."""

    def first_is_slow(number: int, column: str, row: str, run: int) -> float:
        return 3.0 - 0.5 * column.endswith("/a") + 0.001 * number

    plan = [["vanilla-eager"] * 2] * 6
    slow = session(first_is_slow, columns=("vanilla-eager",), rows=ROWS, plan=plan, arms=True)
    cell = aa.measure(slow).cells[0]
    assert (cell.first, cell.first_p) == (pytest.approx(math.exp(-0.5) - 1), 0.03125)
    fair = aa.measure(arms(drift=0.0)).cells[0]
    assert fair.first_p > 0.05


def test_floors_become_margins_of_the_judge() -> None:
    floors = aa.measure(arms(("vanilla-eager", "tapgrid-eager"), drift=0.0, process=0.12))
    store = session(steady({"tapgrid-eager": -0.04}), columns=("vanilla", "tapgrid-eager"), rows=ROWS)
    margins = floors.margins(rounds=6)
    assert set(margins) == set(itertools.product(ROWS, ("vanilla-eager", "tapgrid-eager")))
    for cell in judge(store, floors=margins):
        if cell.column == "tapgrid-eager":
            assert cell.margin == max(0.03, margins[cell.row, cell.column])
            assert cell.verdict == "SAME"
    assert judge(store)[1].verdict == "SLOWER"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"machine": {"cpu": "b"}}, "machine"),
        ({"grid": {"model": "x"}}, "model"),
        ({"grid": {"metric": "wall"}}, "metric"),
    ],
)
def test_floors_of_elsewhere_say_so(options: dict[str, Any], said: str) -> None:
    floors = aa.measure(arms())
    assert floors.misfit(session(steady({}))) is None
    told = floors.misfit(session(steady({}), **options))
    assert told is not None
    assert f"the floors are of {said}" in told


def test_a_tainted_arm_is_left_out() -> None:
    store = arms(rounds=7)
    bad = check(2, 0, "vanilla-eager", verdict="FAIL", reason="r")
    tainted = Store(**{**vars(store), "validations": (*store.validations, bad)})
    assert {f.rounds for f in aa.measure(tainted).cells} == {6}


def test_what_is_no_aa_session_is_refused() -> None:
    with pytest.raises(UsageError, match="no process is an arm"):
        aa.measure(session(steady({})))
    with pytest.raises(UsageError, match="no cell has both arms in two rounds"):
        aa.measure(arms(rounds=1))


def test_the_judge_takes_one_arm_of_an_aa_session() -> None:
    cells = judge(arms(("vanilla", "tapgrid-eager"), rounds=6))
    assert {c.rounds for c in cells} == {6}
    assert len(cells) == 4


def test_floors_are_read_back_as_written(tmp_path: Path) -> None:
    floors = aa.measure(arms())
    assert aa.read(aa.write(floors, tmp_path / "floors.json")) == floors


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no floor file"),
        ('{"kind": "x"}', "not a floor file"),
        ("[1]", "not a floor file"),
        (json.dumps({"kind": aa.KIND, "schema": "2.0"}), "schema 2.0.*upgrade"),
    ],
)
def test_files_that_are_no_floors(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "f.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        aa.read(file)
    with pytest.raises(UsageError, match="no floor file"):
        aa.read(tmp_path / "nowhere.json")
