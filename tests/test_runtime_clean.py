"""The runtime leaves no trace: on the engine, on torch's switches, on the user's hooks, on the process, in memory."""

# ruff: noqa: PT012 (that an error comes out of a whole body is what is tested)

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import adapters
from adapters.errors import InterventionError, LoadError
from adapters.runtime import Runtime
from harness.models import resolve
from tests.engines import LLAMA, assert_clean, booted, capture, hf, our_hooks, prompts, rt, run, same, vllm

__all__ = ["hf", "rt"]  # fixtures

ROOT = Path(__file__).resolve().parents[1]
IDS = prompts(3, shortest=9)


# ---- torch's switches


def test_a_users_grad_block_that_spans_a_read_stays_the_users(rt: Runtime) -> None:
    """Gradients are on in the user's code before and after the read, and off in the model in between."""
    seen: list[bool] = []
    host: Any = getattr(rt.engine, "host", None) or rt.engine
    layer = host.model.model.layers[1]
    handle = layer.register_forward_hook(lambda *a: seen.append(torch.is_grad_enabled()))
    weight = torch.ones(128, requires_grad=True)

    def fn(m: Any) -> None:
        m.save("at first", torch.is_grad_enabled())
        with torch.enable_grad():
            a = m.resid_post[0]
            inside = torch.is_grad_enabled()
            b = m.resid_post[2]
            loss = ((a + b) * weight).sum()
            loss.backward()
            m.save("inside", inside and torch.is_grad_enabled())
        m.save("after", torch.is_grad_enabled())
        m.save("still", m.final_norm.requires_grad)

    try:
        out = run(rt, IDS[:1], fn, max_new_tokens=2)[0]
        beside = run(rt, IDS, [fn, capture(("resid_post", 2)), None], max_new_tokens=2)
    finally:
        handle.remove()
    assert out.saves["at first"] == out.saves["after"] == [False, False]
    assert out.saves["inside"] == [True, True]
    assert out.saves["still"] == [False, False]
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0
    assert set(seen) == {False}
    assert not beside[1].cat("resid_post.2").requires_grad


