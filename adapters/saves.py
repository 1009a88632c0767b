"""What `m.save` keeps: copies that nobody else can change, and the checks on what was kept exactly as it was read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Run:
    """Entries of a row each that lie together: what `of` makes of `held`, [entries, ...]."""

    held: torch.Tensor
    of: Callable[[torch.Tensor], torch.Tensor]

    def __len__(self) -> int:
        return self.held.shape[0]

    def rows(self) -> torch.Tensor:
        return self.of(self.held)


@dataclass(frozen=True, slots=True)
class Joined:
    """The entries of a name in one tensor, and how many rows each has."""

    rows: torch.Tensor
    lengths: Sequence[int]

    def __len__(self) -> int:
        return len(self.lengths)


class Saves(MutableMapping[str, list[Any]]):
    """What was saved, by name. Entries that lie joined are cut up when somebody asks for them, into tensors that share
    nothing; who asks for `whole` gets them as they lie.

    >>> saves = Saves({"x": Joined(torch.tensor([[1.0], [2.0], [3.0]]), [2, 1])})
    >>> whole(saves, "x").flatten().tolist(), saves
    ([1.0, 2.0, 3.0], {'x': [tensor([[1.],
            [2.]]), tensor([[3.]])]})
    """

    def __init__(self, held: Mapping[str, list[Any] | Joined]) -> None:
        self._held = dict(held)

    @staticmethod
    def of(saves: MutableMapping[str, list[Any]]) -> MutableMapping[str, list[Any]]:
        """The same, with every name that has a `Run` joined."""
        if not any(type(e) is Run for entries in saves.values() for e in entries):
            return saves
        with InferenceMode(False):
            return Saves({name: _laid_together(entries) for name, entries in saves.items()})

    def held(self, name: str) -> list[Any] | Joined:
        return self._held[name]

    def __getitem__(self, name: str) -> list[Any]:
        held = self._held[name]
        if isinstance(held, Joined):
            held = self._held[name] = [_cloned(rows) for rows in held.rows.split(list(held.lengths))]
        return held

    def __setitem__(self, name: str, entries: list[Any]) -> None:
        self._held[name] = entries

    def __delitem__(self, name: str) -> None:
        del self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: object) -> bool:
        return name in self._held  # a mapping's own way would cut

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _laid_together(entries: list[Any]) -> list[Any] | Joined:
    if not any(type(e) is Run for e in entries):
        return entries
    pieces, lengths = list[torch.Tensor](), list[int]()
    for entry in entries:
        if type(entry) is Run:
            pieces.append(entry.rows())
            lengths += [1] * len(entry)
        else:
            pieces.append(entry)
            lengths.append(entry.shape[0])
    return Joined(torch.cat(pieces), lengths)


def held(saves: Mapping[str, list[Any]], name: str) -> list[Any] | Joined:
    """The entries of a name as they lie."""
    return saves.held(name) if isinstance(saves, Saves) else saves[name]


def whole(saves: Mapping[str, list[Any]], name: str) -> torch.Tensor:
    """All entries of a name along their first axis; scalars are stacked."""
    found = held(saves, name)
    return _cloned(found.rows) if isinstance(found, Joined) else joined(found)


def check(request: str, saves: Mapping[str, list[Any]], as_read: Mapping[str, Any]) -> BadCaptureError | None:
    """The error for a save that cannot be an activation, or None.

    Args:
        as_read: name -> the point whose values were saved exactly as the model had them, before this request wrote
            anything. What an intervention made itself may be anything.
    """
    for name, point in as_read.items():
        why = _why_bad(held(saves, name))
        # A first token can only look at itself.
        alone = point.name == "pattern" and all(e.shape[-1] == 1 for e in saves[name])
        if why is not None and not alone:
            return BadCaptureError(
                f"{why} in what was read at {point} and saved as {name!r} (request {request}), and this request had "
                "written nothing: the engine does not hold this activation there, or the model itself is broken"
            )
    return None


def _why_bad(found: list[torch.Tensor] | Joined) -> str | None:
    entries = [found.rows] if isinstance(found, Joined) else found
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
