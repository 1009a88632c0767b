"""From what the model holds at a location to one request's rows, and back.

A read hands out a copy. What the model holds is overwritten in place as soon as it goes on (a fused norm, a rotary
kernel), so a view that was kept would turn into somebody else's numbers; and only a tensor of one's own counts its
versions, which is how an edit in place is noticed. `take` makes the copy, `put` writes an edited one back. Layouts that
are more than a place in memory (`layouts.cut`) bring a function of their own for the way back.

What a module has just made and nobody else has is not copied but `lent`: an edit of it has landed, and if the
intervention keeps it, it is the model that goes on with a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from adapters.layouts import Back, cut, replaced, shaped
from adapters.layouts import _found as found_at
from adapters.modes import InferenceMode
from adapters.points import LOGITS_KEY, SAMPLED_KEY, Location, Site
from adapters.rows import Rows

if TYPE_CHECKING:
    from adapters.interleave import Interleaver


def take(
    loc: Location, payload: Any, rows: Rows, index: int, span: tuple[int, int], il: Interleaver
) -> tuple[Any, Back | None]:
    """Request `index`'s part of what the model holds at `loc`, as tensors of its own, and the way back where it is not
    `put`'s.

    `payload` is a module's output, or [args, kwargs] for its input; `span` the first position and the token count.
    """
    if loc.rank < 0:
        if loc.site.side == "out" and isinstance(payload, torch.Tensor):
            if il.fresh:
                x = rows.of(payload, index)
                return x if x is payload else x.detach(), lent
            return rows.copy(payload, index), None
        parts = _whole(loc.site, payload)
        return rows.copy(parts[0], index) if len(parts) == 1 else tuple(rows.copy(t, index) for t in parts), None
    site = loc.site
    form = site.form
    if form == "pair":
        x, second = found_at(site, payload)
        if second is None:
            return rows.copy(x, index), None
        if not il.shared:
            return rows.of(x, index) + rows.of(second, index), None
        total = il.total
        if total is None:
            total = il.total = x + second
        return rows.copy(total, index), None
    if form != "tensor":
        return cut(loc, payload, rows, index, span, il.host)
    if loc.key is LOGITS_KEY:
        return rows.sampled(payload, index).clone(), None
    if loc.key is SAMPLED_KEY:
        # One dtype everywhere: engines draw int32 or int64.
        return rows.sampled(payload, index).to(torch.int64, copy=True), None
    x = payload if site.side == "out" and isinstance(payload, torch.Tensor) else found_at(site, payload)[0]
    if site.lead:
        x = x[0]
    if loc.scale != 1.0:
        return shaped(rows.of(x, index), loc) * loc.scale, None
    if il.fresh and site.side == "out":
        own = shaped(rows.of(x, index), loc)
        return own if own is payload else own.detach(), lent
    if not loc.head_dim and not loc.hi:
        return rows.copy(x, index), None
    return shaped(rows.of(x, index), loc).clone(), None


def lent(value: torch.Tensor) -> None:
    """The way back of a value that is what the model holds: an edit has landed there already."""


def put(loc: Location, payload: Any, rows: Rows, index: int, value: Any) -> Any:
    """Write an edited `value` back to where `take` found it. Returns the payload to use instead, or None: in place."""
    if loc.rank < 0:
        if loc.site.side == "out" and isinstance(payload, torch.Tensor):
            _copy(rows.of(payload, index), value)
            return None
        return _put_whole(loc.site, payload, rows, index, value)
    if loc.key in (LOGITS_KEY, SAMPLED_KEY):
        _copy(rows.sampled(payload, index), value)
        return None
    if value.requires_grad:
        value = value.detach()
    x, second = found_at(loc.site, payload)
    x = rows.of(x[0] if loc.site.lead else x, index)
    if second is not None:
        _put_sum(x, rows.of(second, index), value)
        return None
    x = shaped(x, loc)
    _copy(x, value if loc.scale == 1.0 else torch.where(x * loc.scale == value, x, value / loc.scale))
    return None


def spliced(loc: Location, payload: Any, rows: Rows, index: int, value: Any) -> Any:
    """`payload` with `value` in its place, as a part of autograd's graph: what comes after depends on `value`."""
    if loc.rank < 0:
        return _put_whole(loc.site, payload, rows, index, value, apart=True)
    if loc.key in (LOGITS_KEY, SAMPLED_KEY):
        whole = payload.clone()
        rows.sampled(whole, index).copy_(value)
        return whole
    found = found_at(loc.site, payload)[0]
    if loc.site.held:
        shaped(rows.of(found[0] if loc.site.lead else found, index), loc).copy_(value / loc.scale)
        return None
    whole = found.clone()
    shaped(rows.of(whole[0] if loc.site.lead else whole, index), loc).copy_(value / loc.scale)
    return _with(loc.site, payload, found, whole)


