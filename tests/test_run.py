"""Sessions: balanced, resumable, and at most one cell lost to anything."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import child
from harness.fingerprint import ROOT
from harness.grid import UsageError
from harness.run import Options, choose, execute, prepare
from harness.session import done_in, half_done
from harness.store import Store, read, write
from tests import fake

Measure = Callable[..., Store]
ROWS = ("generate", "capture-1", "steer")


def measured(store: Store) -> dict[tuple[str, str], int]:
    """(row, column) -> runs that count."""
    found: dict[tuple[str, str], int] = {}
    for r in store.runs:
        found[r["row"], r["column"]] = found.get((r["row"], r["column"]), 0) + 1
    return found


def test_a_session_from_beginning_to_end(measure: Measure, heard: Any) -> None:
    store = measure(rounds=2, runs=2)
    session = store.session
    assert session["schema"] == "1.0"
    assert session["plan"] == [["vanilla", "fake-a", "fake-b"], ["fake-a", "fake-b", "vanilla"]]
    assert [(p["round"], p["order"], p["column"]) for p in store.processes] == [
        (r, o, c) for r, columns in enumerate(session["plan"]) for o, c in enumerate(columns)
    ]
    assert measured(store) == {(r, c): 4 for r in ROWS for c in ("fake-a", "fake-b")} | {("generate", "vanilla"): 4}
    assert {(r["row"], r["code"]) for r in store.refusals} == {("capture-1", "not-plain"), ("steer", "not-plain")}
    assert [p["round"] for p in store.probes] == [0, 1]
    assert all(p["cpu_seconds"] > 0 for p in store.probes)
    assert [e["clean"] for e in store.process_ends] == [True] * 6
    assert store.finished
    assert not store.failed
    assert heard.places[0].startswith("round 1/2  vanilla")
    fingerprint = session["fingerprint"]
    assert fingerprint["cores"] >= 1
    assert {"git_commit", "git_dirty", "kernel", "packages"} <= set(fingerprint)
    assert store.processes[0]["env"]["OMP_NUM_THREADS"] == "1"
    assert session["grid"]["settings"]["threads"] == 1
    assert len({p["process"] for p in store.processes}) == 6


def test_no_two_engines_are_ever_alive(measure: Measure, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPGRID_FAKE_ALIVE", str(here / "alive"))
    measure({"fake-a": {"crash": "generate", "straggler": True}}, columns=("fake-a", "fake-b"), rows=("generate",))
    born = [line.split() for line in (here / "alive").read_text().splitlines()]
    assert [column for column, _ in born] == ["fake-a", "fake-b"]
    assert born[1][1] == "0"  # what fake-a left running was gone when fake-b booted


def test_a_group_lives_as_long_as_anything_in_it_runs() -> None:
    sleeps = "[sys.executable, '-c', 'import time; time.sleep(600)']"
    code = f"import subprocess, sys; print(subprocess.Popen({sleeps}, stdout=subprocess.DEVNULL).pid)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as first:
        assert first.stdout is not None
        left = int(first.stdout.readline())
    assert child._lives(first.pid)  # the one that was left behind
    os.kill(left, signal.SIGKILL)
    until = time.monotonic() + 10
    while child._lives(first.pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not child._lives(first.pid)
    zombie = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert not child._lives(zombie.pid)
    zombie.wait()


def a_worker(here: Path) -> child.Worker:
    """Something that was started, and a group of its own."""
    limits = child.Limits(boot=600, validate=600, cell=600)
    return child.Worker(sys.executable, {}, {}, here / "log", limits, module="this")


def test_a_kill_ends_when_the_whole_group_is_gone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [True, True, False]
    monkeypatch.setattr(child, "_lives", lambda group: answers.pop(0))
    worker = a_worker(here)
    worker.kill()
    assert answers == []
    monkeypatch.setattr(child, "_lives", lambda group: True)
    monkeypatch.setattr(child, "GRACE", 0.05)
    with pytest.raises(RuntimeError, match=rf"worker {worker.process.pid} started .* is still running"):
        worker.kill()
    monkeypatch.setattr(child, "_lives", lambda group: False)
    worker.kill()


@pytest.mark.parametrize(("how", "said"), [("crash", "SIGKILL"), ("raise", "planted error"), ("hang", "hung")])
def test_a_row_that_kills_its_worker_costs_itself_and_nothing_else(
    measure: Measure, heard: Any, how: str, said: str
) -> None:
    plant = {"fake-a": {how: "capture-1"}}
    store = measure(plant, columns=("fake-a", "fake-b"), limit=5 if how != "hang" else 2)
    others = {(r, c) for r in ROWS for c in ("fake-a", "fake-b")} - {("capture-1", "fake-a")}
    assert measured(store) == dict.fromkeys(others, 1)
    (failed,) = store.failed
    assert (failed["row"], failed["column"], failed["round"]) == ("capture-1", "fake-a", 0)
    assert said in failed["reason"]
    assert Path(failed["stderr"]).exists()
    assert failed["stderr"] in " ".join(heard.said)
    assert [p["process"] for p in store.processes if p["column"] == "fake-a"] == ["r0-0-fake-a-0", "r0-0-fake-a-1"]
    assert store.finished


def test_a_boot_that_fails_costs_the_column_its_round_and_is_given_up_after_two(measure: Measure) -> None:
    store = measure({"fake-a": {"raise": "boot"}}, columns=("fake-a", "fake-b"), rows=("generate",), rounds=3)
    assert measured(store) == {("generate", "fake-b"): 3}
    assert [f["round"] for f in store.failed] == [0, 1, 2]
    assert store.failed[0]["row"] is None
    assert "boot: RuntimeError: planted error in boot" in store.failed[0]["reason"]
    assert "not tried again: it failed in the 2 rounds before" in store.failed[2]["reason"]
    assert store.failed[2]["process"] is None


@pytest.mark.parametrize(("lacks", "code"), [("missing", "no-library"), ("no_device", "no-device")])
def test_a_column_that_cannot_boot_here_is_asked_once(measure: Measure, lacks: str, code: str) -> None:
    plant = {"fake-a": {lacks: "get it"}}
    store = measure(plant, columns=("fake-a", "fake-b"), rows=("generate", "steer"), rounds=2)
    assert [(r["round"], r["row"], r["code"], r["reason"]) for r in store.refusals] == [
        (n, row, code, "get it") for n in (0, 1) for row in ("generate", "steer")
    ]
    assert [r["process"] is None for r in store.refusals] == [False, False, True, True]
    assert [p["column"] for p in store.processes] == ["fake-b"] * 2
    assert not store.failed


def test_values_shifted_by_one_token_make_a_column_invalid(measure: Measure) -> None:
    from harness.judge import judge

    cells = judge(measure({"fake-a": {"wrong": "shift"}}, runs=2))
    verdicts = {(c.row, c.column): c.verdict for c in cells}
    assert {v for (_, c), v in verdicts.items() if c == "fake-a"} == {"INVALID"}
    assert "INVALID" not in {v for (_, c), v in verdicts.items() if c != "fake-a"}


def test_unselected_cells_are_refused_by_name_and_not_measured(measure: Measure) -> None:
    store = measure(cells=[("generate", "vanilla"), ("steer", "fake-a")])
    assert measured(store) == {("generate", "vanilla"): 1, ("steer", "fake-a"): 1}
    left = [r for r in store.refusals if r["code"] == "not-selected"]
    assert len(left) == 7
    assert {p["column"] for p in store.processes} == {"vanilla", "fake-a"}


def test_a_validation_session_checks_and_times_nothing(measure: Measure, here: Path) -> None:
    store = measure({"fake-b": {"refuse": ["Steer"]}}, timed=False)
    assert not store.runs
    assert {v["column"] for v in store.validations} == {"fake-a", "fake-b"}
    assert ("fake-b", "steer") in {(r["column"], r["row"]) for r in store.refusals}
    assert store.path.parent.parent == here / ".tapgrid" / "validations"
    assert store.finished


def test_a_budget_plans_again_once_it_knows_what_a_round_costs(measure: Measure, heard: Any) -> None:
    tier = "[tiers.little]\nbudget_minutes = 1.0\nruns = 1\nmax_rounds = 3"
    store = measure(tier="little", rounds=None, runs=None, columns=("fake-a",), rows=("generate",), top=tier)
    assert len(store.session["plan"]) == 1  # the estimate of a boot fills most of the minute
    assert len(store.plan) == 3
    assert {p["round"] for p in store.processes} == {0, 1, 2}
    assert any("re-planned: 3 of at most 3 rounds" in s for s in heard.said)
    assert store.plans[-1]["reason"] in " ".join(heard.said)


def test_the_same_command_begins_anew_when_the_session_was_finished(measure: Measure) -> None:
    first, second = (measure(columns=("fake-a",), rows=("generate",)) for _ in range(2))
    assert first.path != second.path
    assert first.session["key"] == second.session["key"]
    assert second.path.parent.name == first.path.parent.name + "-2"


def test_the_key_is_of_all_settings(here: Path) -> None:
    def key(rows: tuple[str, ...] = ("generate",), top: str = "", **options: Any) -> str:
        path = fake.grid_file(here, rows=rows, top=top)
        session = prepare(choose(Options(str(path), fresh=True, **({"rounds": 1} | options))))
        session.writer.close()
        return str(session.line["key"])

    keys = [
        key(),
        key(rounds=2),
        key(runs=1),
        key(rows=("generate", "steer")),
        key(columns="fake-a"),
        key(top="seed = 3"),
        key(tier="standard"),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]
    assert key(top="margin = 0.1") == keys[0]  # read by the judge alone: it may change between two halves
    (here / "model" / "weights.safetensors").write_text("other")
    assert key() != keys[0]


def test_a_store_path_that_is_taken_is_not_touched(measure: Measure, here: Path) -> None:
    store = measure(columns=("fake-a",), rows=("generate",), store="out/mine.jsonl")
    assert store.path == Path("out/mine.jsonl")
    before = store.path.read_bytes()
    with pytest.raises(UsageError, match="is a finished session, and a store is never rewritten"):
        measure(columns=("fake-a",), rows=("generate",), store="out/mine.jsonl")
    with pytest.raises(UsageError, match=r"other settings|finished"):
        measure(columns=("fake-a",), rows=("steer",), store="out/mine.jsonl")
    assert store.path.read_bytes() == before
    inside = measure(columns=("fake-a",), rows=("generate",), store="folder")
    assert inside.path.parent.parent == Path("folder")


def test_two_sessions_do_not_run_at_once(measure: Measure, here: Path) -> None:
    import fcntl

    (here / ".tapgrid").mkdir()
    with (here / ".tapgrid" / "running").open("w") as f:
        f.write("4711")
        f.flush()
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=r"another session is running from .* .process 4711"):
            measure(columns=("fake-a",), rows=("generate",))
    assert measure(columns=("fake-a",), rows=("generate",)).finished


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": "fake-z"}, "no column 'fake-z'; did you mean"),
        ({"rows": "ster"}, "no row 'ster'; did you mean 'steer'"),
        ({"tier": "quik"}, "no tier 'quik'; did you mean 'quick'"),
        ({"rounds": 0}, "rounds must be more than 0"),
    ],
)
def test_names_that_do_not_exist(here: Path, options: dict[str, Any], said: str) -> None:
    path = fake.grid_file(here)
    with pytest.raises(UsageError, match=said):
        choose(Options(str(path), **options))


def test_a_model_or_a_layer_that_does_not_exist_is_said_before_anything_boots(here: Path) -> None:
    path = fake.grid_file(here)
    good = path.read_text()
    path.write_text(re.sub(r"model = .*", 'model = "smollm3"', good, count=1))
    with pytest.raises(UsageError, match="did you mean 'smollm2'"):
        prepare(choose(Options(str(path))))
    path.write_text(good.replace("[rows.steer]", "[rows.steer]\nlayer = 9"))
    with pytest.raises(UsageError, match="row steer: layer = 9, but the model has layers 0 to 3"):
        prepare(choose(Options(str(path))))
    assert not (here / ".tapgrid").exists()


# What survives the death of the parent


def command(path: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "harness.cli",
        "run",
        str(path),
        "--rounds",
        "1",
        "--runs",
        "2",
        "--report",
        "",
        *more,
    ]


def begin(path: Path, plant: dict[str, Any], *more: str) -> subprocess.Popen[str]:
    env = os.environ | fake.planted(**plant) | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command(path, *more), env=env, cwd=path.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # Tests that a shell started in the background ignore Ctrl-C, and their children with them.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def in_hang(folder: Path, *more: str) -> tuple[subprocess.Popen[str], Path]:
    """A session of fake-a and fake-b, in the middle of fake-b's steer."""
    path = fake.grid_file(folder, columns=("fake-a", "fake-b"), limit=60)
    process = begin(path, {"fake-b": {"hang": "steer"}}, *more)
    until = time.monotonic() + 60
    while not any("hanging" in log.read_text() for log in folder.glob(".tapgrid/*/logs/*fake-b*")):
        assert time.monotonic() < until, "it does not come to hang"
        time.sleep(0.05)
    time.sleep(1)  # the worker says that it hangs before the parent has read which row it is in
    (store,) = folder.glob(".tapgrid/*/store.jsonl")
    return process, store


