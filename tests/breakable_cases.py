"""A whole vLLM engine whose graphs are broken at taps, with what a GPU does in their place by a recorder of operators.

Run by test_graphs.py in a process of its own: vLLM decorates its kernels while it is imported. Real are vLLM's capture,
wrapper, decorator, dispatcher, kernels and engine, and all of ours. In the place of a CUDA graph is a list of operators
with the tensors that they had: a replay runs them again on that memory, and knows nothing of Python in between.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.compilation import breakable_cudagraph as vllms
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

import adapters
from adapters import selftest, taps
from adapters.declared import Add, Capture
from adapters.engines import breakable, vllm_worker
from adapters.errors import LoadError
from adapters.runtime import Output, Runtime
from harness.models import resolve

SMALL: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "skip_tokenizer_init": True}
DECLARED = ["resid_post.*", "z.1", "mlp_act.0"]
BUFFERED = ["resid_post.1"]
TAPS, LAYERS, SIZES = 5, 3, list(range(1, 9))
PROMPTS = [[5, 7, 11, 13, 17], [31, 37, 41], [43, 47, 53, 59]]
STEPS = 6


class Graph:
    """What a CUDA graph promises: the operators of its capture again, on the memory that they had. No Python."""

    recording: Graph | None = None
    replays = 0

    def __init__(self) -> None:
        self.ran: list[tuple[Any, Any, Any, Any]] = []

    def capture_begin(self, pool: Any = None) -> None:
        assert Graph.recording is None
        Graph.recording = self

    def capture_end(self) -> None:
        assert Graph.recording is self
        Graph.recording = None

    def replay(self) -> None:
        Graph.replays += 1
        for operator, arguments, keywords, outputs in self.ran:
            fresh = operator(*arguments, **keywords)
            for old, new in zip(tree_leaves(outputs), tree_leaves(fresh), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder(TorchDispatchMode):
    """Adds what runs to the graph that is being recorded; an operator that ended that graph is no part of it."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        graph, kwargs = Graph.recording, kwargs or {}
        outputs = operator(*args, **kwargs)
        if graph is not None and graph is Graph.recording and operator.namespace != "tapgrid":
            graph.ran.append((operator, args, kwargs, outputs))
        return outputs


class Steps:
    """Writes down which kind of graph vLLM chose for every pass; `on` is whether it gets it."""

    def __init__(self) -> None:
        self.on, self.modes = True, list[str]()

    def forward(self, runner: Any, *args: Any, **kwargs: Any) -> Any:
        context = get_forward_context()
        self.modes.append(context.cudagraph_runtime_mode.name)
        if not self.on:
            context.cudagraph_runtime_mode = CUDAGraphMode.NONE
        with Recorder():
            return plain_forward(runner, *args, **kwargs)


plain_forward, plain_load = CPUModelRunner._model_forward, CPUModelRunner.load_model
STEPS_TAKEN = Steps()


def load_as_on_a_gpu(runner: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps the model, as the runner of a GPU does."""
    plain_load(runner, *args, **kwargs)
    runner.model = vllms.BreakableCUDAGraphWrapper(runner.model, runner.vllm_config)
    runner.model.is_debugging_mode = True  # vLLM then asserts that no input has moved


def modes_of_a_gpu(runner: Any, *args: Any, **kwargs: Any) -> None:
    """What a GPU's attention can do: graphs of both kinds. Each is captured here when it first comes."""
    runner.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    capture_sizes(runner, SIZES)


def capture_sizes(runner: Any, sizes: list[int]) -> None:
    config = runner.compilation_config
    config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = sizes, sizes[-1]
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(config.cudagraph_mode, uniform_decode_query_len=1)


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with pytest.MonkeyPatch.context() as patch:
        # What a GPU has and a CPU has not: graphs, their pool, weak references into it, and its cache of memory.
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(vllms, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: "pool"))
        patch.setattr(vllms, "weak_ref_tensor", lambda x: x)
        patch.setattr(vllms, "weak_ref_tensors", lambda x: x)
        patch.setattr(breakable, "has_cuda", lambda: True)
        patch.setattr(vllm_worker, "has_cuda", lambda: True)
        patch.setattr(CPUModelRunner, "load_model", load_as_on_a_gpu)
        patch.setattr(CPUModelRunner, "_check_and_update_cudagraph_mode", modes_of_a_gpu)
        patch.setattr(CPUModelRunner, "get_model", lambda runner: runner.model.unwrap())
        patch.setattr(CPUModelRunner, "_model_forward", lambda runner, *a, **k: STEPS_TAKEN.forward(runner, *a, **k))
        path = resolve("synthetic:llama")
        boot = {"engine": "vllm", "backend": "taps", "taps": DECLARED, "buffers": BUFFERED, "dtype": "float32"}
        with adapters.load(path, **boot, **SMALL) as made:
            yield made


