"""What `m.save` keeps: copies that nobody else can change, and the checks on what was kept exactly as it was read."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adapters.errors import BadCaptureError
from adapters.modes import InferenceMode, is_inference_mode_enabled

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# Up to here the entries of a name are checked as one tensor; above it one by one, to spare the memory.
_JOINED_BYTES = 1 << 26


def copied(value: Any) -> Any:
    """A copy of `value` that shares nothing with it: tensors detached and cloned, containers copied all the way down.

    >>> copied({"a": [torch.zeros(2)], "b": 3})
    {'a': [tensor([0., 0.])], 'b': 3}
    """
    if isinstance(value, torch.Tensor):
        return _cloned(value)
    if isinstance(value, _CONSTANTS):
        return value
    if isinstance(value, tuple):
        entries = [copied(v) for v in value]
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    if isinstance(value, list):
        return [copied(v) for v in value]
    if isinstance(value, Mapping):
        return {k: copied(v) for k, v in value.items()}
    return copy.deepcopy(value)


def _cloned(value: torch.Tensor) -> torch.Tensor:
    if is_inference_mode_enabled():
        # An inference tensor could never take part in autograd afterwards.
        with InferenceMode(False):
            return value.detach().clone()
    return value.detach().clone()


def joined(entries: Sequence[Any]) -> torch.Tensor:
    """All entries along their first axis; scalars are stacked."""
    kept = [e if isinstance(e, torch.Tensor) else torch.as_tensor(e) for e in entries]
    if len(kept) == 1:
        return kept[0] if kept[0].dim() else kept[0][None]
    try:
        return torch.cat(kept) if kept[0].dim() else torch.stack(kept)
    except RuntimeError as odd:
        shapes = ", ".join(str(tuple(e.shape)) for e in kept[:8])
        raise ValueError(
            f"entries of shapes {shapes} do not join along their first axis: take them one by one from `saves`"
        ) from odd


def check(request: str, saves: Mapping[str, list[Any]], as_read: Mapping[str, Any]) -> BadCaptureError | None:
    """The error for a save that cannot be an activation, or None.

    Args:
        as_read: name -> the point whose values were saved exactly as the model had them, before this request wrote
            anything. What an intervention made itself may be anything.
    """
    for name, point in as_read.items():
        why = _why_bad(saves[name])
        # A first token can only look at itself.
        alone = point.name == "pattern" and all(e.shape[-1] == 1 for e in saves[name])
        if why is not None and not alone:
            return BadCaptureError(
                f"{why} in what was read at {point} and saved as {name!r} (request {request}), and this request had "
                "written nothing: the engine does not hold this activation there, or the model itself is broken"
            )
    return None


def _why_bad(entries: list[torch.Tensor]) -> str | None:
    size = sum(e.numel() for e in entries)
    if size == 0:
        return f"nothing (shape {tuple(entries[0].shape)})"
    if not entries[0].is_floating_point() or size == 1:
        return None
    if len(entries) > 1 and size * entries[0].element_size() > _JOINED_BYTES:
        bounds = [torch.aminmax(e) for e in entries if e.numel()]
        low = torch.stack([b.min for b in bounds]).amin().item()
        high = torch.stack([b.max for b in bounds]).amax().item()
    else:
        least, most = torch.aminmax(_flat(entries))
        low, high = least.item(), most.item()
    if low - low != 0 or high - high != 0:  # NaN and both infinities, without a second pass
        return "NaN or infinity"
    if low == high:
        return "nothing but zeros" if low == 0 else f"one constant ({low:g})"
    return None


def _flat(entries: list[torch.Tensor]) -> torch.Tensor:
    """Everything in one tensor, of whatever shape."""
    try:
        return joined(entries)  # a third of the time
    except ValueError:
        return torch.cat([e.reshape(-1) for e in entries])
