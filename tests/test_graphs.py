"""CUDA graphs beside taps, on vLLM's own dispatcher and splitter, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters import taps
from adapters.engines import breakable
from adapters.engines.graphs import (
    check_split,
    demote_descriptors_when,
    demote_when,
    is_compiled,
    is_hybrid,
    splitting,
)
from adapters.errors import LoadError
from harness.twins import TWINS
from tests.engines import armed  # noqa: F401  # autouse

vllm_config = pytest.importorskip("vllm.config", reason="vLLM is what is tested here: run `make install`")
pytestmark = pytest.mark.engine


@pytest.fixture
def dispatcher() -> Any:
    """A dispatcher that has captured full graphs for decode and pieces for everything, at sizes 1, 2, 4 and 8."""
    from vllm.config import (
        CompilationConfig,
        CompilationMode,
        CUDAGraphMode,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    config = VllmConfig(
        compilation_config=CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE, cudagraph_capture_sizes=[1, 2, 4, 8], **splitting()
        ),
        scheduler_config=SchedulerConfig.default_factory(max_num_seqs=8),
        parallel_config=ParallelConfig(),
    )
    # The CPU platform has put its own in their place.
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 8]
    config.compilation_config.max_cudagraph_capture_size = 8
    config.compilation_config.post_init_cudagraph_sizes()
    made = CudagraphDispatcher(config)
    made.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, uniform_decode_query_len=1)
    return made


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7, 8])
def test_only_busy_steps_are_demoted(dispatcher: Any, tokens: int) -> None:
    from vllm.config import CUDAGraphMode

    busy = [False]
    demote_when(dispatcher, lambda: busy[0])
    modes = []
    for state in (False, True, False):
        busy[0] = state
        mode, batch = dispatcher.dispatch(num_tokens=tokens, uniform_decode=True)
        modes.append(mode)
        assert batch.num_tokens >= tokens
    assert modes == [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL]


def test_a_mode_that_vllm_itself_rules_out_stays_out(dispatcher: Any) -> None:
    from vllm.config import CUDAGraphMode

    demote_when(dispatcher, lambda: True)
    mode, _ = dispatcher.dispatch(num_tokens=4, uniform_decode=True, invalid_modes={CUDAGraphMode.PIECEWISE})
    assert mode == CUDAGraphMode.NONE


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The second model runner's manager, which thinks that it has captured sizes 1, 2, 4 and 8."""
    from types import SimpleNamespace as Plain

    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils as v2

    monkeypatch.setattr(v2, "get_pp_group", lambda: Plain(is_first_rank=True, is_last_rank=True))
    monkeypatch.setattr(v2, "current_platform", Plain(get_global_graph_pool=lambda: None))
    config = Plain(
        scheduler_config=Plain(max_num_seqs=8),
        compilation_config=Plain(cudagraph_capture_sizes=[1, 2, 4, 8], max_cudagraph_capture_size=8),
        parallel_config=Plain(data_parallel_size=1, tensor_parallel_size=1),
        speculative_config=None,
    )

    def made(mode: str) -> Any:
        found = v2.CudaGraphManager(config, torch.device("cpu"), CUDAGraphMode[mode], 1)
        found._graphs_captured = True
        return found

    return made


@pytest.mark.parametrize("requests", [1, 2, 3, 5, 7, 8])
def test_only_busy_steps_of_the_second_runner_are_demoted(manager: Any, requests: int) -> None:
    """Live batches of 3, 5 and 7 are padded to 4 and 8 rows either way."""
    busy = [False]
    graphs = manager("FULL_AND_PIECEWISE")
    demote_descriptors_when(graphs, lambda: busy[0])
    found = []
    for state in (False, True, False):
        busy[0] = state
        found.append(graphs.dispatch(requests, requests, 1, 0))
    assert [d.cg_mode.name for d in found] == ["FULL", "PIECEWISE", "FULL"]
    assert {d.num_tokens for d in found} == {next(n for n in (1, 2, 4, 8) if n >= requests)}
    busy[0] = True
    assert graphs.dispatch(1, 30, None, 0).cg_mode.name == "NONE"  # larger than any graph, busy or not


