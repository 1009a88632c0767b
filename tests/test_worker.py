"""One worker process: the lines that it sends, and that nothing it does can outlive or corrupt its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from adapters.work import Settings
from harness import bench
from harness.child import Died, Hang, Worker, tail
from harness.environments import python_of
from harness.fingerprint import ROOT
from harness.grid import Limits
from harness.store import Store
from harness.workloads import Row, row_from
from tests import fake

LIMITS = Limits(boot=20, validate=20, cell=20)


def spec(folder: Path, column: str = "A", rows: tuple[str, ...] = ("generate", "steer"), **more: Any) -> dict[str, Any]:
    made = [row_from(n, Row(n, prompt_tokens=6, new_tokens=4)) for n in rows]
    return {
        "column": {"name": f"fake-{column.lower()}", "target": f"tests.fake:{column}", "about": ""},
        "model": str(fake.model_folder(folder / "model")),
        "settings": vars(Settings(max_model_len=128)),
        "rows": [vars(r) for r in made],
        "runs": 2,
        "seed": 0,
        "validator": "tests.fake:Validator",
        "cache": str(folder / "cache"),
    } | more


def start(folder: Path, given: dict[str, Any], limits: Limits = LIMITS, **plant: Any) -> Worker:
    return Worker(sys.executable, given, fake.planted(**plant), folder / "log", limits)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not [c for c in psutil.Process().children() if "harness.worker" in c.cmdline()], "a worker is left"


def everything(worker: Worker) -> list[dict[str, Any]]:
    try:
        return list(worker)
    finally:
        worker.kill()


def test_the_lines_of_a_worker_in_order(folder: Path) -> None:
    lines = everything(start(folder, spec(folder)))
    told = [(x["kind"], x.get("phase") or x.get("row")) for x in lines if x["kind"] != "validation"]
    assert told == [
        ("phase", "boot"),
        ("process", None),
        ("phase", "validate"),
        ("done", None),
        *[
            ("phase", "ask"),
            ("phase", "run"),
            ("phase", "check"),
            ("run", "generate"),
            ("run", "generate"),
            ("done", "generate"),
        ],
        *[
            ("phase", "ask"),
            ("phase", "run"),
            ("phase", "check"),
            ("run", "steer"),
            ("run", "steer"),
            ("done", "steer"),
        ],
        ("phase", "close"),
    ]
    runs = [x for x in lines if x["kind"] == "run"]
    assert [r["run"] for r in runs] == [0, 1, 0, 1]
    assert [r["sequence"] for r in runs] == [2, 3, 5, 6]  # each warm-up counts
    assert all(r["validated"] and r["invalid_reason"] is None for r in runs)
    assert all(r["tokens"] == 4 and r["unit"] == "tok/s" for r in runs)
    assert all(r["value_cpu"] == pytest.approx(r["tokens"] / r["cpu_seconds"]) for r in runs)
    assert all(r["wall_seconds"] == pytest.approx(1.1 * r["cpu_seconds"]) for r in runs)
    assert all(r["peak_rss_bytes"] > 1e6 and r["load"] >= 0 for r in runs)
    process = next(x for x in lines if x["kind"] == "process")
    assert process["boot_cpu_seconds"] >= 5
    assert process["settings"] == {"fake": True, "speed": 0.9, "bad": 1.0}
    assert process["packages"]["numpy"]
    validations = [x for x in lines if x["kind"] == "validation"]
    assert {v["what"] for v in validations} == {"read", "write"}
    assert {v["verdict"] for v in validations} == {"PASS"}
    assert [v["row"] for v in validations if v["what"] == "write"] == ["steer"] * 3


def test_what_an_engine_prints_is_in_the_log_and_not_in_the_protocol(folder: Path) -> None:
    everything(start(folder, spec(folder)))
    assert "fake engine booting on stdout" in tail(folder / "log")


def test_no_prompt_comes_twice_and_rows_are_shaped_as_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPGRID_FAKE_ORDER", str(folder / "prompts"))
    everything(start(folder, spec(folder, rows=("generate", "generate-x8", "sweep", "sweep-installed"))))
    seen = [json.loads(line) for line in (folder / "prompts").read_text().splitlines()]
    assert len({tuple(tokens) for _, _, tokens in seen}) == len(seen)
    assert sum(id.startswith("sweep/") for _, id, _ in seen) == 3 * 64


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ({"raise": "steer"}, "RuntimeError: planted error in steer"),
        ({"crash": "steer"}, "signal SIGKILL"),
        ({"raise": "boot"}, "RuntimeError: planted error in boot"),
    ],
)
def test_a_worker_that_dies_says_how(folder: Path, plant: dict[str, Any], said: str) -> None:
    worker = start(folder, spec(folder), **{"fake-a": plant})
    with pytest.raises(Died, match=said):
        everything(worker)
    assert worker.cell == (None if "boot" in plant.values() else "steer")
    assert "planted" in tail(folder / "log")


@pytest.mark.parametrize(("where", "phase"), [("boot", "boot"), ("steer", "timed runs"), ("close", "close")])
def test_a_hang_ends_at_its_limit(folder: Path, where: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.child.GRACE", 0.4)
    limits = Limits(boot=1.5 if where == "boot" else 30, validate=30, cell=1.2 if where == "steer" else 30)
    begin = time.monotonic()
    with pytest.raises(Hang, match=phase):
        everything(start(folder, spec(folder), limits, **{"fake-a": {"hang": where}}))
    assert time.monotonic() - begin < 20


def test_a_finished_cell_is_not_lost_to_what_comes_after_it(folder: Path) -> None:
    worker = start(folder, spec(folder))
    try:
        for line in worker:
            if line["kind"] == "done" and line["row"] == "generate":
                assert (worker.cell, worker.phase) == (None, "between rows")
                break
    finally:
        worker.kill()


def test_a_missing_library_refuses_every_row_with_the_install_line(folder: Path) -> None:
    lines = everything(start(folder, spec(folder), **{"fake-a": {"missing": "pip install nothing"}}))
    refusals = [x for x in lines if x["kind"] == "refusal"]
    assert [(r["row"], r["code"], r["reason"]) for r in refusals] == [
        ("generate", "no-library", "pip install nothing"),
        ("steer", "no-library", "pip install nothing"),
    ]
    assert not [x for x in lines if x["kind"] in ("process", "run")]


def test_a_value_of_an_engine_that_is_not_json_loses_itself(folder: Path) -> None:
    lines = everything(start(folder, spec(folder), **{"fake-a": {"nan_setting": True}}))
    process = next(x for x in lines if x["kind"] == "process")
    assert process["settings"]["bad"] is None
    assert process["lost"] == {"settings.bad": "nan is not a JSON number"}
    assert [x for x in lines if x["kind"] == "run"]


@pytest.mark.parametrize(
    ("plant", "invalid", "said"),
    [
        ({"wrong": "shift"}, {"generate", "steer"}, "reads failed validation"),
        ({"wrong": "nan"}, {"generate", "steer"}, "reads failed validation"),
        ({"wrong": "short"}, {"generate", "steer"}, "came back with 3 new tokens, 4 were asked for"),
        ({"wrong": "write"}, {"steer"}, "its write failed validation"),
    ],
)
def test_wrong_activations_are_still_timed_and_never_believed(
    folder: Path, plant: Any, invalid: set[str], said: str
) -> None:
    lines = everything(start(folder, spec(folder), **{"fake-a": plant}))
    runs = [x for x in lines if x["kind"] == "run"]
    assert len(runs) == 4
    assert {r["row"] for r in runs if not r["validated"]} == invalid
    assert all(said in r["invalid_reason"] for r in runs if not r["validated"])
    assert all(r["value_cpu"] for r in runs)


def test_a_validator_that_is_not_there_validates_nothing(folder: Path) -> None:
    lines = everything(start(folder, spec(folder, validator="tests.no_such:Validator")))
    runs = [x for x in lines if x["kind"] == "run"]
    assert runs
    assert not any(r["validated"] for r in runs)
    assert "tests.no_such:Validator is not usable" in runs[0]["invalid_reason"]


def test_a_check_that_raises_is_a_failed_check_and_not_a_lost_cell(folder: Path) -> None:
    lines = everything(start(folder, spec(folder), **{"fake-a": {"raise": "validate"}}))
    finding = next(x for x in lines if x["kind"] == "validation")
    assert (finding["verdict"], finding["row"]) == ("FAIL", None)
    assert "the check raised RuntimeError: planted error in validate" in finding["reason"]
    assert {r["validated"] for r in lines if r["kind"] == "run"} == {False}


def agreed(monkeypatch: pytest.MonkeyPatch, batches: list[list[float]], seconds: float = 0.0, **more: Any) -> Any:
    """What `_agreeing` makes of planted CPU seconds: (those that count, those that it sent as `disagreed`)."""
    flat, sent, now = [t for b in batches for t in b], [], [0.0]

    def run(bench: Any, row: Row, work: Any, number: int) -> Any:
        now[0] += seconds
        return {"cpu_seconds": flat.pop(0), "wall_seconds": 1.0, "number": number}, [], []

    monkeypatch.setattr(bench, "_run", run)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    given: Any = SimpleNamespace(runs=len(batches[0]), metric="cpu", send=lambda kind, **v: sent.append((kind, v)))
    for name, value in more.items():
        setattr(given, name, value)
    found = bench._agreeing(given, Row("generate"), None)  # type: ignore[arg-type]
    assert all(kind == "disagreed" and v["row"] == "generate" for kind, v in sent)
    assert [v["run"] for _, v in sent] == [v["number"] for _, v in sent]
    return [line["cpu_seconds"] for line, _, _ in found], [v["cpu_seconds"] for _, v in sent]


def test_runs_that_agree_are_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(monkeypatch, [[1.0, 1.15, 1.1]]) == ([1.0, 1.15, 1.1], [])


@pytest.mark.parametrize("odd", [1.6, 0.5])
def test_runs_that_disagree_are_done_again_whichever_way_the_odd_one_lies(
    monkeypatch: pytest.MonkeyPatch, odd: float
) -> None:
    assert agreed(monkeypatch, [[1.0, odd, 1.0], [1.2, 1.2, 1.1]]) == ([1.2, 1.2, 1.1], [1.0, odd, 1.0])


def test_what_never_agrees_counts_as_it_was_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [[1.0, 2.0], [1.0, 3.0], [1.0, 4.0], [1.0, 5.0], [1.0, 1.0]]
    counts, thrown = agreed(monkeypatch, batches)
    assert counts == [1.0, 5.0]
    assert thrown == [1.0, 2.0, 1.0, 3.0, 1.0, 4.0]


def test_a_slow_column_is_not_done_again_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(monkeypatch, [[1.0, 2.0], [1.0, 3.0]], seconds=11.0) == ([1.0, 2.0], [])
    assert agreed(monkeypatch, [[1.0, 2.0], [1.0, 3.0]], seconds=6.0) == ([1.0, 3.0], [1.0, 2.0])


def test_the_judged_metric_decides_whether_runs_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(monkeypatch, [[1.0, 2.0]], metric="wall") == ([1.0, 2.0], [])


def test_what_disagreed_is_sent_and_never_counted(folder: Path) -> None:
    lines = everything(start(folder, spec(folder), **{"fake-a": {"noise": 1.0}}))
    thrown = [x for x in lines if x["kind"] == "disagreed"]
    assert thrown
    assert {x["row"] for x in thrown} <= {"generate", "steer"}
    assert [(x["row"], x["run"]) for x in lines if x["kind"] == "run"] == [
        (row, run) for row in ("generate", "steer") for run in (0, 1)
    ]
    sequence = [x["sequence"] for x in lines if x["kind"] in ("run", "disagreed")]
    assert len(sequence) == len(set(sequence))


def test_work_that_cannot_stay_on_the_engine_is_refused(folder: Path) -> None:
    lines = everything(start(folder, spec(folder, rows=("sweep-installed",)), **{"fake-a": {"refuse": ["Install"]}}))
    refusal = next(x for x in lines if x["kind"] == "refusal")
    assert (refusal["code"], refusal["row"]) == ("not-expressible", "sweep-installed")
    assert "cannot leave work" in refusal["reason"]


def test_installed_work_is_validated_like_any_other(folder: Path) -> None:
    good = everything(start(folder, spec(folder, rows=("sweep-installed",))))
    assert all(r["validated"] for r in good if r["kind"] == "run")
    assert [x for x in good if x["kind"] == "validation" and x["what"] == "value"]


def test_without_a_spec_it_says_who_starts_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness.worker"], stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode != 0
    assert "started by `tapgrid run`" in done.stderr


def test_a_worker_does_not_outlive_a_parent_that_was_killed(folder: Path) -> None:
    given = json.dumps(spec(folder))
    code = f"""
        import json, sys
        from pathlib import Path
        sys.path.insert(0, {str(ROOT)!r})
        from tests.test_worker import start
        worker = start(Path({str(folder)!r}), json.loads({given!r}), **{{"fake-a": {{"hang": "steer"}}}})
        for line in worker:
            print(worker.process.pid, line.get("row"), flush=True)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = next(int(line.split()[0]) for line in parent.stdout if line.split()[1] == "steer")
    assert psutil.pid_exists(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the worker goes on without its parent"
        time.sleep(0.05)


def test_the_interpreter_of_a_column_s_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert python_of("default") == sys.executable
    assert python_of("old-vllm") is None
    monkeypatch.setenv("TAPGRID_PYTHON_OLD_VLLM", "/x/python")
    assert python_of("old-vllm") == "/x/python"


def test_sessions_of_the_simulated_engine_measure_what_was_planted(measure: Any) -> None:
    found: Store = measure(
        {"fake-a": {"speed": 0.5, "noise": 0.0, "process_noise": 0.0}}, columns=("fake-a",), rows=("generate",)
    )
    assert found.runs[0]["value_cpu"] == pytest.approx(10.0)
