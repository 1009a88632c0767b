"""CUDA graphs with taps between them: what vLLM is told at boot, and what each step is allowed to replay.

vLLM's default replays one full graph for a decode step, in which a tap is silently dead. So taps split the graph, full
graphs stay captured, and a step in which some intervention is alive is demoted to the pieces. An idle step runs at
full-graph speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adapters.taps import OPERATORS


def has_cuda() -> bool:
    """Whether vLLM will run on an NVIDIA GPU here."""
    import torch

    return torch.cuda.is_available()


def splitting() -> dict[str, Any]:
    """What `compilation_config` needs on a GPU: naming splitting operators replaces vLLM's own, so those come along."""
    from vllm.config import CompilationConfig

    updates = ["vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update"]
    return {
        "splitting_ops": [*CompilationConfig._attention_ops, *updates, *OPERATORS],
        "cudagraph_mode": "FULL_AND_PIECEWISE",
    }


def demote_when(dispatcher: Any, busy: Callable[[], bool]) -> None:
    """Keep full graphs off the steps during which `busy()` holds; `dispatcher` is a `CudagraphDispatcher`."""
    from vllm.config import CUDAGraphMode

    plain = dispatcher.dispatch
    full = frozenset({CUDAGraphMode.FULL})

    def dispatch(*args: Any, invalid_modes: Any = None, **kwargs: Any) -> Any:
        if busy():
            invalid_modes = full | (invalid_modes or frozenset())
        return plain(*args, invalid_modes=invalid_modes, **kwargs)

    dispatcher.dispatch = dispatch
