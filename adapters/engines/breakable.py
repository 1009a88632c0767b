"""CUDA graphs for a model that vLLM does not compile: recorded while it runs, and broken wherever Python has to run.

vLLM ends one graph before an attention kernel, runs that, and begins the next graph after it; a replay does the same.
Our operator is broken out in the same way, by vLLM's own decorator: in a replay it is called between two graphs, with
the memory that they were recorded on. Full graphs are not broken, so taps are dead there as they are in a compiled
model's: `graphs.demote_when` keeps them off the steps in which some intervention is alive.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from adapters import taps
from adapters.engines.graphs import has_cuda
from adapters.errors import LoadError

_SET = "set VLLM_USE_BREAKABLE_CUDAGRAPH=1 before vllm is imported"
# Kernels registered here go before those of `taps`, for as long as this lives.
_OVERRIDES: list[torch.library.Library] = []


def check_breakable(runner: Any) -> None:
    """Refuse (LoadError) a model that vLLM neither compiles nor runs in graphs that can be broken."""
    why = _why_not(runner) if has_cuda() else "graphs that can be broken need a GPU:"
    if why is not None:
        raise LoadError(
            f"vLLM does not compile {type(runner.get_model()).__name__}, so there is no graph for taps to be inside "
            f"of, and {why} backend='eager' reaches every point of it undeclared"
        )


def _why_not(runner: Any) -> str | None:
    from vllm.compilation import breakable_cudagraph as vllms
    from vllm.model_executor.layers.attention import attention

    if not isinstance(runner.model, vllms.BreakableCUDAGraphWrapper):
        return f"graphs that can be broken are off: {_SET}, and leave enforce_eager and cudagraph_mode alone; or"
    if attention.unified_attention_with_output.__code__.co_filename != vllms.__file__:
        # vLLM decorates its kernels when they are imported, and would record this one into a graph by now.
        return f"vLLM's kernels were imported before graphs that can be broken were on: {_SET}; or"
    return None


def break_at_taps(key: str) -> None:
    """Have taps break the graphs that vLLM records; `key` is the dispatch key of its platform, "CUDA" or "CPU"."""
    if _OVERRIDES:
        return
    library = torch.library.Library("tapgrid", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says once that kernels are replaced
        for name in ("tap_", "tap_pair_"):
            library.impl(name, _breaking(), key, allow_override=True)
    taps.dispatch(through=True)
    _OVERRIDES.append(library)


def _breaking() -> Callable[..., None]:
    """A tap's kernel that ends the graph being recorded before it runs, and begins another one afterwards."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    # The id lies on the CPU, where vLLM's weak references do not reach: it goes along as a number.
    broken = eager_break_during_capture(taps.at)
    return lambda *arguments: broken(int(arguments[-1]), *arguments[:-1])
