"""Known issues: the file, what is said when a release fixes one, and each shown on the installed library."""

from __future__ import annotations

import datetime
import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.columns import all_columns
from adapters.engines.settings import environment
from tests.known_issue_inputs import GROUPS, SETTINGS
from validation import known_issues as known
from validation.known_issues import Fixed, KnownIssue

ROOT = Path(__file__).resolve().parent.parent
ISSUES = {i.id: i for i in known.known_issues()}
GROUP_OF = {issue: group for group, (_, _, issues) in GROUPS.items() for issue in issues}
ENTRY = """
[[issue]]
id = "{id}"
library = "lib"
version = "1.2.0"
columns = ["hf"]
where = "w"
wrong = "x"
measured = "m"
input = "i"
date = 2026-01-02
here = "h"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "known.toml"
    path.write_text(text)
    return path


# --- the file ---


def test_every_entry_is_whole_and_about_columns_that_exist() -> None:
    assert len(ISSUES) >= 12
    for issue in ISSUES.values():
        assert all(getattr(issue, f) for f in KnownIssue.__dataclass_fields__), issue.id
        assert set(issue.columns) <= set(all_columns()), issue.id
        assert issue.date <= datetime.date.today()
        assert known.newer(issue.version, "0"), issue.id


def test_every_entry_is_shown_by_a_test_and_every_test_is_of_an_entry() -> None:
    assert set(GROUP_OF) == set(ISSUES)
    assert sum(len(issues) for _, _, issues in GROUPS.values()) == len(ISSUES)


def test_an_entry_is_read_as_it_is_written(tmp_path: Path) -> None:
    (issue,) = known.known_issues(written(tmp_path, ENTRY.format(id="a")))
    assert issue == KnownIssue(
        "a", "lib", "1.2.0", ("hf",), "w", "x", "m", "i", datetime.date(2026, 1, 2), "h"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ENTRY.format(id="a") + ENTRY.format(id="a"), "'a' is there more than once"),
        (ENTRY.format(id="a").replace('here = "h"\n', ""), "'a' lacks, or should not have: here"),
        (ENTRY.format(id="a") + 'url = "u"\n', "'a' lacks, or should not have: url"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_entry(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        known.known_issues(written(tmp_path, text))


def test_issues_of_columns_in_any_environment() -> None:
    assert known.of_columns([]) == ()
    assert known.of_columns(["vanilla-eager", "tapgrid-eager"]) == ()
    own = {"vllm-extract-last-file", "vllm-extract-draft"}
    assert {i.id for i in known.of_columns(["vllm-extract"])} == own | {"vllm-loads-no-graph"}
    here, there = known.of_columns(["interp-engine-static"]), known.of_columns(["interp-engine-static@vllm-0.28"])
    assert here == there
    assert [i.id for i in here] == ["interp-engine-value"]


# --- what is said of another release ---


@pytest.mark.parametrize(
    ("version", "than", "newer"),
    [
        ("1.3.5", "1.3.4", True),
        ("1.3.4", "1.3.4", False),
        ("1.3.4.post1", "1.3.4", True),
        ("1.14.2", "1.3.4", True),
        ("1.3.3", "1.3.4", False),
        ("2.13.0+cpu", "2.13.0", False),
        ("2.0", "1.9.9", True),
        ("1.0", "1.0.0", False),
    ],
)
def test_newer(version: str, than: str, newer: bool) -> None:
    assert known.newer(version, than) is newer


def test_what_still_shows_is_fine_in_every_version(tmp_path: Path) -> None:
    (issue,) = known.known_issues(written(tmp_path, ENTRY.format(id="a")))
    for installed in ("1.1.0", "1.2.0", "9.0"):
        known.check(issue, True, installed)


def test_a_newer_release_that_fixed_it_says_to_remove_the_entry(tmp_path: Path) -> None:
    (issue,) = known.known_issues(written(tmp_path, ENTRY.format(id="a")))
    with pytest.raises(Fixed, match=r"a: fixed in lib 1\.3\.0: remove the entry from known_issues\.toml"):
        known.check(issue, False, "1.3.0")


@pytest.mark.parametrize("installed", ["1.2.0", "1.1.9"])
def test_the_same_release_that_does_not_show_it_is_a_wrong_entry(tmp_path: Path, installed: str) -> None:
    (issue,) = known.known_issues(written(tmp_path, ENTRY.format(id="a")))
    with pytest.raises(AssertionError, match=rf"lib {installed} does not show what .* says of 1\.2\.0: x") as wrong:
        known.check(issue, False, installed)
    assert not isinstance(wrong.value, Fixed)


# --- each on the installed library, in a process for each group ---


@functools.cache
def shown(group: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.known_issue_inputs", group]
    env = os.environ | environment(SETTINGS)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.engine
@pytest.mark.parametrize("issue", sorted(ISSUES))
def test_the_installed_library_shows_it(issue: str) -> None:
    group = GROUP_OF[issue]
    if not os.environ.get("CI"):
        pytest.skip("runs in CI, or with CI=1")
    if importlib.util.find_spec(GROUPS[group][1]) is None:
        pytest.skip(f"{GROUPS[group][1]} is not installed")
    said = shown(group)
    shows, measured = said["found"][issue]
    print(f"{issue}: {measured}")
    known.check(ISSUES[issue], shows, said["versions"][ISSUES[issue].library])
