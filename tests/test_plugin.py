"""`pytest --grid`: selection, reports and exit codes, with the simulated engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import harness.judge  # noqa: F401  # imported once here, or pytester imports all of scipy anew for every session
import reports.html
import reports.markdown  # noqa: F401
from harness.store import find, read
from tests import fake

ALL = [f"grid::fake::{r}::{c}" for r in ("generate", "steer") for c in ("vanilla", "fake-a")]


@pytest.fixture
def grid(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with a grid of two rows and two columns, and a test of its own."""
    fake.grid_file(pytester.path, columns=("vanilla", "fake-a"), rows=("generate", "steer"))
    pytester.makepyfile(test_own="def test_own(): pass")
    pytester.makeini("[pytest]\naddopts = --strict-markers -p no:cacheprovider -p no:hypothesispytest\ntimeout = 1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    return pytester


def plant(monkeypatch: pytest.MonkeyPatch, **columns: Any) -> None:
    monkeypatch.setenv(fake.VARIABLE, json.dumps(columns))


def listed(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if "::" in line]


def run(grid: pytest.Pytester, *more: str, rounds: str = "1") -> pytest.RunResult:
    given = ["--grid", "fake.toml", "--grid-rounds", rounds, "--grid-runs", "1", "--grid-report", ""]
    return grid.runpytest_inprocess(*given, *more)


def nothing_written(grid: pytest.Pytester) -> bool:
    return not [p for p in grid.path.rglob("*") if p.name in (".tapgrid", "report.html", "report.md")]


def test_collecting_lists_the_cells_alone_and_writes_nothing(grid: pytest.Pytester) -> None:
    result = grid.runpytest_inprocess("--grid", "fake.toml", "--co", "-q")
    assert listed(result) == ALL
    assert result.ret == 0
    assert nothing_written(grid)


def test_tests_named_beside_the_grid_are_collected_too(grid: pytest.Pytester) -> None:
    result = grid.runpytest_inprocess("--grid", "fake.toml", "--co", "-q", "test_own.py")
    assert listed(result) == [*ALL, "test_own.py::test_own"]


def test_without_the_option_the_plugin_is_not_there(grid: pytest.Pytester) -> None:
    result = grid.runpytest_inprocess("-q")
    result.assert_outcomes(passed=1)
    assert nothing_written(grid)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["-k", "steer"], ALL[2:]),
        (["-k", "fake-a and not steer"], [ALL[1]]),
        (["-m", "grid(column='vanilla')"], [ALL[0], ALL[2]]),
        (["--grid-rows", "ste*"], ALL[2:]),
        (["--grid-columns", "fake-b,vanilla"], ["grid::fake::generate::vanilla", "grid::fake::generate::fake-b"]),
        (["grid::fake::steer"], ALL[2:]),
        (["grid::fake::steer::fake-a"], [ALL[3]]),
        (["--deselect", ALL[0]], ALL[1:]),
    ],
)
def test_selecting(grid: pytest.Pytester, given: list[str], wanted: list[str]) -> None:
    found = listed(grid.runpytest_inprocess("--grid", "fake.toml", "--co", "-q", *given))
    assert found[: len(wanted)] == wanted
    assert len(found) == len(wanted) or "fake-b,vanilla" in given


def test_from_a_sub_folder_a_built_in_grid_by_name(grid: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    below = grid.mkdir("below")
    monkeypatch.chdir(below)
    found = listed(grid.runpytest_inprocess("--grid", "smollm2", "--co", "-q"))
    assert found[0] == "grid::smollm2::generate::vanilla"
    assert len(found) == 13 * 6


def test_measuring_reports_every_cell(grid: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, **{"fake-a": {"slow_boot": 1.5}})  # longer than the timeout that the project gives its tests
    result = run(grid, "-rs", "--junitxml", "out.xml", "--grid-json", "cells.json", "-v")
    result.assert_outcomes(passed=3, skipped=1)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["grid::fake::generate::vanilla PASSED*", "*a plain engine has nothing attached*"])
    result.stdout.fnmatch_lines(
        ["*= grid fake =*", "*fake-a*", "*vanilla*% of vanilla*", "generate*tok/s*", "store:*store.jsonl"]
    )
    cells = json.loads((grid.path / "cells.json").read_text())
    assert [(c["row"], c["column"]) for c in cells] == [tuple(a.split("::")[2:]) for a in ALL]
    assert {"verdict", "reason", "value", "unit", "metric", "share_vanilla", "p_adjusted", "validated"} <= set(cells[0])
    cases = ElementTree.parse(grid.path / "out.xml").iter("testcase")
    case = next(c for c in cases if c.get("name") == "fake-a" and c.get("classname") == "grid.fake.generate")
    assert "share_vanilla" in {p.get("name") for p in case.iter("property")}


