"""Graphs that vLLM compiled ahead of time, loaded again at the next boot instead of traced again.

A tapped SmolLM2 boots in 15 s of CPU time where plain vLLM takes 20. What is loaded is found by vLLM's hash of its
configuration; what of ours is in the graph is added to that, for nothing else would see that it changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import torch

from adapters.engines.graphs import compiled_parts
from adapters.points import Location

# The key in `additional_config`, which vLLM hashes.
PLACES = "tapgrid_places"


def mend() -> bool:
    """Whether this process can load again what vLLM compiled ahead of time on a CPU; it could not before.

    After loading, vLLM 0.27 calls `finalize_loading`, which its own backend's functions have and those of torch's
    inductor, its backend on a CPU, have not: "no attribute 'finalize_loading'", and every boot compiles anew. There is
    nothing to finalize in them.
    """
    try:
        from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Compiled
    except ImportError:
        return False
    if not hasattr(Compiled, "finalize_loading"):
        Compiled.finalize_loading = lambda self, config: None  # type: ignore[attr-defined]
    return True


def tell(model: Any, taps: Sequence[Location], buffers: Sequence[Location]) -> None:
    """Make what is ours in the graph of `model` a part of vLLM's hash, and what vLLM leaves out of it: the whole of the
    model's config, what torch's compiler is told, and the width of this CPU's vectors, for which its code was written
    (on another one the same code computes something else, and says nothing)."""
    told_to = {n: v for n, v in os.environ.items() if n.startswith("TORCHINDUCTOR_") and not n.endswith("_CACHE_DIR")}
    for module in compiled_parts(model):
        config = module.vllm_config
        facts = [
            *([f"{loc.key} {loc.site}" for loc in places] for places in (taps, buffers)),
            config.scheduler_config.max_num_seqs if buffers else None,
            config.model_config.hf_config.to_dict(),
            told_to,
            torch.backends.cpu.get_cpu_capability(),
        ]
        told = json.dumps(facts, sort_keys=True, default=str)
        config.additional_config[PLACES] = hashlib.sha256(told.encode()).hexdigest()
