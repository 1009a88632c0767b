"""The `tapgrid` command: what each subcommand prints, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import COMMANDS, main
from harness.store import Store, find, write
from tests import fake

Measure = Callable[..., Store]
CELL_KEYS = {
    *("grid", "row", "column", "verdict", "reason", "value", "unit", "metric", "share_vanilla", "share_eager"),
    *("low", "high", "rounds", "p", "p_adjusted", "validated"),
}


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


Said = Callable[..., tuple[int, str, str]]


def test_help_teaches(said: Said) -> None:
    code, out, _ = said("--help")
    assert code == 0
    assert "tapgrid run smollm2" in out
    assert "3 cannot judge" in out
    for name in COMMANDS:
        code, out, _ = said(name, "--help")
        assert code == 0
        assert "example:" in out
        assert f"tapgrid {name}" in out
        assert "--json" in out


def test_no_command_and_a_wrong_one_are_usage(said: Said) -> None:
    assert said()[0] == 2
    code, _, err = said("mesure")
    assert code == 2
    assert "invalid choice: 'mesure'" in err
    assert said("run")[0] == 2
    assert said("run", "smollm2", "--teir", "quick")[0] == 2


def test_list(said: Said) -> None:
    code, out, _ = said("list")
    assert code == 0
    assert "smollm2: SmolLM2-135M" in out
    assert "vanilla-eager: vLLM with enforce_eager" in out
    assert "capture-all: hand back every layer" in out
    code, out, _ = said("list", "rows", "--json")
    assert list(json.loads(out))[:2] == ["generate", "generate-x8"]
    assert set(json.loads(said("list", "--json")[1])) == {"grids", "rows", "columns", "tiers", "models"}
    code, _, err = said("list", "colums")
    assert code == 2
    assert "did you mean 'columns'" in err


def test_plan(said: Said, here: Path) -> None:
    code, out, _ = said("plan", "smollm2", "--tier", "standard", "--rows", "capture-*")
    assert code == 0
    assert "3 rows x 6 columns, 3 runs a process" in out
    assert out.count("\nround ") == 6
    made = json.loads(said("plan", "smollm2", "--rounds", "2", "--json")[1])
    assert len(made["rounds"]) == 2
    assert said("run", "smollm2", "--dry-run")[1].count("\nround ") == 3
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run", "smolm2"], "no grid 'smolm2'; did you mean 'smollm2'"),
        (["plan", "smollm2", "--tier", "quik"], "no tier 'quik'; did you mean 'quick'"),
        (["plan", "smollm2", "--rows", "ster"], "no row 'ster'; did you mean 'steer'"),
        (["plan", "smollm2", "--columns", "nnsight"], "no column 'nnsight'; did you mean 'nnsight-"),
        (["plan", "smollm2", "--runs", "0"], "--runs wants a whole number of at least 1, not '0'"),
        (["plan", "smollm2", "--budget", "ten"], "--budget wants a time"),
    ],
)
def test_bad_names_are_exit_code_2_and_one_sentence(said: Said, here: Path, argv: list[str], words: str) -> None:
    code, out, err = said(*argv)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_without_a_store_there_is_nothing_to_judge(said: Said, here: Path) -> None:
    for command in ("show", "report", "export", "validate"):
        code, out, err = said(command)
        assert (code, out) == (3, "")
        assert "measure first" in err


def test_a_newer_store_is_refused_by_name(said: Said, here: Path) -> None:
    write(here / "s.jsonl", [{"kind": "session", "schema": "7.0"}])
    code, _, err = said("show", "s.jsonl")
    assert code == 3
    assert "schema 7.0" in err


def test_run_and_then_everything_on_its_store(said: Said, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One session serves all the commands that read a store: sessions are the dear part of a test."""
    fake.grid_file(here, rows=("generate", "steer"))
    monkeypatch.setenv(fake.VARIABLE, "{}")
    code, out, err = said("run", "fake.toml", "--rounds", "1", "--runs", "2", "--json")
    cells = json.loads(out)
    assert code == 0
    assert len(cells) == 6
    assert set(cells[0]) >= CELL_KEYS
    assert "measuring fake" in err
    assert (here / "report.html").exists()
    assert (here / "report.md").exists()

    assert json.loads(said("show", "--json")[1]) == cells
    only = json.loads(said("show", "--json", "--rows", "steer", "--columns", "fake-*")[1])
    assert [(c["row"], c["column"]) for c in only] == [("steer", "fake-a"), ("steer", "fake-b")]
    code, out, _ = said("show")
    assert re.search(r"^generate +[\d.]+ tok/s ● +\d+ ~", out, re.M)
    assert said("show", "--rows", "ster")[0] == 2
    other = json.loads(said("show", "--json", "--against", "fake-b")[1])
    assert {c["against"] for c in other} == {"fake-b"} != {c["against"] for c in cells}
    assert {c["verdict"] for c in other if c["column"] == "fake-b"} == {"REFERENCE"}
    code, _, err = said("show", "--against", "fake-z")
    assert (code, "did you mean" in err) == (2, True)

    code, out, _ = said("report", "--report", "out/r.html")
    assert code == 0
    assert out.splitlines() == [str(here / "out" / "r.html"), str(here / "out" / "r.md")]
    assert said("report", "--report", "out/r.html", "--check")[0] == 0
    (here / "out" / "r.md").write_text("drifted")
    code, out, _ = said("report", "--report", "out/r.html", "--check")
    assert code == 1
    assert "r.md is not what" in out

    code, out, _ = said("validate")
    assert code == 0
    assert re.search(r"(\d+) of \1 checks passed", out)
    found = json.loads(said("validate", "--json")[1])
    assert set(found[0]) >= {
        "point",
        "layer",
        "kind",
        "error",
        "yardstick",
        "ratio",
        "slope",
        "nearest_layer",
        "verdict",
        "reason",
    }

    code, out, _ = said("export", "--format", "csv")
    assert code == 0
    assert out.startswith("grid,row,column")
    assert said("export", "--format", "cvs")[0] == 2
    assert json.loads(said("export", "--format", "csv", "--output", "x.csv", "--json")[1])["output"] == "x.csv"
    assert (here / "x.csv").read_text() == out
    assert str(find()) in said("list", "stores")[1]