def resume(folder: Path, store: Path) -> Store:
    """Give the same command again, now without the hang."""
    before = store.read_bytes()
    process = begin(folder / "fake.toml", {})
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "going on with fake" in said
    assert store.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert len(list(folder.glob(".tapgrid/*/store.jsonl"))) == 1
    return read(store)


def all_measured_once(store: Store) -> bool:
    return measured(store) == {(r, c): 2 for r in ROWS for c in ("fake-a", "fake-b")} and store.finished


def test_ctrl_c_loses_the_running_cell_and_the_same_command_goes_on(tmp_path: Path) -> None:
    process, path = in_hang(tmp_path)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted in round 1, fake-b, steer" in said
    assert "give the same command again" in said
    lost = read(path)
    assert [(f["row"], f["column"], f["retry"]) for f in lost.failed] == [("steer", "fake-b", True)]
    assert len(measured(lost)) == 5
    assert not lost.finished
    store = resume(tmp_path, path)
    assert all_measured_once(store)
    assert [p["process"] for p in store.processes] == ["r0-0-fake-a-0", "r0-1-fake-b-0", "r0-1-fake-b-1"]


def test_a_parent_that_is_killed_loses_the_running_cell_and_its_engine_with_it(tmp_path: Path) -> None:
    process, path = in_hang(tmp_path)
    worker = int(re.findall(r"\d+", subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True))[0])
    process.kill()
    process.communicate()
    with path.open("ab") as f:
        f.write(b'{"kind": "run", "torn')  # a kill in the middle of a line
    with pytest.warns(UserWarning, match="torn off"):
        assert len(measured(read(path))) == 5
    until = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
    assert all_measured_once(resume(tmp_path, path))


