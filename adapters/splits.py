"""How one tensor is cut over the ranks of a tensor-parallel engine, and the way from the slices to the whole and back.

Pure functions over plain data: `gathered` makes the whole, in the order in which a single rank would hold it, `own`
cuts one rank's slice out of it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import torch

from adapters.errors import ShardingError


@dataclass(frozen=True)
class Piece:
    """A stretch of a rank's slice that is a stretch of the whole: its width on one rank, and how many neighbouring
    ranks hold the same (key-value heads, where there are fewer of them than ranks)."""

    width: int
    copies: int = 1


@dataclass(frozen=True)
class Split:
    """How a tensor is cut: along `axis`, into `pieces` one after the other on every rank.

    Without pieces every rank holds a summand of the whole.

    >>> two = Split("q|k", (Piece(2), Piece(1, copies=2)))
    >>> whole = gathered([torch.tensor([[0, 1, 9]]), torch.tensor([[2, 3, 9]])], two)
    >>> whole.tolist(), own(whole, two, 1, 2).tolist()
    ([[0, 1, 2, 3, 9]], [[2, 3, 9]])
    """

    kind: str
    pieces: tuple[Piece, ...] = ()
    axis: int = -1

    def __str__(self) -> str:
        if not self.pieces:
            return f"{self.kind}: a summand on each rank"
        cut = "+".join(f"{p.width}" + (f" (same on {p.copies})" if p.copies > 1 else "") for p in self.pieces)
        return f"{self.kind}: {cut} of axis {self.axis} on each rank"


def even(kind: str, width: int, axis: int = -1) -> Split:
    """A split into one piece a rank.

    >>> str(even("column", 64))
    'column: 64 of axis -1 on each rank'
    """
    return Split(kind, (Piece(width),), axis)


def gathered(parts: Sequence[torch.Tensor], split: Split) -> torch.Tensor:
    """The whole of every rank's part, as a tensor of its own."""
    if not split.pieces:
        return reduce(torch.add, parts) if len(parts) > 1 else parts[0].clone()
    for part in parts:
        _check(part, split, sum(p.width for p in split.pieces), "a rank's slice")
    if len(split.pieces) == 1 and split.pieces[0].copies == 1:
        return torch.cat(list(parts), split.axis)
    cut = [part.split([p.width for p in split.pieces], split.axis) for part in parts]
    return torch.cat(
        [cut[r][i] for i, p in enumerate(split.pieces) for r in range(0, len(parts), p.copies)], split.axis
    )


def own(whole: torch.Tensor, split: Split, rank: int, ranks: int) -> torch.Tensor:
    """What `rank` holds of a whole; a view where it lies in one piece."""
    if not split.pieces:
        return whole if rank == 0 else torch.zeros_like(whole)
    widths = [p.width * (ranks // p.copies) for p in split.pieces]
    _check(whole, split, sum(widths), "the whole")
    starts = [0, *accumulate(widths)]
    mine = [
        whole.narrow(split.axis, start + rank // p.copies * p.width, p.width)
        for start, p in zip(starts, split.pieces, strict=False)
    ]
    return mine[0] if len(mine) == 1 else torch.cat(mine, split.axis)


def _check(x: torch.Tensor, split: Split, width: int, what: str) -> None:
    if x.dim() == 0 or x.shape[split.axis] != width:
        raise ShardingError(
            f"{what} has shape {tuple(x.shape)} where the engine's plan ({split}) says {width} along axis {split.axis}"
        )
