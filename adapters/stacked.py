"""Passes in which the same requests decode one token each, stacked: one operator a pass for all that they capture.

Cut up at once, 30 points of eight requests are 240 tensors a pass, of 3 us each with the caches cold. Here the rows of
up to `PASSES` passes lie together until each request gets its own: a batch's memory must not live as long as the
longest of its requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adapters.layouts import shaped
from adapters.live import Job
from adapters.modes import InferenceMode
from adapters.modules import Key
from adapters.points import Location
from adapters.rows import Rows
from adapters.saves import Run

# How many passes lie together, and in how much memory at the most where one pass does not take more.
PASSES, BYTES = 16, 1 << 26


@dataclass(frozen=True)
class Place:
    """Where something is captured, and under which name. `is_whole`: rows of what lies there are the point as it is."""

    name: str
    loc: Location
    is_whole: bool

    @staticmethod
    def of(name: str, loc: Location) -> Place:
        return Place(name, loc, not (loc.site.lead or loc.hi or loc.head_dim or loc.scale != 1.0))

    def value(self, rows: torch.Tensor) -> torch.Tensor:
        """The point, of a request's rows of what lies here."""
        if self.is_whole:
            return rows
        value = shaped(rows, self.loc)
        if self.loc.scale != 1.0:
            return value * self.loc.scale
        # A part of a fused projection must not keep the whole.
        return value.clone() if self.loc.hi or self.loc.site.part else value


class Stack:
    """What the requests of `jobs` have at `places`, from one pass of theirs to the next."""

    def __init__(
        self, places: Sequence[Place], jobs: Sequence[Job], rows: Rows, held: Mapping[Key, torch.Tensor]
    ) -> None:
        """`held` is what the places held in such a pass, where every request has one row."""
        self._lives = [job.live for job in jobs]
        self._at = [job.place for job in jobs]
        self._kinds = [(x.shape, x.dtype) for x in held.values()]
        self._passes, self._most = 0, _passes(held.values())
        lead = {place.loc.key: place.loc.site.lead for place in places}
        alike: dict[Any, list[Key]] = {}
        for key, x in held.items():
            alike.setdefault((x.shape, x.dtype, lead[key]), []).append(key)
        # [passes, places, ...] as the model has it, and the same memory as [passes, places, requests, ...].
        self._stacks: list[tuple[torch.Tensor, list[Key]]] = []
        self._by_request: list[torch.Tensor] = []
        found = dict[Key, tuple[int, int]]()
        for keys in alike.values():
            x = held[keys[0]]
            stack = x.new_empty(self._most, len(keys), *x.shape)
            ones = rows.ones(stack[0, 0, 0] if lead[keys[0]] else stack[0, 0])
            by_request = stack.as_strided(
                (*stack.shape[:2], *ones.shape), (*stack.stride()[:2], *ones.stride()), ones.storage_offset()
            )
            found |= {key: (len(self._stacks), i) for i, key in enumerate(keys)}
            self._stacks.append((stack, keys))
            self._by_request.append(by_request)
        self._places = [(place.name, place.loc, place.value, *found[place.loc.key]) for place in places]
        for _, _, value, group, i in self._places:
            value(self._by_request[group][0, i, :1])  # what cannot be had is known now
        for live in self._lives:
            live.stack = self

    def goes_on(self, jobs: Sequence[Job]) -> bool:
        """Whether these are the requests that it is of, where they were."""
        return len(jobs) == len(self._lives) and all(
            job.live is live and job.place == at for job, live, at in zip(jobs, self._lives, self._at, strict=True)
        )

    def fits(self, held: Mapping[Key, torch.Tensor]) -> bool:
        """Whether tensors are as they were, and this stack is not closed."""
        return [(x.shape, x.dtype) for x in held.values()] == self._kinds

    def add(self, held: Mapping[Key, torch.Tensor]) -> None:
        """Keep a pass."""
        if self._passes == self._most:
            self.cut()
        for stack, keys in self._stacks:
            torch.stack([held[key] for key in keys], out=stack[self._passes])
        self._passes += 1

    def cut(self) -> None:
        """To every request its own part, in memory of its own."""
        passes, self._passes = self._passes, 0
        if not passes:
            return
        with InferenceMode(False):
            for live, at in zip(self._lives, self._at, strict=True):
                try:
                    parts = [_own(rows[:passes, :, at]) for rows in self._by_request]
                except Exception as error:  # no memory is left
                    live.error = live.error or error
                    continue
                for name, loc, value, group, i in self._places:
                    live.keep(name, loc, Run(parts[group][i], value))

    def close(self) -> None:
        """Cut, and let go of the requests and of the memory."""
        self.cut()
        for live in self._lives:
            live.stack = None
        self._lives, self._kinds, self._stacks, self._by_request = [], [], [], []


def _passes(held: Iterable[torch.Tensor]) -> int:
    return max(1, min(PASSES, BYTES // max(1, sum(x.nbytes for x in held))))


def _own(rows: torch.Tensor) -> Sequence[torch.Tensor]:
    """[passes, places, ...] -> for every place [passes, ...], in memory that is theirs alone."""
    return rows.transpose(0, 1).clone(memory_format=torch.contiguous_format).unbind()