def test_a_full_disk_ends_the_session_with_a_sentence_and_it_resumes(tmp_path: Path) -> None:
    path = fake.grid_file(tmp_path, columns=("fake-a", "fake-b"))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    # A limit on the size of a file, in blocks of 1024 bytes, stands in for the end of the disk.
    line = "ulimit -f 14; exec " + " ".join(f"'{a}'" for a in command(path))
    done = subprocess.run(["bash", "-c", line], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "cannot write to" in done.stderr
    assert "make room and give the same command again" in done.stderr
    store = next(tmp_path.glob(".tapgrid/*/store.jsonl"))
    assert not read(store).finished
    kept = len(read(store).runs)
    after = resume(tmp_path, store)
    assert all_measured_once(after)
    assert kept - len([r for r in after.runs if r["process"].endswith("-0")]) <= 2  # one cell of two runs at most


def test_a_half_measured_cell_is_named_and_measured_again(tmp_path: Path) -> None:
    line = {"session": "s", "round": 0, "column": "a", "process": "p"}
    store = read(
        write(
            tmp_path / "s.jsonl",
            [
                {
                    "kind": "session",
                    "schema": "1.0",
                    "session": "s",
                    "runs": 2,
                    "rows": ["x", "y", "z"],
                    "plan": [["a"]],
                },
                *({"kind": "run", **line, "row": row, "run": run} for row, run in (("x", 0), ("x", 1), ("y", 0))),
                {"kind": "refusal", **line, "row": "z", "code": "c", "reason": ""},
            ],
        )
    )
    (lost,) = half_done(store)
    assert (lost["row"], lost["process"], lost["reason"]) == ("y", "p", "interrupted after 1 of 2 runs")
    assert done_in(store) == {(0, "x", "a"), (0, "y", "a"), (0, "z", "a")}
    assert lost["retry"]


def test_every_line_of_a_session_is_strict_json(measure: Measure) -> None:
    store = measure({"fake-a": {"nan_setting": True, "crash": "steer"}}, columns=("fake-a",))
    for line in store.path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} in the store"))


