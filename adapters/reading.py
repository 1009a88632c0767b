"""How a read reaches the model, and how an edit of what was handed out gets back there.

`Reading` is the machinery of a `Pass`: a function's place in one forward pass. One value at a time is open, that of the
last point that was read, until the next one is asked for.
"""

from __future__ import annotations

from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from greenlet import GreenletExit, getcurrent

from adapters.errors import (
    InterventionError,
    NeverRanError,
    NotInRowsError,
    PassedError,
    StaleWriteError,
    WriteError,
    at_user_line,
)
from adapters.exchange import lent, put, spliced, take
from adapters.handed import (
    LENT,
    UNHELD,
    check_counted,
    check_finite,
    check_token,
    check_write,
    in_graph,
    refuse_shared,
    storage_uses,
    versions,
)
from adapters.modes import (
    InferenceMode,
    cross,
    is_any_autocast_enabled,
    is_grad_enabled,
    is_inference_mode_enabled,
    refuse_autocast,
    set_grad_enabled,
)
from adapters.points import _STRIDE, LOGITS_KEY, SAMPLED_KEY, UNEMBED, Location
from adapters.recompute import Written
from adapters.saves import copied

if TYPE_CHECKING:
    from adapters.interleave import Interleaver
    from adapters.live import Live
    from adapters.rows import Rows


