"""The gate: joined by key, compared by share, and never green with nothing judged."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import baseline, stats
from harness.compare import STATUSES, least_p
from harness.gate import ALLOW, Change, Gate, GateResult, compare, gate, gate_from, parse_gate, to_json, to_markdown
from harness.grid import UsageError
from harness.judge import judge
from harness.store import Store, write
from tests.fake_sessions import check, session
from tests.test_judge import steady

ROWS = ("generate", "steer", "forward")
COLUMNS = ("vanilla", "tapgrid-eager", "nnsight-eager")


def made(seed: int = 0, effects: dict[str, float] | None = None, noise: float = 0.004, **options: Any) -> Store:
    return session(
        steady({"tapgrid-eager": -0.1, "nnsight-eager": -0.3} | (effects or {}), noise, seed),
        **{"columns": COLUMNS, "rows": ROWS} | options,
    )


def status(result: GateResult, column: str = "tapgrid-eager", row: str = "generate") -> str:
    return change(result, column, row).status


def change(result: GateResult, column: str = "tapgrid-eager", row: str = "generate") -> Change:
    assert result.comparison is not None
    return next(c for c in result.comparison.changes if (c.key.row, c.key.column) == (row, column))


# ---------------------------------------------------------------------------------------------- what it decides


def test_the_same_twice_passes() -> None:
    result = gate(made(1), made(2), Gate(0.03), strict=True)
    assert (result.exit_code, result.messages) == (0, ())
    assert status(result) == "same"
    assert status(result, "vanilla") == "reference"


def test_a_regression_fails_and_the_others_do_not() -> None:
    result = gate(made(1), made(2, {"tapgrid-eager": -0.2}))
    assert result.exit_code == 1
    assert (status(result), status(result, "nnsight-eager")) == ("slower", "same")
    found = change(result)
    assert found.change == pytest.approx(math.exp(-0.1) - 1, abs=0.01)
    assert found.low < found.change < found.high < 0  # type: ignore[operator]
    assert found.p_adjusted >= found.p > 0  # type: ignore[operator]
    assert any("generate / tapgrid-eager" in m and "-9." in m for m in result.messages)


def test_an_improvement_is_told_and_passes() -> None:
    """conbench #330: improvements are results too."""
    result = gate(made(1), made(2, {"nnsight-eager": -0.1}), strict=True)
    assert (result.exit_code, status(result, "nnsight-eager")) == (0, "faster")


def test_a_slower_day_is_no_regression() -> None:
    """Shares of the same session's plain engine are compared, and not rates."""
    slow_day = session(
        lambda n, c, r, run: steady({"tapgrid-eager": -0.1, "nnsight-eager": -0.3}, 0.004, 7)(n, c, r, run) - 0.9,
        columns=COLUMNS,
        rows=ROWS,
    )
    assert judge(slow_day)[1].value < 0.5 * judge(made(1))[1].value  # type: ignore[operator]
    assert gate(made(1), slow_day, Gate(0.05)).exit_code == 0


def test_limits_of_single_cells() -> None:
    slower = made(2, {"tapgrid-eager": -0.2})
    assert gate(made(1), slower, parse_gate("slower:3%,slower:15%@*/tapgrid-eager")).exit_code == 0
    one = gate(made(1), slower, parse_gate("slower:15%, slower:3%@steer"))
    assert (one.exit_code, status(one), status(one, row="steer")) == (1, "same", "slower")


def test_inconclusive_passes_unless_strict() -> None:
    noisy, other = made(1, noise=0.15), made(2, noise=0.15)
    tested = [c for c in compare(noisy, other).changes if c.p is not None]
    assert all(c.p_adjusted >= c.p for c in tested)  # type: ignore[operator]
    assert any(c.p_adjusted > c.p for c in tested)  # type: ignore[operator]
    assert status(gate(noisy, other)) == "inconclusive"
    assert (gate(noisy, other).exit_code, gate(noisy, other, strict=True).exit_code) == (0, 3)


def test_a_failed_validation_fails_whatever_the_speed() -> None:
    wrong = made(2, {"tapgrid-eager": 1.0}, extra=[check(0, 1, "tapgrid-eager", verdict="FAIL", reason="ratio 40")])
    result = gate(made(1), wrong)
    assert (result.exit_code, status(result)) == (1, "invalid")
    assert any("ratio 40" in m for m in result.messages)


# ---------------------------------------------------------------------------------------- never a pass by absence


def without(column: str = "tapgrid-eager", row: str = "generate", **options: Any) -> Store:
    return made(2, drop=lambda x: x["kind"] == "run" and x["column"] == column and x["row"] == row, **options)


