"""How the tensors at a site are read and written: from what the model holds there to one request's rows, and back.

`cut` hands out the rows and, where an edit does not land in the model's memory by itself, what writes it back.
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
) -> tuple[Any, Back | None]:
    """Request `index`'s part of what the model holds at `loc`, and how an edit of it gets back (None: by itself).

    `payload` is a module's output, or [args, kwargs] for its input; `span` the first position and the token count;
    `host` lends the model, and says whether the engine reuses all of its buffers (`copies`).
    """
    site = loc.site
    if site.form == "pattern":
        return _fresh(payload.read(index, *span)), lambda value: payload.write(index, *span, value)
    if loc.rank < 0 and site.side == "out" and _several(payload):
        return tuple(rows.of(t, index) if isinstance(t, torch.Tensor) else t for t in payload), None
    found, second = _found(site, payload)
    if site.form == "replaced":
        return _replaced(loc, payload, found, rows, index)
    if site.lead:
        found = found[0]
    x = shaped(rows.of(found, index), loc)
    if second is not None:
        return _pair(x, rows.of(second, index))
    if site.form == "tensor" and not host.copies:
        return x, None
    if site.form == "router":
        return _fresh(x), lambda logits: _choose_again(
            host.model.get_submodule(site.path), payload, rows, index, logits
        )
    if loc.scale != 1.0:
        return _fresh(x * loc.scale), lambda value: _put(x, value / loc.scale)
    return _fresh(x), lambda value: _put(x, value)


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


def _several(output: Any) -> bool:
    return not isinstance(output, torch.Tensor) and sum(isinstance(t, torch.Tensor) for t in output) > 1


def _fresh(x: torch.Tensor) -> torch.Tensor:
    """A copy that counts its versions, which is how an edit in place is noticed: inference tensors do not."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return x.clone()
    return x.clone()


def _put(x: torch.Tensor, value: torch.Tensor) -> None:
    x.copy_(value)


def _pair(hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, Back]:
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            total = hidden + residual
    else:
        total = hidden + residual

    def back(value: torch.Tensor) -> None:
        residual.copy_(value)
        hidden.zero_()

    return total, back


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

    return _fresh(x if earlier is None else earlier[2]), back


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
