"""Engines for the runtime's tests: one boot each for the whole session, and what the tests say about both engines.

`rt` runs a test on `transformers` and (marked `engine`) on vLLM, on the same tiny random Llama in float32.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import adapters
from adapters import taps
from adapters.intervention import Intervention
from adapters.runtime import Output, Runtime
from harness.models import resolve

LLAMA = "synthetic:llama"
LAYERS, D_MODEL, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 3, 128, 4, 2, 32, 512

# vLLM on a CPU: small enough to boot in seconds, eight requests at once.
VLLM = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 2048, "skip_tokenizer_init": True}

BOTH = ["hf", pytest.param("vllm", marks=pytest.mark.engine)]


@functools.cache
def booted(
    engine: str, model: str = LLAMA, dtype: str = "float32", arguments: tuple[tuple[str, Any], ...] = ()
) -> Runtime:
    given = {**(VLLM if engine == "vllm" else {"threads": 1}), **dict(arguments)}
    rt = adapters.load(resolve(model), engine=engine, dtype=dtype, **given)
    atexit.register(rt.close)
    return rt


def vllm(**arguments: Any) -> Runtime:
    """A vLLM engine with settings of its own."""
    return booted("vllm", arguments=tuple(sorted(arguments.items())))


def on_taps(engine: str, declared: Sequence[str]) -> Runtime:
    """A compiled engine with these taps, which is its caller's to close."""
    given: dict[str, Any] = {"threads": 1, "compiler": "aot_eager"} if engine == "hf" else VLLM
    return adapters.load(resolve(LLAMA), engine=engine, backend="taps", taps=declared, dtype="float32", **given)


def tapped(declared: Sequence[str]) -> Any:
    """The fixture `rt` of a file: compiled engines of both kinds with the same taps, each booted once for it."""

    @pytest.fixture(scope="module", params=BOTH, name="rt")
    def compiled(request: pytest.FixtureRequest) -> Iterator[Runtime]:
        with on_taps(request.param, declared) as runtime:
            yield runtime

    return compiled


@pytest.fixture(autouse=True)
def armed() -> Iterator[None]:
    """For files that import it: an id is an address, which another tensor may have after a test that failed, so nothing
    is left at it."""
    before = dict(taps._ARMED)
    yield
    taps._ARMED.clear()
    taps._ARMED.update(before)


@pytest.fixture(params=BOTH)
def rt(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """Both engines, one after the other; each must be left as it was found."""
    runtime = booted(request.param)
    yield runtime
    assert_clean(runtime)


@pytest.fixture
def hf() -> Iterator[Runtime]:
    runtime = booted("hf")
    yield runtime
    assert_clean(runtime)


def assert_clean(runtime: Runtime) -> None:
    """Nothing of a run is left on the engine, or on torch's switches."""
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    host = getattr(runtime.engine, "host", None) or runtime.engine
    assert len(host.hooks) == 0
    assert not host.il.waiting
    assert not runtime.engine.running
    assert not runtime._installed
    if hasattr(host, "runner"):
        assert not host.live
        assert not host.ended
        assert not host.carried
        assert not {"_model_forward", "_sample"} & set(vars(host.runner))
        assert "compute_logits" not in vars(host.model)
    assert not our_hooks(host.model)


def our_hooks(model: torch.nn.Module) -> list[Any]:
    """What of ours listens in a model: hooks, and what stands in the place of a module's `forward`."""
    tables = [t for m in model.modules() for t in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
    placed = [m.__dict__["forward"] for m in model.modules() if "forward" in m.__dict__]
    return [h for h in (*placed, *(h for t in tables for h in t.values())) if h.__module__.startswith("adapters")]


def prompts(n: int, shortest: int = 3, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Token ids whose first token names the request, of lengths that are multiples of nothing."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(shortest, longest, n).round().int().tolist()
    shuffled = [lengths[i] for i in torch.randperm(n, generator=rng).tolist()]
    return [
        [100 + i, *torch.randint(3, VOCAB, (length - 1,), generator=rng).tolist()] for i, length in enumerate(shuffled)
    ]


def run(runtime: Runtime, ids: Sequence[Sequence[int]], fn: Any = None, **options: Any) -> list[Output]:
    return runtime.run(list(ids), fn, **{"max_new_tokens": 4, "ignore_eos": True} | options)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative error of `a` against `b`; shapes must be equal."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def worst(got: Output, wanted: Output) -> float:
    """The largest relative error over everything that two requests saved."""
    assert list(got.saves) == list(wanted.saves)
    return max(relative(got.cat(name), wanted.cat(name)) for name in wanted.saves)


def same(got: Sequence[Output], wanted: Sequence[Output], *, bits: bool = True) -> None:
    """Equal tokens and saves, to the bit."""
    for a, b in zip(got, wanted, strict=True):
        assert a.token_ids == b.token_ids
        assert list(a.saves) == list(b.saves)
        for name in b.saves:
            if bits:
                assert torch.equal(a.cat(name), b.cat(name)), name


def same_entries(got: Sequence[Output], wanted: Sequence[Output]) -> None:
    """Equal tokens and saves, to the bit and entry by entry."""
    for a, b in zip(got, wanted, strict=True):
        assert a.token_ids == b.token_ids
        assert list(a.saves) == list(b.saves)
        for name in b.saves:
            assert len(a.saves[name]) == len(b.saves[name])
            assert all(torch.equal(p, q) for p, q in zip(a.saves[name], b.saves[name], strict=True)), name


def by_hand(*stated: Intervention) -> Intervention:
    """The same as a function, which no engine can look into and which waits in a greenlet."""

    def fn(m: Any) -> None:
        for each in stated:
            each(m)

    return fn


def capture(*points: tuple[Any, ...]) -> Intervention:
    """Save `(name,)` or `(name, layer)`, under "name" or "name.layer"."""

    def fn(m: Any) -> None:
        for name, *layer in points:
            at = getattr(m, name)
            m.save(".".join(map(str, (name, *layer))), at[layer[0]] if layer else at)

    return fn


def in_turn(*fns: Callable[[Any], Any]) -> Intervention:
    """One function of several."""

    def fn(m: Any) -> None:
        for f in fns:
            f(m)

    return fn


# Every point of a Llama in the model's order, at the first and the last layer.
PER_LAYER = ["resid_pre", "attn_in", "q", "k", "v", "z", "attn_out", "resid_mid", "mlp_in"]
PER_LAYER += ["mlp_pre", "mlp_act", "mlp_out", "resid_post"]
EVERY = [("embed",), *((p, layer) for layer in (0, 2) for p in PER_LAYER), ("final_norm",), ("logits",), ("sampled",)]
SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        ("embed", "resid_pre", "attn_in", "attn_out", "resid_mid", "mlp_in", "mlp_out", "resid_post"), (D_MODEL,)
    ),
    **dict.fromkeys(("q", "z"), (HEADS, HEAD_DIM)),
    **dict.fromkeys(("k", "v"), (KV_HEADS, HEAD_DIM)),
    **dict.fromkeys(("mlp_pre", "mlp_act"), (256,)),
    "final_norm": (D_MODEL,),
}