def test_a_vanished_cell_is_no_pass() -> None:
    """developerz-ai/wurk #68 and others: pytest-benchmark loops over what is there now."""
    for after in (without(), made(2, columns=COLUMNS[:1] + COLUMNS[2:]), made(2, rows=ROWS[1:])):
        result = gate(made(1), after)
        assert (result.exit_code, status(result)) == (3, "vanished")
        assert gate(made(1), after, allow=["vanished"]).exit_code == 0


def test_a_vanished_plain_cell_or_one_without_a_share_is_no_pass_either() -> None:
    rows = (*ROWS, "gradient")
    before = made(1, rows=rows)
    assert status(gate(before, made(2, rows=rows)), row="gradient") == "no-share"
    gone = gate(before, made(2))
    assert (gone.exit_code, status(gone, row="gradient")) == (3, "vanished")


def test_what_was_never_measured_is_not_missed() -> None:
    result = gate(without(), without())
    assert (result.exit_code, status(result)) == (0, "unsupported")


def test_a_new_cell_is_listed_and_only_strict_minds() -> None:
    grown = gate(made(1, rows=ROWS[:2]), made(2))
    assert (grown.exit_code, status(grown, row="forward")) == (0, "new")
    assert gate(made(1, rows=ROWS[:2]), made(2), strict=True).exit_code == 3


def test_no_baseline_is_told_apart_from_a_regression() -> None:
    """Case 84: the first run."""
    first = gate(None, made(1))
    assert first.exit_code == 3
    assert "no baseline" in first.messages[0]
    assert gate(None, made(1), allow=["missing-baseline"]).exit_code == 0
    wrong = made(1, extra=[check(0, 1, "tapgrid-eager", verdict="FAIL", reason="r")])
    assert gate(None, wrong, allow=["missing-baseline"]).exit_code == 1


def test_a_baseline_that_was_invalid_is_none() -> None:
    bad = made(1, extra=[check(0, 1, "tapgrid-eager", verdict="FAIL", reason="r")])
    result = gate(bad, made(2))
    assert (result.exit_code, status(result)) == (3, "no-baseline")
    assert gate(bad, made(2), allow=["missing-baseline"]).exit_code == 0
    lost = gate(without(), made(2))
    assert (lost.exit_code, status(lost)) == (3, "no-baseline")


@pytest.mark.parametrize("after", [made(2, drop=lambda line: True), made(2, grid={"name": "other"})])
def test_nothing_compared_is_never_zero(after: Store) -> None:
    result = gate(made(1), after, allow=ALLOW)
    assert result.exit_code == 3
    assert "no cell could be compared: nothing was judged" in result.messages


@pytest.mark.parametrize(("before", "after"), [(3, 3), (1, 9), (2, 6)])
def test_too_few_rounds_cannot_pass_by_showing_nothing(before: int, after: int) -> None:
    result = gate(made(1, rounds=before), made(2, {"tapgrid-eager": -3.0}, rounds=after))
    if least_p(before, after) < 0.05 and min(before, after) > 1:
        assert result.exit_code == 1
    else:
        assert (result.exit_code, status(result)) == (3, "too-few")
        assert "4 against 4 would" in change(result).reason


@pytest.mark.parametrize(("n", "m"), [(4, 4), (2, 6), (3, 5)])
def test_least_p_is_what_the_permutation_test_reaches(n: int, m: int) -> None:
    a, b = np.arange(n)[:, None] / 1000, 5 + np.arange(m)[:, None] / 1000
    assert stats.max_t_permutation(a, b)[0] == pytest.approx(least_p(n, m))


# ------------------------------------------------------------------------------------- compared with its like only


def test_cells_are_joined_by_key_and_never_by_position() -> None:
    """Case 79: models and rows in another order, one missing."""
    shuffled = made(2, {"tapgrid-eager": -0.1}, columns=COLUMNS[::-1], rows=ROWS[::-1])
    result = gate(made(1), shuffled, strict=True)
    assert result.exit_code == 0
    assert change(result, "nnsight-eager").before == pytest.approx(math.exp(-0.3), abs=0.01)
    other = gate(made(1), made(2, grid={"model": "other"}))
    assert other.comparison is not None
    assert {c.status for c in other.comparison.changes if c.key.model == "m"} == {"vanished", "unsupported"}
    assert {c.status for c in other.comparison.changes if c.key.model == "other"} == {"new", "unsupported"}


def test_another_machine_cannot_be_judged() -> None:
    """Case 84: no error and no regression, but no pass."""
    result = gate(made(1), made(2, {"tapgrid-eager": -0.4}, machine={"cpu": "b"}))
    assert result.exit_code == 3
    assert "cpu a then, b now" in result.messages[0]
    allowed = gate(made(1), made(2, {"tapgrid-eager": -0.4}, machine={"cpu": "b"}), allow=["other-machine"])
    assert allowed.exit_code == 1
    assert gate(made(1), made(2, machine={"load": 9.0, "git_commit": "x"})).exit_code == 0


