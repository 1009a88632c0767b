"""`transformers`, compiled, with taps inside: a static cache, one function for prompts and one for decode."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from adapters.engines.hf import HFEngine, load_hf
from adapters.modules import layer_stem
from adapters.points import Location, Points
from adapters.recorded import Recorder
from adapters.taps import Taps, declared


class HFTapsEngine(HFEngine):
    """A compiled `transformers` model whose declared points are live.

    On a GPU the operator is tagged unsafe for CUDA graphs, so inductor graphs what lies between the taps.
    """

    taps: Sequence[str]

    def __init__(self, model: Any, tokenizer: Any, taps: Sequence[str], compiler: str = "inductor") -> None:
        super().__init__(model, tokenizer)
        # CUDA graphs are captured for the addresses of one layer's weights, so there the model is one graph.
        self.layers = alike(model, self.points) if model.device.type == "cpu" else []
        self.hooks: Any = Taps(model, taps, self.points)
        self.il.recorder = Recorder(self.il)
        self.taps = list(taps)
        self.compiler = compiler
        mode = "reduce-overhead" if model.device.type == "cuda" and compiler == "inductor" else None
        # Compiled code is shared between instances of a class, and hooks are not guarded: without isolation this model
        # could run the graph of an untapped one that was compiled before it.
        shared: Any = {"backend": compiler, "fullgraph": True, "isolate_recompiles": True, "recompile_limit": 64}
        self._prefill: Any = model.forward
        self._decode: Any = model.forward
        if self.layers:
            self._one_token = False
            self._compile_layers(shared)
        else:
            self._prefill = torch.compile(model.forward, dynamic=True, **shared)
            self._decode = torch.compile(model.forward, mode=mode, **shared)
        self._caches: dict[tuple[int, int], Any] = {}
        self._stateful = any("linear" in traits for traits in self.points.dims.traits)

    def _compile_layers(self, shared: dict[str, Any]) -> None:
        """Compile a layer once for all that are built alike: what sets them apart (weights, cache, tap ids) is data.

        Hooks are not guarded, so layers with other taps must have code of their own.
        """
        compiled: dict[frozenset[tuple[str, str]], tuple[Any, Any]] = {}
        for index, layer in enumerate(self.layers):
            taps = tapped_at(layer)
            if taps not in compiled:
                compiled[taps] = (
                    torch.compile(_call, dynamic=True, **shared),
                    torch.compile(_call, **shared),
                )
            layer._compiled_call_impl = functools.partial(self._layer, compiled[taps], layer, index)
            layer.self_attn.layer_idx = 0

    def _layer(self, compiled: tuple[Any, Any], layer: Any, index: int, *args: Any, **kwargs: Any) -> Any:
        kwargs["past_key_values"] = self._of_layer[index][self._one_token]
        return compiled[self._one_token](layer, args, kwargs)

    def _cache(self, batch: int, tokens: int) -> Any:
        """A static cache, kept by size and reused: its address must not move under a captured graph."""
        from transformers import StaticCache

        size = (batch, 1 << max(7, (tokens - 1).bit_length()))
        if size not in self._caches:
            cache: Any = StaticCache(config=self.model.config, max_batch_size=batch, max_cache_len=size[1])
            # Left to its first use, a cache that is not made yet costs a graph of its own.
            dims = self.points.dims
            cache.early_initialization(batch, dims.kv_heads, dims.head_dim, self.model.dtype, self.model.device)
            self._caches[size] = (cache, self._slices(cache))
        cache, self._of_layer = self._caches[size]
        self._room = size[1]  # more than a cache says of itself whose layers all slide
        cache.reset()
        return cache

    def _slices(self, cache: Any) -> list[tuple[Any, Any]]:
        """A cache for each layer, for prompts and for decode, with that layer's part alone: number 0 of its own."""
        from transformers.cache_utils import Cache

        return [(_Filled(part), Cache(layers=[part])) for part in cache.layers]

    def _forward(self, ids: Any, mask: Any, positions: Any, cache: Any) -> tuple[torch.Tensor, Any]:
        from transformers import DynamicCache

        self._one_token = ids.shape[1] == 1
        run: Any = self._decode if self._one_token else self._prefill
        if self.layers and not self._one_token:
            seen = DynamicCache(config=self.model.config)  # empty: the mask is made for the prompt's own keys
        else:
            seen = cache
            # As long as the room there is, whatever the step: what lies in the future is masked by causality. But
            # layers that keep a state take the end of a prompt's mask for their own tokens.
            length = ids.shape[1] if self._stateful and not self._one_token else self._room
            if mask is None:
                mask = ids.new_ones(ids.shape[0], length)
            else:
                mask = torch.nn.functional.pad(mask, (0, length - mask.shape[1]), value=1)
        out = run(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=seen,
            use_cache=True,
            logits_to_keep=self._last,
        )
        # A captured graph overwrites its outputs at the next replay.
        return out.logits[:, -1].clone(), cache

    def declared(self) -> list[Location]:
        return declared(self.taps, self.points)

    def close(self) -> None:
        super().close()
        for layer in self.layers:
            layer._compiled_call_impl = None
        self.layers, self._of_layer, self._prefill, self._decode = [], None, None, None
        self._caches.clear()

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "taps": self.taps,
            "cache": "static",
            "compiler": self.compiler,
            "by_layer": bool(self.layers),
        }


class _Filled:
    """A layer's static cache during a prompt, which attends to its own keys and not to all the room there is."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.part.update(keys, values)
        return keys, values


def _call(layer: Any, args: Any, kwargs: Any) -> Any:
    """A module with its hooks, from inside of which it is not compiled once more."""
    return layer._call_impl(*args, **kwargs)


def tapped_at(layer: Any) -> frozenset[tuple[str, str]]:
    """Where a layer has taps: (path in it, side)."""
    return frozenset(
        (name, side)
        for name, module in layer.named_modules()
        for side in ("in", "out")
        if f"tapgrid_{side}" in module._buffers
    )


def alike(model: Any, points: Points) -> list[Any]:
    """The layers of a model that can share code; none where a layer's number is more than its place in the cache."""
    stem = (layer_stem(points) or "").rstrip(".")
    try:
        layers = list(model.get_submodule(stem)) if stem else []
    except AttributeError:
        return []
    numbered = {name for layer in layers for name, module in layer.named_modules() if hasattr(module, "layer_idx")}
    return layers if numbered == {"self_attn"} else []


def load_hf_taps(
    path: Path, *, dtype: str, taps: Sequence[str], compiler: str = "inductor", **arguments: Any
) -> HFTapsEngine:
    """Load a local folder with `transformers`, insert the taps, compile at the first run.

    `compiler` is a backend of `torch.compile`; "aot_eager" skips code generation, for debugging.
    """
    plain = load_hf(path, dtype=dtype, **arguments)
    return HFTapsEngine(plain.model, plain.tokenizer, taps, compiler)
