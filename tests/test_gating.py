"""Gates, A/A floors and trends from the command line, on saved stores: every exit code."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import commands, gating, store
from harness.cli import main
from harness.options import Asked
from harness.store import Store, read
from tests.fake_sessions import session

KINDS = {"processes": "process", "runs": "run", "validations": "validation", "refusals": "refusal", "failed": "failed"}


def save(made: Store, path: Path) -> Path:
    lines = [made.session, *(line for name in KINDS for line in getattr(made, name))]
    return store.write(path, lines)


def steady(shares: Mapping[str, float], jitter: float = 0.002) -> Callable[[int, str, str, int], float]:
    """Log speeds of columns at known shares of vanilla, with a little that is not the same in every round."""

    def speed(number: int, column: str, row: str, run: int) -> float:
        import math

        return 3.0 + math.log(shares.get(column, 1.0)) + jitter * math.sin(7 * number + 3 * run + 5 * len(column))

    return speed


def at(share: float, path: Path, **more: Any) -> Path:
    return save(session(steady({"tapgrid-eager": share}), **more), path)


@pytest.fixture
def said(here: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


Said = Callable[..., tuple[int, str, str]]


def test_the_same_speed_passes(said: Said, here: Path) -> None:
    a, b = at(0.9, here / "a.jsonl"), at(0.9, here / "b.jsonl")
    code, out, _ = said("gate", str(a), str(b))
    assert code == 0
    assert "tapgrid gate: Pass" in out


def test_a_planted_slowdown_fails_and_a_limit_pardons_it(said: Said, here: Path) -> None:
    a, b = at(0.9, here / "a.jsonl"), at(0.8, here / "b.jsonl")
    code, out, _ = said("gate", str(a), str(b), "--gate", "slower:3%")
    assert code == 1
    assert "tapgrid-eager" in out
    assert "**slower**" in out
    assert said("gate", str(a), str(b), "--gate", "slower:3%,slower:20%@generate/tapgrid-eager")[0] == 0
    found = json.loads(said("gate", str(a), str(b), "--json")[1])
    assert found["exit_code"] == 1
    assert [c["status"] for c in found["cells"] if c["column"] == "tapgrid-eager"] == ["slower"]


def test_what_cannot_be_judged_is_3_and_may_be_allowed(said: Said, here: Path) -> None:
    b = at(0.9, here / "b.jsonl")
    code, out, _ = said("gate", "nowhere.jsonl", str(b))
    assert code == 3
    assert "no baseline 'nowhere.jsonl': neither a file nor a git revision" in out
    assert said("gate", "nowhere.jsonl", str(b), "--allow", "missing-baseline")[0] == 0
    other = at(0.9, here / "other.jsonl", machine={"cpu": "another"})
    assert said("gate", str(other), str(b))[0] == 3
    assert said("gate", str(other), str(b), "--allow", "other-machine")[0] == 0
    wider = at(0.9, here / "wider.jsonl", columns=("vanilla", "tapgrid-eager", "tapgrid-taps"))
    code, out, _ = said("gate", str(wider), str(b))
    assert code == 3
    assert "vanished" in out


@pytest.mark.parametrize(
    ("more", "words"),
    [(["--gate", "faster:3%"], "there is no rule 'faster'"), (["--allow", "anything"], "nothing called 'anything'")],
)
def test_words_that_make_no_sense_are_2(said: Said, here: Path, more: list[str], words: str) -> None:
    a = at(0.9, here / "a.jsonl")
    code, _, err = said("gate", str(a), str(a), *more)
    assert code == 2
    assert words in err


def test_they_are_said_before_anything_is_measured(said: Said, here: Path) -> None:
    code, _, err = said("run", "smollm2", "--gate", "slower:much")
    assert code == 2
    assert "'much' is not a number" in err
    assert not (here / ".tapgrid").exists()


def test_a_baseline_file_is_small_and_gates_like_its_store(said: Said, here: Path) -> None:
    a, b = at(0.9, here / "a.jsonl"), at(0.8, here / "b.jsonl")
    assert said("export", str(a), "--format", "baseline", "--output", "base.json")[0] == 0
    assert (here / "base.json").stat().st_size < a.stat().st_size
    assert said("gate", "base.json", str(b))[0] == 1
    assert said("gate", "base.json", str(a))[0] == 0


def test_compare_informs_and_does_not_fail(said: Said, here: Path) -> None:
    a, b = at(0.9, here / "a.jsonl"), at(0.8, here / "b.jsonl")
    code, out, _ = said("compare", str(a), str(b))
    assert code == 0
    assert "0.900 → 0.800" in out
    assert json.loads(said("compare", str(a), str(b), "--json")[1])["counts"]["slower"] == 1


def test_an_alarm_is_confirmed_on_fresh_rounds(here: Path) -> None:
    a, b = at(0.9, here / "a.jsonl"), at(0.8, here / "b.jsonl")
    asked: list[Any] = []

    def fresh(share: float, name: str) -> gating.Confirm:
        def confirm(cells: Any) -> Path:
            asked.extend(cells)
            return at(share, here / name, rounds=2)

        return confirm

    held = gating.ask(Asked(str(a)), read(b), fresh(0.8, "held.jsonl"))
    assert held.exit_code == 1
    assert "confirmed by fresh rounds" in held.messages[0]
    assert asked == [("generate", "tapgrid-eager")]
    gone = gating.ask(Asked(str(a)), read(b), fresh(0.9, "gone.jsonl"))
    assert gone.exit_code == 0
    assert gone.comparison is not None
    assert gone.comparison.counts()["unconfirmed"] == 1
    asked.clear()
    assert gating.ask(Asked(str(a)), read(a), fresh(0.9, "never.jsonl")).exit_code == 0
    assert not asked  # no alarm, nothing to confirm


def test_a_confirmation_measures_only_what_the_alarm_is_about(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.session import Options, choose

    seen: list[Any] = []
    monkeypatch.setattr(commands, "_execute", lambda choice, **_: seen.append(choice))
    commands.confirm(choose(Options("smollm2")), [("capture-1-x8", "tapgrid-eager")])
    (choice,) = seen
    assert [r.name for r in choice.rows] == ["generate-x8", "capture-1-x8"]
    assert choice.columns == ("vanilla", "vanilla-eager", "tapgrid-eager", "hf")
    assert (choice.options.rounds, choice.options.fresh) == (2, True)
    assert choice.options.store == str(here / ".tapgrid" / "confirmations")


def git(*words: str) -> str:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    return subprocess.run(
        ["git", *words], check=True, capture_output=True, text=True, env=os.environ | who
    ).stdout.strip()


def test_a_baseline_may_be_a_git_revision(said: Said, here: Path) -> None:
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    commit = git("rev-parse", "HEAD")
    old = at(0.9, here / ".tapgrid" / "old" / "store.jsonl", machine={"project_commit": commit})
    new = at(0.9, here / ".tapgrid" / "new" / "store.jsonl", machine={"project_commit": commit})
    os.utime(old, (1, 1))
    assert gating.find_baseline("HEAD") == new
    assert gating.find_baseline("HEAD", but=new) == old
    assert said("gate", "HEAD", str(new))[0] == 0
    git("commit", "-q", "--allow-empty", "-m", "two")
    code, out, _ = said("gate", "HEAD", str(new))
    assert code == 3
    assert "no store under" in out


def test_floors_are_kept_and_widen_the_margins(said: Said, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def apart(number: int, column: str, row: str, run: int) -> float:
        return 3.0 + (0.1 * (-1) ** number if column.endswith("/b") else 0.0)

    plan = [["tapgrid-eager", "tapgrid-eager"]] * 6
    arms = save(session(apart, columns=("tapgrid-eager",), plan=plan, arms=True), here / "arms.jsonl")
    monkeypatch.setattr(commands, "_execute", lambda choice: arms)
    code, out, _ = said("aa", "smollm2", "--columns", "tapgrid-eager")
    assert code == 0
    assert "tapgrid-eager, generate: floor" in out
    assert "relabellings raised a false alarm" in out
    file = here / ".tapgrid" / "floors-smollm2.json"
    assert file.exists()
    floor = json.loads(said("aa", "smollm2", "--columns", "tapgrid-eager", "--json")[1])["cells"][0]["floor"]
    assert floor > 0.03
    (here / ".tapgrid" / "floors-g.json").write_text(file.read_text())
    found = at(0.9, here / ".tapgrid" / "s" / "store.jsonl")
    cells = {c["column"]: c for c in json.loads(said("show", str(found), "--json")[1])}
    assert cells["tapgrid-eager"]["margin"] == pytest.approx(floor)
    elsewhere = at(0.9, here / ".tapgrid" / "t" / "store.jsonl", machine={"cpu": "another"})
    cells = {c["column"]: c for c in json.loads(said("show", str(elsewhere), "--json")[1])}
    assert cells["tapgrid-eager"]["margin"] == pytest.approx(0.03)


def test_a_session_that_is_no_a_a_session_has_no_floors(
    said: Said, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = at(0.9, here / "s.jsonl")
    monkeypatch.setattr(commands, "_execute", lambda choice: path)
    code, _, err = said("aa", "smollm2")
    assert code == 2
    assert "no A/A session" in err


def test_trend_finds_the_planted_step(said: Said, here: Path) -> None:
    for day, share in enumerate([0.9, 0.9, 0.9, 0.9, 0.8, 0.8, 0.8, 0.8], 1):
        at(share, here / ".tapgrid" / f"d{day}" / "store.jsonl", started=f"2025-01-0{day}T00:00:00Z")
    code, out, _ = said("trend")
    assert code == 0
    assert "8 sessions, now 80.0 %" in out
    assert "-11.1 % at 2025-01-05" in out
    found = json.loads(said("trend", ".tapgrid", "--json")[1])
    (cell,) = (t for t in found if t["key"]["column"] == "tapgrid-eager")
    assert [s["index"] for s in cell["steps"]] == [4]
    assert said("trend", str(here / ".tapgrid" / "d1"))[0] == 0
    (here / "empty").mkdir()
    assert said("trend", "empty")[0] == 3


def test_pytest_with_a_gate_and_no_baseline_is_3(pytester: pytest.Pytester) -> None:
    from tests import fake

    fake.grid_file(pytester.path, columns=("vanilla", "fake-a"), rows=("generate",))
    given = [
        "--grid",
        "fake.toml",
        "--grid-rounds",
        "1",
        "--grid-runs",
        "1",
        "--grid-report",
        "",
        "-p",
        "no:cacheprovider",
    ]
    result = pytester.runpytest_inprocess(*given, "--grid-baseline", "none.jsonl", "--grid-gate", "slower:3%")
    result.assert_outcomes(passed=2)
    assert result.ret == 3
    result.stdout.fnmatch_lines(["*tapgrid gate: Cannot judge*", "*no baseline 'none.jsonl'*"])
