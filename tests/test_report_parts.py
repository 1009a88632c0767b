"""The report's parts on their own: marks, axes, findings, differences of environments, the timeline, the floors."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from harness import aa
from reports import environment, findings, matrix, words
from reports.floors import floors
from reports.marks import SHAPES, SMALL, marks
from reports.runs import runs
from reports.svg import Axis, axis
from reports.timeline import points, probe_changes, timeline
from reports.view import arrange, view
from tests.test_report_dom import parse
from tests.test_report_sample import COLUMNS, PLAIN, Spec, lines, rich, store_of

ALL_COLUMNS = (
    "vanilla", "vanilla-eager", "hf", "tapgrid-eager", "tapgrid-taps", "tapgrid-sharded", "tapgrid-hf", "nnsight-eager",
    "nnsight-taps", "nnsight-hf", "interp-engine-vllm", "interp-engine-static", "interp-engine-hf", "vllm-lens",
    "transformerlens-vllm", "transformerlens-hf",
)  # fmt: skip


# ---- marks


def test_every_library_has_a_shape_and_a_hue_of_its_own() -> None:
    found = {m.library.key: m for m in marks(ALL_COLUMNS, {}).values()}
    assert len({m.library.shape for m in found.values()}) == len(found) == 7
    assert len({m.hue for m in found.values()}) == len(found)
    assert set(SHAPES) == set(SMALL)


def test_columns_of_one_library_differ_by_fill_or_dot() -> None:
    found = marks(ALL_COLUMNS, {})
    assert (found["tapgrid-taps"].compiled, found["tapgrid-eager"].compiled) == (True, False)
    assert [c for c, m in found.items() if m.transformers] == [c for c in ALL_COLUMNS if "hf" in c.split("-")]


def test_what_the_engine_booted_with_decides_over_the_name() -> None:
    settings = {"acme-fast": {"enforce_eager": False}, "vanilla": {"enforce_eager": True}}
    found = marks(["acme-fast", "vanilla", "other-thing"], settings)
    assert found["acme-fast"].compiled
    assert not found["vanilla"].compiled
    assert found["acme-fast"].library.shape != found["other-thing"].library.shape


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, "eager"),
        ({"enforce_eager": True}, "eager"),
        ({"enforce_eager": False}, "not compiled"),
        ({"eager": False, "compilation": "NONE", "cudagraph_mode": "NONE"}, "neither compiled nor graphs"),
        ({"eager": False, "compilation": "VLLM_COMPILE"}, "compiled"),
        ({"eager": False, "compilation": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY"}, "graphs, not compiled"),
    ],
)
def test_what_breakable_graphs_leave_uncompiled_is_not_called_compiled(settings: dict[str, Any], mode: str) -> None:
    for column in ("nnsight-taps", "interp-engine-static", "nnsight-taps@vllm-0.30"):
        assert marks([column], {column: settings})[column].mode == mode
    other = {"enforce_eager": False, "eager": False, "compilation": "DYNAMO_TRACE_ONCE"}
    assert marks(["vllm-extract"], {"vllm-extract": other})["vllm-extract"].mode == "compiled"
    assert marks(["vllm-extract"], {"vllm-extract": other | {"compilation": "NONE"}})["vllm-extract"].mode != "compiled"


def test_hues_are_defined_for_light_and_for_dark() -> None:
    css = (Path(matrix.__file__).parent / "report.css").read_text()
    light, _, dark = css.partition("prefers-color-scheme: dark")
    for mark in marks([*ALL_COLUMNS, "a-x", "b-x", "c-x"], {}).values():
        assert f".{mark.hue} " in css
        variable = f"--{mark.library.key}:"
        assert variable in light
        assert variable in dark.partition("* {")[0]
    for verdict in words.VERDICTS:
        assert f".b-{verdict.style} " in css


# ---- axes and tints


def test_an_axis_is_even_in_the_logarithm_and_holds_what_it_was_made_for() -> None:
    made = axis([0.25, 0.5, 1.02])
    assert made.low < 0.25
    assert made.high > 1.08
    assert made.at(0.5) - made.at(0.25) == pytest.approx(made.at(1.0) - made.at(0.5), abs=0.2)
    assert 1.0 in made.ticks()
    assert len(made.ticks()) <= 7


@pytest.mark.parametrize("low", [0.97, 0.8, 0.3, 0.03, 1e-3, 1e-5])
def test_ticks_lie_inside_and_are_few_at_any_width(low: float) -> None:
    made = Axis(low, 1.1)
    assert made.ticks() == sorted(made.ticks())
    assert all(made.low <= t <= made.high for t in made.ticks())
    assert 1.0 in made.ticks()
    assert len(made.ticks()) <= 7


def test_an_axis_without_shares_and_with_hopeless_ones_still_stands() -> None:
    assert axis([]).low < 1 < axis([]).high
    made = axis([None, math.nan, -1.0, 0.0, 1e-9])
    assert made.low == pytest.approx(0.02, rel=0.3)
    assert made.at(1e-9) == 0.0


def test_tints_are_even_in_the_logarithm() -> None:
    assert [matrix.tint(s) for s in (None, math.nan, 0.0, 0.98, 1.02)] == [None] * 5
    for share in (0.9, 0.6, 0.2):
        below, above = matrix.tint(share), matrix.tint(1 / share)
        assert below is not None
        assert above == below.replace("-m", "-p")


# ---- reasons


def refusals(sentence: str) -> list[matrix.Why]:
    cells = [c for c in rich().cells if c.verdict == "UNSUPPORTED" and c.column == "hf"]
    made = [dataclasses.replace(c, reason=sentence.format(row=c.row)) for c in cells]
    return matrix.reasons(arrange(made)[0])


def test_a_refusal_that_only_names_its_row_is_one_reason() -> None:
    (why,) = refusals("hf cannot do {row}")
    assert why.sentence == "[not-plain] hf cannot do this row"
    assert why.where == "hf; 9"


def test_a_reason_that_holds_for_one_row_keeps_its_words() -> None:
    found = refusals("no way to probe")
    assert {w.sentence for w in found} == {"[not-plain] no way to probe"}


# ---- words


def test_sentences_add_up_for_any_mixture() -> None:
    for step in range(1, 9):
        cells = rich().cells[::step]
        tally = words.counts(cells)
        assert sum(tally.values()) == len(cells)
        assert words.sentence(cells).startswith(f"{len(cells)} cell")


# ---- findings


def finding(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "column": "c", "row": None, "what": "read", "point": "resid_post", "layer": 3, "error": 0.01, "yardstick": 0.01,
        "ratio": 1.0, "slope": 1.0, "nearest_layer": 3, "verdict": "PASS", "reason": "",
    }  # fmt: skip
    return base | changes


def test_the_worst_of_a_place_stands_for_it() -> None:
    several = [finding(ratio=1.0), finding(ratio=2.0), finding(ratio=1.5, verdict="WARN"), finding(ratio=0.5)]
    (spot,) = findings.spots(several)
    assert (spot.verdict, spot.ratio, spot.found) == ("WARN", 1.5, 4)
    (spot,) = findings.spots([finding(ratio=9.0), finding(ratio=None, verdict="FAIL", reason="shape (3,) is not (4,)")])
    assert spot.verdict == "FAIL"


def test_a_layer_in_the_points_name_is_a_layer() -> None:
    apart, joined = findings.spots([finding()])[0], findings.spots([finding(point="resid_post.3", layer=None)])[0]
    assert (apart.label, apart.layer) == (joined.label, joined.layer) == ("resid_post", 3)
    assert findings.spots([finding(point="resid_post.3")])[0].place == "resid_post.3"
    assert findings.spots([finding(point="resid_post.4")])[0].place == "resid_post.4.3"  # two layers: both are shown
    assert findings.spots([finding(point="logits", layer=None)])[0].layer is None


def test_what_passed_without_a_ratio_is_no_alarm() -> None:
    """A head that reads back as exactly zero has no ratio, and nothing about it is bad."""
    exact = finding(row="ablate-head", point="z", ratio=None, error=0.0, reason="head 0 reads back as exactly zero")
    spots = findings.spots([exact, finding(ratio=1.2), finding(point="logits", layer=None, ratio=None, verdict="FAIL")])
    assert [s.place for s in findings.worst(spots)] == ["logits", "resid_post.3", "ablate-head → z.3"]
    assert findings.step(None, "PASS") == findings.step(1.0)
    assert findings.step(None, "FAIL") == 8


def test_writes_and_values_stand_apart_from_reads() -> None:
    found = findings.spots([finding(), finding(what="write", row="steer"), finding(what="write", row="ablate-head")])
    assert [s.label for s in found] == ["resid_post", "steer → resid_post", "ablate-head → resid_post"]


@pytest.mark.parametrize(
    ("reason", "letter"),
    [
        ("nearer to layer 4 than to its own layer 3", "L"),
        ("shape (3, 576) where (4, 576) is right", "S"),
        ("2 values are NaN", "N"),
        ("zeros in 3 tokens where the reference has none", "Z"),
        ("constant over tokens", "C"),
        ("31 new tokens came back", "T"),
        ("median token error 1e-1 is 20 x the yardstick's", "E"),
        ("", "E"),
        (None, "E"),
    ],
)
def test_failures_have_a_letter(reason: str | None, letter: str) -> None:
    assert findings.kind(finding(reason=reason)) == letter
    assert letter in {k for k, _, _ in findings.KINDS}


def test_another_nearest_layer_is_l_whatever_the_reason_says() -> None:
    assert findings.kind(finding(nearest_layer=7)) == "L"


def test_colours_diverge_at_one_and_turn_at_the_validators_limits() -> None:
    steps = [findings.step(r) for r in (0.1, 0.3, 0.5, 0.7, 0.9, 1.2, 1.5, 2.0, 2.5, 2.6, 5.0, 5.1)]
    assert steps == sorted(steps)
    assert findings.step(1.0) == 4
    assert findings.step(2.5) < findings.step(2.51)
    assert findings.step(5.0) < findings.step(5.01) == findings.step(None) == 8


def test_the_places_to_look_at_first_are_failures_then_warnings() -> None:
    found = findings.spots(rich().store.validations)
    first = [s.verdict for s in findings.worst(found, 5)]
    assert first == ["FAIL", "FAIL", "FAIL", "WARN", "PASS"]
    assert sum(findings.tally(found).values()) == len(found)


def test_every_finding_is_drawn() -> None:
    root = parse(
        str(__import__("reports.heatmap", fromlist=["validation"]).validation(view(rich().store, rich().cells)))
    )
    assert len(root.one("div", class_="maps").all("rect")) == len(findings.spots(rich().store.validations))
    letters = [t.text for t in root.all("text", class_="letter")]
    assert sorted(letters) == ["L", "L", "L", "w"]
    assert f"Not validated: {', '.join(c for c in COLUMNS if c in PLAIN)}." in root.words


# ---- environment


def test_what_differs_is_told_from_what_is_shared() -> None:
    table = environment.by_key(
        [
            {"column": "a", "settings": {"seed": 0, "eager": True, "deep": {"x": 1}}},
            {"column": "b", "settings": {"seed": 0, "eager": False, "deep": {"x": 1}, "only": None}},
        ],
        "settings",
    )
    common, differ = environment.split(table, ["a", "b"])
    assert common == {"seed": "0", "deep.x": "1"}
    assert differ == {"eager": {"a": "true", "b": "false"}, "only": {"b": "none"}}


def test_a_column_whose_processes_disagree_is_never_shared() -> None:
    processes = [{"column": c, "env": {"THREADS": n}} for c in "ab" for n in ("1", "2")]
    common, differ = environment.split(environment.by_key(processes, "env"), ["a", "b"])
    assert common == {}
    assert differ == {"THREADS": {"a": "1 / 2", "b": "1 / 2"}}


# ---- time


def test_processes_stand_in_the_order_in_which_they_ran(tmp_path: Path) -> None:
    made = lines(Spec(rounds=3, runs=1, columns=("vanilla", "tapgrid-eager"), rows=("generate",), layers=1))
    store = store_of([made[0], *reversed(made[1:])], tmp_path)  # whatever the order in the file
    line = timeline(view(store, []))
    assert list(line.slots) == [
        "p0-vanilla", "p0-tapgrid-eager", "p1-tapgrid-eager", "p1-vanilla", "p2-vanilla", "p2-tapgrid-eager"
    ]  # fmt: skip
    assert [(r.first, r.slots, r.name) for r in line.rounds] == [(0, 2, "1"), (2, 2, "2"), (4, 2, "3")]


def test_points_are_changes_from_the_cells_own_median_and_more_is_faster() -> None:
    line = timeline(view(rich().store, []))
    own = [r for r in rich().store.runs if r["row"] == "forward" and r["column"] == "vanilla"]
    found = points(own, "cpu", line, whole=False)
    assert len(found) == len(own)
    quickest = min(range(len(own)), key=lambda i: own[i]["value_cpu"])
    assert found[quickest].change == max(p.change for p in found) > 0
    assert len(points(own, "cpu", line, whole=True)) == len({r["process"] for r in own})


def test_runs_without_a_value_are_counted_and_not_drawn(tmp_path: Path) -> None:
    made = lines(Spec(rounds=2, columns=("vanilla", "tapgrid-eager"), rows=("generate",), layers=1))
    lost = [r for r in made if r["kind"] == "run"][:2]
    for run in lost:
        run["value_cpu"] = None
    sample = store_of(made, tmp_path)
    cells = [c for c in rich().cells if c.row == "generate"]
    root = parse(str(runs(view(sample, cells))))
    assert "2 runs without a value not drawn" in root.words


def test_a_dropped_round_is_marked_with_its_reason(tmp_path: Path) -> None:
    made = lines(Spec(rounds=3, columns=("vanilla", "tapgrid-eager"), rows=("generate",), layers=1))
    made.append({"kind": "contaminated", "session": "s1", "round": 1, "reason": "another process on the device"})
    page = view(store_of(made, tmp_path), [c for c in rich().cells if c.row == "generate"])
    root = parse(str(runs(page)))
    marked = root.all("rect", class_="dropped")
    assert marked
    assert all("another process on the device" in m.text for m in marked)
    assert "Dropped for all columns: 1 round (2)." in root.words


def test_probe_changes_are_relative_to_their_median() -> None:
    probes = [{"session": "s", "round": i, "cpu_seconds": t} for i, t in enumerate((1.0, 1.1, 0.9, None))]
    found = probe_changes(probes, "cpu")
    assert found == pytest.approx({("s", 0): 0.0, ("s", 1): 0.1, ("s", 2): -0.1})


# ---- A/A


def given(**changes: Any) -> aa.Floors:
    cells = (
        aa.Floor("generate", "vanilla-eager", 6, 0.012, 0.02, (0.99, 1.01, 1.0), 0.001, 0.6),
        aa.Floor("sweep", "vanilla-eager", 6, 0.051, 0.09, (0.93, 1.05, 1.02), 0.03, 0.03),
    )
    made = aa.Floors("smollm2", "smollm2", "cpu", "m1", cells, relabellings=32, alarm_rate=0.03125, alarms=0.031)
    return dataclasses.replace(made, **changes)


def test_floors_are_shown_with_the_false_alarm_rate() -> None:
    root = parse(str(floors(view(rich().store, rich().cells), given())))
    rows = root.one("tbody").all("tr")
    assert [r.all("td", class_="n")[1].words for r in rows] == ["1.2 %", "5.1 %"]
    assert rows[1].one("b").words == "5.1 %"  # wider than the margin, so it is the margin
    assert len(rows[1].all("td", class_="bad")) == 1  # the first arm was faster, and not by chance
    assert "3.1" in root.one("p").words
    assert [t.attributes["d"].count("M") for t in root.all("path", class_="tick")] == [3, 3]


def test_no_floors_no_section() -> None:
    page = view(rich().store, rich().cells)
    assert floors(page, None) == floors(page, given(cells=())) == ""
