"""Grid files: what they may say, and the one sentence about what they may not."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from harness import grid
from harness.fingerprint import ROOT
from harness.grid import UsageError, load, pick, tier
from tests import fake


@pytest.mark.parametrize("name", grid.names())
def test_every_grid_of_ours_loads(name: str) -> None:
    found = load(name)
    assert found.name == name
    assert found.about
    assert {"quick", "standard", "publish", "first"} <= set(found.tiers)
    assert [found.tiers[t].rounds for t in ("quick", "standard", "publish")] == [3, 6, 10]
    assert found.tiers["first"].budget_minutes
    json.dumps(grid.to_dict(found), allow_nan=False)


def test_the_default_grid_is_the_issue_s() -> None:
    found = load("smollm2")
    assert len(found.rows) == 13
    assert not {"generate-x32", "capture-1-x32", "gradient"} & {r.name for r in found.rows}
    assert found.columns == ("vanilla", "vanilla-eager", "tapgrid-eager", "tapgrid-hf", "hf", "nnsight-eager")
    assert found.metric == "cpu"
    assert found.row("sweep").requests == 64
    assert found.row("forward").prompt_tokens == 512


def test_a_grid_file_of_one_s_own(tmp_path: Path) -> None:
    path = fake.grid_file(tmp_path, top='metric = "wall"\nmargin = 0.05')
    found = load(str(path))
    assert (found.name, found.metric, found.margin) == ("fake", "wall", 0.05)
    assert found.settings.max_model_len == 128
    assert found.known_columns()["fake-a"].target == "tests.fake:A"
    assert found.columns == ("vanilla", "fake-a", "fake-b")
    assert [r.name for r in found.rows] == ["generate", "capture-1", "steer"]
    plain = grid.to_dict(found)
    assert plain["rows"]["steer"]["plain"] == "generate"
    assert plain["settings"]["dtype"] == "bfloat16"


MINIMAL = 'model = "m"\ncolumns = ["vanilla"]\n[rows.generate]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model = ", "not TOML"),
        ('columns = ["vanilla"]\n[rows.generate]', "'model' is missing"),
        ('model = "m"\ncolumns = []\n[rows.generate]', "'columns' is missing or empty"),
        ('model = "m"\ncolumns = ["vanilla"]', "'rows' is missing"),
        (MINIMAL.replace("vanilla", "vanila"), "no column 'vanila'; did you mean 'vanilla'"),
        (MINIMAL.replace("generate", "genrate"), "no row 'genrate'; did you mean 'generate'"),
        ("colums = 1\n" + MINIMAL, "no setting 'colums'; did you mean 'columns'"),
        (MINIMAL + "prompt_token = 3", r"\[rows.generate\] no setting 'prompt_token'; did you mean 'prompt_tokens'"),
        (MINIMAL + 'prompt_tokens = "3"', r"\[rows.generate\] prompt_tokens = '3' is not int"),
        (MINIMAL + "prompt_tokens = true", "prompt_tokens = True is not int"),
        (MINIMAL + "new_tokens = 0", "new_tokens must be at least 1, not 0"),
        (MINIMAL + "prompt_tokens = 2000", "needs 2032 tokens, more than max_model_len = 1024"),
        (MINIMAL.replace("generate", "generate-x32"), "has 32 requests, more than max_concurrent = 8"),
        ('metric = "gpu"\n' + MINIMAL, "neither 'cpu' nor 'wall'"),
        (MINIMAL + "[settings]\ndtyp = 1", r"\[settings\] no setting 'dtyp'; did you mean 'dtype'"),
        ("settings = 3\n" + MINIMAL, r"\[settings\] is a int, not a table"),
        (MINIMAL.replace('["vanilla"]', '["hf", "hf"]'), "named twice"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_file_s_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        load(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no grid 'smolm2'; did you mean 'smollm2'"):
        load("smolm2")
    with pytest.raises(UsageError, match="given by its path"):
        load("nowhere/my.toml")
    with pytest.raises(UsageError, match="no tier 'standart'; did you mean 'standard'"):
        tier(load("smollm2"), "standart")


def test_picking() -> None:
    names = ["vanilla", "vanilla-eager", "hf"]
    assert pick("column", None, names) == ("vanilla", "vanilla-eager", "hf")
    assert pick("column", "hf, vanilla", names) == ("vanilla", "hf")
    assert pick("column", "vanilla*", names) == ("vanilla", "vanilla-eager")
    assert pick("column", "extra", names, also=["extra"]) == ("extra",)
    assert pick("column", "*", names, also=["extra"]) == tuple(names)
    also = ["extra", "vanilla@new", "extra@new"]
    assert pick("column", "all", names, also) == (*names, "extra")
    assert pick("column", "*@*", names, also) == ("vanilla@new", "extra@new")
    assert pick("column", "all,*@new", names, also) == (*names, *also)
    with pytest.raises(UsageError, match="no column 'vanila'; did you mean"):
        pick("column", "hf,vanila", names)
    with pytest.raises(UsageError, match="no column selected by ','"):
        pick("column", ",", names)


@pytest.mark.parametrize(
    "module", ["harness.cli", "harness.plugin", "harness.run", "harness.commands", "harness.finish"]
)
def test_neither_the_parent_nor_its_commands_import_torch(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "from harness.cli import main\n"
        "assert main(['list']) == 0 and main(['plan', 'smollm2']) == 0\n"
        "heavy = [m for m in ('torch', 'vllm', 'transformers', 'scipy') if m in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_grids_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("smollm2").margin = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vanilla", "entry point 'acme:Acme' claims the column name 'vanilla', which is taken"),
        ("acme@new", "column 'acme@new' (from an entry point): a name is of letters, digits, dots, dashes and _"),
        ("a,b", "column 'a,b' (from an entry point): a name is of letters, digits, dots, dashes and _"),
    ],
)
def test_a_third_partys_name_that_cannot_be(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name, "acme:Acme", "tapgrid.adapters")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    with pytest.raises(UsageError) as error:
        grid.every_column()
    assert str(error.value) == said
    point = EntryPoint("acme_2.0-fast", "acme:Acme", "tapgrid.adapters")
    assert grid.every_column()["acme_2.0-fast"].target == "acme:Acme"
