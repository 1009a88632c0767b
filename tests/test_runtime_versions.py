"""What is refused at construction, by name and range, before anything boots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import adapters
from adapters.engines import versions
from adapters.engines.vllm import _environment, load_vllm
from adapters.errors import LoadError
from harness.models import resolve
from tests.engines import LLAMA


@pytest.mark.parametrize("version", ["0.27.1", "0.27.1+cpu", "0.28.0", "0.30.0", "0.32.0", "0.32.0rc1"])
def test_tested_releases_are_taken(version: str) -> None:
    versions.check_version(version)


@pytest.mark.parametrize("version", ["0.27.0", "0.26.9", "0.32.1", "0.33.0", "1.0.0", "dev", ""])
def test_other_releases_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(LoadError, match=r"outside of the tested releases, 0\.27\.1 to 0\.32\.0: install one of those"):
        versions.check_version(version)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size=2 is not supported: a stage holds only some of the layers",
        ),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config=.*rows of rejected tokens"),
        ({"enable_dbo": True}, "enable_dbo=True is not supported"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2 is not supported"),
    ],
)
def test_combinations_are_refused_before_vllm_is_imported(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.engines.vllm._environment", lambda *a: pytest.fail("it went on to boot"))
    with pytest.raises(LoadError, match=message):
        load_vllm(resolve(LLAMA), dtype="float32", **arguments)


def test_values_that_mean_nothing_are_fine() -> None:
    versions.check_arguments({"pipeline_parallel_size": 1, "speculative_config": None, "enable_dbo": False})


def test_a_runner_without_a_seam_is_refused_by_name() -> None:
    """case 13: A new engine's runner has another layout: capturing nothing and steering nothing would be silent."""
    whole = SimpleNamespace(**dict.fromkeys(versions.SEAMS))
    versions.check_runner(whole, "0.27.1")
    del whole.input_batch
    with pytest.raises(
        LoadError, match=r"vLLM 0\.99\.0: SimpleNamespace has no input_batch \(which request is where\)"
    ):
        versions.check_runner(whole, "0.99.0")


def test_a_boots_environment_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("TAPGRID_OWN", "the user's")
    monkeypatch.delenv("TAPGRID_OURS", raising=False)
    seen = {}

    def fails() -> None:
        with _environment({"TAPGRID_OWN": "ours", "TAPGRID_OURS": "ours"}):
            seen.update(own=os.environ["TAPGRID_OWN"], ours=os.environ["TAPGRID_OURS"])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert seen == {"own": "the user's", "ours": "ours"}
    assert os.environ["TAPGRID_OWN"] == "the user's"
    assert "TAPGRID_OURS" not in os.environ


class FakeCore:
    """What `shut_down` touches of an engine."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        part = SimpleNamespace(
            shutdown=lambda: self.calls.append("part"), clear_backend=lambda: self.calls.append("part")
        )
        self.structured_output_manager = self.model_executor = self.scheduler = part


FakeCore.__name__ = "EngineCore"


def test_the_last_engine_shuts_down_as_a_whole_and_others_by_their_parts() -> None:
    core = FakeCore()
    client = SimpleNamespace(engine_core=core, shutdown=lambda: core.calls.append("whole"))
    beside = FakeCore()
    versions.shut_down(client)
    assert core.calls == ["part"] * 3
    core.calls.clear()
    del beside
    versions.shut_down(client)
    assert core.calls == ["whole"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "tensorrt"}, "there is no engine='tensorrt'"),
        ({"backend": "jit"}, "there is no engine='hf' with backend='jit'"),
        ({"backend": "taps"}, r"backend='taps' needs taps=\["),
        ({"taps": ["resid_post.*"]}, "needs backend='taps'"),
    ],
)
def test_load_refuses_what_there_is_not(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        adapters.load(resolve(LLAMA), **arguments)
