"""What vLLM compiled ahead of time is loaded at the next boot; not where what the graph holds of ours differs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.boot import load
from adapters.columns import all_columns
from adapters.declared import Add, Capture
from adapters.engines import ahead
from adapters.engines.graphs import compiled_parts
from adapters.engines.settings import environment
from adapters.errors import LoadError
from adapters.points import Location, points_of
from adapters.runtime import Runtime
from adapters.work import Settings
from harness.models import resolve
from tests.engines import LLAMA, VLLM, on_taps, vllm

POINTS = points_of({"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 2}, "vllm")
VARIABLE = "VLLM_USE_AOT_COMPILE"


# ---- which engines may


def test_only_engines_that_can_load_it_again_compile_ahead_of_time_on_a_cpu() -> None:
    assert environment(Settings())[VARIABLE] == "0"
    assert VARIABLE not in environment(Settings(), ahead=True)
    # vLLM's own backend for GPUs loads what it saved.
    assert VARIABLE not in environment(Settings(), cuda=True)
    ours = {name for name, column in all_columns().items() if column.ahead}
    assert ours == {"tapgrid-taps", "tapgrid-sharded-taps"}


def test_what_torch_compiled_can_be_finalized_and_a_method_of_its_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import aot_compile_types as types

    class Old:
        pass

    class New:
        def finalize_loading(self, config: Any) -> str:
            return "its own"

    monkeypatch.setattr(types, "BundledAOTAutogradSerializableCallable", Old)
    assert ahead.mend()
    Old().finalize_loading("config")  # type: ignore[attr-defined]
    monkeypatch.setattr(types, "BundledAOTAutogradSerializableCallable", New)
    assert ahead.mend()
    assert New().finalize_loading("config") == "its own"
    monkeypatch.delattr(types, "BundledAOTAutogradSerializableCallable")
    assert not ahead.mend()


# ---- what is told


def told(
    taps: list[Location], buffers: list[Location] | None = None, config: Mapping[str, Any] | None = None, most: int = 8
) -> str:
    vllm_config = SimpleNamespace(
        additional_config={"tapgrid_taps": ["kept"]},
        scheduler_config=SimpleNamespace(max_num_seqs=most),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: dict(config or {"eps": 1e-5}))),
    )
    model, plain = torch.nn.Sequential(torch.nn.Linear(1, 1)), torch.nn.Linear(1, 1)
    model[0].do_not_compile, model[0].vllm_config = False, vllm_config  # type: ignore[assignment]
    plain.do_not_compile = True  # type: ignore[assignment]
    model.append(plain)
    ahead.tell(model, taps, buffers or [])
    assert vllm_config.additional_config["tapgrid_taps"] == ["kept"]
    return str(vllm_config.additional_config[ahead.PLACES])


def test_whatever_of_ours_is_in_the_graph_tells_it_apart() -> None:
    z, other, post = POINTS.at("z", 1), POINTS.at("z", 2), POINTS.at("resid_post", 1)
    many = [
        told([]),
        told([z]),
        told([other]),
        told([post]),
        told([z, post]),
        told([post], [z]),
        told([], [z]),
        told([], [z], most=4),
        told([z], config={"eps": 1e-6}),
    ]
    assert len(set(many)) == len(many)
    assert told([z]) == told([z])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another width of vectors")
        assert told([z]) not in many
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
        assert told([z]) not in many
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    assert told([z]) == many[1]
    # Where the graph holds no buffers, it holds nothing of that size.
    assert told([z], most=4) == told([z])


# ---- vLLM itself


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path


def was_loaded(rt: Runtime) -> bool:
    compiled = compiled_parts(rt.engine.host.model)  # type: ignore[attr-defined]
    assert compiled
    return all(m.was_aot_compile_fn_loaded_from_disk for m in compiled)


def rotary(rt: Runtime) -> set[int]:
    """The rotary embeddings of an engine: vLLM would give one engine the other's, with the other's kernel."""
    modules = rt.engine.host.model.named_modules()  # type: ignore[attr-defined]
    found = {id(module) for name, module in modules if name.endswith("rotary_emb")}
    assert found
    return found


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_second_boot_loads_what_the_first_compiled_and_is_bit_equal(cache: Path) -> None:
    def edit(m: Any) -> None:
        m.resid_post[1] += 1.0
        m.save("z", m.z[2])
        m.save("logits", m.logits)

    def run(rt: Runtime) -> list[torch.Tensor]:
        add = Add("resid_post.1", torch.ones(128), 2.0).then(Capture("z.2", "logits"))
        outs = [o for work in (edit, add) for o in rt.run([[5, 6, 7], [8, 9]], work, max_new_tokens=3, ignore_eos=True)]
        return [o.cat(name) for o in outs for name in o.saves]

    beside = vllm()
    with on_taps("vllm", ["z.*", "resid_post.1"]) as rt:
        assert not was_loaded(rt)
        assert not rotary(rt) & rotary(beside)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache / "inductor"), "vLLM would leave its own folder"
        first = run(rt)
    with on_taps("vllm", ["z.*", "resid_post.1"]) as rt:
        assert was_loaded(rt)
        again = run(rt)
    assert len(first) == 8
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_graph_with_buffers_is_loaded_and_does_what_it_did(cache: Path) -> None:
    """They are in it by another way than taps: closed over by hooks, whose numbers are others at the next boot."""
    work = Add("resid_post.1", torch.ones(128), 2.0).then(Capture("resid_post.1", "resid_post.2", "logits"))

    def boot() -> Runtime:
        more: Any = {**VLLM, "dtype": "float32"}
        return load(resolve(LLAMA), engine="vllm", backend="taps", taps=[], buffers=["resid_post.*"], **more)

    found = []
    for again in (False, True):
        torch.nn.Identity().register_forward_hook(lambda *_: None)
        with boot() as rt:
            assert was_loaded(rt) is again
            (out,) = rt.run([[5, 6, 7]], work, max_new_tokens=3, ignore_eos=True)
            found.append([out.cat(name) for name in out.saves])
    assert len(found[0]) == 3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_self_test_catches_a_graph_of_another_engine_out_of_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hash that says nothing of taps: the second engine gets the first one's graph, which has none."""
    from vllm.config import VllmConfig

    monkeypatch.setattr(VllmConfig, "compute_hash", lambda self: "the same")
    with on_taps("vllm", []) as rt:
        assert not was_loaded(rt)
    with pytest.raises(LoadError, match=r"did not fire: z\[1\] \(0 of 2 passes\).*a compile cache from an engine with"):
        on_taps("vllm", ["z.1"])
