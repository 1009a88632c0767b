"""How `transformers` has split a model over its ranks, read from the plan that it applied: a style for each module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from adapters.points import Points
from adapters.sharded import Layer, Sharding
from adapters.splits import Piece, Split, even

_NEITHER = frozenset({"in", "out", "attention"})


def sharding_of(model: Any, points: Points, ranks: int) -> Sharding:
    """The plan of `model`: one `Layer` for every module that its `tp_plan` names, and the heads of its attention."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, _get_parameter_tp_plan

    found: dict[str, Layer] = {}
    for path, module in model.named_modules():
        style = _get_parameter_tp_plan(parameter_name=path, tp_plan=model.tp_plan, is_weight=False)
        if path and style is not None:
            found[path] = _layer(style, ALL_PARALLEL_STYLES[style], module)
    for layer in points.layers("pattern"):
        z = points.at("z", layer)
        projection, path = found.get(z.key[0]), points.at("pattern", layer).key[0]
        if projection is not None and "in" not in projection.unsaid:
            known = found.get(path, Layer("attention", unsaid=_NEITHER))
            # A rank attends with the heads whose outputs it projects.
            heads = projection.input and even("heads", projection.input.pieces[0].width // z.head_dim, 0)
            found[path] = replace(known, attention=heads, unsaid=known.unsaid - {"attention"})
    return Sharding(ranks, found)


def _layer(name: str, style: Any, module: Any) -> Layer:
    from torch.distributed.tensor import DTensor, Replicate

    weight = getattr(module, "weight", None)
    kind = type(style).__name__
    if not isinstance(weight, DTensor) or not isinstance(module, torch.nn.Linear):
        return Layer(name, unsaid=_NEITHER)
    out, into = weight.to_local().shape
    cut = _placed(module)
    if kind == "ColwiseParallel":
        gathered = isinstance(style.output_layouts, Replicate)
        return Layer(name, output=None if gathered else even("column", out), parameters=cut)
    if kind == "RowwiseParallel" and isinstance(style.output_layouts, Replicate):
        cut_here = isinstance(style.input_layouts, Replicate)
        return Layer(name, None if cut_here else even("row", into), parameters=cut)
    if kind == "PackedColwiseParallel":
        width = out // style.split_factor
        return Layer(name, output=Split("packed columns", (Piece(width),) * style.split_factor), parameters=cut)
    return Layer(name, parameters=cut, unsaid=_NEITHER)


def _placed(module: torch.nn.Module) -> dict[str, Split]:
    """How parameters are placed, for those who ask: what makes them whole is their own `full_tensor`."""
    parameters: dict[str, Any] = dict(module.named_parameters(recurse=False))
    return {
        name: even(str(placement), p.to_local().shape[placement.dim], placement.dim)
        for name, p in parameters.items()
        for placement in getattr(p, "placements", ())
        if hasattr(placement, "dim")
    }
