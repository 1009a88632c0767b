"""The store: strict, append-only, and whole whatever happens to the process or the disk."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import store
from harness.fingerprint import ROOT
from harness.store import StoreError, Writer, clean, dump, find, read, write

SESSION = {
    "kind": "session",
    "schema": "1.0",
    "session": "s",
    "plan": [["a"]],
    "runs": 1,
    "rows": ["r"],
    "columns": ["a"],
}


def run_line(process: str = "p", row: str = "r", run: int = 0) -> dict[str, Any]:
    return {"kind": "run", "session": "s", "process": process, "round": 0, "column": "a", "row": row, "run": run}


def strict(data: bytes) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in the file")

    return json.loads(data, parse_constant=refuse)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    lines = [
        SESSION,
        run_line(),
        {"kind": "text", "text": "Paris é ☃"},
        {"kind": "refusal", "row": "r"},
        {"kind": "odd", "x": 1},
    ]
    found = read(write(tmp_path / "d" / "store.jsonl", lines))
    assert found.session == SESSION
    assert found.runs == (run_line(),)
    assert found.texts[0]["text"] == "Paris é ☃"
    assert found.other == ({"kind": "odd", "x": 1},)
    assert found.plan == [["a"]]
    assert store.asdict(found)["runs"] == [run_line()]


@pytest.mark.parametrize(
    ("value", "wanted", "lost"),
    [
        (float("nan"), None, "nan is not"),
        (float("inf"), None, "inf is not"),
        (np.float32(1.5), 1.5, None),
        (np.int64(3), 3, None),
        (np.bool_(True), True, None),
        (np.float64("nan"), None, "nan is not"),
        (object(), None, "a object is not JSON"),
        ((1, 2), [1, 2], None),
        (Path("/a"), "/a", None),
        ({"k": {"n": math.nan}}, {"k": {"n": None}}, "nan is not"),
        (np.zeros(3), None, "a ndarray is not JSON"),
    ],
)
def test_a_value_that_is_not_json_loses_itself_and_says_why(value: Any, wanted: Any, lost: str | None) -> None:
    line = strict(dump({"kind": "run", "good": 1, "value": value}))
    assert line["value"] == wanted
    assert line["good"] == 1
    assert (lost in str(line.get("lost"))) if lost else ("lost" not in line)


def test_lost_values_are_named_by_their_path() -> None:
    assert clean({"a": [1, {"b": math.inf}]})[1] == {"a.1.b": "inf is not a JSON number"}


def test_a_torn_last_line_is_left_out_with_a_warning(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", [SESSION, run_line()])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "run", "proc')
    with pytest.warns(UserWarning, match="torn off"):
        found = read(path)
    assert found.runs == (run_line(),)
    assert "torn off" in found.warnings[0]
    with pytest.warns(UserWarning, match="dropped"):
        writer = Writer(path)
    writer.append("text", text="after")
    writer.close()
    assert path.read_bytes().startswith(whole)
    assert read(path).texts[0]["text"] == "after"


def test_damage_in_the_middle_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", [SESSION, run_line()])
    path.write_bytes(path.read_bytes().replace(b'"run"', b'"ru', 1))
    with pytest.raises(StoreError, match="line 2 is not a line of a store"):
        read(path)


def test_a_bare_nan_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", [SESSION])
    path.write_bytes(path.read_bytes() + b'{"kind": "run", "value": NaN}\n')
    with pytest.raises(StoreError, match="NaN is not JSON"):
        read(path)


def test_a_newer_major_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", [{**SESSION, "schema": "2.0"}])
    with pytest.raises(StoreError, match=r"schema 2\.0, and this tapgrid reads up to 1\.0; upgrade"):
        read(path)


@pytest.mark.parametrize("schema", ["1.0", "1.7", "0.9"])
def test_other_minors_are_read(tmp_path: Path, schema: str) -> None:
    assert read(write(tmp_path / "s.jsonl", [{**SESSION, "schema": schema}])).session["schema"] == schema


@pytest.mark.parametrize("content", [b"", b"{}\n", b'{"kind": "run"}\n', b"not json\n"])
def test_what_is_no_store_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"x\.jsonl: line 1 is not"):
        read(path)


def test_runs_of_a_lost_cell_do_not_count_and_are_not_forgotten(tmp_path: Path) -> None:
    failed = {"kind": "failed", "process": "p", "round": 0, "column": "a", "row": "r", "reason": "crash"}
    found = read(write(tmp_path / "s.jsonl", [SESSION, run_line("p"), run_line("p", "other"), run_line("q"), failed]))
    assert [(r["process"], r["row"]) for r in found.runs] == [("p", "other"), ("q", "r")]
    assert [(r["process"], r["row"]) for r in found.lost] == [("p", "r")]


def test_a_store_is_never_rewritten(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", [SESSION])
    with pytest.raises(StoreError, match="never rewritten"):
        write(path, [SESSION])


def test_a_full_disk_costs_the_line_and_nothing_before_it(tmp_path: Path) -> None:
    """A limit on the file's size stands in for the full disk: the kernel refuses the write half way."""
    path = tmp_path / "s.jsonl"
    code = f"""
        import resource, sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from harness.store import StoreError, Writer
        writer = Writer(Path({str(path)!r}))
        writer.append("session", schema="1.0", plan=[])
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))
        for i in range(100):
            try:
                writer.append("run", process="p", row=str(i), note="x" * 90)
            except StoreError as error:
                print(error)
                break
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.append("text", text="room again")
    """
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    ).stdout
    assert "cannot write to" in said
    assert "give the same command again" in said
    found = read(path)
    assert len(found.runs) >= 1
    assert found.texts[0]["text"] == "room again"


def test_the_home_is_the_working_directory_or_the_project_above_it(here: Path) -> None:
    below = here / "a" / "b"
    below.mkdir(parents=True)
    assert store.home(below) == below / ".tapgrid"
    (here / ".tapgrid").mkdir()
    assert store.home(below) == here / ".tapgrid"
    (here / "a" / "pyproject.toml").touch()  # another project begins here
    assert store.home(below) == below / ".tapgrid"


def test_the_newest_store_is_found(here: Path) -> None:
    with pytest.raises(StoreError, match="measure first"):
        find()
    old, new = (write(here / ".tapgrid" / n / "store.jsonl", [SESSION]) for n in ("old", "new"))
    os.utime(old, (1, 1))
    assert find() == new
    assert find(here / ".tapgrid" / "old") == old
    assert find(here) == new
    with pytest.raises(StoreError, match="no store at"):
        read(find("nowhere.jsonl"))