def test_only_the_selected_cells_are_measured(grid: pytest.Pytester) -> None:
    result = run(grid, "-k", "generate and fake-a", "-q")
    result.assert_outcomes(passed=1, deselected=3)
    store = read(find(grid.path))
    assert {(r["row"], r["column"]) for r in store.runs} == {("generate", "fake-a")}
    assert store.session["columns"] == ["fake-a"]


def test_a_wrong_activation_fails_its_cells(grid: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, **{"fake-a": {"wrong": "shift"}})
    result = run(grid)
    result.assert_outcomes(passed=1, failed=2, skipped=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*INVALID: *read of resid_post.0*failed*"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_a_lost_cell_fails_and_the_log_is_named(grid: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, **{"fake-a": {"crash": "steer"}})
    result = run(grid)
    result.assert_outcomes(passed=2, failed=1, skipped=1)
    assert result.ret == 3  # it cannot be judged; nothing was found wrong
    line = next(x for x in result.outlines if x.startswith("lost cells; the output of the worker:"))
    assert "planted crash in steer" in Path(line.rpartition(": ")[2]).read_text()


def test_nothing_measured_is_never_0(grid: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(grid, "-k", "no_such_cell").ret == 3
    plant(monkeypatch, vanilla={"missing": "pip install x"}, **{"fake-a": {"missing": "pip install x"}})
    result = run(grid)
    result.assert_outcomes(skipped=4)
    assert result.ret == 3


def test_a_failing_test_of_the_project_stays_a_failure(grid: pytest.Pytester) -> None:
    grid.makepyfile(test_bad="def test_bad(): assert 0")
    assert run(grid, "-k", "generate or bad", "test_bad.py").ret == 1


def test_a_dry_run_prints_the_plan_and_measures_nothing(grid: pytest.Pytester) -> None:
    result = run(grid, "--grid-dry-run", "-k", "steer", rounds="2")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "grid fake on *: 1 rows x 2 columns, 1 runs a process",
            "round  1:  vanilla  fake-a",
            "round  2:  fake-a   vanilla",
            "time: about *",
        ]
    )
    assert nothing_written(grid)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--grid", "smolm2"], "no grid 'smolm2'; did you mean 'smollm2'"),
        (["--grid", "fake.toml", "--grid-runs", "many"], "--grid-runs wants a whole number of at least 1, not 'many'"),
        (["--grid", "fake.toml", "grid::fake::ster"], "no cell 'grid::fake::ster'; did you mean"),
        (["--grid", "fake.toml", "-n", "2"], "does not run under xdist"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(grid: pytest.Pytester, given: list[str], said: str) -> None:
    result = grid.runpytest_subprocess(*given)  # names of rows, columns and tiers take the same way: test_cli has them
    assert result.ret == 2
    assert [x for x in (*result.errlines, *result.outlines) if said in x]
    assert "Traceback" not in result.stderr.str()
    assert nothing_written(grid)


def test_an_unknown_model_is_exit_code_2(grid: pytest.Pytester) -> None:
    path = grid.path / "fake.toml"
    path.write_text(re.sub(r'model = ".*"', 'model = "smolm2"', path.read_text(), count=1))
    result = run(grid)
    assert result.ret == 2
    assert "did you mean 'smollm2'" in result.stdout.str() + result.stderr.str()


OTHER = """
def pytest_addoption(parser):
    {how}("--grid", dest="other", help="another plugin's")
"""


@pytest.mark.parametrize("how", ["parser.addoption", 'parser.getgroup("other").addoption'])
def test_another_plugin_s_grid_option_gets_our_sentence(pytester: pytest.Pytester, how: str) -> None:
    pytester.makepyfile(other_plugin=OTHER.format(how=how))
    pytester.makeconftest(OTHER.format(how=how))
    for more in (["-p", "other_plugin", "--noconftest"], []):  # before us, and after us
        result = pytester.runpytest_subprocess("-p", "no:hypothesispytest", *more)
        assert result.ret == 4
        result.stderr.fnmatch_lines(
            ["*tapgrid: another plugin or conftest.py already has an option --grid*-p no:tapgrid*"]
        )
        result.stderr.no_fnmatch_line("*Traceback*")


def test_another_plugin_s_grid_option_works_without_ours(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(OTHER.format(how="parser.addoption"))
    pytester.makepyfile("def test_it(pytestconfig): assert pytestconfig.option.other == 'x'")
    pytester.runpytest_subprocess("-p", "no:hypothesispytest", "-p", "no:tapgrid", "--grid", "x").assert_outcomes(
        passed=1
    )
