"""The sharded backend: interventions on a model that is split over ranks see whole tensors.

Every rank runs the same interventions. Where a rank holds a slice, the visit gathers the whole, hands it over, and puts
this rank's slice of what was left there back; where all ranks hold the same, nothing is exchanged. Which is which comes
from the engine's own plan, as a `Sharding`; a module that the plan says nothing of is compared over the ranks once, and
refused when they differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from adapters.errors import RanksDivergedError, ShardingError, at_line, line_of
from adapters.exchange import _whole as _shown
from adapters.exchange import _with as swapped
from adapters.interleave import Host, Interleaver, Key
from adapters.intervention import Intervention
from adapters.live import Live
from adapters.modes import InferenceMode
from adapters.points import LOGITS_KEY, SAMPLED_KEY, Site
from adapters.ranks import Ranks, Trail, digest
from adapters.rows import Rows
from adapters.splits import Split, gathered, own


@dataclass(frozen=True)
class Layer:
    """How one module that the plan names is split; None is whole on every rank.

    `unsaid` are sides ("in", "out") and parameters of it that the plan says nothing of.
    """

    kind: str
    input: Split | None = None
    output: Split | None = None
    parameters: Mapping[str, Split] = field(default_factory=dict)
    attention: Split | None = None
    unsaid: frozenset[str] = frozenset({"attention"})

    @property
    def split(self) -> bool:
        """Whether anything of it is in slices."""
        return bool(self.input or self.output or self.parameters or self.attention)

    def __str__(self) -> str:
        sides = {"input": self.input, "output": self.output, "attention": self.attention, **self.parameters}
        cut = "; ".join(f"{name} {split}" for name, split in sides.items() if split is not None)
        return f"{self.kind}: {cut or 'whole on every rank'}"


@dataclass(frozen=True, repr=False)
class Sharding:
    """Which modules of a model are split over how many ranks, as the engine's own plan says.

    >>> from adapters.splits import even
    >>> Sharding(2, {f"layers.{i}.up": Layer("ColumnParallel", output=even("column", 8)) for i in range(3)})
    2 ranks
    layers.0-2.up  ColumnParallel: output column: 8 of axis -1 on each rank
    """

    ranks: int
    modules: Mapping[str, Layer]

    def __repr__(self) -> str:
        alike: dict[tuple[str, str], list[int]] = {}
        for path, layer in self.modules.items():
            if layer.split:
                number = re.search(r"\.(\d+)(?=\.|$)", path)
                stem = path if number is None else f"{path[: number.start()]}.{{}}{path[number.end() :]}"
                alike.setdefault((stem, str(layer)), []).extend([int(number[1])] if number else [])
        rows = [(stem.replace("{}", _ranges(numbers)), layer) for (stem, layer), numbers in alike.items()]
        width = max((len(path) for path, _ in rows), default=0)
        return "\n".join([f"{self.ranks} ranks", *(f"{path:{width}}  {layer}" for path, layer in rows)])

    def at(self, key: Key) -> Split | None:
        """How the tensor at `key` is split; None for whole. LookupError where the plan says nothing."""
        layer, side = self.modules[key[0]], key[1]
        if side in layer.unsaid:
            raise LookupError(side)
        return {"in": layer.input, "out": layer.output, "attention": layer.attention}[side]

    def parameter(self, path: str) -> Split | None:
        """How the parameter at `path` is split; None for whole. LookupError where the plan says nothing."""
        module, _, name = path.rpartition(".")
        layer = self.modules[module]
        if name in layer.unsaid:
            raise LookupError(name)
        return layer.parameters.get(name)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


class WholeInterleaver(Interleaver):
    """An `Interleaver` whose visits are given whole tensors."""

    lending = False

    def __init__(self, host: Host, sharding: Sharding, ranks: Ranks) -> None:
        super().__init__(host)
        self.sharding, self.ranks = sharding, ranks
        # Logits and tokens are gathered by the engines themselves, on every rank.
        self._splits: dict[Key, Split | None] = {LOGITS_KEY: None, SAMPLED_KEY: None}
        # Which tensors of an output ranks hold differently, beside a point that they hold alike.
        self._beside: dict[Key, set[int]] = {}
        # What this rank did, by request; `check_reads` is whether what is read counts too, for requests to come.
        self.trails: dict[str, Trail] = {}
        self.check_reads = False

    def live(self, id: str, fns: Sequence[Intervention], body: Any = None, check_finite: bool = False) -> Live:
        live = super().live(id, fns, body, check_finite)
        live.trail = self.trails[id] = Trail(self.check_reads)
        return live

    def visit(self, key: Key, payload: Any) -> Any:
        passes = self.waiting.get(key)
        if passes is None:
            return None
        try:
            split = self._splits[key] if key in self._splits else self._learn(key, payload)
            if split is not None:
                return self._whole(key, payload, split)
        except (RanksDivergedError, ShardingError) as error:
            self._refuse(key, error)
            return None
        if key in self._beside:
            alike = [t for i, t in enumerate(_tensors(key, payload)) if i not in self._beside[key]]
            payload = tuple(x if any(x is t for t in alike) else None for x in payload)
        for m in passes:
            if m.live.trail is not None and m.live.trail.reads and key[1] != "attention":
                m.live.trail.add(f"{self.name(key)} (step {m.step})", _tensors(key, payload))
        return super().visit(key, payload)

    def name(self, key: Key) -> str:
        """The points at `key`, or the module."""
        return " ".join(map(str, self.points.there(key))) or f"{key[0]} ({key[1]})"

    def _learn(self, key: Key, payload: Any) -> Split | None:
        """How the tensor at `key` is split; one that the plan does not name is compared over the ranks."""
        try:
            split = self.sharding.at(key)
        except LookupError:
            split = None
            if key[1] == "attention":
                raise ShardingError(
                    f"{self.name(key)}: the engine's plan does not say which heads a rank has"
                ) from None
            self._compare(key, payload)
        self._splits[key] = split
        return split

    def _compare(self, key: Key, payload: Any) -> None:
        """See that all ranks hold the same at `key`. What lies beside a point in the same tuple may differ: it is left
        out of what is handed over."""
        shown = _shown(Site("", "in"), payload) if key[1] == "in" else _tensors(key, payload)
        apart = {
            i for i, x in enumerate(shown) if len(set(self.ranks.agree(f"{self.name(key)} #{i}", int(digest(x))))) > 1
        }
        if apart and (not self.points.there(key) or key[1] == "in" or 0 in apart):
            raise ShardingError(
                f"{self.name(key)} differs between ranks, and the engine's plan does not say how it is split: read the "
                "input or output of a linear layer beside it; rt.sharding() lists what is known"
            )
        if apart:
            self._beside[key] = apart

    def _whole(self, key: Key, payload: Any, split: Split) -> Any:
        where = self.name(key)
        self.fresh = False  # it is not what the module made that is handed out
        if key[1] == "attention":
            return super().visit(key, WholeAttended(payload, split, self.ranks, where))
        held = _tensors(key, payload)[0]
        parts = self.ranks.gather(held, where)
        with InferenceMode(False), torch.no_grad():
            # Only ordinary tensors count their versions.
            whole = gathered(parts, split)
        given = swapped(Site("", key[1]), payload, held, whole)  # type: ignore[arg-type]
        before = whole._version
        for m in self.waiting[key]:
            if m.live.trail is not None and m.live.trail.reads:
                m.live.trail.add(f"{where} (step {m.step})", whole)
        instead = super().visit(key, tuple(given) if type(payload) is tuple and key[1] == "in" else given)
        if instead is not None:
            left = _tensors(key, instead)[0]
            mine = own(left, split, self.ranks.rank, self.ranks.size).contiguous()
            return swapped(Site("", key[1]), instead, left, mine)  # type: ignore[arg-type]
        if whole._version != before:
            held.copy_(own(whole, split, self.ranks.rank, self.ranks.size))
        return None

    def _refuse(self, key: Key, error: Exception) -> None:
        """Whoever waits at `key` gets `error` there."""
        for m in self.waiting.pop(key, ()):
            self._throw(m, type(error)(at_line(str(error), line_of(m.thread))))

    def apart(self, where: str, function: Any, *args: Any) -> Any:
        """Call something of the engine's that itself is a collective, once all ranks are there."""
        self.ranks.agree(where)
        return function(*args)

    def parameter(self, path: str, held: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter of which this rank holds `held`."""
        try:
            split = self.sharding.parameter(path)
        except LookupError:
            split = None
            if len(set(self.ranks.agree(path, digest(held)))) > 1:
                raise ShardingError(
                    f"{path} differs between ranks, and the engine's plan does not say how it is split: read it from "
                    "the checkpoint instead"
                ) from None
        return held if split is None else gathered(self.ranks.gather(held, path), split)


class WholeAttended:
    """Attention of all heads, of which each rank has some (patterns.Attended)."""

    def __init__(self, mine: Any, split: Split, ranks: Ranks, where: str) -> None:
        self.mine, self.split, self.ranks, self.where = mine, split, ranks, where

    def read(self, rows: Rows, index: int, first: int, tokens: int) -> torch.Tensor:
        part = self.mine.read(rows, index, first, tokens)
        return gathered(self.ranks.gather(part, self.where), self.split)

    def write(self, rows: Rows, index: int, first: int, tokens: int, pattern: torch.Tensor) -> None:
        self.mine.write(rows, index, first, tokens, own(pattern, self.split, self.ranks.rank, self.ranks.size))


def _tensors(key: Key, payload: Any) -> list[torch.Tensor]:
    """The tensors that a module takes or gives, the first one being what is split."""
    if key[1] == "in":
        found = [*payload[0], *payload[1].values()]
    else:
        found = [payload] if isinstance(payload, torch.Tensor) else list(payload)
    return [t for t in found if isinstance(t, torch.Tensor)]