def with_process(store: Store, column: str, **groups: Any) -> Store:
    processes = tuple(
        dict(p) | {g: dict(p[g]) | v for g, v in groups.items()} if p["column"] == column else p
        for p in store.processes
    )
    return dataclasses.replace(store, processes=processes)


@pytest.mark.parametrize(
    ("column", "groups", "said"),
    [
        ("tapgrid-eager", {"env": {"VLLM_X": "1"}}, "env.VLLM_X was not set, is 1"),
        ("tapgrid-eager", {"settings": {"enforce_eager": True}}, "settings.enforce_eager was not set, is true"),
        ("tapgrid-eager", {"packages": {"torch": "3"}}, "packages.torch was 2, is 3"),
        ("vanilla", {"settings": {"dtype": "float32"}}, "vanilla: settings.dtype was bfloat16, is float32"),
    ],
)
def test_other_settings_are_marked_and_not_compared(column: str, groups: dict[str, Any], said: str) -> None:
    """Case 78: a regression claim withdrawn, one arm had another environment flag."""
    result = gate(made(1), with_process(made(2, {"tapgrid-eager": -0.4}), column, **groups))
    assert (result.exit_code, status(result)) == (3, "incomparable")
    assert said in change(result).reason
    allowed = gate(made(1), with_process(made(2, {"tapgrid-eager": -0.4}), column, **groups), allow=["other-settings"])
    assert (allowed.exit_code, status(allowed)) == (1, "slower")


@pytest.mark.parametrize(
    "groups",
    [
        {"packages": {"tapgrid": "9"}},
        {"packages": {"nnsight": "9"}},
        {"settings": {"model": "/elsewhere/model"}},
        {"env": {"TAPGRID_PROCESS": "r1"}},
    ],
)
def test_what_is_under_test_or_only_a_place_may_differ(groups: dict[str, Any]) -> None:
    assert gate(made(1), with_process(made(2), "tapgrid-eager", **groups), strict=True).exit_code == 0


def test_another_row_shape_metric_or_model_is_another_measurement() -> None:
    spec = {r: {"new_tokens": 32, "requests": 1, "prompt_tokens": 512} for r in ROWS}
    assert status(gate(made(1), made(2, grid={"rows": spec}))) == "incomparable"
    assert status(gate(made(1), made(2, grid={"metric": "wall"}))) == "incomparable"
    weights = made(2)
    other = dataclasses.replace(weights, session={**weights.session, "model_hash": "z"})
    assert "model_hash" in change(gate(made(1), other)).reason


# -------------------------------------------------------------------------------------------- confirmed afresh


def test_a_regression_has_to_show_again_in_fresh_rounds() -> None:
    before, after = made(1), made(2, {"tapgrid-eager": -0.2})
    again = gate(before, after, fresh=made(3, {"tapgrid-eager": -0.2}, rounds=1))
    assert (again.exit_code, "confirmed" in change(again).reason) == (1, True)
    gone = gate(before, after, fresh=made(3, rounds=1))
    assert (gone.exit_code, status(gone)) == (0, "unconfirmed")
    assert gate(before, after, fresh=made(3, rounds=1), strict=True).exit_code == 3
    unmeasured = gate(before, after, fresh=made(3, rounds=1, columns=COLUMNS[::2]))
    assert (unmeasured.exit_code, status(unmeasured)) == (1, "slower")


