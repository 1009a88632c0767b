"""Layouts that are more than a place in memory: what one request reads there, and how an edit of it gets back.

`cut` serves the forms of a `Site` whose edits have to be carried out (`exchange.py` serves those that lie in memory);
`shaped` finds a point's columns and heads in a projection; `finished` is what follows the head's product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from adapters.rows import Rows
from adapters.sites import Head, Location, Site

Back = Callable[[torch.Tensor], None]


def cut(
    loc: Location, payload: Any, rows: Rows, index: int, span: tuple[int, int], host: Any
) -> tuple[torch.Tensor, Back]:
    """Request `index`'s part of what the model holds at `loc`, as a tensor of its own, and what carries an edit out.

    `payload` is a module's output, [args, kwargs] for its input, or `patterns.Attended`; `span` the first position and
    the token count; `host` lends the model.
    """
    site = loc.site
    if site.form == "pattern":
        return payload.read(rows, index, *span), lambda pattern: payload.write(rows, index, *span, pattern)
    found, _ = _found(site, payload)
    if site.form == "replaced":
        return _replaced(loc, payload, found, rows, index)
    router = host.model.get_submodule(site.path)
    logits = rows.of(found, index).clone()
    return logits, lambda edited: _choose_again(router, payload, rows, index, edited)


def shaped(x: torch.Tensor, loc: Location) -> torch.Tensor:
    """Rows of a projection -> the columns and heads of one point; a view.

    >>> from adapters.points import points_of
    >>> gpt2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 9}
    >>> shaped(torch.arange(24.0)[None], points_of(gpt2, "hf").at("k", 0))[0].tolist()
    [[8.0, 9.0, 10.0, 11.0], [12.0, 13.0, 14.0, 15.0]]
    """
    if loc.hi:
        x = x[..., loc.lo : loc.hi]
    if not loc.head_dim:
        return x
    which, of = loc.site.part or (0, 1)
    heads = x.view(*x.shape[:-1], -1, loc.head_dim * of)
    return heads[..., which * loc.head_dim : (which + 1) * loc.head_dim] if of > 1 else heads


def _found(site: Site, payload: Any) -> tuple[Any, Any]:
    """The tensor at the site, and its partner where the engine keeps the residual apart."""
    pair = site.form == "pair"
    if site.side == "out":
        if isinstance(payload, torch.Tensor):
            return payload, None
        return payload[site.index], payload[1] if pair else None
    args, kwargs = payload[0], payload[1]
    if site.arg is not None and site.arg in kwargs:
        return kwargs[site.arg], kwargs.get("residual") if pair else None
    if len(args) > site.index:
        second = args[site.index + 1] if len(args) > site.index + 1 else kwargs.get("residual")
        return args[site.index], second if pair else None
    return next(iter(kwargs.values())), None


# ---- inputs that something else reads as well


def _replaced(loc: Location, payload: Any, found: Any, rows: Rows, index: int) -> tuple[torch.Tensor, Back]:
    if not isinstance(payload, list):
        raise TypeError(f"{loc}: this backend cannot give the module an argument of its own")
    edits: dict[int, Any] = payload[2] if len(payload) > 2 else {}
    x = rows.of(found[0] if loc.site.lead else found, index)
    earlier = edits.get(index)

    def back(value: torch.Tensor) -> None:
        if len(payload) == 2:
            payload.append({})
        payload[2][index] = (loc, rows, value)

    return (x if earlier is None else earlier[2]).clone(), back


def replaced(payload: list[Any]) -> tuple[Any, Any]:
    """The arguments of a module after its visit: the model's own, but for an input that was edited apart from them."""
    args, kwargs, edits = payload
    site = next(iter(edits.values()))[0].site
    found, _ = _found(site, payload)
    own = found.clone()
    for index, (_, rows, value) in edits.items():
        rows.of(own[0] if site.lead else own, index).copy_(value)
    if site.arg in kwargs:
        return args, {**kwargs, site.arg: own}
    if len(args) > site.index:
        return (*args[: site.index], own, *args[site.index + 1 :]), kwargs
    return args, {**kwargs, next(iter(kwargs)): own}


# ---- routers


def _choose_again(router: torch.nn.Module, outputs: Any, rows: Rows, index: int, logits: torch.Tensor) -> None:
    """Let the router's own code choose from edited logits: its matrix product is made to return them."""
    weight = router.get_parameter("weight")
    experts, d_model = weight.shape
    x = weight.new_zeros(logits.shape[0], d_model, dtype=logits.dtype)
    # An expert that is ruled out by -inf would make NaN of the zeros in the product.
    x[:, :experts] = logits.clamp(min=torch.finfo(logits.dtype).min)
    eye = torch.eye(experts, d_model, dtype=logits.dtype, device=logits.device)
    for held, new in zip(outputs, torch.func.functional_call(router, {"weight": eye}, (x,)), strict=True):
        mine = rows.of(held, index)
        mine.copy_(new.view_as(mine))


# ---- after the head


def finished(logits: torch.Tensor, head: Head, config: Any) -> torch.Tensor:
    """What a family does to the head's product, as its config says: scaling and soft cap.

    >>> finished(torch.tensor([2.0]), Head(over="logits_scaling"), {"logits_scaling": 4.0})
    tensor([0.5000])
    """

    def value(name: str | None) -> Any:
        if name is None:
            return None
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    if (times := value(head.times)) is not None:
        logits = logits * times
    if (over := value(head.over)) is not None:
        logits = logits / over
    if (bound := value(head.cap)) is not None:
        logits = torch.tanh(logits / bound) * bound
    return logits
