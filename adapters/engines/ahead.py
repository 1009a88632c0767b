"""Graphs that vLLM compiled ahead of time, loaded again at the next boot instead of traced again.

A tapped SmolLM2 boots in 12 s of CPU time where tracing it takes 22, plain vLLM 19. What is loaded is found by vLLM's
hash of its configuration; what of ours is in the graph is added to that, for nothing else would see that it changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

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
    """Make what is ours in the graph of `model` a part of vLLM's hash, and the whole of the model's own config."""
    for module in model.modules():
        if getattr(module, "do_not_compile", True) is False:
            config = module.vllm_config
            facts = [
                *([f"{loc.key} {loc.site}" for loc in places] for places in (taps, buffers)),
                config.scheduler_config.max_num_seqs if buffers else None,
                config.model_config.hf_config.to_dict(),
            ]
            told = json.dumps(facts, sort_keys=True, default=str)
            config.additional_config[PLACES] = hashlib.sha256(told.encode()).hexdigest()