def _whole(site: Site, payload: Any) -> list[torch.Tensor]:
    """What a module by its path takes in or gives out: one tensor, or several that stand side by side.

    Several outputs are all of its tensors. Several inputs are those of the first floating-point one's shape and dtype:
    an engine that keeps the residual apart passes (hidden, residual), and half of it is not the module's input.
    """
    if site.side == "out":
        parts = (payload,) if isinstance(payload, torch.Tensor) else _members(payload)
        tensors = [t for t in parts if isinstance(t, torch.Tensor)]
    else:
        args, kwargs = replaced(payload) if len(payload) > 2 else payload
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        first = next((t for t in given if t.is_floating_point()), None)
        tensors = given[:1]
        if first is not None:
            tensors = [t for t in given if t.shape == first.shape and t.dtype == first.dtype]
    if not tensors:
        raise ValueError(f"the {site.side}put of {site.path} holds no tensor")
    return tensors


def _members(payload: Any) -> Any:
    return payload if isinstance(payload, (tuple, list)) else payload.values() if hasattr(payload, "values") else ()


def _put_whole(site: Site, payload: Any, rows: Rows, index: int, value: Any, *, apart: bool = False) -> Any:
    """A module by its path gets tensors of its own, where it can: what else reads its input does not see the edit."""
    if site.side == "in" and len(payload) > 2:
        payload = list(replaced(payload))
    apart = apart or (site.side == "in" and isinstance(payload, list))
    for old, new in zip(_whole(site, payload), value if isinstance(value, tuple) else (value,), strict=True):
        if not apart:
            _copy(rows.of(old, index), new)
            continue
        whole = old.clone()
        rows.of(whole, index).copy_(new)
        payload = _with(site, payload, old, whole)
    return payload if apart else None


def _with(site: Site, payload: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """`payload` with `new` where `old` is."""

    def swap(x: Any) -> Any:
        return new if x is old else x

    if site.side == "in":
        return [tuple(map(swap, payload[0])), {k: swap(v) for k, v in payload[1].items()}]
    if payload is old:
        return new
    if isinstance(payload, (tuple, list)):
        return type(payload)(map(swap, payload))
    for name, x in payload.items():
        payload[name] = swap(x)
    return payload


def _put_sum(hidden: torch.Tensor, residual: torch.Tensor, value: torch.Tensor) -> None:
    """Write a sum back as (0, value), which the next norm adds up to exactly value; rows that are as they were stay."""
    old = hidden + residual
    changed = (old != value).flatten(1).any(1)
    if changed.all():
        _copy(residual, value)
        _copy(hidden, torch.zeros_like(hidden))
    elif changed.any():
        _copy(residual, torch.where(changed[:, None], value, residual))
        _copy(hidden, hidden.masked_fill(changed[:, None], 0))


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    if value.requires_grad:
        value = value.detach()
    if not target.is_inference():
        target.copy_(value)
        return
    # Outside of inference mode such a tensor may not be written.
    guard = InferenceMode(True)
    try:
        target.copy_(value)
    finally:
        del guard
