"""The committed results hold what they claim: every cell a number or a reason, every column given the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.columns import all_columns
from harness import fairness, store
from harness.judge import judge
from harness.store import Store

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(f for f in (ROOT / "results").glob("*/*.jsonl") if f.parent.name != "published")
EVERY = ROOT / "results" / "smollm2" / "quick.jsonl"  # every column of the default environment, in one go
LATER: set[str] = set()  # columns that are newer than that
each = pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.name}")


def read(file: Path) -> Store:
    return store.read(file)


def test_there_is_a_result_of_every_column() -> None:
    found = read(EVERY)
    own = {name for name, c in all_columns().items() if c.target.startswith("adapters.")}
    assert own - LATER <= set(found.session["columns"])
    assert len(found.plan) == 3
    # Those that cannot run on the machine it was measured on say why.
    measured = {run["column"] for run in found.runs}
    assert set(found.session["columns"]) - measured == {"hotwire", "tapgrid-sharded", "tapgrid-sharded-taps"}


@each
def test_every_row_by_column_has_a_number_or_a_reason(file: Path) -> None:
    found = read(file)
    cells = judge(found)
    asked = {(row, column) for row in found.session["rows"] for column in found.session["columns"]}
    assert {(c.row, c.column) for c in cells} == asked
    for cell in cells:
        assert cell.value is not None or len(cell.reason) > 10, (cell.row, cell.column)
        assert cell.verdict not in ("INVALID", "MISSING"), (cell.row, cell.column, cell.reason)


@each
def test_every_number_was_validated_in_its_own_process(file: Path) -> None:
    found = read(file)
    passed = {v["process"] for v in found.validations if v["verdict"] == "PASS"}
    assert {r["process"] for r in found.runs} <= passed
    assert all(r["validated"] for r in found.runs)
    assert {v["verdict"] for v in found.validations} <= {"PASS", "WARN"}


@each
def test_every_column_was_given_the_same_but_for_what_a_library_forces(file: Path) -> None:
    assert [str(d) for d in fairness.differences(read(file)) if not d.forced] == []


@each
def test_no_folder_of_a_machine_is_in_it(file: Path) -> None:
    text = file.read_text()
    assert not [p for p in ("/root/", "/home/", "/tmp/", "/work/", "/Users/") if p in text]


def test_every_forced_reason_was_seen_and_none_is_a_guess() -> None:
    seen = set()
    for file in FILES:
        found = read(file)
        libraries = {str(p["column"]): str(p["settings"].get("library") or "tapgrid") for p in found.processes}
        seen |= {(libraries[d.column], d.fact) for d in fairness.differences(found) if d.forced}
    assert seen == set(fairness.FORCED)


def test_every_engine_said_what_it_is() -> None:
    for line in read(EVERY).processes:
        assert line["engine"]["threads"] == 1, line["column"]
        on_transformers = "hf" in line["column"].split("-")
        assert ("max_num_seqs" in line["engine"]) is not on_transformers, line["column"]
        assert ("attention" in line["settings"]) is on_transformers, line["column"]


def test_all_columns_ran_the_same_prompts() -> None:
    asked: dict[tuple[str, int], set[str]] = {}
    for run in read(EVERY).runs:
        asked.setdefault((run["row"], run["run"]), set()).add(run["prompts"])
    assert asked
    assert {at: len(digests) for at, digests in asked.items() if len(digests) > 1} == {}
