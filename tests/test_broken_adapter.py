"""A real engine, broken on purpose, through the whole harness: its cells are INVALID, and nobody else's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

GRID = """
name = "broken"
about = "a broken column beside its honest twin"
model = "synthetic:llama"
columns = ["hf", "tapgrid-hf", "shifted", "dropped"]
metric = "cpu"
[settings]
dtype = "float32"
max_model_len = 128
[adapters]
shifted = "tests.broken:shifted"
dropped = "tests.broken:dropped"
[tiers.quick]
rounds = 1
runs = 1
[rows.generate]
prompt_tokens = 16
new_tokens = 4
[rows.capture-1]
prompt_tokens = 16
new_tokens = 4
[rows.steer]
prompt_tokens = 16
new_tokens = 4
"""


def test_a_broken_adapter_is_never_a_result(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(GRID)
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "run", str(file), "--tier", "quick", "--store", str(tmp_path / "stores"),
         "--report", str(tmp_path / "report.html"), "--json"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-3000:]
    verdicts = {(c["row"], c["column"]): c["verdict"] for c in json.loads(done.stdout)}
    assert {v for (_, column), v in verdicts.items() if column == "shifted"} == {"INVALID"}
    assert verdicts["steer", "dropped"] == "INVALID"
    assert "INVALID" not in {v for (_, column), v in verdicts.items() if column in ("hf", "tapgrid-hf")}
    page = (tmp_path / "report.html").read_text()
    assert page.count("INVALID") >= 4
