"""Exports are read back by the formats' own rules; imports say what they do not know."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness import export, importing
from harness.grid import UsageError
from harness.judge import judge
from harness.store import Store, StoreError, read, write
from harness.workloads import KINDS, Row

PUBLISHED = Path(__file__).parent.parent / "results" / "published" / "throughput.jsonl"


def line(row: str, column: str, run: int, seconds: float, unit: str = "tok/s", **more: Any) -> dict[str, Any]:
    value = 8 / seconds if unit == "tok/s" else seconds
    return {
        "kind": "run", "session": "s", "process": f"r0-{column}", "round": 0, "column": column, "row": row, "run": run,
        "wall_seconds": seconds * 2, "cpu_seconds": seconds, "tokens": 8,
        "value_wall": value / 2, "value_cpu": value, "unit": unit,
        "validated": True, "invalid_reason": None, "load": 0.1, "peak_rss_bytes": 1, "started": "t", "sequence": run,
    } | more  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    rows, columns = ["generate", "capture-1-x8", "forward"], ["vanilla", "fake-a"]
    session = {
        "kind": "session", "schema": "1.0", "session": "s", "tier": "quick", "rounds": 1, "runs": 3, "rows": rows,
        "columns": columns, "plan": [columns], "key": "k", "started": "2026-01-01T00:00:00Z",
        "fingerprint": {"cpu": "A <CPU>", "git_commit": "abc"},
        "grid": {
            "name": "g", "model": "m", "metric": "cpu", "margin": 0.03, "alpha": 0.05, "columns": columns,
            "rows": {r: asdict(Row(r, new_tokens=8)) for r in rows},
        },
    }  # fmt: skip
    booted = [
        {"kind": "process", "session": "s", "process": f"r0-{c}", "round": 0, "order": i, "column": c}
        for i, c in enumerate(columns)
    ]
    runs = [line("generate", c, i, 0.5 + i / 100) for c in columns for i in range(3)]
    runs += [line("forward", "vanilla", i, 1 / 3, "s") for i in range(3)]
    bad = {"validated": False, "invalid_reason": "read at resid_post.1: \x1b[31moff by one\x1b[0m\nand more"}
    runs += [line("capture-1-x8", "fake-a", i, 0.7, **bad) for i in range(3)]
    refused = {
        "kind": "refusal",
        "process": "p",
        "round": 0,
        "column": "vanilla",
        "row": "capture-1-x8",
        "code": "not-plain",
        "reason": "p",
    }
    return read(write(tmp_path / "s.jsonl", [session, *booted, *runs, refused]))


def test_csv_holds_every_run_unrounded(store: Store) -> None:
    rows = list(csv.DictReader(io.StringIO(export.to_csv(store))))
    assert len(rows) == len(store.runs) == 12
    assert [float(r["cpu_seconds"]) for r in rows] == [r["cpu_seconds"] for r in store.runs]
    assert float(rows[6]["value_cpu"]) == 1 / 3
    assert {r["validated"] for r in rows if r["row"] == "capture-1-x8"} == {"False"}
    assert rows[0]["grid"] == "g"


def test_benchfmt_is_what_benchstat_reads(store: Store) -> None:
    """The grammar of golang.org/x/perf/benchfmt: `Benchmark<Name> <iterations> (<value> <unit>)+`."""
    lines = export.to_benchfmt(store).splitlines()
    results = [x.split() for x in lines if x.startswith("Benchmark")]
    assert len(results) == 9
    for name, iterations, *pairs in results:
        assert name[len("Benchmark")].isupper()
        assert not name.rpartition("-")[2].isdigit() or "/" in name.rpartition("-")[2]
        assert int(iterations) == 1
        assert len(pairs) % 2 == 0
        assert all(float(v) > 0 for v in pairs[::2])
    assert results[0] == [
        "BenchmarkGenerate/column=vanilla",
        "1",
        "0.5",
        "cpu-s",
        "1.0",
        "wall-s",
        "8.0",
        "tok/s",
        "16.0",
        "tok/cpu-s",
    ]
    assert "Unit tok/s better=higher" in lines
    assert sum(x.startswith("# BenchmarkCapture1X8/column=fake-a left out:") for x in lines) == 3
    assert "goos: linux" in lines or not sys.platform.startswith("linux")


def test_pytest_benchmark_s_own_compare_reads_our_json(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "0001_ours.json"
    path.write_text(export.to_pytest_benchmark(store))
    data = json.loads(path.read_text())
    first = data["benchmarks"][0]
    assert first["fullname"] == "grid::generate::vanilla"
    assert first["stats"]["data"] == [0.5, 0.51, 0.52]
    assert first["stats"]["median"] == first["stats"]["mean"] == pytest.approx(0.51)
    assert first["extra_info"]["validated"]
    pytest.importorskip("pytest_benchmark")
    done = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "compare", str(path), "--columns=median,rounds"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "generate[vanilla]" in done.stdout


def test_junit_has_a_case_a_cell(store: Store) -> None:
    text = export.to_junit(store)
    suite = ElementTree.fromstring(text.encode()).find("testsuite")
    assert suite is not None
    cases = {(c.get("classname"), c.get("name")): c for c in suite.iter("testcase")}
    assert len(cases) == 6
    assert suite.get("failures") == str(len(suite.findall(".//failure")))
    assert suite.get("skipped") == str(len(suite.findall(".//skipped"))) == "1"
    failure = cases["grid.g.capture-1-x8", "fake-a"].find("failure")
    assert failure is not None
    assert "INVALID" in str(failure.get("message"))
    assert "\x1b" not in text
    skipped = cases["grid.g.capture-1-x8", "vanilla"].find("skipped")
    assert skipped is not None


def test_markdown_is_the_report(store: Store) -> None:
    text = export.to_markdown(store)
    assert "fake-a" in text
    assert "capture-1-x8" in text


def test_the_formats_of_the_command_line() -> None:
    from harness.cli import FORMATS

    assert tuple(export.FORMATS) == FORMATS


def test_the_published_cells_become_a_store_a_panel(tmp_path: Path) -> None:
    paths = importing.import_file(PUBLISHED, tmp_path)
    assert len(paths) == 15
    stores = [read(p) for p in paths]
    assert sum(len(s.runs) + len(s.refusals) for s in stores) == 1215
    first = stores[0]
    assert first.session["grid"]["name"] == "Llama-3.1-8B, one GPU"
    vanilla = next(r for r in first.runs if (r["row"], r["column"]) == ("generate", "vanilla"))
    assert (vanilla["value_wall"], vanilla["unit"]) == (92.0, "tok/s")
    assert not vanilla["validated"]
    assert "without samples and without validation" in vanilla["invalid_reason"]
    forward = next(r for s in stores for r in s.runs if r["row"] == "forward")
    assert forward["unit"] == "s"
    assert 0 < forward["wall_seconds"] < 5  # published in milliseconds
    assert first.session["rows"] == sorted(first.session["rows"], key=list(KINDS).index)
    assert {r["code"] for s in stores for r in s.refusals} == {"not-expressible", "not-measured"}
    cells = judge(first)
    assert {c.verdict for c in cells} == {"INVALID", "UNSUPPORTED"}
    assert any("without validation" in c.reason for c in cells)
    with pytest.raises(StoreError, match="never rewritten"):
        importing.import_file(PUBLISHED, tmp_path)


def test_our_own_pytest_benchmark_file_comes_back(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "0001_ours.json"
    path.write_text(export.to_pytest_benchmark(store))
    (made,) = importing.import_file(path, tmp_path / "in")
    back = read(made)
    wanted = sorted((r["row"], r["column"], r["cpu_seconds"]) for r in store.runs)
    assert sorted((r["row"], r["column"], r["value_wall"]) for r in back.runs) == wanted
    assert not any(r["validated"] for r in back.runs)
    assert back.session["fingerprint"]["git_commit"] == "abc"


def test_a_pytest_benchmark_file_without_raw_data_gives_its_mean(tmp_path: Path) -> None:
    data = {
        "benchmarks": [{"name": "test_x", "group": None, "params": None, "stats": {"mean": 0.25}}],
        "machine_info": {},
    }
    path = tmp_path / "b.json"
    path.write_text(json.dumps(data))
    (run,) = read(importing.import_file(path, tmp_path)[0]).runs
    assert (run["row"], run["column"], run["value_wall"], run["unit"]) == ("test_x", "benchmark", 0.25, "s")


Make = Callable[[Path], Path]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "[1]", "is neither"),
        ("a.json", "{", "is neither"),
        ("a.jsonl", '{"panel": "p", "workload": "new", "column": "c"}', "line 1: 'new' or 'c' has no counterpart"),
        ("none.json", None, "cannot read"),
    ],
)
def test_what_cannot_be_imported_is_said(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=said):
        importing.import_file(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
