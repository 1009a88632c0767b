"""How vLLM has split a model over its ranks, read from the layers themselves: their classes, the sizes they carry, and
the axes that its loader is told.

It is read when the weights are loaded and nothing else has happened to them: kernels pack them afterwards, and what the
loader knew of them is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from adapters.ranks import digest
from adapters.sharded import Layer, Sharding
from adapters.splits import Piece, Split, even


def sharding_of(model: torch.nn.Module, ranks: int) -> Sharding:
    """The plan of `model`: one `Layer` for every module that vLLM's own layer classes describe."""
    found: dict[str, Layer] = {}
    # vLLM's class around the code of transformers keeps its attention layers outside of the module tree.
    apart = getattr(model, "attention_instances", None) or {}
    attention = {f"attention_instances.{layer}": core for layer, core in apart.items()}
    for path, module in (*model.named_modules(), *attention.items()):
        read = next((_READERS[c.__name__] for c in type(module).__mro__ if c.__name__ in _READERS), None)
        layer = None if read is None or _loads_its_own_way(module) else read(module)
        if layer is not None:
            found[path] = layer
    return Sharding(ranks, found)


@contextmanager
def planned(ranks: int) -> Iterator[list[Sharding]]:
    """While a model loads: its plan, as soon as its weights are there. Empty when no loader came by here.

    Parameters that the engine then lays out anew are taken off the plan, which is no longer about them.
    """
    from vllm.model_executor.model_loader import base_loader

    plain, found = base_loader.process_weights_after_loading, []

    def process(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        plan = sharding_of(model, ranks)
        loaded = {f"{path}.{name}": _first(model, f"{path}.{name}") for path, name in _cut(plan)}
        done = plain(model, *args, **kwargs)
        same = {path for path, was in loaded.items() if was is not None and _first(model, path) == was}
        found.append(
            Sharding(
                ranks,
                {
                    path: replace(
                        layer,
                        parameters={n: s for n, s in layer.parameters.items() if f"{path}.{n}" in same},
                        unsaid=layer.unsaid | {n for n in layer.parameters if f"{path}.{n}" not in same},
                    )
                    for path, layer in plan.modules.items()
                },
            )
        )
        return done

    base_loader.process_weights_after_loading = process
    try:
        yield found
    finally:
        base_loader.process_weights_after_loading = plain


def _cut(plan: Sharding) -> list[tuple[str, str]]:
    return [(path, name) for path, layer in plan.modules.items() for name in layer.parameters]


def _first(model: torch.nn.Module, path: str) -> tuple[torch.Size, int] | None:
    """The shape and the first row of a parameter; None for one that is gone."""
    try:
        held = model.get_parameter(path).detach()
    except AttributeError:
        return None
    return (held.shape, digest(held[:1])) if held.numel() and held.dim() else None


def _loads_its_own_way(layer: Any) -> bool:
    """Whether a weight has a loader that is no layer's own: a mixer's that lays several things side by side, of which
    the layer knows nothing. (Tied weights have that of the layer they are tied to.)"""
    loaders = [getattr(p, "weight_loader", None) for p in layer.parameters(recurse=False)]
    owners = [type(getattr(loader, "__self__", None)).__mro__ for loader in loaders if loader is not None]
    return any(not any(c.__name__ in _READERS for c in mro) for mro in owners)


def _replicated(layer: Any) -> Layer:
    # Its weights are; what it is given may still be a rank's own.
    return Layer("replicated", unsaid=frozenset({"in", "out", "attention"}))


def _column(layer: Any) -> Layer:
    widths = list(layer.output_partition_sizes)
    return _columns(layer, "column" if len(widths) == 1 else "merged columns", widths, [1] * len(widths))


def _qkv(layer: Any) -> Layer | None:
    widths = list(layer.output_partition_sizes)
    if len(widths) != 3 or sum(widths) != layer.output_size_per_partition:
        return None  # a subclass with pieces of its own
    return _columns(layer, "q|k|v", widths, [1, layer.num_kv_head_replicas, layer.num_kv_head_replicas])


def _columns(layer: Any, kind: str, widths: list[int], copies: list[int]) -> Layer:
    if layer.tp_size == 1:
        return _replicated(layer)
    pieces = tuple(Piece(w, c) for w, c in zip(widths, copies, strict=True))
    name = type(layer).__name__
    if layer.gather_output:
        return Layer(f"{name}, gathered", parameters=_parameters(layer, kind, pieces, "output_dim"))
    return Layer(name, None, Split(kind, pieces), _parameters(layer, kind, pieces, "output_dim"))


def _row(layer: Any) -> Layer:
    if layer.tp_size == 1:
        return _replicated(layer)
    width = layer.input_size_per_partition
    return Layer(
        type(layer).__name__,
        even("row", width) if layer.input_is_parallel else None,
        None if layer.reduce_results else Split("sum"),
        _parameters(layer, "row", (Piece(width),), "input_dim"),
    )


def _vocabulary(layer: Any) -> Layer:
    if layer.tp_size == 1:
        return _replicated(layer)
    shard = layer.shard_indices
    pieces = tuple(Piece(n) for n in (shard.num_org_elements_padded, shard.num_added_elements_padded) if n)
    return Layer(type(layer).__name__, parameters=_parameters(layer, "vocabulary", pieces, "output_dim"))


def _parameters(layer: Any, kind: str, pieces: tuple[Piece, ...], attribute: str) -> Mapping[str, Split]:
    """The parameters that vLLM's loader cuts, along the axis that it is told on each of them."""
    axes = {name: getattr(p, attribute, None) for name, p in layer.named_parameters(recurse=False)}
    return {name: Split(kind, pieces, axis) for name, axis in axes.items() if axis is not None}


def _attention(layer: Any) -> Layer:
    heads, size = layer.num_heads, getattr(layer, "head_size_v", None) or layer.head_size
    return Layer(
        type(layer).__name__,
        output=even("heads", heads * size),
        attention=even("heads", heads, 0),
        unsaid=frozenset({"in"}),
    )


def _experts(layer: Any) -> Layer | None:
    """Experts of which every rank has a slice (two halves, gate and up), or every rank has some whole ones."""
    config, unsaid = layer.moe_config.moe_parallel_config, frozenset({"in", "out"})
    inner = dict(layer.named_parameters(recurse=False))
    if config.use_ep:
        if not _in_order(layer.expert_map, config.ep_rank, layer.local_num_experts):
            return None
        split = even("experts", layer.local_num_experts, 0)
        return Layer("experts, each on one rank", parameters=dict.fromkeys(inner, split), unsaid=unsaid)
    if config.tp_size == 1:
        return _replicated(layer)
    if set(inner) != {"w13_weight", "w2_weight"} or inner["w13_weight"].dim() != 3:
        return None
    half = inner["w13_weight"].shape[1] // 2
    return Layer(
        "experts, each in slices",
        parameters={
            "w13_weight": Split("gate|up", (Piece(half), Piece(half)), 1),
            "w2_weight": even("row", inner["w2_weight"].shape[2], 2),
        },
        unsaid=unsaid,
    )


def _in_order(expert_map: torch.Tensor | None, rank: int, local: int) -> bool:
    """Whether this rank's experts are the next `local` ones after those of the ranks before it."""
    if expert_map is None:
        return False
    mine = (expert_map >= 0).nonzero().flatten().tolist()
    return bool(mine == list(range(rank * local, (rank + 1) * local)))


# By the name of the nearest class of vLLM's that says how a layer is cut.
_READERS: dict[str, Callable[[Any], Layer | None]] = {
    "QKVParallelLinear": _qkv,
    "MergedColumnParallelLinear": _column,
    "DCPGroupColumnParallelLinear": lambda layer: None,
    "ColumnParallelLinear": _column,
    "RowParallelLinear": _row,
    "ReplicatedLinear": _replicated,
    "VocabParallelEmbedding": _vocabulary,
    "RoutedExperts": _experts,
    "Attention": _attention,
}
