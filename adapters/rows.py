"""Which rows of a batch or a packed slab belong to which request, for one forward pass.

`of` is a live view of request `i`'s rows, `copy` the same rows as a tensor of their own; `ones` are all requests' rows,
[requests, ...], where each has one; `sampled` is request `i`'s row of what the sampler sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from adapters.errors import NotInRowsError

_narrow_copy = torch.narrow_copy  # one operator instead of a slice and a clone: half of their cost


class Rows(Protocol):
    """Every backend's answer to "whose rows are these"."""

    def of(self, x: torch.Tensor, i: int) -> torch.Tensor: ...

    def copy(self, x: torch.Tensor, i: int) -> torch.Tensor: ...

    def ones(self, x: torch.Tensor) -> torch.Tensor: ...

    def sampled(self, x: torch.Tensor, i: int) -> torch.Tensor: ...

    @property
    def size(self) -> int:
        """How many requests are in the pass."""

    @property
    def alone(self) -> bool:
        """Whether all rows are of one request."""


@dataclass(frozen=True)
class Slab:
    """An engine that packs requests one after another: request `i` owns rows `starts[i]` to `starts[i + 1]`.

    `padded` is how many rows the engine computes, where that is more than the requests own.

    >>> Slab([0, 3, 4]).of(torch.arange(4)[:, None], 0).shape
    torch.Size([3, 1])
    >>> Slab([0, 3, 4]).copy(torch.arange(4)[:, None], 1)
    tensor([[3]])
    """

    starts: list[int]
    padded: int = -1

    def of(self, x: torch.Tensor, i: int) -> torch.Tensor:
        starts = self.starts
        if not x.dim() or x.size(0) != starts[-1]:
            self._check(x)
        elif len(starts) == 2:
            return x
        return x[starts[i] : starts[i + 1]]

    def copy(self, x: torch.Tensor, i: int) -> torch.Tensor:
        starts = self.starts
        if not x.dim() or x.size(0) != starts[-1]:
            self._check(x)
        start = starts[i]
        return _narrow_copy(x, 0, start, starts[i + 1] - start)

    def ones(self, x: torch.Tensor) -> torch.Tensor:
        n = self.starts[-1]
        if not x.dim() or x.size(0) != n:
            self._check(x)
            return x[:n]
        return x

    def sampled(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return x[i : i + 1] if x.dim() != 2 or x.dtype.is_floating_point else x[i]

    @property
    def size(self) -> int:
        return len(self.starts) - 1

    @property
    def alone(self) -> bool:
        return len(self.starts) == 2

    def _check(self, x: torch.Tensor) -> None:
        rows = x.size(0) if x.dim() else -2
        if rows != self.starts[-1] and rows != self.padded:
            raise NotInRowsError(
                f"cannot tell the requests apart in a tensor of shape {tuple(x.shape)}: this pass packs "
                f"{len(self.starts) - 1} requests into {self.starts[-1]} rows, which should be its first axis"
            )


@dataclass(frozen=True)
class Batch:
    """An engine that pads on the left: request `i` owns row `i` of the batch from `pads[i]` on.

    A module that flattens the batch (a router sees [batch * tokens, d]) is unflattened first.

    >>> Batch(2, 5, [0, 2]).of(torch.zeros(2, 5, 8), 1).shape
    torch.Size([3, 8])
    """

    size: int
    tokens: int
    pads: list[int]

    def of(self, x: torch.Tensor, i: int) -> torch.Tensor:
        if x.dim() >= 2 and x.size(0) == self.size and x.size(1) == self.tokens:
            rows = x[i]
        elif x.dim() and x.size(0) == self.size * self.tokens:
            rows = x.view(self.size, self.tokens, *x.shape[1:])[i]
        else:
            raise NotInRowsError(
                f"cannot tell the requests apart in a tensor of shape {tuple(x.shape)}: this pass has {self.size} "
                f"requests of {self.tokens} tokens, so its first axes should be ({self.size}, {self.tokens}) or "
                f"({self.size * self.tokens},)"
            )
        pad = self.pads[i]
        return rows[pad:] if pad else rows

    def copy(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return self.of(x, i).clone()

    def ones(self, x: torch.Tensor) -> torch.Tensor:
        row = self.of(x, 0)
        return x.view(self.size, *row.shape[1:])

    def sampled(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return x[i : i + 1]

    @property
    def alone(self) -> bool:
        return self.size == 1


@dataclass(frozen=True)
class Part:
    """Rows `lo` to `hi` of a request's rows in this pass: what is left for an intervention of a pass that computes some
    of them again, and what is not.

    >>> Part(Slab([0, 5]), 3, 5).of(torch.arange(5), 0)
    tensor([3, 4])
    """

    whole: Rows
    lo: int
    hi: int

    def of(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return self.whole.of(x, i)[self.lo : self.hi]

    def copy(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return self.of(x, i).clone()

    def ones(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole.ones(x)

    def sampled(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return self.whole.sampled(x, i)

    @property
    def size(self) -> int:
        return self.whole.size

    @property
    def alone(self) -> bool:
        return False