def test_on_a_cpu_the_refusal_says_what_there_is() -> None:
    with pytest.raises(LoadError, match=r"does not compile LlamaForCausalLM.*need a GPU: backend='eager'"):
        adapters.load(resolve("synthetic:llama"), engine="vllm", backend="taps", taps=DECLARED, **SMALL)


@pytest.fixture
def steps() -> Iterator[Steps]:
    STEPS_TAKEN.modes.clear()
    yield STEPS_TAKEN
    STEPS_TAKEN.on = True


def graphs(rt: Runtime) -> dict[Any, Any]:
    """What vLLM has captured: a descriptor of a batch -> its capture."""
    entries = rt.engine.host.runner.model.entries  # type: ignore[attr-defined]
    return {batch: entry.capture for batch, entry in entries.items()}


def generate(rt: Runtime, work: Any, prompts: list[list[int]] = PROMPTS) -> list[Output]:
    return rt.run(prompts, work, max_new_tokens=STEPS, ignore_eos=True)


def edit(m: Any) -> None:
    """Every tap in the model's order: reading one that had already passed is an error."""
    m.mlp_act[0] = m.mlp_act[0] * 2
    m.save("act", m.mlp_act[0])
    m.resid_post[0] += 0.5
    m.z[1][:, 3] = 0
    m.save("mid", m.resid_post[1])
    m.save("last", m.resid_post[2])
    m.save("logits", m.logits)


def look(m: Any) -> None:
    m.save("last", m.resid_post[2])
    m.save("logits", m.logits)