def test_execute_returns_the_path_of_a_resumed_and_complete_plan(here: Path, heard: Any) -> None:
    path = fake.grid_file(here, columns=("fake-a",), rows=("generate",))
    session = prepare(choose(Options(str(path), rounds=1, runs=1)))
    session.writer.close()
    again = prepare(choose(Options(str(path), rounds=1, runs=1)))
    assert again.before is not None
    assert execute(again, heard) == session.path
    assert read(session.path).finished


# Against itself, and not alone


def test_an_a_a_session_runs_each_column_as_both_arms(measure: Measure, here: Path, heard: Any) -> None:
    from harness.session import twinned

    path = fake.grid_file(here, columns=("fake-a",), rows=("generate",))
    session = prepare(twinned(choose(Options(str(path), rounds=2, runs=1))))
    store = read(execute(session, heard))
    assert store.session["columns"] == ["fake-a"]
    assert store.plan == [["fake-a", "fake-a~b"], ["fake-a~b", "fake-a"]]
    assert [(p["round"], p["order"], p["column"], p["arm"]) for p in store.processes] == [
        (0, 0, "fake-a", "a"),
        (0, 1, "fake-a", "b"),
        (1, 0, "fake-a", "b"),
        (1, 1, "fake-a", "a"),
    ]
    assert len(store.runs) == 4
    assert done_in(store) == {(r, "generate", s) for r in (0, 1) for s in ("fake-a", "fake-a~b")}


