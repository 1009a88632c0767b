"""Verdicts: which one, why, and that nothing is claimed that the evidence does not hold."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from harness import evidence, stats
from harness.evidence import against, gather, plain_row
from harness.judge import VERDICTS, Cell, counts, judge, to_json
from harness.store import Store, read, write
from harness.workloads import KINDS
from tests.fake_sessions import Line, Speed, check, drifting_host, session

KEYS = {
    "grid", "row", "column", "verdict", "reason", "value", "unit", "metric", "share_vanilla", "share_eager", "low",
    "high", "rounds", "p", "p_adjusted", "validated",
}  # fmt: skip
COLUMNS = ("vanilla", "vanilla-eager", "tapgrid-eager", "hf", "tapgrid-hf")


def steady(effects: Mapping[str, float], noise: float = 0.002, seed: int = 0) -> Speed:
    """A quiet host."""
    rng = np.random.default_rng(seed)
    table: dict[Any, float] = {}

    def speed(number: int, column: str, row: str, run: int) -> float:
        return 3 + effects.get(column, 0.0) + table.setdefault((number, column, row, run), rng.normal(0, noise))

    return speed


def cell(store: Store, column: str = "tapgrid-eager", row: str = "generate", **options: Any) -> Cell:
    return next(c for c in judge(store, **options) if (c.column, c.row) == (column, row))


# ------------------------------------------------------------------------------------------------ the verdicts


@pytest.mark.parametrize(("effect", "verdict"), [(-0.2, "SLOWER"), (0.2, "FASTER"), (0.0, "SAME"), (-0.01, "SAME")])
@pytest.mark.parametrize("row", ["generate", "forward"])
def test_a_quiet_host_tells_them_apart_in_either_unit(effect: float, verdict: str, row: str) -> None:
    found = cell(session(steady({"tapgrid-eager": effect}), rows=(row,)), row=row)
    assert found.verdict == verdict
    assert found.share_vanilla == pytest.approx(math.exp(effect), abs=0.01)
    assert found.low is not None
    assert found.high is not None
    assert found.low - 0.002 < math.exp(effect) < found.high + 0.002
    assert found.validated
    assert found.unit == KINDS[row].unit


def test_any_column_can_be_what_the_others_are_judged_against() -> None:
    store = session(
        steady({"tapgrid-eager": 0.2, "tapgrid-hf": 0.1, "hf": -0.4}), columns=COLUMNS, rows=("generate", "capture-1")
    )
    found = {(c.row, c.column): c for c in judge(store, against="tapgrid-eager")}
    assert {c.against for c in found.values()} == {"tapgrid-eager"}
    assert found["capture-1", "tapgrid-eager"].verdict == "REFERENCE"
    theirs = found["capture-1", "tapgrid-hf"]
    assert theirs.verdict == "SLOWER"
    assert theirs.share == pytest.approx(math.exp(-0.1), abs=0.01)
    assert theirs.reason.startswith("-9.")
    assert "against tapgrid-eager" in theirs.reason
    assert theirs.low is not None
    assert theirs.low < math.exp(-0.1)
    # A plain engine has no capture-1 of its own, and its generate is compared with this column's.
    assert found["capture-1", "vanilla"].verdict in ("UNSUPPORTED", "MISSING")
    assert found["generate", "vanilla"].share == pytest.approx(math.exp(-0.2), abs=0.01)
    assert found["generate", "hf"].verdict == "SLOWER"


def test_the_margin_is_the_largest_of_the_grids_its_own_and_its_references() -> None:
    store = session(steady({}), columns=COLUMNS, rows=("generate", "capture-1"))

    def margin(row: str, **floors: float) -> float | None:
        given = {
            ("generate", "vanilla"): floors.get("theirs", 0.0),
            ("capture-1", "tapgrid-eager"): floors.get("own", 0.0),
        }
        return cell(store, row=row, floors=given).margin

    assert margin("capture-1") == 0.03
    assert margin("capture-1", theirs=0.09) == margin("generate", theirs=0.09) == 0.09  # plain engines run `generate`
    assert margin("capture-1", theirs=0.05, own=0.07) == 0.07
    assert margin("generate", own=0.07) == 0.03


def test_a_row_without_a_plain_engine_is_judged_against_a_column_that_has_it() -> None:
    store = session(steady({"tapgrid-hf": 0.3}), columns=("hf", "tapgrid-hf", "nnsight-hf"), rows=("gradient",))
    assert cell(store, "tapgrid-hf", "gradient").verdict == "UNCLEAR"
    found = cell(store, "tapgrid-hf", "gradient", against="nnsight-hf")
    assert (found.verdict, found.against) == ("FASTER", "nnsight-hf")


def test_seconds_are_turned_so_that_a_share_above_one_is_faster() -> None:
    found = cell(session(steady({"tapgrid-eager": 0.2}), rows=("forward",)), row="forward")
    plain = cell(session(steady({"tapgrid-eager": 0.2}), rows=("forward",)), column="vanilla", row="forward")
    assert found.value < plain.value  # type: ignore[operator]
    assert found.share_vanilla == pytest.approx(plain.value / found.value, rel=1e-6)  # type: ignore[operator]


def test_every_cell_has_one_verdict_and_the_counts_add_up() -> None:
    """Case 108: no state is hidden."""
    rows = ("generate", "capture-1", "forward", "gradient")
    cells = judge(session(steady({}), columns=COLUMNS, rows=rows))
    assert len(cells) == len(rows) * len(COLUMNS)
    assert [(c.row, c.column) for c in cells] == [(r, c) for r in rows for c in COLUMNS]
    told = counts(cells)
    assert list(told) == list(VERDICTS)
    assert sum(told.values()) == len(cells)
    assert all(c.reason for c in cells)


def test_rows_come_in_canonical_order_whatever_the_session_says() -> None:
    cells = judge(session(steady({}), rows=("forward", "steer", "generate")))
    assert list(dict.fromkeys(c.row for c in cells)) == ["generate", "steer", "forward"]


def test_each_engine_is_read_against_its_own_plain_column() -> None:
    cells = judge(session(steady({"hf": -1.0, "tapgrid-hf": -1.2}), columns=COLUMNS))
    by = {c.column: c for c in cells}
    assert (by["vanilla"].verdict, by["hf"].verdict) == ("REFERENCE", "REFERENCE")
    assert by["tapgrid-hf"].against == "hf"
    assert by["tapgrid-hf"].share == pytest.approx(math.exp(-0.2), abs=0.01)
    assert by["tapgrid-hf"].share_hf == by["tapgrid-hf"].share
    assert by["tapgrid-hf"].share_vanilla == pytest.approx(math.exp(-1.2), abs=0.01)
    assert by["tapgrid-eager"].share_eager == pytest.approx(1, abs=0.01)
    assert by["vanilla-eager"].verdict == "SAME"


@pytest.mark.parametrize(
    ("column", "columns", "plain"),
    [
        ("nnsight-hf", COLUMNS, "hf"),
        ("tapgrid-hf-taps", COLUMNS, "hf"),
        ("tapgrid-sharded-taps", COLUMNS, "vanilla"),
        ("vllm-lens", ("vanilla-eager", "vllm-lens"), "vanilla-eager"),
        ("nnsight-hf", ("vanilla",), None),
    ],
)
def test_against(column: str, columns: tuple[str, ...], plain: str | None) -> None:
    assert against(column, columns) == plain


def test_an_attached_row_is_read_against_the_plain_row_of_its_shape() -> None:
    assert [plain_row(r) for r in ("steer", "capture-1-x32", "sweep-installed", "gradient")] == [
        "generate", "generate-x32", "sweep", None,
    ]  # fmt: skip
    found = cell(session(steady({"tapgrid-eager": -0.3}), rows=("generate", "capture-1")), row="capture-1")
    assert (found.verdict, found.share) == ("SLOWER", pytest.approx(math.exp(-0.3), abs=0.01))
    alone = cell(session(steady({}), rows=("capture-1",)), row="capture-1")
    assert (alone.verdict, alone.share) == ("UNCLEAR", None)
    assert "no round has a valid vanilla" in alone.reason


def test_a_row_without_a_plain_counterpart_has_a_value_and_no_verdict() -> None:
    found = cell(session(steady({}), rows=("gradient",)), row="gradient")
    assert (found.verdict, found.p, found.p_adjusted) == ("UNCLEAR", None, None)
    assert found.value is not None
    assert "no plain engine" in found.reason
    orphan = cell(session(steady({}), columns=("vanilla", "nnsight-hf")), column="nnsight-hf")
    assert "no plain column of its engine" in orphan.reason


# --------------------------------------------------------------------------------------------- too little, too noisy


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_too_few_rounds_claim_nothing_however_large_the_difference(rounds: int) -> None:
    """Case 73: 3 rounds can never be bold."""
    found = cell(session(steady({"tapgrid-eager": -2.0}), rounds=rounds))
    assert found.verdict == "UNCLEAR"
    assert f"{rounds} round" in found.reason
    assert "6 would" in found.reason
    assert found.p == found.p_exact == stats.minimum_p_paired(rounds)
    assert (found.low is None) == (rounds == 1)
    assert found.rounds_needed is not None
    assert found.rounds_needed >= 6


def test_unclear_says_what_could_have_been_seen_and_what_would_settle_it() -> None:
    found = cell(session(drifting_host(4, ["vanilla", "tapgrid-eager"], 6, {"tapgrid-eager": -0.01})))
    assert found.verdict == "UNCLEAR"
    assert found.smallest_detectable is not None
    assert found.smallest_detectable > 0.03
    assert f"could have seen {100 * found.smallest_detectable:.1f} %" in found.reason
    assert found.rounds_needed is None or found.rounds_needed > 6


def test_a_difference_inside_the_margin_is_never_called_however_sure() -> None:
    quiet = cell(session(steady({"tapgrid-eager": -0.02}, noise=0.0005)))
    assert (quiet.verdict, quiet.p_adjusted < 1e-4) == ("SAME", True)  # type: ignore[operator]


def test_floors_widen_the_margin_of_their_own_cell_only() -> None:
    store = session(steady({"tapgrid-eager": -0.06}), rows=("generate", "steer"))
    floors = {("generate", "tapgrid-eager"): 0.1, ("steer", "tapgrid-eager"): 0.001}
    wide, narrow = (cell(store, row=r, floors=floors) for r in ("generate", "steer"))
    assert (wide.margin, wide.verdict) == (0.1, "SAME")
    assert (narrow.margin, narrow.verdict) == (0.03, "SLOWER")


def test_clear_means_the_whole_interval_is_beyond_the_margin() -> None:
    seen = set()
    for seed in range(12):
        found = cell(session(steady({"tapgrid-eager": -0.045}, noise=0.02, seed=seed)))
        assert found.low is not None
        assert found.high is not None
        assert found.clear == (found.high < 1 / 1.03 or found.low > 1.03)
        seen.add(found.clear)
    assert seen == {True, False}


def test_no_noise_at_all_is_judged_by_the_exact_test() -> None:
    """A store made by hand, and case 74: identical timings on one side are information."""
    found = cell(session(lambda number, column, row, run: 2.0 - (column == "tapgrid-eager")))
    assert (found.verdict, found.p, found.test) == ("SLOWER", 0.03125, "sign flip")
    equal = cell(session(lambda number, column, row, run: 2.0))
    assert (equal.verdict, equal.p, equal.p_unpaired, equal.share) == ("SAME", 1.0, 1.0, 1.0)


# ------------------------------------------------------------------------------------------------ the unit of evidence


def test_the_process_is_the_unit_and_not_the_run() -> None:
    """Six times as many runs of the same processes are no more evidence (notes: pseudo-replication)."""
    few = cell(session(drifting_host(1, ["vanilla", "tapgrid-eager"], 6, {}, run=0.0), runs=3))
    many = cell(session(drifting_host(1, ["vanilla", "tapgrid-eager"], 6, {}, run=0.0), runs=18))
    assert few.p == pytest.approx(many.p)
    assert (few.low, few.high) == (pytest.approx(many.low), pytest.approx(many.high))
    assert (few.runs, many.runs, few.rounds, many.rounds) == (18, 108, 6, 6)


def test_shares_are_taken_inside_the_round() -> None:
    """A host that halves its speed from round to round changes no share."""
    falling = cell(session(lambda n, c, r, run: 5 - 0.7 * n - 0.2 * (c == "tapgrid-eager")))
    assert falling.process_shares == pytest.approx([math.exp(-0.2)] * 6)
    assert (falling.low, falling.high) == (pytest.approx(math.exp(-0.2)), pytest.approx(math.exp(-0.2)))
    assert falling.process_rounds == tuple(range(6))


def test_numbers_of_a_cell_are_those_of_the_definitions() -> None:
    store = session(drifting_host(2, ["vanilla", "tapgrid-eager"], 7, {"tapgrid-eager": -0.1}), rounds=7)
    found = cell(store)
    e = gather(store)
    ours, theirs = (e.of("generate", c) for c in ("tapgrid-eager", "vanilla"))
    d = [ours[r].speed["cpu"] - theirs[r].speed["cpu"] for r in range(7)]  # type: ignore[operator]
    interval = stats.paired_interval(d)
    assert found.share == pytest.approx(math.exp(interval.estimate))
    assert (found.low, found.high) == (pytest.approx(math.exp(interval.low)), pytest.approx(math.exp(interval.high)))
    assert found.p_exact == stats.sign_flip(d)
    assert found.p_unpaired == stats.mann_whitney(
        [p.speed["cpu"] for p in ours.values()],  # type: ignore[misc]
        [p.speed["cpu"] for p in theirs.values()],  # type: ignore[misc]
    )
    assert found.value == pytest.approx(stats.geometric_mean(found.process_values))
    runs = [r["value_cpu"] for r in store.runs if r["column"] == "tapgrid-eager" and r["round"] == 0]
    assert found.process_values[0] == pytest.approx(stats.geometric_mean(runs))


def test_p_adjusted_is_benjamini_hochberg_over_the_report() -> None:
    columns = ["vanilla", "vanilla-eager", "tapgrid-eager", "nnsight-eager"]
    store = session(drifting_host(3, columns, 6, {"tapgrid-eager": -0.1}), columns=columns, rows=("generate", "steer"))
    cells = [c for c in judge(store) if c.p is not None]
    assert len(cells) == 1 + 4
    assert [c.p_adjusted for c in cells] == stats.benjamini_hochberg([c.p for c in cells])
    assert {c.family for c in cells} == {5}
    invalid = judge(edited(store, "tapgrid-eager", validated=False))
    assert {c.family for c in invalid if c.p is not None} == {4}  # what may not be believed is in no family


def test_with_three_columns_the_host_is_read_off_all_of_them() -> None:
    columns = ["vanilla", "vanilla-eager", "tapgrid-eager"]
    store = session(drifting_host(3, columns, 6, {}), columns=columns)
    assert {c.test for c in judge(store) if c.p is not None} == {"drift-adjusted t"}
    assert cell(session(drifting_host(3, ["vanilla", "tapgrid-eager"], 6, {}))).test == "paired t"


# ------------------------------------------------------------------------------------------------------- INVALID


def failing(**changes: Any) -> Line:
    """A FAIL in round 3 of tapgrid-eager, which stands second there."""
    return check(2, 1, "tapgrid-eager", verdict="FAIL", reason="ratio 90", **changes)


ROWS = ("generate", "capture-1", "steer", "force-token", "forward")


@pytest.mark.parametrize(
    ("line", "touched"),
    [
        (failing(), set(ROWS)),
        (failing(row="steer", what="write"), {"steer"}),
        (failing(row="capture-1", what="value"), {"capture-1"}),
        (failing(what="write"), {"steer", "force-token"}),
    ],
)
def test_a_failed_validation_taints_what_it_speaks_of(line: Line, touched: set[str]) -> None:
    store = session(steady({"tapgrid-eager": 0.5}), rows=ROWS, extra=[line])
    cells = [c for c in judge(store) if c.column == "tapgrid-eager"]
    assert {c.row for c in cells if c.verdict == "INVALID"} == touched
    for c in cells:
        assert c.validated == (c.row not in touched)
        if c.row in touched:
            assert "round 3" in c.reason
            assert "ratio 90" in c.reason
            assert (c.p, c.share_vanilla) == (None, None)
            assert c.value is not None  # shown, and claimed nothing of


def test_a_warning_of_the_validator_is_no_failure() -> None:
    line = check(0, 1, "tapgrid-eager", verdict="WARN", reason="ratio 3")
    assert cell(session(steady({}), extra=[line])).verdict == "SAME"


def edited(store: Store, column: str, **changes: Any) -> Store:
    """The store with the last run of that column changed."""
    runs = list(store.runs)
    at = max(i for i, r in enumerate(runs) if r["column"] == column)
    runs[at] = dict(runs[at]) | changes
    return dataclasses.replace(store, runs=tuple(runs))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"validated": False, "invalid_reason": "throttled"}, "throttled"),
        ({"validated": None}, "not validated"),
        ({"tokens": 31}, "31 new tokens, 32 were asked for"),
    ],
)
def test_a_run_that_may_not_be_believed_makes_its_cell_invalid(changes: dict[str, Any], said: str) -> None:
    """Case 106: fewer tokens than asked fails the cell."""
    found = cell(edited(session(steady({"tapgrid-eager": 1.0})), "tapgrid-eager", **changes))
    assert found.verdict == "INVALID"
    assert said in found.reason


def test_a_process_that_nobody_validated_is_invalid_unless_nothing_was_attached() -> None:
    store = session(steady({}), columns=COLUMNS, drop=lambda line: line["kind"] == "validation")
    by = {c.column: c for c in judge(store)}
    assert by["tapgrid-eager"].verdict == by["tapgrid-hf"].verdict == "INVALID"
    assert "no activation of this process was validated" in by["tapgrid-eager"].reason
    assert (by["vanilla"].verdict, by["vanilla-eager"].verdict) == ("REFERENCE", "SAME")


def test_an_invalid_plain_process_is_nobodys_denominator() -> None:
    store = edited(session(steady({"tapgrid-eager": -0.2}), rounds=7), "vanilla", validated=False)
    assert cell(store, "vanilla").verdict == "INVALID"
    found = cell(store)
    assert (found.rounds, found.verdict) == (6, "SLOWER")
    assert len(found.process_values) == 7


# ------------------------------------------------------------------------------- UNSUPPORTED, MISSING, half a session


def refusal(code: str = "not-expressible") -> Line:
    at = {"session": "s", "process": None, "round": 0, "column": "tapgrid-eager", "row": "generate"}
    return {"kind": "refusal", **at, "code": code, "reason": "has no words for it"}


def failed(round: int = 0, row: str | None = "generate") -> Line:
    at = {"session": "s", "process": "x", "round": round, "column": "tapgrid-eager", "row": row}
    return {"kind": "failed", **at, "reason": "the worker died of signal 9", "stderr": None}


def ran(line: Line) -> bool:
    return bool(line["kind"] == "run" and line["column"] == "tapgrid-eager")


def test_a_refusal_is_unsupported_with_its_code_and_words() -> None:
    found = cell(session(steady({}), drop=ran, extra=[refusal()]))
    assert (found.verdict, found.code, found.reason) == ("UNSUPPORTED", "not-expressible", "has no words for it")
    plain = cell(session(steady({}), rows=("generate", "steer")), "vanilla", "steer")
    assert (plain.verdict, plain.code) == ("UNSUPPORTED", "not-plain")


def test_nothing_measured_is_missing_with_the_last_word_on_why() -> None:
    assert cell(session(steady({}), drop=ran)).verdict == "MISSING"
    died = cell(session(steady({}), drop=ran, extra=[failed(1, None)]))
    assert (died.verdict, died.reason) == ("MISSING", "round 2: the worker died of signal 9")
    left_out = cell(session(steady({}), drop=ran, extra=[refusal("not-selected")]))
    assert left_out.verdict == "MISSING"


def test_no_token_or_no_time_is_not_measured_and_no_crash() -> None:
    """Case 106: a per-token time of 0 is not a number."""
    store = session(steady({}))
    runs = tuple(dict(r) | ({"value_cpu": None} if r["column"] == "tapgrid-eager" else {}) for r in store.runs)
    found = cell(dataclasses.replace(store, runs=runs))
    assert (found.verdict, found.value) == ("MISSING", None)
    zero = tuple(dict(r) | ({"value_cpu": 0.0} if r["column"] == "vanilla" else {}) for r in store.runs)
    assert "no round has a valid vanilla" in cell(dataclasses.replace(store, runs=zero)).reason


def test_lost_rounds_are_told_and_the_rest_is_judged() -> None:
    store = session(
        steady({"tapgrid-eager": -0.2}),
        rounds=8,
        drop=lambda x: ran(x) and x["round"] < 2,
        extra=[failed(0), failed(1)],
    )
    found = cell(store)
    assert (found.verdict, found.rounds) == ("SLOWER", 6)
    assert len([w for w in found.warnings if "signal 9" in w]) == 2


def test_a_contaminated_round_is_dropped_whole_for_all_columns() -> None:
    lines = [{"kind": "contaminated", "round": 2, "reason": "another process on the device"}]
    cells = judge(session(steady({"tapgrid-eager": -0.2}), rounds=7, extra=lines))
    assert {c.rounds for c in cells} == {6}
    assert all("round 3 was dropped for all columns: another process" in " ".join(c.warnings) for c in cells)


def test_a_column_that_booted_twice_in_a_round_counts_once() -> None:
    store = session(steady({"tapgrid-eager": -0.2}))
    process = next(p for p in store.processes if p["column"] == "tapgrid-eager" and p["round"] == 0)
    again = dict(process) | {"process": "again"}
    half = dict(next(r for r in store.runs if r["process"] == process["process"])) | {
        "process": "again",
        "value_cpu": 1e-9,
    }
    twice = dataclasses.replace(store, processes=(*store.processes, again), runs=(*store.runs, half))
    found = cell(twice)
    assert (found.rounds, len(found.process_values)) == (6, 6)
    assert found.share == pytest.approx(math.exp(-0.2), abs=0.01)


def test_an_empty_session_is_all_missing() -> None:
    cells = judge(session(steady({}), drop=lambda line: True))
    assert counts(cells)["MISSING"] == len(cells) == 2


def test_a_metric_that_nobody_knows_is_refused_with_the_store_named() -> None:
    with pytest.raises(ValueError, match=r"made\.jsonl.*'energy'"):
        judge(session(steady({}), grid={"metric": "energy"}))


# ------------------------------------------------------------------------------------------------------ warnings


def test_processor_and_wall_time_that_point_apart_are_a_warning() -> None:
    store = session(steady({"tapgrid-eager": -0.2}), wall=steady({"tapgrid-eager": 0.1}))
    said = " ".join(cell(store).warnings)
    assert "processor time says -18" in said
    assert "wall time +10" in said
    assert not cell(session(steady({"tapgrid-eager": -0.2}), wall=steady({"tapgrid-eager": -0.1}))).warnings
    other = cell(session(steady({"tapgrid-eager": -0.2}), wall=steady({"tapgrid-eager": 0.1}), grid={"metric": "wall"}))
    assert (other.verdict, other.metric) == ("FASTER", "wall")
    assert other.value_other == cell(store).value


def test_one_round_far_from_the_others_is_a_warning() -> None:
    def speed(number: int, column: str, row: str, run: int) -> float:
        return 3 + (column == "tapgrid-eager") * (0.9 if number == 3 else 0.04 + 0.001 * number)

    found = cell(session(speed))
    assert any("disagree about 0" in w for w in found.warnings)
    assert found.verdict == "UNCLEAR"


def test_a_claim_that_the_plain_interval_does_not_show_says_so() -> None:
    """The drift-adjusted test sees more than the paired interval; where they part, the cell tells."""
    columns = ["vanilla", "vanilla-eager", "tapgrid-eager", "nnsight-eager"]
    seen = 0
    for seed in range(40):
        found = cell(session(drifting_host(seed, columns, 6, {"tapgrid-eager": -0.06}), columns=columns))
        assert found.low is not None
        assert found.high is not None
        apart = found.verdict == "SLOWER" and found.high >= 1
        assert apart == any("paired interval includes 1" in w for w in found.warnings)
        seen += apart
    assert seen > 0


# ------------------------------------------------------------------------------------------------------ as data


def test_a_cell_is_strict_json_with_the_designs_keys() -> None:
    for store in (session(steady({})), session(steady({}), rounds=1), session(steady({}), drop=ran)):
        for c in judge(store):
            data = json.loads(json.dumps(to_json(c), allow_nan=False))
            assert set(data) >= KEYS
            assert data["share"] == c.share


def test_a_store_read_from_disk_gives_the_same_cells(tmp_path: Any) -> None:
    store = session(steady({"tapgrid-eager": -0.2}), rows=("generate", "steer"), extra=[failed(0, "steer")])
    lines = [*store.processes, *store.validations, *store.refusals, *store.runs]
    path = write(tmp_path / "store.jsonl", [store.session, *lines])
    assert judge(read(path)) == judge(dataclasses.replace(store, failed=()))


def test_evidence_hands_out_only_what_may_be_believed() -> None:
    found = evidence.gather(session(steady({}), extra=[failing()]))
    assert sorted(found.of("generate", "tapgrid-eager")) == [0, 1, 3, 4, 5]
    assert len(found.points["generate", "tapgrid-eager"]) == 6
