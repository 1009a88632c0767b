"""Keys and values out of vLLM's paged cache, in position order.

A kernel lays a block out as it likes (on a CPU, keys are packed for the vector unit). The layout is learnt from the
kernel itself: known numbers are written into a scratch block through the layer's own update, and where they turn up
says where every element is.
"""

from __future__ import annotations

from typing import Any

import torch

# (kernel, dtype, shape of a block) -> where an element of [block_size, kv_heads, d] lies in a flat block: keys, values.
_LAYOUTS: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
_BASE = 128  # digits that every dtype holds exactly


def why_not(core: Any) -> str | None:
    """Why keys cannot be read from this attention layer's cache, or None."""
    if getattr(core.impl, "alibi_slopes", None) is not None:
        return "this layer adds position biases (ALiBi) to its scores, which are not recomputed here"
    if getattr(core.impl, "sinks", None) is not None:
        return "this layer has attention sinks, so its rows do not sum to 1"
    if not hasattr(core.impl, "do_kv_cache_update"):
        return f"{type(core.impl).__name__} writes its cache inside the kernel, so its layout cannot be learnt"
    if core.kv_cache_torch_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the cache holds {core.kv_cache_torch_dtype}, which is not what attention computes with"
    return None


def cached(core: Any, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [length, kv_heads, d] of request `index` of this pass, this pass's own included."""
    from vllm.forward_context import get_forward_context

    cache = core.kv_cache
    block_axis, size_axis = _axes(core)
    size = cache.shape[size_axis]
    metadata = get_forward_context().attn_metadata[core.layer_name]
    blocks = metadata.block_table[index, : -(-length // size)].long()
    with torch.inference_mode(False):
        held = cache.index_select(block_axis, blocks).movedim(block_axis, 0).flatten(1)
        k, v = (held[:, where].flatten(0, 1)[:length] for where in _layout(core, size))
    return k, v


def _axes(core: Any) -> tuple[int, int]:
    """Which axes of the cache count blocks and positions in a block."""
    shape = core.attn_backend.get_kv_cache_shape(3, 16, 5, 64)
    return shape.index(3), shape.index(16)


def _layout(core: Any, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    cache, (block_axis, _) = core.kv_cache, _axes(core)
    scratch = torch.zeros_like(cache.narrow(block_axis, 0, 1))
    key = (type(core.impl), getattr(core.impl, "isa", None), cache.dtype, tuple(scratch.shape), core.head_size)
    if key not in _LAYOUTS:
        _LAYOUTS[key] = (_learn(core, scratch, size, 0), _learn(core, scratch, size, 1))
    return _LAYOUTS[key]


def _learn(core: Any, scratch: torch.Tensor, size: int, which: int) -> torch.Tensor:
    """Write every element's own number, a digit at a time, and look where it is."""
    shape = (size, core.num_kv_heads, core.head_size)
    count = size * core.num_kv_heads * core.head_size
    numbers = torch.arange(1, count + 1, device=scratch.device)
    found = torch.zeros(scratch.numel(), dtype=torch.long, device=scratch.device)
    place = 1
    while place <= count:
        scratch.zero_()
        digit = (numbers // place % _BASE).view(shape).to(scratch.dtype)
        pair = [torch.zeros_like(digit), torch.zeros_like(digit)]
        pair[which] = digit
        core.impl.do_kv_cache_update(core, *pair, scratch, torch.arange(size, device=scratch.device))
        found += scratch.flatten().long() * place
        place *= _BASE
    where = torch.zeros(count, dtype=torch.long, device=scratch.device)
    there = found > 0
    if int(there.sum()) != count or int(found.max()) != count:
        raise RuntimeError(
            f"the layout of {type(core.impl).__name__}'s cache could not be learnt: elements are missing"
        )
    where[found[there] - 1] = there.nonzero().squeeze(1)
    return where.view(shape)
