"""Which rows of a batch or a packed slab belong to which request, for one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Rows(Protocol):
    """`of` is request `i`'s rows of a tensor of this pass, `sampled` its row of what the sampler sees; both are views."""

    def of(self, x: torch.Tensor, i: int) -> torch.Tensor: ...

    def sampled(self, x: torch.Tensor, i: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Slab:
    """An engine that packs requests one after another: request `i` owns rows `starts[i]` to `starts[i + 1]`.

    >>> Slab([0, 3, 4]).of(torch.arange(6)[:, None], 0).shape
    torch.Size([3, 1])
    """

    starts: list[int]

    def of(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return x[self.starts[i] : self.starts[i + 1]]

    def sampled(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return x[i : i + 1] if x.dim() != 2 or x.dtype.is_floating_point else x[i]


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
        if x.dim() >= 2 and x.shape[0] == self.size and x.shape[1] == self.tokens:
            return x[i, self.pads[i] :]
        if x.shape[0] == self.size * self.tokens:
            return x.view(self.size, self.tokens, *x.shape[1:])[i, self.pads[i] :]
        raise ValueError(
            f"cannot tell the requests apart in a tensor of shape {tuple(x.shape)}: this pass has {self.size} requests of "
            f"{self.tokens} tokens, so its first axes should be ({self.size}, {self.tokens}) or ({self.size * self.tokens},)"
        )

    def sampled(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return x[i : i + 1]
