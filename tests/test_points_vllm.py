"""Every point of every family on vLLM against `transformers`; what is compared is in points_vllm_cases.py.

CI runs the families whose layouts differ. TAPGRID_ALL_FAMILIES=1 runs every one that vLLM's CPU engine can run in
float32; one family is `-k gpt_neox`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as Xml
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.twins import TWINS

IN_CI = ("qwen3", "gemma3", "gpt2", "gpt_neox", "phi3", "olmo2", "mixtral", "granite", "granitemoehybrid")
# Qwen3-Next runs in bfloat16 only (below), Qwen3.5 asks for torchvision as well; a parallel StableLM is run by vLLM as
# a sequential one.
NOT_ON_THIS_ENGINE = ("qwen3_next", "qwen3_5", "stablelm_parallel")
ELSEWHERE = tuple(sorted(set(TWINS) - {*IN_CI, *NOT_ON_THIS_ENGINE}))
CASES = Path(__file__).with_name("points_vllm_cases.py")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, str]]:
    """Family -> test -> what went wrong, "" for nothing.

    One process for all families that were asked for, and for nothing else: closing a vLLM engine takes down what every
    other one in its process needs, and a dense model that was booted first leaves experts without their group.
    """
    mine = (i for i in request.session.items if getattr(i, "fspath", None) == request.fspath and hasattr(i, "callspec"))
    asked = [i.callspec.params["family"] for i in mine if "family" in i.callspec.params]
    report = tmp_path_factory.mktemp("points") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES), f"--junitxml={report}"]
    env = os.environ | {"TAPGRID_FAMILIES": ",".join(asked), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=CASES.parent.parent, env=env, capture_output=True, text=True)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, dict[str, str]] = {}
    for case in Xml.parse(report).iter("testcase"):
        name, _, family = case.attrib["name"].rstrip("]").partition("[")
        bad = next((c for c in case if c.tag in ("failure", "error")), None)
        found.setdefault(family, {})[name] = "" if bad is None else (bad.text or "")[-2000:]
    return found


@pytest.mark.engine
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", [*IN_CI, *(ELSEWHERE if os.environ.get("TAPGRID_ALL_FAMILIES") == "1" else ())])
def test_every_point_is_the_same_on_both_engines(family: str, outcomes: Mapping[str, dict[str, str]]) -> None:
    """case 3."""
    assert len(outcomes[family]) >= 10
    bad = {name: why for name, why in outcomes[family].items() if why}
    assert not bad, "\n".join(f"{name}:\n{why}" for name, why in bad.items())


@pytest.mark.engine
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.environ.get("TAPGRID_ALL_FAMILIES") != "1", reason="TAPGRID_ALL_FAMILIES=1 runs every family")
def test_a_hybrid_is_within_the_yardstick() -> None:
    """case 15."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(CASES.with_name("points_hybrid_cases.py")),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=CASES.parent.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
