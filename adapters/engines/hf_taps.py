"""`transformers`, compiled, with taps inside: a static cache, one function for prompts and one for decode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from adapters.engines.hf import HFEngine, load_hf
from adapters.points import Location
from adapters.taps import Taps, declared


class HFTapsEngine(HFEngine):
    """A compiled `transformers` model whose declared points are live.

    On a GPU the operator is tagged unsafe for CUDA graphs, so inductor graphs what lies between the taps.
    """

    def __init__(self, model: Any, tokenizer: Any, taps: Sequence[str], compiler: str = "inductor") -> None:
        super().__init__(model, tokenizer)
        self.hooks: Any = Taps(model, taps, self.points)
        self.taps = list(taps)
        self.compiler = compiler
        mode = "reduce-overhead" if model.device.type == "cuda" and compiler == "inductor" else None
        # Compiled code is shared between instances of a class, and hooks are not guarded: without isolation this model
        # could run the graph of an untapped one that was compiled before it.
        shared: Any = {"backend": compiler, "fullgraph": True, "isolate_recompiles": True}
        self._prefill: Any = torch.compile(model.forward, dynamic=True, **shared)
        self._decode: Any = torch.compile(model.forward, mode=mode, **shared)
        self._caches: dict[tuple[int, int], Any] = {}

    def _cache(self, batch: int, tokens: int) -> Any:
        """A static cache, kept by size and reused: its address must not move under a captured graph."""
        from transformers import StaticCache

        size = (batch, 1 << max(7, (tokens - 1).bit_length()))
        if size not in self._caches:
            cache: Any = StaticCache(config=self.model.config, max_batch_size=batch, max_cache_len=size[1])
            # Left to its first use, a cache that is not made yet costs a graph of its own.
            dims = self.points.dims
            cache.early_initialization(batch, dims.kv_heads, dims.head_dim, self.model.dtype, self.model.device)
            self._caches[size] = cache
        self._caches[size].reset()
        return self._caches[size]

    def _forward(self, ids: Any, mask: Any, positions: Any, cache: Any) -> tuple[torch.Tensor, Any]:
        run: Any = self._decode if ids.shape[1] == 1 else self._prefill
        # One mask of the cache's own length, whatever the step: what lies in the future is masked by causality.
        length = cache.get_max_length()
        if mask is None:
            mask = ids.new_ones(ids.shape[0], length)
        else:
            mask = torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=1)
        out = run(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        # A captured graph overwrites its outputs at the next replay.
        return out.logits[:, -1].clone(), cache

    def declared(self) -> list[Location]:
        return declared(self.taps, self.points)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "taps": self.taps, "cache": "static", "compiler": self.compiler}


def load_hf_taps(
    path: Path, *, dtype: str, taps: Sequence[str], compiler: str = "inductor", **arguments: Any
) -> HFTapsEngine:
    """Load a local folder with `transformers`, insert the taps, compile at the first run.

    `compiler` is a backend of `torch.compile`; "aot_eager" skips code generation, for debugging.
    """
    plain = load_hf(path, dtype=dtype, **arguments)
    return HFTapsEngine(plain.model, plain.tokenizer, taps, compiler)
