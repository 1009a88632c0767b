"""What `Capture` and `Add` state, as part of a compiled graph: buffers that the model itself fills and reads.

Where a point has buffers, the graph adds to each row what its request's slot of a table holds, and copies the rows to
one of them. An addition of another request is another slot, a capture is a copy out of the buffer after the pass:
nothing is traced again, no Python runs in the pass, and a CUDA graph that holds it may be replayed whole.

The same bits as in Python: there the sum of hidden and residual is rounded to the model's dtype, and so is the sum with
the vector, while a compiler keeps what it fuses in float32. So bfloat16 is rounded here by integer arithmetic, which no
compiler takes away.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from adapters.declared import Add, Capture, is_stated
from adapters.errors import PointRefusedError
from adapters.live import Live
from adapters.points import Dimensions, Location, Points
from adapters.sampling import keep_logprobs
from adapters.taps import declared, hook

_copy = torch.ops.aten.copy_.default  # by its schema: a pass that removes dead code keeps what is mutated


@dataclass
class Planned:
    """What a request leaves to the graph: names to save -> places of buffers, and what to add where."""

    captures: list[tuple[str, Location, int]] = field(default_factory=list)
    adds: dict[int, Add] = field(default_factory=dict)
    handed: int = 0  # positions whose rows were handed out

    @functools.cached_property
    def key(self) -> tuple[Add, ...]:
        return tuple(self.adds.values())


@dataclass(frozen=True)
class Part:
    """A request's part of one pass: its rows `start` to `stop` of the batch, the first of them at position `first`."""

    live: Live
    planned: Planned
    start: int
    stop: int
    first: int