class Reading:
    """One function's place in one pass: what it was handed last, and what it still holds of what it was handed."""

    __slots__ = ("_adopted", "_at", "_back", "_first", "_handed", "_hub", "_il", "_index", "_instead", "_key", "_loc",
                 "_multiplied", "_n", "_payload", "_points", "_positions", "_rank", "_refs", "_rows", "_value",
                 "_version", "draws", "fn", "is_prompt", "live", "order", "request", "state", "step",
                 "thread")  # fmt: skip

    def __init__(self, il: Interleaver, live: Live, fn: Any, order: int = 0) -> None:
        self._il, self._points = il, il.points
        self.live, self.fn, self.order = live, fn, order
        self.request = live.id
        self.state: dict[Any, Any] = live.state
        self.step = -1
        self.is_prompt = self.draws = True
        self.thread: Any = None
        self._hub: Any = None
        self._positions: torch.Tensor | None = None
        self._key: tuple[str, str] | None = None
        self._loc: Location | None = None
        self._at: Location | None = None
        self._adopted: Location | None = None
        self._value: Any = None
        self._payload: Any = None
        self._instead: Any = None
        self._multiplied: Any = None
        # What was handed out in this pass and is still held by somebody, at which version: a later edit is an error.
        self._handed: list[tuple[Location, Any, Any]] = []

    def _begin(self, index: int, rows: Rows, first: int, n: int, is_prompt: bool, draws: bool, hub: Any) -> None:
        self._index, self._rows, self._first, self._n = index, rows, first, n
        self.is_prompt, self.draws, self._hub = is_prompt, draws, hub
        self.step += 1
        self._positions = self._key = self._loc = self._value = self._at = self._adopted = None
        self._rank = -1

    def _read(self, loc: Location) -> Any:
        if self._loc is not None:
            if loc is self._loc:
                return self._value
            self._settle()
        il, rank = self._il, loc.rank
        if rank < 0:
            rank = loc.floor
            if 0 <= rank < (self._rank - 1) // _STRIDE * _STRIDE:
                rank = -2  # all of its layer has surely run
        elif rank <= self._rank and loc is not self._adopted:
            rank = -2
        if loc.key != self._key:
            if rank == -2:
                raise self._passed(loc)
            try:
                self._payload = self._go(loc)
            except BaseException:
                # What was held at the place before is gone, unless the model has not moved at all.
                self._key = None if self._payload is None else self._key
                raise
            self._key = loc.key
        elif rank == -2 and loc.rank >= 0:
            raise self._passed(loc)
        if rank > self._rank:
            self._rank = rank
        self._adopted = None
        try:
            value, self._back = take(loc, self._payload, self._rows, self._index, (self._first, self._n), il)
        except NotInRowsError as odd:
            raise NotInRowsError(at_user_line(f"{loc}: {odd}")) from None
        if il.grad:
            value = in_graph(value)
        if self.live.check_finite:
            check_finite(loc, value, "is read there", self)
        try:
            self._version = value._version if type(value) is not tuple else versions(value)
        except RuntimeError:
            # Read inside of the user's inference mode, whose tensors count no versions.
            with InferenceMode(False):
                value = tuple(v.clone() for v in value) if isinstance(value, tuple) else value.clone()
            self._version = versions(value) if isinstance(value, tuple) else value._version
        if self._back is lent:
            self._refs = getrefcount(value)
        self._loc, self._value = loc, value
        return value

    def _go(self, loc: Location) -> Any:
        """Let the model go on to `loc`: the hub resumes this with what the model holds there."""
        hub = self._hub
        if getcurrent() is not self.thread or hub is None:
            raise self._not_here(loc)
        if not self.draws and loc.key in (LOGITS_KEY, SAMPLED_KEY):
            self._no_draw(loc)
        self._il.host.attach(loc.key)
        if is_any_autocast_enabled():
            refuse_autocast()
        self._payload = None  # a whole batch's: it must not live on until this request is served again
        if is_inference_mode_enabled():
            return cross(hub.switch, loc)
        grad = is_grad_enabled()
        try:
            return hub.switch(loc)
        finally:  # also where an error comes back instead
            if is_grad_enabled() is not grad:
                set_grad_enabled(grad)

    def _together(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of rows [n, d_model], out of one product with what other requests unembed at this place."""
        self._multiplied = x
        logits: torch.Tensor = cross(self._hub.switch, UNEMBED)
        return logits

    def _not_here(self, loc: Location) -> InterventionError:
        if self._hub is None:
            return PassedError(at_user_line(f"{loc} was read after its pass had ended (request {self.request})"))
        return InterventionError(at_user_line(f"{loc} was read on the Pass of another request ({self.request})"))

    def _no_draw(self, loc: Location) -> None:
        """The engine holds logits for every pass, but those of an early chunk are nobody's."""
        if self.fn is not None:
            raise GreenletExit
        raise NeverRanError(
            at_user_line(f"{loc}: this pass is an early chunk of a long prompt and draws no token (m.draws says so)")
        )

    def _passed(self, loc: Location) -> PassedError:
        at = self._at or "a later point"
        return PassedError(at_user_line(f"{loc} had already passed when it was read: the model was at {at}"))

    def _settle(self) -> None:
        """The function moves on: the model gets what was left at the location, if that was edited."""
        loc, value = self._loc, self._value
        assert loc is not None
        self._loc = self._value = None
        version = value._version if type(value) is not tuple else versions(value)
        if version != self._version or self._il.grad:
            self._edited(loc, value, version != self._version)
        elif self.live.check_finite and self._back is not lent:
            there, _ = take(loc, self._payload, self._rows, self._index, (self._first, self._n), self._il)
            check_counted(loc, value, there, self)
        if self._back is lent:
            shared = storage_uses(value.untyped_storage()._cdata)
            if getrefcount(value) > self._refs or shared > LENT - (value is self._payload):
                self._handed.append((loc, value, version))
                self._give_another()
        elif getrefcount(value) > UNHELD or type(value) is tuple:
            self._handed.append((loc, value, version))
        self._at = loc

    def _give_another(self) -> None:
        """What was lent is kept by somebody: the model goes on with a tensor of its own."""
        self._payload = self._instead = self._payload.clone()

    def _edited(self, loc: Location, value: Any, changed: bool) -> None:
        """Write `value` back. With gradients always: what comes after is to depend on what was handed out."""
        live = self.live
        self._il.total = None
        if changed:
            if type(self._payload) is tuple and loc.rank < 0 and loc.site.side == "in":
                refuse_shared(loc, self)
            if live.check_finite:
                check_finite(loc, value, "was written there", self)
            if loc.key is SAMPLED_KEY:
                check_token(value, self._points.dims.vocab)
            live.wrote = True
            if live.written is not None:
                live.written.append(Written(loc, self._first, self._n, copied(value)))
            if live.trail is not None:
                live.trail.add(f"{loc} written (step {self.step})", value)
        if self._back is lent:
            if value is self._payload and value.requires_grad:
                self._payload = self._instead = value.detach()
            return
        if self._back is not None:
            self._write_back(value)
            return
        splice = self._il.grad and loc.key is not SAMPLED_KEY
        instead = (spliced if splice else put)(loc, self._payload, self._rows, self._index, value)
        if instead is not None:
            self._payload = self._instead = instead

    def _write_back(self, value: Any) -> None:
        assert self._back is not None
        if self._il.inference:
            # What the engine holds are inference tensors, which may be written in their own mode only.
            with InferenceMode(True):
                self._back(value)
        else:
            self._back(value)

    def _write(self, loc: Location, value: torch.Tensor) -> None:
        current = self._read(loc)
        if value is current:
            return
        if isinstance(current, tuple):
            raise WriteError(
                at_user_line(f"{loc} hands out a tuple of {len(current)} tensors: edit one of them in place")
            )
        check_write(loc, current, value)
        current.copy_(value)

    def _finish(self) -> None:
        """The function has returned: write back what is open, and refuse edits that came too late."""
        if self._loc is not None:
            self._settle()
        for loc, value, version in self._handed:
            if version != (value._version if type(value) is not tuple else versions(value)):
                raise StaleWriteError(
                    f"{loc} was edited in place after the model had gone past it, so the edit took no part in this "
                    "pass: edit it before reading the next point, or edit a clone "
                    f"(request {self.request}, step {self.step})"
                )

    def _end(self) -> None:
        """The pass is over for this function: nothing of the model's is held any longer."""
        if self._loc is not None and self._back is lent:
            self._give_another()
        self._hub = self._loc = self._value = self._payload = self._key = self._multiplied = None
        self._rank = -1
        self._handed.clear()
