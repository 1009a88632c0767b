"""Documentation that runs: the README's Python, every doctest, and the words that the documents use."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from adapters.points import CANONICAL

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def callable_or_property(thing: object) -> bool:
    return inspect.isfunction(thing) or isinstance(thing, property)


MODULES = [
    "tapgrid",
    *sorted(
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
        for room in ("adapters", "harness", "validation", "reports")
        for path in (ROOT / room).rglob("*.py")
        if ">>>" in path.read_text()
    ),
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("module", MODULES)
def test_doctests(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert tried, f"{module} has '>>>' and no doctest that runs"
    assert not failed


def public() -> dict[str, object]:
    """Every public name of the face and of the runtime."""
    return {
        f"{package}.{name}": getattr(importlib.import_module(package), name)
        for package in ("tapgrid", "adapters")
        for name in importlib.import_module(package).__all__
    }


def examples(thing: object) -> str:
    """The code of the examples in a thing's own docstring."""
    return "".join(e.source for e in doctest.DocTestParser().get_examples(inspect.getdoc(thing) or ""))


@pytest.mark.parametrize("name", public())
def test_every_public_name_has_an_example_that_is_run(name: str) -> None:
    """In its own docstring, and in a module whose doctests `test_doctests` runs."""
    thing = public()[name]
    assert examples(thing), f"{name} has no example"
    assert thing.__module__ in MODULES
    assert re.search(rf"\b{name.rpartition('.')[2]}\b|rt\.|m\.", examples(thing))


@pytest.mark.parametrize(
    ("name", "member"),
    [
        (name, member)
        for name, thing in public().items()
        if inspect.isclass(thing) and name in ("tapgrid.Output", "tapgrid.Pass", "tapgrid.Runtime")
        for member in vars(thing)
        if not member.startswith("_") and member not in CANONICAL and callable_or_property(vars(thing)[member])
    ],
)
def test_every_method_is_told_and_shown(name: str, member: str) -> None:
    """Each has a docstring, and an example of its own or a place in its class's."""
    kind = public()[name]
    thing = inspect.getattr_static(kind, member)
    assert inspect.getdoc(thing), f"{name}.{member} has no docstring"
    shown = examples(kind) + examples(thing) + examples(importlib.import_module("tapgrid").load)
    assert f".{member}" in shown or f" {member}" in shown, f"no example shows {name}.{member}"


@pytest.mark.engine
def test_the_readme_runs() -> None:
    code = "\n".join(blocks("python"))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "torch.Size([13])" in done.stdout, "6 prompt tokens and 8 new ones, less the last, which is never an input"
    assert done.stdout.count("[0, 1, 2, 3, 4, 5]") == 1, "the first pass of steps() holds the prompt"


def test_every_tapgrid_command_of_the_readme_exists() -> None:
    listed = re.search(r"^tapgrid ([a-z| ]+)$", README, re.MULTILINE)
    assert listed is not None
    help_text = subprocess.run(
        [sys.executable, "-m", "tapgrid", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for command in listed.group(1).split(" | "):
        assert re.search(rf"^    {command}\b", help_text, re.MULTILINE), command


def test_the_workflow_uses_words_that_exist() -> None:
    """docs/tapgrid.yml is copied by others: every option and column in it must be one of ours."""
    import yaml

    from adapters.columns import all_columns
    from harness.gate import parse_gate

    text = (ROOT / "docs" / "tapgrid.yml").read_text()
    steps = yaml.safe_load(text)["jobs"]["gate"]["steps"]
    script = "\n".join(step.get("run", "") for step in steps)
    options = set(re.findall(r"--grid-[a-z]+", script))
    help_text = subprocess.run(
        [sys.executable, "-m", "pytest", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert options
    assert all(option in help_text for option in options)
    for columns in re.findall(r"COLUMNS=(\S+)", script):
        assert set(columns.split(",")) <= set(all_columns())
    assert parse_gate(re.search(r"--grid-gate (\S+?)\"", script).group(1))  # type: ignore[union-attr]