class Buffers:
    """The buffers of one model, made before it compiles.

    Args:
        taps: the points at which there are taps as well, so that functions may read and write there.
        tokens: the most rows of a pass; `requests`: the most requests in one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        names: Sequence[str],
        points: Points,
        taps: Sequence[str] = (),
        *,
        tokens: int,
        requests: int,
    ) -> None:
        self.names, self.points = list(names), points
        self.locations = declared(names, points)
        self._tapped = {loc.key for loc in declared(taps, points)}
        self._places = {loc: i for i, loc in enumerate(self.locations)}
        self._shapes = [shape_of(loc, points.dims) for loc in self.locations]
        like = next(model.parameters())
        width = max((shape.numel() for shape in self._shapes), default=0)
        with torch.inference_mode(False):
            # One tensor a place: what is written through several views of one, the compiler copies whole at every pass.
            self.kept = [like.new_zeros(tokens, shape.numel()) for shape in self._shapes]
            self.table = like.new_zeros(len(self.locations), requests + 1, width)
            self.adds = torch.zeros(len(self.locations), requests + 1, dtype=torch.bool, device=like.device)
            self.slots = torch.zeros(tokens, dtype=torch.int64, device=like.device)
        self._filled: list[tuple[int, int, int]] = []  # rows that are somebody's: start, stop, slot
        self._held: dict[tuple[Add, ...], int] = {}
        for i, loc in enumerate(self.locations):
            hook(model, loc, self._in_graph(i, loc, self._shapes[i].numel()))

    def _in_graph(self, i: int, loc: Location, width: int) -> Any:
        held, table, adds, slots = self.kept[i], self.table[i, :, :width], self.adds[i], self.slots

        def traced(module: torch.nn.Module, found: torch.Tensor, second: torch.Tensor | None) -> None:
            x = found[0] if loc.site.lead else found
            rows = x.shape[0]
            whole = x if second is None else x + second
            mine = slots[:rows]
            on = adds[mine][:, None]
            old = x.float() if second is None else rounded(x.float() + second.float(), x.dtype)
            new = rounded(old + table[mine].float(), x.dtype)
            kept = torch.where(on, new, old).to(whole.dtype)
            if second is None:
                _copy(x, kept)
            else:
                # As in `exchange`: (0, sum) where a row has changed, and rows that are as they were stay.
                changed = on & (old != new).any(-1, keepdim=True)
                _copy(second, torch.where(changed, kept, second))
                _copy(x, torch.where(changed, torch.zeros_like(x), x))
            _copy(held[:rows], kept)

        return traced

    # ---- a request

    def split(self, fns: Sequence[Any]) -> tuple[tuple[Any, ...], Planned]:
        """What of a request's interventions runs as Python, and what the graph does.

        At a point the graph comes after all Python, adds once and then captures. What is stated in another order (two
        additions, a capture before one, a function after either where the point has a tap, too) runs as Python, all of
        it, and in its order.
        """
        last = max((i for i, fn in enumerate(fns) if not is_stated(fn) and fn is not keep_logprobs), default=-1)
        left, planned, seen = list[Any](), Planned(), set[int]()
        for i, part in enumerate(fns):
            if not is_stated(part):
                left.append(part)
                continue
            adds = isinstance(part, Add)
            named = [(part.point, self.points.parse(part.point))] if adds else part.places(self.points)
            here = [
                (name, loc, self._places[loc])
                for name, loc in named
                if loc in self._places and (i > last or loc.key not in self._tapped)
            ]
            if not here:
                left.append(part)
                continue
            if adds:
                ((_, loc, place),) = here
                if place in seen:
                    return tuple(fns), Planned()
                part.amount(loc, self._shapes[place], self.table)  # an error is the request's, and now
                planned.adds[place] = part
            else:
                planned.captures += here
                graphed = {name for name, _, _ in here}
                if len(graphed) < len(named):
                    left.append(Capture(*(name for name, _ in named if name not in graphed)))
            seen.update(place for _, _, place in here)
        return tuple(left), planned

    # ---- a pass

    def begin(self, parts: Sequence[Part]) -> None:
        """Before a pass: which of its rows get which additions."""
        adding = [p for p in parts if p.planned.adds and not p.live.ended]
        for part in adding:
            part.live.wrote = True
        wanted = {p.planned.key for p in adding}
        filled = [(p.start, p.stop, self._slot(p.planned, wanted)) for p in adding]
        if filled == self._filled:
            return
        self.slots.zero_()
        for start, stop, slot in filled:
            self.slots[start:stop] = slot
        self._filled = filled

    def _slot(self, planned: Planned, wanted: set[tuple[Add, ...]]) -> int:
        """The slot that holds these additions; loaded into one that this pass does not want, if none does."""
        key = planned.key
        if key in self._held:
            return self._held[key]
        free = set(range(1, self.table.shape[1])) - set(self._held.values())
        slot = free.pop() if free else self._held.pop(next(k for k in self._held if k not in wanted))
        self.table[:, slot] = 0
        self.adds[:, slot] = False
        for i, add in planned.adds.items():
            shape = self._shapes[i]
            self.table[i, slot, : shape.numel()] = add.amount(self.locations[i], shape, self.table).flatten()
            self.adds[i, slot] = True
        self._held[key] = slot
        self._filled = []
        return slot

    def end(self, parts: Sequence[Part]) -> None:
        """After a pass: hand every request's rows out, as copies of its own."""
        if not parts:
            return
        with torch.inference_mode(False):
            for part in parts:
                self._hand_out(part)

    def _hand_out(self, part: Part) -> None:
        live, planned, stop = part.live, part.planned, part.stop
        # Positions that are computed again were handed out before; what is added to them was added again.
        start = part.start + max(planned.handed - part.first, 0)
        planned.handed = max(planned.handed, part.first + stop - part.start)
        if not planned.captures or start >= stop:
            return
        for name, loc, i in planned.captures:
            row = torch.narrow_copy(self.kept[i], 0, start, stop - start)
            shape = self._shapes[i]
            entries = live.saves.get(name)
            if entries is None:
                entries = live.saves[name] = []
                if not live.wrote:
                    live.as_read[name] = loc
            entries.append(row if len(shape) == 1 else row.view(-1, *shape))


def shape_of(loc: Location, dims: Dimensions) -> torch.Size:
    """The shape of a token's row at a point; PointRefusedError for one that is only a part of what the model holds."""
    if loc.hi or loc.site.part or loc.scale != 1.0:
        raise PointRefusedError(
            f"buffers={str(loc)!r}: the point is a part of what this engine holds there, and a buffer is whole; "
            "name it in taps=[...], where Capture and Add run as Python"
        )
    if loc.head_dim:
        return torch.Size((dims.kv_heads if loc.name in ("k", "v") else dims.heads, loc.head_dim))
    return torch.Size((dims.d_mlp if loc.name in ("mlp_pre", "mlp_act") else dims.d_model,))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 numbers rounded to what `dtype` can hold, as float32; bfloat16 to the nearest, halves to even.

    >>> x = torch.tensor([1.00390625, 1.01171875, -3.3, float("inf")])
    >>> torch.equal(rounded(x, torch.bfloat16), x.bfloat16().float())
    True
    """
    if dtype != torch.bfloat16:
        return x.to(dtype).float()
    bits = x.view(torch.int32)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).view(torch.float32)
    return torch.where(x != x, x, near)  # `isnan` is not vectorized by inductor
