"""The environment variables and engine arguments that every column shares, in one place.

`ENVIRONMENT` is set by the harness before a worker's interpreter starts, and by `tapgrid.load` for an
engine that it boots itself. Facts: with two OpenMP threads on a busy two-core machine the same engine
fell from 19 tok/s to 1; an engine in this process boots in 5 to 7 s instead of 40 to 100.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from adapters.work import Settings


def environment(settings: Settings, *, cuda: bool = False, ahead: bool = False) -> dict[str, str]:
    """Environment variables for a worker of any column.

    `ahead`: its vLLM can load again on a CPU what it compiled ahead of time, so it may (`ahead.py`).

    >>> environment(Settings())["OMP_NUM_THREADS"]
    '1'
    """
    threads = str(settings.threads)
    shared = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    # Who cannot load again what is compiled ahead of time compiles SmolLM2 for 50 s at every boot. Traced, torch's own
    # cache serves a second boot: 20 s for 70.
    traced = {} if ahead else {"VLLM_USE_AOT_COMPILE": "0"}
    cpu = traced | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind"
        if settings.tensor_parallel == 1
        else _a_core_each(settings.tensor_parallel),
    }
    # The seams of our worker are those of the first model runner.
    gpu = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    return shared | (gpu if cuda else cpu)


def _a_core_each(ranks: int) -> str:
    """One of the cores that this process may use for every rank, as vLLM takes them."""
    known = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(ranks))
    return "|".join(str(known[i % len(known)]) for i in range(ranks))


def vllm_arguments(model: Path, settings: Settings, *, eager: bool) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` that every vLLM column boots with."""
    return {
        "model": str(model),
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_concurrent,
        "max_num_batched_tokens": settings.max_model_len,
        "tensor_parallel_size": settings.tensor_parallel,
        "enforce_eager": eager,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": settings.seed,
    }
