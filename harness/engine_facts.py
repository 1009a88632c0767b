"""What a booted engine says of itself: measured in the worker's process, whatever library drives it and whatever
arguments that library says it passed on. Stored with every process; `harness.fairness` compares columns by it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import psutil

# name in the store: where vLLM's own configuration has it
VLLM = {
    "dtype": "model_config.dtype",
    "max_model_len": "model_config.max_model_len",
    "seed": "model_config.seed",
    "prefix_caching": "cache_config.enable_prefix_caching",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "async_scheduling": "scheduler_config.async_scheduling",
    "scheduling_policy": "scheduler_config.policy",
    "tensor_parallel": "parallel_config.tensor_parallel_size",
    "eager": "model_config.enforce_eager",
}
# Processes that an engine of this process starts as well: they compile, or clean up.
_HELPERS = ("resource_tracker", "compile_worker")


def facts() -> dict[str, Any]:
    """The facts of this process: threads of torch, whether the engine is in it, and vLLM's configuration if it has one.

    Two configurations that disagree are told as a list, for then nobody can say which one was measured.
    """
    found: dict[str, Any] = {"in_process": not any(_engines()), "omp_threads": os.environ.get("OMP_NUM_THREADS")}
    if torch := sys.modules.get("torch"):
        found["threads"] = torch.get_num_threads()
    if "vllm" in sys.modules:
        found |= from_configs(_configs())
    return found


def _engines() -> Iterator[psutil.Process]:
    """Children that may be running the model: started by multiprocessing, and not as a helper."""
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join([child.name(), *child.cmdline()])
        except psutil.Error:
            continue
        if ("spawn_main" in line or "VLLM" in line) and not any(h in line for h in _HELPERS):
            yield child


def _configs() -> list[Any]:
    # Libraries keep their engine in places of their own; the collector knows all of them.
    return [o for o in gc.get_objects() if type(o).__name__ == "VllmConfig"]


def from_configs(configs: Iterable[Any]) -> dict[str, Any]:
    """The facts of vLLM's configurations; what none of them has is left out.

    >>> from types import SimpleNamespace as NS
    >>> from_configs([NS(cache_config=NS(enable_prefix_caching=False)), NS()])
    {'prefix_caching': False}
    """
    found: dict[str, Any] = {}
    configs = list(configs)
    for name, path in VLLM.items():
        values = list(dict.fromkeys(v for c in configs if (v := _at(c, path)) is not None))
        if values:
            found[name] = values[0] if len(values) == 1 else sorted(values, key=str)
    return found


def _at(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part, None)
    return config if isinstance(config, bool | int | type(None)) else str(config).removeprefix("torch.")
