"""What `tapgrid doctor` says of each column: whether it runs here, and what to install if not."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from adapters.columns import Column, all_columns
from harness import environments, readiness
from harness.cli import main
from harness.doctor import Finding, line


@pytest.fixture(autouse=True)
def whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with every module, a compiler, a GPU, vLLM-Lens out of sight, and no environment built."""
    monkeypatch.setattr(environments, "has_cuda", lambda: True)
    monkeypatch.setattr(readiness, "_importable", lambda module: True)
    monkeypatch.setattr(readiness.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "tapgrid-peers" / "vllm-lens").mkdir(parents=True)
    monkeypatch.setenv(environments.VARIABLE, str(tmp_path / "none"))
    monkeypatch.delenv("TAPGRID_PYTHON_VLLM_0_32", raising=False)


def found() -> dict[str, Finding]:
    return {f.what.removeprefix("column "): f for f in readiness.columns()}


def test_every_column_of_this_interpreter_runs_and_the_others_name_the_command() -> None:
    seen = found()
    assert {n for n, f in seen.items() if f.good} == set(all_columns())
    other = seen["tapgrid-taps@vllm-0.32"]
    assert line(other) == (
        "note  column tapgrid-taps@vllm-0.32: no environment. its environment 'vllm-0.32' is not built here: "
        "run `tapgrid env build vllm-0.32` (about 4 GB)"
    )
    assert line(seen["vanilla"]) == "ok    column vanilla: runs here"


def test_a_built_environment_names_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPGRID_PYTHON_VLLM_0_32", "/x/python")
    assert line(found()["vanilla@vllm-0.32"]) == "ok    column vanilla@vllm-0.32: runs under /x/python"


@pytest.mark.parametrize(
    ("missing", "prefix"),
    [("nnsight", "nnsight"), ("interp_engine", "interp-engine"), ("transformer_lens", "transformerlens")],
)
def test_a_missing_library_is_named_for_its_columns_alone(
    missing: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "_importable", lambda module: module != missing)
    seen = {n: f for n, f in found().items() if f.good is None and "@" not in n}
    assert set(seen) == {n for n in all_columns() if n.startswith(prefix + "-")}
    name = f"{prefix}-hf" if f"{prefix}-hf" in seen else f"{prefix}-vllm"
    assert line(seen[name]) == f"note  column {name}: without {missing}. `make install` brings it"


def test_a_plugin_that_is_not_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tapgrid-peers" / "vllm-lens"
    folder.rmdir()
    seen = {n: f for n, f in found().items() if f.good is None and "@" not in n}
    assert {n: line(f) for n, f in seen.items()} == {
        "vllm-lens": f"note  column vllm-lens: nothing in {folder}. `make install` brings it"
    }


def test_without_a_gpu_what_needs_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "has_cuda", lambda: False)
    seen = {n: f for n, f in found().items() if f.good is None and "@" not in n}
    assert {n: line(f) for n, f in seen.items()} == {
        "hotwire": "note  column hotwire: no CUDA GPU here. it runs on no CPU: its cells are refused with that reason"
    }


def test_without_a_compiler_the_compiled_columns_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness.shutil, "which", lambda name: None)
    seen = {n for n, f in found().items() if f.good is None and "@" not in n}
    assert seen == {n for n, c in all_columns().items() if c.compiled}
    assert "no C++ compiler here" in found()["vanilla"].advice


def test_a_third_partys_column_whose_module_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Column("acme", "acme_adapter:Acme", "from tapgrid-acme")
    monkeypatch.setattr(readiness, "every_column", lambda: {"acme": theirs})
    monkeypatch.setattr(readiness, "_importable", lambda module: False)
    assert [line(f) for f in readiness.columns()] == [
        "note  column acme: without acme_adapter. acme_adapter:Acme (from tapgrid-acme) is not found: "
        "install that package again"
    ]


def test_looking_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    seen: list[str] = []
    real: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: seen.append(name) or real(name))
    assert readiness._importable("json.no_such_module")
    assert not readiness._importable("no_such_package.sub")
    assert seen == ["json", "no_such_package"]


def test_doctor_prints_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    what = [f["what"] for f in json.loads(capsys.readouterr().out)]
    assert what[-len(found()) :] == [f"column {n}" for n in found()]
