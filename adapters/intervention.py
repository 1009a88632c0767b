"""What a user's function sees: `Pass`, one request's rows of one forward pass.

Reading a point parks the function until the model gets there; the model then waits while the function
computes and writes, and goes on when the function asks for the next point or returns. No source is
rewritten and nothing is traced: the function is an ordinary one in a greenlet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from adapters.errors import PassedError, StaleWriteError, UnknownPointError, WriteError, at_user_line
from adapters.layouts import Back, cut
from adapters.points import AFTER, BEFORE, LOGITS_KEY, PER_LAYER, SAMPLED_KEY, Location

if TYPE_CHECKING:
    from adapters.interleave import Interleaver, Live
    from adapters.rows import Rows

Intervention = Callable[["Pass"], Any]


class _Layered:
    """`m.resid_post`: indexed by layer, read and written."""

    __slots__ = ("_m", "_name")

    def __init__(self, m: Pass, name: str) -> None:
        self._m, self._name = m, name

    def __getitem__(self, layer: int) -> Any:
        return self._m._read(self._m._points.at(self._name, layer))

    def __setitem__(self, layer: int, value: torch.Tensor) -> None:
        self._m._write(self._m._points.at(self._name, layer), value)

    def __getattr__(self, name: str) -> Any:
        raise UnknownPointError(at_user_line(f"m.{self._name} is one per layer: write m.{self._name}[layer].{name}"))


class _Module:
    """`m.at(path)`: a module's first input and its output, read and written."""

    __slots__ = ("_m", "_path")

    def __init__(self, m: Pass, path: str) -> None:
        self._m, self._path = m, path

    @property
    def input(self) -> Any:
        return self._m._read(self._m._engine_location(self._path, "in"))

    @input.setter
    def input(self, value: torch.Tensor) -> None:
        self._m._write(self._m._engine_location(self._path, "in"), value)

    @property
    def output(self) -> Any:
        return self._m._read(self._m._engine_location(self._path, "out"))

    @output.setter
    def output(self, value: torch.Tensor) -> None:
        self._m._write(self._m._engine_location(self._path, "out"), value)


