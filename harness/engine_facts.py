"""What a booted engine says of itself: measured in the worker's process, whatever library drives it and whatever
arguments that library says it passed on. Stored with every process; `harness.fairness` compares columns by it.

    facts(adapter)  # {"in_process": True, "threads": 1, "prefix_caching": False, "max_num_seqs": 8, ...}
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
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
    "compilation": "compilation_config.mode",
    "cudagraph_mode": "compilation_config.cudagraph_mode",
}
# Processes that an engine of this process starts as well: they compile, or clean up.
_HELPERS = ("resource_tracker", "compile_worker")
# So much of a process's memory is on huge pages only where they were asked for, or are everybody's.
_MANY = 64 << 20
# What leads out of an object into the whole process.
_ELSEWHERE = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType, str, bytes, int, float)


def facts(adapter: object = None) -> dict[str, Any]:
    """The facts of this process: threads of torch, whether the engine is in it, and the configuration of the vLLM that
    the adapter holds, if it holds one.

    Two configurations that disagree are told as a list, for then nobody can say which one was measured.
    """
    found: dict[str, Any] = {"in_process": not any(_engines()), "omp_threads": os.environ.get("OMP_NUM_THREADS")}
    if torch := sys.modules.get("torch"):
        found["threads"] = torch.get_num_threads()
    # The configuration of what runs, and not of a model that a library only built to look at (nnsight does).
    engines = held(adapter, "LLMEngine", "AsyncLLM")
    # Only where it is asked: the system walks all pages of the process for it, 50 ms where there are many.
    if engines and found["in_process"] and (huge := huge_bytes()) is not None:
        found["huge_pages"] = huge >= _MANY
    return found | from_configs(e.vllm_config for e in engines)


def huge_bytes(rollup: Path = Path("/proc/self/smaps_rollup")) -> int | None:
    """How much of this process's own memory is on huge pages; None where the system does not tell."""
    try:
        found = re.search(r"^AnonHugePages:\s*(\d+) kB$", rollup.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def _engines() -> Iterator[psutil.Process]:
    """Children that may be running the model: started by multiprocessing, and not as a helper."""
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join([child.name(), *child.cmdline()])
        except psutil.Error:
            continue
        if ("spawn_main" in line or "VLLM" in line) and not any(h in line for h in _HELPERS):
            yield child


def held(root: object, *names: str, most: int = 100_000) -> list[Any]:
    """The objects that are of a class of one of these names, among the `most` nearest that `root` holds.

    Libraries keep their engine in places of their own, and vLLM takes what it holds out of the collector's sight
    (`gc.freeze`), so it is looked for from here, breadth first, by what refers to what.

    >>> held({"a": [ZeroDivisionError()]}, "ZeroDivisionError")
    [ZeroDivisionError()]
    """
    found, seen, queue = [], {id(root)}, deque([root])
    while queue and len(seen) < most:
        one = queue.popleft()
        if any(c.__name__ in names for c in type(one).__mro__):
            found.append(one)
            continue
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, _ELSEWHERE):
                seen.add(id(other))
                queue.append(other)
    return found


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
    if isinstance(config, Enum):
        return config.name
    return config if isinstance(config, bool | int | type(None)) else str(config).removeprefix("torch.")