def test_a_hybrid_trunk_has_graphs_for_idle_decode_alone(manager: Any) -> None:
    from vllm.config import CUDAGraphMode

    mode = splitting(hybrid=True)["cudagraph_mode"]
    assert CUDAGraphMode[mode].mixed_mode() == CUDAGraphMode.NONE
    busy = [False]
    graphs = manager(mode)
    demote_descriptors_when(graphs, lambda: busy[0])
    assert graphs.dispatch(3, 3, 1, 0).cg_mode.name == "FULL"
    assert graphs.dispatch(2, 8, None, 0).cg_mode.name == "NONE"  # prefill and decode mixed
    busy[0] = True
    assert graphs.dispatch(3, 3, 1, 0).cg_mode.name == "NONE"


def test_the_first_runner_does_the_same_for_a_hybrid_trunk(dispatcher: Any) -> None:
    from vllm.config import CUDAGraphMode

    mode = CUDAGraphMode[splitting(hybrid=True)["cudagraph_mode"]]
    dispatcher.cudagraph_keys = {kind: set() for kind in dispatcher.cudagraph_keys}
    dispatcher.initialize_cudagraph_keys(mode, uniform_decode_query_len=1)
    busy = [False]
    demote_when(dispatcher, lambda: busy[0])
    modes = [dispatcher.dispatch(num_tokens=n, uniform_decode=u)[0].name for n, u in ((3, True), (6, False))]
    busy[0] = True
    modes.append(dispatcher.dispatch(num_tokens=3, uniform_decode=True)[0].name)
    assert modes == ["FULL", "NONE", "NONE"]


@pytest.mark.parametrize(
    ("config", "hybrid"),
    [
        ({"model_type": "llama"}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"text_config": {"full_attention_interval": 4}}, True),
        ({"layers_block_type": ["mamba", "attention"]}, True),
        ({"mamba_d_state": 16}, True),
        ({"layer_types": ["conv", "full_attention"]}, True),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3]}}, True),
        ({"text_config": None, "vision_config": {}}, False),
    ],
)
def test_hybrid_trunks_are_known_by_their_config(config: dict[str, Any], hybrid: bool) -> None:
    assert is_hybrid(config) is hybrid


# fmt: off
HYBRIDS = [
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba",
    "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_next", "recurrent_gemma", "zamba2",
]
# fmt: on


@pytest.mark.parametrize("name", [*HYBRIDS, *sorted({twin.model_type for twin in TWINS.values()} - set(HYBRIDS))])
def test_hybrid_trunks_are_known_by_the_config_that_transformers_writes(name: str) -> None:
    from transformers import AutoConfig

    stateful = name in HYBRIDS or name.startswith("qwen3_5")
    assert is_hybrid(AutoConfig.for_model(name).to_dict()) is stateful


def test_a_model_that_vllm_does_not_compile_is_told_apart() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    assert not is_compiled(model)
    setattr(model[1], "do_not_compile", True)  # noqa: B010
    assert not is_compiled(model)
    setattr(model[1], "do_not_compile", False)  # noqa: B010
    assert is_compiled(model)


def test_splitting_keeps_vllms_own_operators() -> None:
    from vllm.config import CompilationConfig

    ops = splitting()["splitting_ops"]
    assert set(CompilationConfig._attention_ops) < set(ops)
    assert set(taps.OPERATORS) < set(ops)
    assert CompilationConfig(**splitting()).splitting_ops == ops


@pytest.mark.parametrize("fused", ["enable_sp", "fuse_gemm_comms"])
def test_a_pass_that_resets_the_split_is_caught(fused: str) -> None:
    """By vLLM's own hand: without a split taps are inside of the graph, silently."""
    from vllm.config import CompilationConfig, CompilationMode

    def settled(**passes: bool) -> CompilationConfig:
        config = CompilationConfig(**splitting(), mode=CompilationMode.VLLM_COMPILE, pass_config=passes)
        config.set_splitting_ops_for_v1(all2all_backend="naive", data_parallel_size=1)
        return config

    check_split(settled())
    reset = settled(**{fused: True})
    assert reset.splitting_ops == []
    with pytest.raises(LoadError, match=r"taps do not split the graph.*without these"):
        check_split(reset)


class Replayed:
    """What a CUDA graph promises: it reads the addresses that it was captured with, and writes its captured outputs."""

    moved = 0

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.inputs, self.outputs = run, None, None

    def __call__(self, *inputs: Any) -> Any:
        if self.inputs is None:
            self.inputs, self.outputs = inputs, self.run(*inputs)
            return self.outputs
        tensors = [(a, b) for a, b in zip(self.inputs, inputs, strict=True) if isinstance(a, torch.Tensor)]
        Replayed.moved += sum(a.data_ptr() != b.data_ptr() for a, b in tensors)
        fresh = self.run(*self.inputs)
        for out, new in zip(_listed(self.outputs), _listed(fresh), strict=True):
            if isinstance(out, torch.Tensor):
                out.copy_(new)
        return self.outputs