class Pass:
    """One request's part of one forward pass; the argument of every intervention.

    Points are attributes: `m.resid_post[16]` is [tokens of this pass, d_model], live: editing it in place
    and assigning to it both count as writes. `m.logits` is [1, vocab] and `m.sampled` [1], the row that the
    sampler sees and the token it drew; a pass that draws no token (an early chunk of a long prompt) ends there.

    Attributes:
        step: passes of this request so far, from 0.
        is_prompt: whether these rows are prompt tokens.
        state: this request's own dict, kept from pass to pass.
        request: the request's id.
    """

    __slots__ = ("_back", "_edited", "_first", "_hub", "_il", "_index", "_key", "_loc", "_n", "_payload", "_points",
                 "_positions", "_rank", "_rows", "_value", "_version", "fn", "is_prompt", "live", "order", "request", "state",
                 "step", "thread")  # fmt: skip

    def __init__(self, il: Interleaver, live: Live, fn: Intervention | None, order: int = 0) -> None:
        self._il, self._points = il, il.points
        self.live, self.fn, self.order = live, fn, order
        self.request = live.id
        self.state: dict[Any, Any] = live.state
        self.step = -1
        self.is_prompt = True
        self.thread: Any = None
        self._hub: Any = None
        self._positions: torch.Tensor | None = None
        self._value: Any = None
        self._loc: Location | None = None
        self._back: Back | None = None
        self._edited: list[tuple[Location, torch.Tensor, int]] = []

    # ---- what the user calls

    @property
    def positions(self) -> torch.Tensor:
        """Absolute token positions of these rows, int64 [tokens of this pass]."""
        if self._positions is None:
            self._positions = torch.arange(self._first, self._first + self._n)
        return self._positions

    @property
    def tokens(self) -> int:
        """How many tokens of this request are in this pass."""
        return self._n

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._il.host.tokenizer

    def at(self, path: str) -> _Module:
        """Any module by its path in the engine's model: `m.at("model.layers.3.mlp.down_proj").output`."""
        return _Module(self, path)

    def weight(self, path: str) -> torch.Tensor:
        """A parameter by its path, as the engine holds it."""
        return self._il.host.weight(path)

    def unembed(self, x: torch.Tensor) -> torch.Tensor:
        """Residual rows [n, d_model] -> logits [n, vocab]: final norm, head, scaling and soft cap, as the model does it."""
        return self._il.host.unembed(x)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """The model's final norm of residual rows [n, d_model]."""
        return self._il.host.norm(x)

    def save(self, name: str, value: Any) -> None:
        """Keep a copy of `value` under `name`; every save of a name is kept, one entry each, in order."""
        saves = self.live.saves
        kept = value.detach().clone() if isinstance(value, torch.Tensor) else _copied(value)
        if name in saves:
            saves[name].append(kept)
        else:
            saves[name] = [kept]

    def stop(self) -> None:
        """End this request's generation with this pass; the token that it samples is kept."""
        self.live.stopped = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._points.at(name)
        raise UnknownPointError(at_user_line(f"a Pass has no {name!r}"))

    # ---- how a read reaches the model

    def _begin(self, index: int, rows: Rows, first: int, n: int, is_prompt: bool) -> None:
        self._index, self._rows, self._first, self._n, self.is_prompt = index, rows, first, n, is_prompt
        self.step += 1
        self._positions = None
        self._key: tuple[str, str] | None = None
        self._rank = -1
        self._payload: Any = None
        self._value = self._loc = self._back = None
        if self._edited:
            self._edited.clear()

    def _read(self, loc: Location) -> Any:
        if loc is self._loc:
            return self._value
        if self._back is not None:
            self._settle()
        rank = loc.rank
        if rank >= 0:
            if rank <= self._rank:
                raise PassedError(
                    at_user_line(
                        f"{loc} had already passed when it was read: the model was at {self._loc or 'a later point'}"
                    )
                )
        elif self._il.is_behind(loc, self._rank):
            raise PassedError(
                at_user_line(
                    f"{loc} had already passed when it was read: the model was at {self._loc or 'a later layer'}"
                )
            )
        if loc.key != self._key:
            # The hub resumes this with what the model holds there; it may have moved to another greenlet since.
            if self._hub is None:
                raise PassedError(at_user_line(f"{loc} was read after its pass had ended"))
            self._il.host.attach(loc.key)
            self._payload = self._hub.switch(loc)
            self._key = loc.key
        if rank >= 0:
            self._rank = rank
        self._loc = loc
        self._value = value = self._cut(loc)
        return value

    def _cut(self, loc: Location) -> Any:
        payload = self._payload
        if loc.key is LOGITS_KEY or loc.key is SAMPLED_KEY:
            return self._rows.sampled(payload, self._index)
        value, self._back = cut(loc, payload, self._rows, self._index, (self._first, self._n), self._il.host)
        if self._back is not None:
            self._version = value._version
        return value

    def _settle(self) -> None:
        """Write a copy back that was edited; one with a gradient always, so that the model computes with it."""
        if self._back is None:
            return
        value = self._value
        if value._version != self._version or value.requires_grad:
            self._back(value)
        assert self._loc is not None
        self._edited.append((self._loc, value, value._version))
        self._back = None

    def _write(self, loc: Location, value: torch.Tensor) -> None:
        current = self._read(loc)
        if value is current:
            return
        if isinstance(current, tuple):
            raise WriteError(
                at_user_line(f"{loc} hands out a tuple of {len(current)} tensors: edit one of them in place")
            )
        _check_write(loc, current, value)
        current.copy_(value)

    def _finish(self) -> None:
        """The function has returned: write back what is open, and refuse edits that came too late."""
        if self._back is not None:
            self._settle()
        for loc, total, version in self._edited:
            if total._version != version:
                raise StaleWriteError(
                    f"{loc} was edited in place after the model had gone past it, so the edit took no part in this pass: "
                    f"edit it before reading the next point, or edit a clone (request {self.request}, step {self.step})"
                )

    def _engine_location(self, path: str, side: Any) -> Location:
        return self._il.module_location(path, side)


def _copied(value: Any) -> Any:
    """A deep copy whose tensors are detached clones."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(v) for v in value)
    return value


def _check_write(loc: Location, current: torch.Tensor, value: Any) -> None:
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


def _layered(name: str) -> property:
    return property(lambda m: _Layered(m, name), doc=f"`m.{name}[layer]`: read and written by layer.")


def _single(name: str) -> property:
    def read(m: Pass) -> Any:
        return m._read(m._points.at(name))

    def write(m: Pass, value: torch.Tensor) -> None:
        m._write(m._points.at(name), value)

    return property(read, write, doc=f"`m.{name}`: one a pass, read and written.")


for _name in PER_LAYER:
    setattr(Pass, _name, _layered(_name))
for _name in (*BEFORE, *AFTER):
    setattr(Pass, _name, _single(_name))
