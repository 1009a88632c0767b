"""The ranks of a tensor-parallel engine as interventions need them: gather, agree, and say where they parted.

Interventions run on every rank, on the same whole tensors, so every rank comes to the same places. Before each
collective of ours the ranks agree on where they are, over a group of their own and with a time limit: an intervention
that does something else on another rank (random numbers of its own, a clock) is an error that names the place, where it
would otherwise wait for ever or mix up two tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from adapters.errors import RanksDivergedError

# One thing that happened to a request on a rank: where, and a digest of the values there.
Entry = tuple[str, int]
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Trail:
    """What a rank did for one request, to be compared between ranks; `reads` is whether what was read counts too."""

    reads: bool = False
    _entries: list[tuple[str, Any]] = field(default_factory=list)

    def add(self, where: str, value: Any) -> None:
        """Note that `value` was at `where`."""
        self._entries.append((where, digest(value)))

    def entries(self) -> tuple[Entry, ...]:
        """What was noted so far."""
        return tuple((where, int(found)) for where, found in self._entries)


def digest(value: Any) -> Any:
    """A checksum of tensors' bytes, whatever holds them; 0 for what holds none. That of a tensor on a device is a sum
    that is left there, so that nothing has to wait for it; `int` fetches it.

    >>> digest(torch.zeros(3)) == digest(torch.zeros(3)) != digest(torch.ones(3))
    True
    """
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        if flat.device.type != "cpu":
            return flat.view(_WORDS.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64)
        return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return zlib.crc32(repr([int(digest(v)) for v in value]).encode())
    return zlib.crc32(repr(value).encode()) if isinstance(value, (int, float, str, bool)) else 0


def parted(trails: Sequence[Sequence[Entry]]) -> str | None:
    """Where the trails of several ranks first differ, or None.

    >>> parted([[("q[0]", 1), ("z[0]", 2)], [("q[0]", 1), ("z[0]", 3)]])
    'z[0]'
    >>> parted([[("q[0]", 1)], []])
    'q[0] (on some ranks only)'
    """
    for i in range(max(map(len, trails), default=0)):
        there = {t[i] if i < len(t) else None for t in trails}
        if len(there) > 1:
            where = next(t[i][0] for t in trails if i < len(t))
            same_place = None not in there and len({e[0] for e in there if e}) == 1
            return where if same_place else f"{where} (on some ranks only)"
    return None


class Ranks:
    """This rank among the others. `all_gather` is the engine's own collective; agreement has a group of its own.

    Attributes:
        broken: whether the ranks have parted in the middle of a collective, so that `regroup` has to come first.
        visits: how many gathers there were, for tests and reports.
    """

    def __init__(self, all_gather: Callable[[torch.Tensor], Sequence[torch.Tensor]], *, timeout: float = 30.0) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout, self.visits, self.broken = timeout, 0, False
        self._all_gather = all_gather
        self._count = 0
        self.regroup()

    def regroup(self) -> None:
        """A fresh group to agree in. Called on every rank."""
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        self._count, self.broken = 0, False

    def agree(self, where: str, value: int = 0) -> list[int]:
        """Wait until every rank is at `where`; RanksDivergedError when one is elsewhere. Returns every `value`."""
        self._count += 1
        if self.broken:
            raise RanksDivergedError(f"{where}: the ranks had parted earlier in this run")
        with torch.inference_mode(False):
            mine = torch.tensor([self._count, zlib.crc32(where.encode()), value])
            heard = [torch.empty_like(mine) for _ in range(self.size)]
            try:
                dist.all_gather(heard, mine, group=self._group)
            except RuntimeError as late:
                self.broken = True
                raise RanksDivergedError(
                    f"{where}: rank {self.rank} waited {self.timeout:g} s for the others, and not all came: does the "
                    "intervention do the same on every rank (no random numbers or clock of its own)?"
                ) from late
        if any(h[:2].tolist() != mine[:2].tolist() for h in heard):
            raise RanksDivergedError(
                f"{where}: rank {self.rank} is here while another rank is elsewhere: the intervention has to do the "
                "same on every rank (no random numbers or clock of its own)"
            )
        return [int(h[2]) for h in heard]

    def gather(self, x: torch.Tensor, where: str) -> list[torch.Tensor]:
        """Every rank's `x`, in rank order."""
        self.agree(where)
        self.visits += 1
        return list(self._all_gather(x.contiguous()))