SMI = """#!/bin/sh
case "$1" in
  *compute-apps*) {apps} ;;
  *throttle*|*clocks_event*) echo "{throttle}" ;;
  *) exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("apps", "throttle", "said"),
    [
        ("echo '4711, other'", "Not Active, Not Active, Not Active", "another process is on the device: 4711, other"),
        ("true", "Not Active, Active, Not Active", "the device throttled: sw_thermal_slowdown"),
        ("true", "Not Active, Not Active, Not Active", None),
    ],
)
def test_a_round_that_was_not_alone_is_marked_whole(
    measure: Measure, here: Path, monkeypatch: pytest.MonkeyPatch, apps: str, throttle: str, said: str | None
) -> None:
    smi = here / "smi"
    smi.write_text(SMI.format(apps=apps, throttle=throttle))
    smi.chmod(0o755)
    monkeypatch.setenv("TAPGRID_SMI", str(smi))
    store = measure(columns=("fake-a",), rows=("generate",))
    marked = [line for line in store.other if line["kind"] == "contaminated"]
    assert [m["round"] for m in marked] == ([0] if said else [])
    assert not said or said in marked[0]["reason"]
    assert measured(store) == {("generate", "fake-a"): 1}  # nothing is deleted; the judge leaves the round out


def test_load_contaminates_wall_time_and_not_cpu_time(here: Path) -> None:
    from harness.contamination import by_load, load_limit
    from harness.grid import load

    wall, cpu = (load(str(fake.grid_file(here, top=f'metric = "{m}"'))) for m in ("wall", "cpu"))
    limit = load_limit(wall, cores=4)
    assert limit == 3.0
    assert load_limit(cpu, cores=4) is None
    runs = [{"load": 3.5, "column": "hf", "row": "steer"}, {"load": None, "column": "hf", "row": "lens"}]
    assert by_load(runs, limit) == ["load 3.5 while hf ran steer, above 3"]
    assert by_load(runs, 4.0) == by_load(runs, None) == []


def test_the_code_that_counts_is_what_the_measured_process_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import fingerprint
    from harness.fingerprint import code_hash

    (here / "mine.py").write_text("x = 1")
    (here / "pack").mkdir()
    (here / "pack" / "__init__.py").write_text("raise SystemExit('imported')")
    (here / "pack" / "peer.py").write_text("y = 1")
    ours, theirs, packed = (code_hash([t], here) for t in ("adapters.ours:A", "mine:B", "pack.peer:C"))
    assert len({ours, theirs, packed}) == 3
    (here / "mine.py").write_text("x = 2")
    assert code_hash(["mine:B"], here) != theirs
    assert code_hash(["pack.peer:C"], here) == packed
    (here / "pack" / "peer.py").write_text("y = 2")
    assert code_hash(["pack.peer:C"], here) != packed
    assert code_hash(["no_such.module:D"], here) == code_hash([], here)  # its worker will say what is missing
    monkeypatch.setattr(fingerprint, "MEASURED_CODE", ("harness/clock.py",))
    assert code_hash([], here) != code_hash(["mine:B"], here)


# ---- rounds that are added to a finished session


def test_added_rounds_go_on_in_the_same_store_and_are_shown_as_added(measure: Measure) -> None:
    from harness.judge import judge

    given: dict[str, Any] = {"columns": ("vanilla", "fake-a"), "rows": ("generate",), "rounds": 3}
    before = measure({}, **given)
    after = measure({}, **given, add=2)
    assert after.path == before.path
    assert after.finished
    assert (len(after.plan), after.added) == (5, 2)
    assert after.plan[:3] == before.plan
    assert measured(after) == {("generate", "vanilla"): 5, ("generate", "fake-a"): 5}
    (cell,) = [c for c in judge(after) if c.column == "fake-a"]
    assert cell.rounds == 5
    assert "2 of the session's 5 rounds were added after the others had been seen" in cell.warnings
    assert not any("added" in w for c in judge(before) for w in c.warnings)


def test_adding_to_nothing_is_refused(measure: Measure) -> None:
    with pytest.raises(UsageError, match="no finished session of these settings to add 2 rounds to"):
        measure({}, columns=("fake-a",), rows=("generate",), rounds=1, add=2)
