"""A test process that dies says where: the suite runs on machines where nobody can look afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = """
import ctypes

def test_runs_pytest(pytester):
    pytester.makepyfile("def test_inner(): pass")
    pytester.runpytest_inprocess("-q", "-p", "no:hypothesispytest").assert_outcomes(passed=1)

def test_dies():
    ctypes.string_at(0)
"""


@pytest.mark.parametrize("how", [["-p", "no:xdist"], ["-n", "1", "--max-worker-restart", "0"]], ids=["alone", "xdist"])
def test_where_it_died_is_told_after_a_test_that_ran_pytest(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    pytester.makeconftest("from tests.conftest import *  # noqa: F403")
    pytester.makepyfile(test_it=TESTS)
    result = pytester.runpytest_subprocess("-p", "no:hypothesispytest", "-p", "no:cacheprovider", *how)
    assert result.ret
    result.stderr.fnmatch_lines(["Fatal Python error: Segmentation fault", "*test_it.py*in test_dies"])
    if "-n" in how:
        result.stderr.fnmatch_lines(["gw0, process *, ended with status -11 (negative: a signal)"])