def _listed(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (tuple, list)) else [x]


def test_taps_between_replayed_pieces_read_and_write_the_captured_buffers() -> None:
    """vLLM's own splitter on a tapped model, with pieces that replay fixed addresses: no input moves, edits land."""
    from vllm.compilation.backends import split_graph

    places = [taps.new_id() for _ in range(3)]
    ids = [int(id) for id in places]
    weights = [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) / 3 for i in range(4)]

    def model(x: torch.Tensor) -> torch.Tensor:
        for i, w in enumerate(weights):
            x = torch.relu(x @ w) + 0.1
            if i < 3:
                torch.ops.tapgrid.tap_(x, places[i])
        return x

    def backend(graph: Any, _: Any) -> Any:
        whole, items = split_graph(graph, list(taps.OPERATORS))
        assert sum(item.is_splitting_graph for item in items) == 3
        for item in items:
            if not item.is_splitting_graph:
                piece = getattr(whole, item.submod_name)
                wrapper = torch.nn.Module()
                wrapper.forward = Replayed(piece.forward)  # type: ignore[method-assign]
                setattr(whole, item.submod_name, wrapper)
        return whole

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    buffer = torch.randn(5, 8, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        plain = model(buffer).clone()
        assert torch.equal(compiled(buffer), plain)  # the capture
        seen: list[torch.Tensor] = []

        def edit(x: torch.Tensor) -> None:
            x.mul_(2)

        taps._ARMED[ids[0]], taps._ARMED[ids[2]] = edit, lambda x: seen.append(x.clone())
        replayed = compiled(buffer).clone()
        expected = model(buffer)
        assert torch.equal(replayed, expected)
        assert not torch.equal(replayed, plain)
        assert torch.equal(seen[0], seen[1])
        del taps._ARMED[ids[0]], taps._ARMED[ids[2]]
        assert torch.equal(compiled(buffer), plain)
    assert Replayed.moved == 0


# ---- models that vLLM does not compile


@pytest.mark.timeout(600)
def test_a_whole_engine_with_graphs_that_are_broken_at_taps() -> None:
    """What is compared is in breakable_cases.py: what a replay calls and in which order, idle and busy."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    cases = Path(__file__).with_name("breakable_cases.py")
    env = os.environ | {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(cases)], cwd=cases.parent.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "15 passed" in done.stdout


class Uncompiled:
    """Stands for a model."""


@pytest.mark.parametrize(
    ("gpu", "wrapped", "says"),
    [
        (False, False, "need a GPU:"),
        (True, False, "set VLLM_USE_BREAKABLE_CUDAGRAPH=1 before vllm is imported, and leave enforce_eager"),
        (True, True, "imported before graphs that can be broken were on: set VLLM_USE_BREAKABLE_CUDAGRAPH=1"),
    ],
)
def test_without_graphs_that_can_be_broken_the_refusal_says_why(
    gpu: bool, wrapped: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper

    monkeypatch.setattr(breakable, "has_cuda", lambda: gpu)
    model = object.__new__(BreakableCUDAGraphWrapper) if wrapped else Uncompiled()
    with pytest.raises(LoadError, match=f"vLLM does not compile Uncompiled, .*{says}.* backend='eager' reaches"):
        breakable.check_breakable(SimpleNamespace(model=model, get_model=Uncompiled))


def test_taps_that_break_graphs_are_taps_where_none_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    monkeypatch.setattr(breakable, "_OVERRIDES", [])
    before = taps._ONE._op, taps._PAIR._op
    x, id = torch.ones(3), taps.new_id()
    taps._ARMED[int(id)] = lambda x: x.mul_(2)
    breakable.break_at_taps("CPU")
    try:
        torch.ops.tapgrid.tap_(x, id)
        assert x.tolist() == [2.0] * 3
        breakable.break_at_taps("CPU")
        assert len(breakable._OVERRIDES) == 1
        assert torch.ops.tapgrid.tap_.default._op is not taps._tap, "graphs are broken in the operator's kernel"
    finally:
        breakable._OVERRIDES.pop()._destroy()
        taps._ONE._op, taps._PAIR._op = before
    torch.ops.tapgrid.tap_(x, id)
    assert x.tolist() == [4.0] * 3
    del taps._ARMED[int(id)]
