"""CUDA graphs with taps between them: what vLLM is told at boot, and what each step is allowed to replay.

vLLM's default replays one full graph for a decode step, in which a tap is silently dead. So taps split the graph, full
graphs stay captured, and a step in which some intervention is alive is demoted to the pieces. An idle step runs at
full-graph speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from adapters.errors import LoadError
from adapters.taps import OPERATORS


def has_cuda() -> bool:
    """Whether vLLM will run on an NVIDIA GPU here."""
    import torch

    return torch.cuda.is_available()


# What configs call a layer with a state of its own, and entries that only models with such layers have.
_STATEFUL = ("linear", "mamba", "recurrent", "hybrid", "conv")
_OF_STATES = ("mamba_", "ssm_", "state_size", "linear_num_", "linear_attn_config", "full_attention_interval",
              "attn_type_list", "conv_L_cache", "lru_width")  # fmt: skip


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a trunk with a state of its own beside attention (gated delta net, Mamba).

    >>> is_hybrid({"model_type": "llama"}), is_hybrid({"text_config": {"layer_types": ["linear_attention"]}})
    (False, True)
    """
    text = config.get("text_config") or config
    kinds = text.get("layer_types") or text.get("layers_block_type") or ()
    return any(str(k).startswith(_STATEFUL) for k in kinds) or any(str(k).startswith(_OF_STATES) for k in text)


def compiled_parts(model: Any) -> list[Any]:
    """The modules of `model` that vLLM compiles; its model classes say so one by one."""
    return [module for module in model.modules() if getattr(module, "do_not_compile", True) is False]


def is_compiled(model: Any) -> bool:
    """Whether vLLM compiles any part of `model`."""
    return bool(compiled_parts(model))


def splitting(*, hybrid: bool = False) -> dict[str, Any]:
    """What `compilation_config` needs on a GPU: naming splitting operators replaces vLLM's own, so those come along.

    A hybrid trunk has graphs for decode alone: in a batch that mixes prefill and decode they are not shown to be right.
    """
    from vllm.config import CompilationConfig

    updates = ["vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update"]
    return {
        "splitting_ops": [*CompilationConfig._attention_ops, *updates, *OPERATORS],
        "cudagraph_mode": "FULL_DECODE_ONLY" if hybrid else "FULL_AND_PIECEWISE",
    }


def check_split(config: Any) -> None:
    """Refuse (LoadError) a `compilation_config` that was given `splitting()` and has lost it: sequence parallelism and
    what is fused with it want one graph, in which taps run when it is captured and never again."""
    if not set(OPERATORS) <= set(config.splitting_ops or ()):
        raise LoadError(
            "taps do not split the graph: splitting_ops lacks them. vLLM resets it for pass_config's enable_sp and "
            "fuse_gemm_comms, and one given by hand replaces it: load(..., compilation_config=...) without these"
        )


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


def demote_descriptors_when(manager: Any, busy: Callable[[], bool]) -> None:
    """The same for vLLM's second model runner, which our worker does not boot yet; `manager` is its `CudaGraphManager`.

    It walks a list of what it captured for a size: the pieces come after the full graph."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils as v2

    plain = manager.dispatch

    def dispatch(num_reqs: int, num_tokens: int, uniform_token_count: int | None, num_active_loras: int) -> Any:
        found = plain(num_reqs, num_tokens, uniform_token_count, num_active_loras)
        if found.cg_mode != CUDAGraphMode.FULL or not busy():
            return found
        loras = found.num_active_loras
        for other in manager._candidates[num_tokens, loras]:
            fits = v2._is_compatible(other, num_reqs, num_tokens, uniform_token_count, loras)
            if fits and other.cg_mode == CUDAGraphMode.PIECEWISE:
                return other
        return v2.BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs, num_active_loras=loras)

    manager.dispatch = dispatch
