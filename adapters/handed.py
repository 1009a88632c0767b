"""What is handed out to an intervention: who still holds it, its versions, and what may be put in its place."""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch

from adapters.errors import NonFiniteError, StaleWriteError, WriteError, at_user_line
from adapters.sites import Location

if TYPE_CHECKING:
    from adapters.reading import Reading


class _Nobody:
    """What `getrefcount` says of a handed out tensor that nobody holds, not even by a view of it: in `_settle`, where
    such a value need not be watched for edits to the end of its pass, and in `save`, where it need not be copied again.

    Zero, which never applies, where a reference or a view does not count (torch before 2.10).
    """

    def __init__(self) -> None:
        self.held = torch.zeros(2)

    def save(self, name: str, value: torch.Tensor) -> int:
        return getrefcount(value)

    def settle(self) -> int:
        value, self.held = self.held, torch.zeros(2)
        return getrefcount(value)

    def count(self) -> tuple[int, int]:
        in_settle, in_save = self.settle(), self.save("", self.held)
        view = self.held[:1]
        seen = self.save("", self.held) > in_save and self.settle() > in_settle and view.numel() == 1
        value = self.held
        seen = seen and self.save("", value) > in_save and self.settle() > in_settle
        return (in_settle, in_save) if seen else (0, 0)


UNHELD, UNHELD_IN_SAVE = _Nobody().count()


# How many tensors share a memory: views count, and what `.detach()` and `.data` gave.
storage_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda data: 0)


def _lent() -> tuple[int, int]:
    """What `getrefcount` says of a tensor that a call has just returned and nobody else has, and `storage_uses` of one
    of which there is one alias; zeros, which never apply, where that cannot be told."""
    held = torch.zeros(2)
    one = storage_uses(held.untyped_storage()._cdata)
    alias = held.detach()
    two = storage_uses(alias.untyped_storage()._cdata)
    return (getrefcount(held), two) if UNHELD and two == one + 1 else (0, 0)


# What a module has just made and nobody else has is lent out itself, instead of a copy.
ALONE, LENT = _lent()


def in_graph(value: Any) -> Any:
    """`value` with a gradient of its own; not a leaf, which could not be edited in place."""
    if type(value) is tuple:
        return tuple(map(in_graph, value))
    if not value.is_floating_point():
        return value
    if not value.requires_grad:
        value = value.detach().requires_grad_().clone()
    value.retain_grad()
    return value


def versions(values: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    return tuple(v._version for v in values)


def check_finite(loc: Location, value: Any, what: str, m: Reading) -> None:
    for x in value if type(value) is tuple else (value,):
        if x.is_floating_point() and not bool(x.isfinite().all()):
            bad = int((~x.isfinite()).sum())
            raise NonFiniteError(
                at_user_line(
                    f"{loc}: NaN or infinity {what}, {bad} of {x.numel()} values in shape {tuple(x.shape)} "
                    f"(request {m.request}, step {m.step})"
                )
            )


def check_counted(loc: Location, value: Any, there: Any, m: Reading) -> None:
    """Nothing has counted an edit of `value`, so it has to be what the model still holds `there`."""
    for x, y in zip(*((v if type(v) is tuple else (v,)) for v in (value, there)), strict=True):
        if not torch.equal(x, y):
            raise StaleWriteError(
                at_user_line(
                    f"{loc} was edited in a way that torch does not count (through .data or a NumPy array), so the "
                    f"edit took no part: edit the tensor itself, or assign to it (request {m.request}, step {m.step})"
                )
            )


def refuse_shared(loc: Location, m: Reading) -> None:
    """A module's input, edited in the memory of a compiled graph: WriteError where others read that as well."""
    held = next((there for there in m._points.there(loc.key) if there.site.held), None)
    if held is not None:
        raise WriteError(
            at_user_line(
                f"{loc}: inside a compiled graph an edit of this input would be one of {held}, which others read as "
                f"well, and nothing was written; write m.{held} where that is meant, else the module's output "
                f"(request {m.request}, step {m.step})"
            )
        )


def check_token(value: torch.Tensor, vocab: int) -> None:
    if not 0 <= int(value) < vocab:
        raise WriteError(at_user_line(f"sampled: token id {int(value)} is outside the vocabulary of {vocab}"))


def check_write(loc: Location, current: torch.Tensor, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise WriteError(at_user_line(f"{loc}: a write needs a tensor, not {type(value).__name__}"))
    for what, wanted, got in (
        ("shape", tuple(current.shape), tuple(value.shape)),
        ("dtype", current.dtype, value.dtype),
        ("device", current.device, value.device),
    ):
        if wanted != got:
            raise WriteError(
                at_user_line(f"{loc}: the {what} there is {wanted}, the write has {got}; nothing was written")
            )