def same(got: list[Output], wanted: list[Output]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert a.token_ids == b.token_ids
        assert list(a.saves) == list(b.saves)
        for name in b.saves:
            assert torch.equal(a.cat(name), b.cat(name)), name


def test_an_idle_step_replays_one_graph_and_a_busy_one_is_broken_at_every_tap(rt: Runtime, steps: Steps) -> None:
    generate(rt, None)
    assert steps.modes == ["NONE"] + ["FULL"] * (STEPS - 1)  # twelve tokens of prompts are more than any graph
    steps.modes.clear()
    generate(rt, look)
    generate(rt, look, PROMPTS[:1])
    assert steps.modes == ["NONE"] + ["PIECEWISE"] * (2 * STEPS - 1)
    for batch, capture in graphs(rt).items():
        broken = 0 if batch.uniform else LAYERS + TAPS
        assert (capture.num_eager_breaks, capture.num_graphs) == (broken, broken + 1), batch
        kinds = [getattr(segment, "__func__", None) is Graph.replay for segment in capture.segments]
        assert kinds == [i % 2 == 0 for i in range(2 * broken + 1)]
    assert {batch.uniform for batch in graphs(rt)} == {True, False}
    # Graphs are found by their batch alone: none of one kind may pass for one of the other.
    keys = rt.engine.host.runner.cudagraph_dispatcher.cudagraph_keys  # type: ignore[attr-defined]
    assert not keys[CUDAGraphMode.FULL] & keys[CUDAGraphMode.PIECEWISE]


@pytest.mark.parametrize("work", [edit, look, [edit, None, look], None], ids=["edit", "look", "some", "idle"])
def test_replays_equal_the_model_without_graphs_to_the_bit(rt: Runtime, steps: Steps, work: Any) -> None:
    alone = work if callable(work) else None
    steps.on = False
    wanted, wanted_alone = generate(rt, work), generate(rt, alone, PROMPTS[:1])
    steps.on = True
    for _ in range(2):
        known = len(graphs(rt))
        steps.modes.clear()
        same(generate(rt, work), wanted)
        same(generate(rt, alone, PROMPTS[:1]), wanted_alone)
    # The second time round nothing was captured, and every pass but the one of three prompts was replayed.
    assert len(graphs(rt)) == known
    assert len(steps.modes) == 2 * STEPS
    assert steps.modes.count("NONE") == 1


def test_what_is_stated_runs_in_whole_graphs(rt: Runtime, steps: Steps) -> None:
    works = [Capture("resid_post.1"), [Add("resid_post.1", torch.arange(128.0), 0.01), Capture("resid_post.1"), None]]
    for work in works:
        steps.on = False
        wanted = generate(rt, work)
        steps.on = True
        steps.modes.clear()
        for _ in range(2):
            same(generate(rt, work), wanted)
        assert steps.modes == (["NONE"] + ["FULL"] * (STEPS - 1)) * 2


@pytest.mark.parametrize("n", [3, 5, 7])
def test_a_batch_that_is_padded_to_a_graph_gives_exactly_its_rows(rt: Runtime, steps: Steps, n: int) -> None:
    """Graphs of 1, 4 and 8 rows: there are rows that are nobody's in every decode step."""
    prompts = [[k + 3, 101 + k, 7] for k in range(n)]
    seen: list[tuple[int, int]] = []  # of each pass with edits: rows of the batch, and of this request

    def fn(m: Any) -> None:
        m.resid_post[0] += 0.5
        seen.append((m._payload[0].shape[0], m.tokens))
        look(m)

    steps.on = False
    wanted = generate(rt, fn, prompts), generate(rt, Capture("resid_post.*"), prompts)
    steps.on = True
    runner, sizes = rt.engine.host.runner, [1, 4, 8]  # type: ignore[attr-defined]
    capture_sizes(runner, sizes)
    runner.model.clear_graphs()
    seen.clear()
    steps.modes.clear()
    try:
        for _ in range(2):
            for work, want in zip((fn, Capture("resid_post.*")), wanted, strict=True):
                for a, b in zip(generate(rt, work, prompts), want, strict=True):
                    assert a.token_ids == b.token_ids
                    for name, entries in b.saves.items():
                        assert [x.shape for x in a.saves[name]] == [x.shape for x in entries]
                        torch.testing.assert_close(a.cat(name), b.cat(name), atol=1e-5, rtol=1e-5)
        assert steps.modes.count("PIECEWISE") == 4 * (STEPS - 1)
        assert {rows for rows, tokens in seen if tokens == 1} == {4 if n == 3 else 8}
    finally:
        capture_sizes(runner, SIZES)
        runner.model.clear_graphs()


def test_a_kept_read_is_of_its_own_step(rt: Runtime) -> None:
    kept: list[torch.Tensor] = []

    def keep(m: Any) -> None:
        kept.append(m.resid_post[2])

    generate(rt, keep, PROMPTS[:1])
    first = [k.clone() for k in kept]
    generate(rt, edit, PROMPTS[:1])
    assert [k.shape[0] for k in kept] == [len(PROMPTS[0])] + [1] * (STEPS - 1)
    assert all(torch.equal(a, b) for a, b in zip(kept, first, strict=True))
    assert not any(torch.equal(a, b) for a, b in pairwise(kept))


def test_neighbours_of_an_edited_request_are_equal_to_the_bit(rt: Runtime) -> None:
    plain, mixed = generate(rt, look), generate(rt, [look, edit, look])
    same([mixed[0], mixed[2]], [plain[0], plain[2]])
    assert not torch.equal(mixed[1].cat("logits"), plain[1].cat("logits"))


def test_the_ends_of_the_model_are_reached_through_what_replays_it(rt: Runtime) -> None:
    def ends(m: Any) -> None:
        stream = m.resid_post[2][-1:].clone()
        m.save("unembedded", m.unembed(stream))
        m.save("logits", m.logits)

    for out in generate(rt, ends):
        assert float((out.cat("unembedded") - out.cat("logits")).abs().max()) < 1e-5


def test_without_the_break_taps_are_dead_in_a_replay_and_the_self_test_says_so(rt: Runtime) -> None:
    wrapper = rt.engine.host.runner.model  # type: ignore[attr-defined]
    breakable._OVERRIDES.pop()._destroy()
    wrapper.clear_graphs()
    try:
        locations = rt.engine.declared()
        rt.run([selftest.PROMPT], max_new_tokens=2, ignore_eos=True)
        selftest._counts(rt, locations)  # the captures
        assert selftest._counts(rt, locations) == [0] * TAPS
        with pytest.raises(LoadError, match="self-test"):
            selftest._deaf(rt, locations)
    finally:
        breakable.break_at_taps("CPU")
        wrapper.clear_graphs()
    assert selftest._counts(rt, locations) == [2] * TAPS
    assert selftest._deaf(rt, locations) == []


def test_nothing_is_left_behind(rt: Runtime) -> None:
    generate(rt, edit)
    host = rt.engine.host  # type: ignore[attr-defined]
    assert not taps._ARMED
    assert not {"_model_forward", "_sample"} & set(vars(host.runner))
    assert "compute_logits" not in vars(host.model)
    assert vllms.BreakableCUDAGraphCapture.current() is None
    assert Graph.recording is None
