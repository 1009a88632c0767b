"""`tapgrid adapter check` and the template: installed by its entry point it passes, broken on purpose it fails."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adapters.columns import all_columns
from harness import adapter_check
from harness.cli import main
from harness.models import resolve
from tests import broken_template
from validation.conformance import MODEL, SETTINGS, Line, conform

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "docs" / "adapter_template"
NEW = 4
REFUSED = ["capture-mixed", "lens", "ablate-head", "ablate-head-watched", "force-token", "gradient"]


def load(folder: Path, source: str) -> ModuleType:
    file = folder / "broken_adapter.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("broken_adapter", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines_of(folder: Path, source: str) -> list[Line]:
    pytest.importorskip("transformers")
    adapter: Any = load(folder, source).Acme()
    adapter.boot(resolve(MODEL), SETTINGS)
    try:
        return conform(adapter, resolve(MODEL), NEW)
    finally:
        adapter.close()


def wrong(lines: list[Line]) -> dict[str, str]:
    return {line.what: line.reason for line in lines if line.verdict == "wrong"}


# --- the suite, on the template and on copies of it with one mistake each ---


def test_the_template_passes(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, (TEMPLATE / "acme_adapter.py").read_text())
    assert wrong(lines) == {}
    assert [line.what for line in lines if line.verdict == "refused"] == REFUSED
    held = [line.what for line in lines if line.verdict == "holds"]
    assert held[:4] == ["protocol", "nothing x1", "nothing x3", "nothing, again"]
    assert held[-1] == "unchanged after all"
    for work in ("capture-1", "capture-all", "probe", "steer", "steer-watched"):
        assert {f"{work} x1", f"{work} x3", f"{work} installed"} <= set(held)


@pytest.mark.parametrize("mistake", broken_template.MISTAKES, ids=lambda m: m.name)
def test_a_mistake_is_named_by_its_line(mistake: broken_template.Mistake, tmp_path: Path) -> None:
    source = (TEMPLATE / "acme_adapter.py").read_text()
    assert source.count(mistake.right) == 1, "the template no longer says that"
    found = wrong(lines_of(tmp_path, source.replace(mistake.right, mistake.wrong)))
    assert mistake.line in found
    assert mistake.says in found[mistake.line]
    assert not [what for what in found if not what.startswith(mistake.only)]


# --- the command ---


def check(folder: Path, *argv: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    own = [str(ROOT), *([str(path)] if path else [])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(own)}
    command = [sys.executable, "-P", "-m", "harness.cli", *argv]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=580)


@pytest.mark.engine
def test_installed_in_a_folder_it_is_a_column_by_its_entry_point(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(TEMPLATE, source)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, capture_output=True)
    listed = check(tmp_path, "list", "columns", path=site)
    assert "acme: from tapgrid-acme" in listed.stdout.splitlines()
    done = check(tmp_path, "adapter", "check", "acme", "--new-tokens", "3", path=site)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "made, and closed before any boot  holds",
        "boot                              holds",
        "protocol                          holds",
    ]
    assert "lens                              refused  not-expressible: acme has no words for Lens" in lines
    assert lines[-2:] == ["", f"acme: {len(lines) - 2 - len(REFUSED)} hold, {len(REFUSED)} refused, 0 wrong"]


@pytest.mark.engine
def test_a_module_of_the_working_directory_is_found_and_what_is_wrong_is_exit_code_1(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = (TEMPLATE / "acme_adapter.py").read_text()
    mistake = broken_template.MISTAKES[0]
    (tmp_path / "mine.py").write_text(source.replace(mistake.right, mistake.wrong))
    done = check(tmp_path, "adapter", "check", "mine", "--new-tokens", "2", "--json")
    assert done.returncode == 1, done.stderr
    found = {line["what"]: line for line in json.loads(done.stdout)}
    assert found[mistake.line]["verdict"] == "wrong"
    assert found["nothing x1"] == {"what": "nothing x1", "verdict": "holds", "reason": ""}
    assert found["closed"]["verdict"] == "holds"


SMALL = """
from adapters.work import MissingLibrary
class Base:
    plain = False
    def boot(self, model, settings): {boot}
    def close(self): {close}
    def refuses(self, work, shape): return None
    def run(self, requests, work): return []
    def install(self, work): pass
    def remove(self): pass
    def engine_settings(self): return {{}}