@pytest.mark.parametrize("block", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_blocks_around_everything(rt: Runtime, block: Any) -> None:
    """A run inside of a block: what is saved is an ordinary tensor all the same, and the block is as it was."""
    wanted = run(rt, IDS, capture(("resid_post", 1), ("logits",)))
    with block():
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        got = run(rt, IDS, capture(("resid_post", 1), ("logits",)))
        with rt.trace(IDS[0]) as m:
            h = m.resid_post[1]
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (grad, inference)
            h.mul_(1.0)
            assert not h.is_inference()
            m.save("h", h)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (grad, inference)
    same(got, wanted)
    for saved in (*got[0].saves["logits"], *m.saves["h"]):
        assert not saved.is_inference()
        assert not saved.requires_grad


@pytest.mark.parametrize("block", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_blocks_inside_that_span_reads_and_writes(rt: Runtime, block: Any) -> None:
    def fn(m: Any) -> None:
        with block():
            a = m.resid_post[0]
            a += 1
            m.resid_post[1] = m.resid_post[1] * 2
            m.save("saved", m.resid_post[2])
            mode = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        m.save("mode", mode)
        m.save("logits", m.logits)

    def plain(m: Any) -> None:
        m.resid_post[0] += 1
        m.resid_post[1] = m.resid_post[1] * 2
        m.save("saved", m.resid_post[2])
        m.save("mode", None)
        m.save("logits", m.logits)

    got = run(rt, IDS, [fn, plain, fn])
    wanted = run(rt, IDS, plain)
    for a, b in zip(got, wanted, strict=True):
        assert a.token_ids == b.token_ids
        assert torch.equal(a.cat("saved"), b.cat("saved"))
        assert torch.equal(a.cat("logits"), b.cat("logits"))
        assert not a.saves["saved"][0].is_inference()
    with block():
        expected = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    assert set(got[0].saves["mode"]) == {expected}


def test_a_body_that_ends_inside_of_a_block(rt: Runtime) -> None:
    """Left by an error with the block still open: the switches are the caller's again."""
    before = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    def fn(m: Any) -> None:
        with torch.enable_grad(), torch.inference_mode():
            m.resid_post[0]
            raise RuntimeError

    for _ in range(3):
        with pytest.raises(RuntimeError):
            run(rt, IDS, [fn, capture(("resid_post", 1)), None])
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    wanted = run(rt, IDS, capture(("logits",)))
    same(run(rt, IDS, capture(("logits",))), wanted)


def test_autocast_across_a_read_is_refused(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        h = m.resid_post[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            m.save("fine", h @ h.T)
            m.resid_post[1]

    with pytest.raises(InterventionError, match=r"a torch.autocast block is open across a read.*test_runtime_clean.py"):
        run(rt, IDS, [fn, None, None])


# ---- hooks and attributes


def test_the_users_own_hooks_survive_and_fire(rt: Runtime) -> None:
    """case 57."""
    host: Any = getattr(rt.engine, "host", None) or rt.engine
    layer, calls = host.model.model.layers[1], []
    handles = [
        layer.register_forward_hook(lambda *a: calls.append("out")),
        layer.register_forward_pre_hook(lambda *a: calls.append("in")),
    ]

    def fails(m: Any) -> None:
        m.save("post", m.resid_post[1])
        assert our_hooks(host.model)
        raise RuntimeError

    try:
        with pytest.raises(RuntimeError):
            run(rt, IDS, fails)
        with pytest.raises(ZeroDivisionError), rt.trace(IDS[0]) as m:
            m.resid_post[1] / (1 // 0)
        assert not our_hooks(host.model)
        calls.clear()
        run(rt, IDS[:1], max_new_tokens=2)
        assert calls == ["in", "out"] * 2
        calls.clear()
        run(rt, IDS[:1], capture(("resid_pre", 1), ("resid_post", 1)), max_new_tokens=2)
        assert calls == ["in", "out"] * 2
    finally:
        for handle in handles:
            handle.remove()


def test_only_touched_modules_are_hooked_and_only_while_they_are(rt: Runtime) -> None:
    host: Any = getattr(rt.engine, "host", None) or rt.engine

    def hooked() -> set[str]:
        return {
            name for name, module in host.model.named_modules() if our_hooks(module) and not list(module.children())
        }

    def fn(m: Any) -> None:
        assert hooked() == set()
        m.at("model.layers.1.mlp.down_proj").output  # noqa: B018
        assert hooked() == {"model.layers.1.mlp.down_proj"}

    run(rt, IDS[:1], fn, max_new_tokens=1)
    run(rt, IDS[:1], lambda m: m.save("hooked", len(hooked())), max_new_tokens=1)
    assert not our_hooks(host.model)


def test_an_untouched_engine_computes_the_same_bits_as_a_never_touched_one() -> None:
    """A model that has been read, written and failed in against a fresh one of the same weights."""
    used = booted("hf")
    run(used, IDS, lambda m: m.resid_post[1].mul_(2))
    fresh = adapters.load(resolve(LLAMA), engine="hf", dtype="float32", threads=1)
    ids = torch.tensor(IDS[0])[None]
    with torch.no_grad():
        a, b = (r.engine.model(ids).logits for r in (used, fresh))  # type: ignore[attr-defined]
    assert torch.equal(a, b)
    fresh.close()


@pytest.mark.engine
def test_a_plain_engine_beside_ours_is_untouched() -> None:
    """case 55: Same process: another worker class, no hooks, no environment of ours, the same tokens."""
    ours = booted("vllm")
    from vllm import SamplingParams
    from vllm.v1.worker.cpu_worker import CPUWorker

    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ or os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0"
    engine: Any = ours.engine
    before = run(ours, IDS)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False)
    outs = engine.llm.generate([{"prompt_token_ids": p} for p in IDS], params, use_tqdm=False)
    assert [tuple(o.outputs[0].token_ids) for o in outs] == [o.token_ids for o in before]
    for name, attribute in vars(CPUWorker).items():
        assert not str(getattr(attribute, "__module__", "")).startswith("adapters"), name


# ---- the process


def python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_importing_patches_nothing_and_imports_no_engine() -> None:
    """case 55."""
    out = python(
        """
        import os, sys
        before = dict(os.environ)
        import tapgrid, adapters, adapters.columns, adapters.work
        assert not any(m in sys.modules for m in ("torch", "vllm", "transformers")), "an engine was imported"
        import torch
        snapshot = {n: (id(v)) for n, v in vars(torch.nn.Module).items()}
        import adapters.runtime, adapters.intervention, adapters.boot, adapters.engines.hf, adapters.engines.vllm
        assert {n: (id(v)) for n, v in vars(torch.nn.Module).items()} == snapshot
        assert "vllm" not in sys.modules and "transformers" not in sys.modules
        assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        print("clean")
        """
    )
    assert out.strip().endswith("clean")


@pytest.mark.engine
def test_importing_our_worker_changes_no_attribute_of_vllm() -> None:
    out = python(
        """
        import importlib
        NAMES = ["vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.cpu_model_runner:CPUModelRunner",
                 "vllm.v1.worker.cpu_worker:CPUWorker", "vllm.v1.worker.gpu_worker:Worker",
                 "vllm.v1.sample.sampler:Sampler", "vllm.v1.engine.llm_engine:LLMEngine", "vllm:LLM",
                 "vllm.sampling_params:SamplingParams"]
        def snap():
            found = {}
            for name in NAMES:
                module, _, cls = name.partition(":")
                found[name] = {k: id(v) for k, v in vars(getattr(importlib.import_module(module), cls)).items()}
            return found
        before = snap()
        import adapters.engines.vllm_worker, adapters.engines.vllm, adapters.runtime, adapters.taps
        after = snap()
        for name in NAMES:
            assert before[name] == after[name], (name, set(before[name]) ^ set(after[name]))
        print("clean")
        """,
        VLLM_LOGGING_LEVEL="ERROR",
    )
    assert out.strip().endswith("clean")


# ---- memory


def megabytes() -> float:
    gc.collect()
    import psutil

    return psutil.Process().memory_info().rss / 1e6


def tensors() -> int:
    gc.collect()
    return sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor))


def test_memory_is_flat_over_two_hundred_runs(rt: Runtime) -> None:
    """case 59."""
    everything = capture(
        *((p, layer) for layer in range(3) for p in ("resid_pre", "q", "z", "resid_post")), ("logits",)
    )
    gc.disable()  # nothing may wait for the collector
    try:
        for i in range(210):
            run(rt, IDS, everything if i % 2 else lambda m: m.resid_post[1].add_(1), max_new_tokens=2)
            with rt.trace(IDS[0]) as m:
                m.save("logits", m.logits)
            if i == 9:
                before = len([o for o in gc.get_objects() if type(o) is torch.Tensor]), resident()
        after = len([o for o in gc.get_objects() if type(o) is torch.Tensor]), resident()
    finally:
        gc.enable()
    assert after[0] <= before[0] + 30
    assert after[1] - before[1] < 40


def resident() -> float:
    import psutil

    return float(psutil.Process().memory_info().rss) / 1e6


def test_the_model_is_freed_when_the_runtime_is_closed() -> None:
    import weakref

    runtime = adapters.load(resolve(LLAMA), engine="hf", dtype="float32", threads=1)
    model = weakref.ref(runtime.engine.model)  # type: ignore[attr-defined]
    run(runtime, IDS, capture(("resid_post", 1)))
    with runtime:
        pass
    gc.collect()
    assert model() is None
    runtime.close()  # twice is fine
    with pytest.raises(LoadError, match=r"this runtime is closed: load\(\) another"):
        run(runtime, IDS)
    with pytest.raises(LoadError, match="closed"), runtime.trace(IDS[0]):
        pass


@pytest.mark.engine
def test_a_closed_vllm_engine_lets_go() -> None:
    from adapters.engines.vllm_worker import WORKERS

    beside = booted("vllm")
    wanted = run(beside, IDS, capture(("resid_post", 1)))
    runtime = vllm(max_num_seqs=2)
    host: Any = runtime.engine.host  # type: ignore[attr-defined]
    assert any(w.tapgrid is host for w in WORKERS)
    run(runtime, IDS, capture(("resid_post", 1)))
    assert_clean(runtime)
    runtime.close()
    assert not any(w.tapgrid is host for w in WORKERS)
    with pytest.raises(LoadError, match="closed"):
        run(runtime, IDS)
    # vLLM tears the whole process's state down with one engine; whoever lives beside it must not notice.
    same(run(beside, IDS, capture(("resid_post", 1))), wanted)


def test_an_error_thrown_into_a_body_gives_the_switches_back(rt: Runtime) -> None:
    """The engine's own error, an installed intervention's, a location that never ran: each comes out of a read."""
    host: Any = getattr(rt.engine, "host", None) or rt.engine

    def fails(m: Any) -> None:
        m.resid_post[0]
        raise OSError("installed")

    before = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    assert before == (True, False)
    rt.install(fails, name="fails")
    try:
        with pytest.raises(OSError, match="installed"), rt.trace(IDS[0]) as m:
            m.resid_post[2]
    finally:
        rt.remove("fails")
    assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    with pytest.raises(InterventionError), rt.trace(IDS[0]) as m:
        m.resid_post[1]
        m.at("model.layers.1.input_layernorm").output  # noqa: B018
    assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    wanted = run(rt, IDS, capture(("resid_post", 1)))
    handle = host.model.model.layers[2].register_forward_pre_hook(lambda module, args: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError), rt.trace(IDS[0]) as m:
            m.resid_post[2]
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
        with pytest.raises(ZeroDivisionError), rt.trace(IDS[0]) as m:
            pass
        with pytest.raises(ZeroDivisionError):
            run(rt, IDS, capture(("resid_post", 1)))
    finally:
        handle.remove()
    same(run(rt, IDS, capture(("resid_post", 1))), wanted)
    assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before


def test_a_function_that_catches_a_thrown_error_keeps_its_own_switches(rt: Runtime) -> None:
    def fn(m: Any) -> None:
        with torch.enable_grad():
            try:
                m.resid_post[1]
                m.at("model.layers.1.input_layernorm").output  # noqa: B018
            except InterventionError:
                m.save("grad", torch.is_grad_enabled())

    assert run(rt, IDS[:1], fn, max_new_tokens=2)[0].saves["grad"] == [True, True]