# ------------------------------------------------------------------------------------------------------ words


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("slower:3%", Gate(0.03)),
        ("slower: 2.5 %", Gate(0.025)),
        ("slower:0.05", Gate(0.05)),
        ("slower:8%@capture-*", Gate(0.03, (("capture-*", 0.08),))),
        ("slower:5%,slower:8%@steer/hf", Gate(0.05, (("steer/hf", 0.08),))),
    ],
)
def test_a_gate_in_words(text: str, rule: Gate) -> None:
    assert parse_gate(text.replace(" %", "%")) == rule


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not of the form"),
        ("3%", "not of the form"),
        ("faster:3%", "no rule 'faster'"),
        ("slower:x%", "'x%' is not a number"),
        ("slower:300%", "between 0 and 100"),
        ("slower:3", "3 % is written 3%"),
        ("slower:-1%", "between 0"),
        ("slower:nan", "between 0"),
        ("slower:3%,slower:4%", "twice"),
    ],
)
def test_words_that_make_no_sense_are_a_usage_error(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_gate(text)


def test_limits_from_a_grid_file() -> None:
    rule = gate_from({"slower": "5%", "limits": {"capture-*": "8%", "steer/hf": 0.2}}, parse_gate("slower:1%@lens"))
    assert [rule.limit(*at) for at in (("lens", "hf"), ("capture-1", "hf"), ("steer", "hf"), ("steer", "x"))] == [
        0.01, 0.08, 0.2, 0.05,
    ]  # fmt: skip
    with pytest.raises(UsageError, match="'slowr'"):
        gate_from({"slowr": 1})
    with pytest.raises(UsageError, match="'everything'"):
        gate(made(1), made(2), allow=["everything"])


# ------------------------------------------------------------------------------------------------- told to people


def test_every_cell_is_listed_the_largest_change_first() -> None:
    """vllm-xpu-kernels #568: the first fifty by alphabet."""
    result = gate(made(1), made(2, {"nnsight-eager": 0.2, "tapgrid-eager": -0.2}))
    assert result.comparison is not None
    changes = result.comparison.changes
    assert len(changes) == len(ROWS) * len(COLUMNS) == sum(result.comparison.counts().values())
    sizes = [abs(math.log1p(c.change)) for c in changes if c.change is not None]
    assert sizes == sorted(sizes, reverse=True)
    assert all(c.change is None for c in changes[len(sizes) :])
    assert all(c.status in STATUSES and c.reason for c in changes)


def test_markdown_for_a_pull_request() -> None:
    text = to_markdown(gate(made(1), made(2, {"nnsight-eager": -0.1, "tapgrid-eager": -0.2})))
    assert text.startswith("### tapgrid gate: Fail\n")
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert len({line.count("|") for line in table}) == 1
    assert sum("**slower**" in line for line in table) == sum("| faster |" in line for line in table) == 3
    assert "same" in to_markdown(gate(made(1), made(2)), unchanged=True)
    assert to_markdown(gate(None, made(1))).startswith("### tapgrid gate: Cannot judge")


def test_markdown_takes_names_literally() -> None:
    """Case 82: <img src=x onerror=1> as a name."""
    evil = "<img src=x onerror=1>|`x`"
    text = to_markdown(gate(made(1, columns=("vanilla", evil)), made(2, columns=("vanilla",))))
    assert "<img" not in text
    rows = [line for line in text.splitlines() if "img" in line and line.startswith("|")]
    assert rows
    assert all(line.count("|") == 4 for line in rows)


def test_results_are_strict_json() -> None:
    for result in (gate(made(1), made(2, {"tapgrid-eager": -0.2})), gate(None, made(1)), gate(without(), made(2))):
        data = json.loads(json.dumps(to_json(result), allow_nan=False))
        assert data["exit_code"] == result.exit_code
        assert sum(data["counts"].values()) == len(data["cells"])


# ------------------------------------------------------------------------------------------------ baseline files


def test_an_exported_baseline_judges_as_its_store_does(tmp_path: Path) -> None:
    before, after = made(1), made(2, {"tapgrid-eager": -0.2})
    file = tmp_path / "baseline.json"
    file.write_text(json.dumps(baseline.export(before), allow_nan=False))
    by_file, by_store = gate(baseline.load(file), after), gate(before, after)
    assert by_file.comparison is not None
    assert by_store.comparison is not None
    assert by_file.comparison.changes == by_store.comparison.changes
    assert by_file.exit_code == 1
    lines = [*before.processes, *before.validations, *before.refusals, *before.runs]
    on_disk = baseline.load(write(tmp_path / "store.jsonl", [before.session, *lines]))
    assert compare(on_disk, after).changes == by_store.comparison.changes


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "no baseline"), ("[]", "not a baseline file"), ('{"kind": "tapgrid-baseline", "schema": "9.0"}', "upgrade")],
)
def test_files_that_are_no_baseline(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        baseline.load(file)


def test_a_baseline_of_a_newer_minor_is_read(tmp_path: Path) -> None:
    data = baseline.export(made(1)) | {"schema": "1.7", "news": 1}
    data["cells"] = [c | {"unheard_of": 1} for c in data["cells"]]
    (tmp_path / "b.json").write_text(json.dumps(data))
    assert gate(baseline.load(tmp_path / "b.json"), made(2)).exit_code == 0


# ----------------------------------------------------------------------------------------------- its own error


def test_the_gates_false_alarm_rate_and_power() -> None:
    """60 gates of 6 cells on a noisy machine: at most alpha of them alarm without cause, most see 15 %."""

    def noisy(seed: int, effect: float) -> Store:
        return made(seed, {"tapgrid-eager": -0.1 + effect}, noise=0.1)

    alarms = sum(gate(noisy(2 * s, 0), noisy(2 * s + 1, 0)).exit_code for s in range(60))
    assert alarms <= 6
    seen = [status(gate(noisy(2 * s, 0), noisy(2 * s + 1, -0.25))) == "slower" for s in range(20)]
    assert sum(seen) >= 16