"""


@pytest.mark.parametrize(
    ("source", "target", "code", "lines"),
    [
        (
            SMALL.format(boot="raise MissingLibrary('pip install acme')", close="pass"),
            "mine",
            3,
            [
                "made, and closed before any boot  holds",
                "boot                              refused  no-library: pip install acme",
                "closed                            holds",
                "",
                "mine: 2 hold, 1 refused, 0 wrong",
            ],
        ),
        (
            SMALL.format(boot="raise ValueError('no weights')", close="pass"),
            "mine:Base",
            1,
            [
                "made, and closed before any boot  holds",
                "boot                              WRONG    ValueError: no weights",
                "closed                            holds",
                "",
                "mine:Base: 2 hold, 0 refused, 1 wrong",
            ],
        ),
        (
            SMALL.format(boot="pass", close="self.engine.stop()"),
            "mine",
            1,
            [
                "made, and closed before any boot  WRONG    AttributeError: 'Base' object has no attribute 'engine'",
                "",
                "mine: 0 hold, 0 refused, 1 wrong",
            ],
        ),
        (
            SMALL.format(boot="import os; os._exit(7)", close="pass"),
            "mine",
            1,
            [
                "made, and closed before any boot  holds",
                "the process                       WRONG    ended with exit code 7",
                "",
                "mine: 1 hold, 0 refused, 1 wrong",
            ],
        ),
        (
            "import no_such_library",
            "mine",
            1,
            [
                "made, and closed before any boot  WRONG    ModuleNotFoundError: No module named 'no_such_library'",
                "",
                "mine: 0 hold, 0 refused, 1 wrong",
            ],
        ),
    ],
)
def test_what_never_boots(source: str, target: str, code: int, lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(source)
    done = check(tmp_path, "adapter", "check", target)
    assert (done.returncode, done.stdout.splitlines()) == (code, lines)


TWO = SMALL.format(boot="pass", close="pass") + "class Other(Base): pass\nclass Helper: pass\n"


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        (TWO, "mine", "mine holds 2 adapters (Base, Other): name one, as mine:Class"),
        (TWO, "mine:Bsae", "mine has no 'Bsae'; adapters in it: Base, Other"),
        ("x = 1", "mine", "mine holds no adapter: no class with boot, close, refuses, run, install, remove, engine_se"),
    ],
)
def test_a_module_that_does_not_say_which_is_usage(source: str, target: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(source)
    done = check(tmp_path, "adapter", "check", target)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(f"tapgrid: {said}")


def test_names_that_do_not_exist_are_usage(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapter", "chekc", "x"]) == 2
    assert main(["adapter", "check", "tapgrid-eagre"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tapgrid: no action 'chekc'; did you mean 'check'? Known: check"
    assert lines[1].startswith("tapgrid: no module and no column 'tapgrid-eagre'; did you mean 'tapgrid-eager'")


def test_a_column_whose_environment_is_not_built_names_the_command(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAPGRID_ENVIRONMENTS", str(here))
    monkeypatch.delenv("TAPGRID_PYTHON_VLLM_0_32", raising=False)
    assert main(["adapter", "check", "tapgrid-eager@vllm-0.32"]) == 3
    assert capsys.readouterr().out.splitlines() == [
        "boot  refused  its environment 'vllm-0.32' is not built here: run `tapgrid env build vllm-0.32` (about 4 GB)",
        "",
        "tapgrid-eager@vllm-0.32: 0 hold, 1 refused, 0 wrong",
    ]


def test_columns_of_ours_are_targets_too() -> None:
    assert adapter_check.column_of("hf") == all_columns()["hf"]
    assert adapter_check.column_of("tests.fake:A").target == "tests.fake:A"


def test_all_refused_is_not_a_pass() -> None:
    lines: list[dict[str, Any]] = [
        {"what": "made, and closed before any boot", "verdict": "holds"},
        {"what": "boot", "verdict": "refused"},
        {"what": "closed", "verdict": "holds"},
    ]
    assert adapter_check.code_of(lines) == 3
    assert adapter_check.code_of([*lines, {"what": "nothing x1", "verdict": "holds"}]) == 0
    assert adapter_check.code_of([*lines, {"what": "nothing x1", "verdict": "wrong"}]) == 1


# --- the template's own words ---


def test_the_readme_of_the_template_tells_the_protocol_as_it_is() -> None:
    from adapters.work import Adapter
    from validation.conformance import CODES, METHODS

    text = (TEMPLATE / "README.md").read_text()
    for word in (*METHODS, "plain", *CODES):
        assert f"`{word}" in text, word
    assert set(METHODS) == {n for n in vars(Adapter) if not n.startswith("_") and callable(getattr(Adapter, n))}
    assert 'entry-points."tapgrid.adapters"' in (TEMPLATE / "pyproject.toml").read_text()


def test_importing_the_template_imports_no_engine() -> None:
    path = [str(TEMPLATE), str(ROOT)]
    code = f"import sys; sys.path[:0] = {path!r}; import acme_adapter; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"'torch'", "'transformers'"} & set(done.stdout.strip("[]\n").split(", "))


# --- our own columns ---

OURS = {"tapgrid-hf": "hf", "tapgrid-eager": "vllm", "tapgrid-hf-taps": "hf", "tapgrid-taps": "vllm"}


@pytest.mark.engine
@pytest.mark.parametrize("column", OURS)
def test_our_own_columns_conform(column: str, tmp_path: Path) -> None:
    """All of them in CI; elsewhere the one that boots at once."""
    pytest.importorskip({"hf": "transformers", "vllm": "vllm"}[OURS[column]])
    if column != "tapgrid-hf" and not os.environ.get("CI"):
        pytest.skip("runs in CI, or with CI=1")
    done = check(tmp_path, "adapter", "check", column, "--json")
    assert done.stdout, done.stderr
    lines = json.loads(done.stdout)
    refused = ["gradient installed"] if column == "tapgrid-hf" else ["gradient"]
    assert [line for line in lines if line["verdict"] == "wrong"] == []
    assert [line["what"] for line in lines if line["verdict"] == "refused"] == refused
    assert done.returncode == 0