def test_run_says_1_for_a_wrong_activation_and_3_for_a_lost_cell(
    said: Said, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.grid_file(here, columns=("fake-a", "fake-b"), rows=("generate",))
    given = ("run", "fake.toml", "--rounds", "1", "--runs", "1", "--report", "")
    for planted, wanted in (
        ({"fake-a": {"wrong": "shift"}}, 1),
        ({"fake-a": {"crash": "generate"}}, 3),
        ({"fake-a": {"missing": "pip install x"}, "fake-b": {"missing": "pip install x"}}, 3),
    ):
        monkeypatch.setenv(fake.VARIABLE, json.dumps(planted))
        code, out, _ = said(*given)
        assert code == wanted
        assert "store:" in out
        assert not (here / "report.html").exists()


def test_validate_a_grid_times_nothing_and_fails_on_what_is_wrong(
    said: Said, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.grid_file(here, columns=("vanilla", "fake-a"), rows=("steer",))
    monkeypatch.setenv(fake.VARIABLE, json.dumps({"fake-a": {"wrong": "shift"}}))
    code, out, _ = said("validate", "fake.toml", "--columns", "fake-a")
    assert code == 1
    assert "fake-a read resid_post.0: FAIL" in out
    assert said("show")[0] == 3  # it is no session that could be shown


def test_doctor(said: Said, here: Path) -> None:
    code, out, _ = said("doctor")
    assert code in (0, 3)
    assert "packages" in out
    found = json.loads(said("doctor", "--json")[1])
    assert {f["what"] for f in found} >= {"packages", "load", "memory", "disk", "model cache"}
    assert all(f["advice"] for f in found if f["good"] is not True)


def test_a_closed_pipe_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m harness.cli list | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert "Traceback" not in done.stderr


def test_json_prints_json_and_nothing_else(said: Said, here: Path, measure: Measure) -> None:
    measure(columns=("vanilla", "fake-a"), rows=("generate",))
    argvs: list[Any] = [
        ["list"],
        ["plan", "fake.toml"],
        ["show"],
        ["validate"],
        ["doctor"],
        ["export"],
        ["report", "--report", "r.html"],
    ]
    for argv in argvs:
        json.loads(said(*argv, "--json")[1])


OURS = (
    "bench child cli clock commands contamination costs doctor export fingerprint finish gating grid importing options "
    "plan plugin progress run session store visit workloads"
)


@pytest.mark.parametrize("module", OURS.split())
def test_the_examples_in_docstrings_hold(module: str) -> None:
    import doctest
    import importlib

    found = doctest.testmod(importlib.import_module(f"harness.{module}"))
    assert found.failed == 0
