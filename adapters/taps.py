"""The taps backend: declared locations stay live inside a compiled engine.

A tap is a custom operator, inserted at a module's input or output before anything compiles. It mutates its
arguments in place and returns nothing, which is the one form that is right both under inductor and in pieces
with fixed addresses (a functional operator that returns its own input is silently wrong, one without mutation is
dead code). Inside it any Python runs; idle it costs a look-up.

What a tap hands out is a copy, written back when it was edited: a compiled engine reuses its buffers as soon as
the model has gone on, so a view kept by an intervention would be somebody else's memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from adapters.declared import Add, every, is_stated
from adapters.errors import InterventionError, LoadError, NotDeclaredError, PointRefusedError, at_user_line
from adapters.interleave import Interleaver, Key, no_such_module
from adapters.points import LOGITS_KEY, SAMPLED_KEY, Location, Points

OPERATORS = ("tapgrid::tap_", "tapgrid::tap_pair_")

# What to call at an armed tap, by its id: an idle one costs a look-up that finds nothing.
_ARMED: dict[int, Callable[..., None]] = {}

# Raw definitions: 1.7 us idle, against 56 us for the `torch.library.custom_op` decorator.
_LIBRARY = torch.library.Library("tapgrid", "DEF")
# The id is data: as a constant it would make every layer's graph another one, to be compiled for itself. It is the
# address of the tensor that holds it, for its address a tensor tells without another operator: of the 19 us that an
# idle tap took with its caches cold, as they are between two layers, reading a value took 9.
# The tag: what inductor captures as CUDA graphs ends before a tap and begins again after it.
_LIBRARY.define("tap_(Tensor(a!) x, Tensor id) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
_LIBRARY.define(
    "tap_pair_(Tensor(a!) hidden, Tensor(b!) residual, Tensor id) -> ()", tags=(torch.Tag.cudagraph_unsafe,)
)


# The key itself and not its name, which is parsed at every call: 0.1 us against 1.9.
_COUNTS_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded


def new_id() -> torch.Tensor:
    """The id of another tap, an int64 scalar on the CPU; it is the tap's for as long as the tensor lives."""
    id = torch.zeros((), dtype=torch.int64, device="cpu")
    return id.fill_(id.data_ptr())


def at(id: int, *parts: torch.Tensor) -> None:
    """A tap by the value of its id."""
    callback = _ARMED.get(id)
    if callback is not None:
        _call(callback, *parts)


def _by_address(*arguments: torch.Tensor) -> None:
    at(arguments[-1].data_ptr(), *arguments[:-1])


def _by_value(*arguments: torch.Tensor) -> None:
    at(int(arguments[-1]), *arguments[:-1])


def _call(callback: Callable[..., None], *parts: torch.Tensor) -> None:
    """Call with version counters on: an edit in place is noticed by its tensor's version, and the first call of a
    freshly compiled graph runs with the dispatch key that counts versions excluded."""
    if not _is_excluded(_COUNTS_VERSIONS):
        callback(*parts)
        return
    _set_excluded(_COUNTS_VERSIONS, False)
    try:
        callback(*parts)
    finally:
        _set_excluded(_COUNTS_VERSIONS, True)


_LIBRARY.impl("tap_", _by_address, "CPU")
_LIBRARY.impl("tap_pair_", _by_address, "CPU")
# What replays CUDA graphs may copy what goes in beside them.
_LIBRARY.impl("tap_", _by_value, "CUDA")
_LIBRARY.impl("tap_pair_", _by_value, "CUDA")
_LIBRARY._register_fake("tap_", lambda x, id: None)
_LIBRARY._register_fake("tap_pair_", lambda hidden, residual, id: None)


_ONE, _PAIR = torch.ops.tapgrid.tap_.default, torch.ops.tapgrid.tap_pair_.default
# An attribute of torch's own, and no promise: without it every tap is dispatched.
_DISPATCHED: tuple[Any, Any] = getattr(_ONE, "_op", None), getattr(_PAIR, "_op", None)
_Tensor = torch.Tensor


# Twice the same, and the same as `at`: a call more is 2 us with cold caches.
def _tap(x: torch.Tensor, id: torch.Tensor) -> None:
    if type(x) is not _Tensor:
        _DISPATCHED[0](x, id)
        return
    callback = _ARMED.get(id.data_ptr())
    if callback is not None:
        _call(callback, x)


def _tap_pair(hidden: torch.Tensor, residual: torch.Tensor, id: torch.Tensor) -> None:
    if type(hidden) is not _Tensor:
        _DISPATCHED[1](hidden, residual, id)
        return
    callback = _ARMED.get(id.data_ptr())
    if callback is not None:
        _call(callback, hidden, residual)


def dispatch(through: bool) -> None:
    """Whether compiled code calls a tap through torch's dispatcher, or as the Python function that it is.

    Inductor writes `torch.ops.tapgrid.tap_pair_.default(...)`, and an overload calls its `_op`. With the caches cold,
    as they are between two layers, the two idle taps of a layer take 18 to 23 us by way of the dispatcher and 5 to 10
    without. What is no ordinary tensor (a compiler traces) is dispatched all the same, and so is everything under a
    torch that calls its overloads otherwise. To be settled before anything compiles: an overload hashes as its `_op`.
    """
    if None not in _DISPATCHED:
        _ONE._op, _PAIR._op = _DISPATCHED if through else (_tap, _tap_pair)


dispatch(through=bool(torch.version.cuda or torch.version.hip))  # on a GPU an id goes by its value


def declared(taps: Sequence[str], points: Points) -> list[Location]:
    """The locations that `taps` name, in the model's order, one a place: "resid_post.*" is every layer.

    `logits` and `sampled` lie outside the compiled region: they are always reachable and need no tap.
    """
    found: dict[Key, Location] = {}
    for tap in taps:
        for _, loc in every(tap, points):
            if not loc.site.in_place:
                raise PointRefusedError(
                    f"taps={tap!r}: an edit of {loc} is more than a write to the memory that the model holds, which is "
                    "all that a tap can do; backend='eager' has this point"
                )
            if loc.key not in (LOGITS_KEY, SAMPLED_KEY):
                found.setdefault(loc.key, loc)
    return sorted(found.values(), key=lambda loc: loc.rank)


def has_no_tap(taps: Sequence[str], buffers: Sequence[str], more: str | None) -> str:
    """Why something cannot be reached, and the `load` that reaches it; `more` is the point that would be declared.

    >>> has_no_tap(["z.1"], [], "k.1")
    "has no tap: this engine was loaded with taps=['z.1']; load(..., backend='taps', taps=['z.1', 'k.1']) has one"
    """
    also = f" and buffers={list(buffers)}, where the graph captures and adds once, and no more" if buffers else ""
    line = (
        f"load(..., backend='taps', taps={[*taps, more]}) has one"
        if more is not None
        else "no point lies there that could be declared; backend='eager' reaches every module"
    )
    return f"has no tap: this engine was loaded with taps={list(taps)}{also}; {line}"


@functools.lru_cache(maxsize=16)
def _reached(names: tuple[str, ...], points: Points) -> frozenset[Key]:
    return frozenset({LOGITS_KEY, SAMPLED_KEY, *(loc.key for loc in declared(names, points))})


def refuse_undeclared(fn: Any, points: Points, taps: Sequence[str], buffers: Sequence[str]) -> None:
    """NotDeclaredError for stated work at a place that has neither tap nor buffer: seen before anything runs.

    What a function reads is seen when it reads. A point that does not exist is the error of its own request.
    """
    if not is_stated(fn):
        return
    reached = _reached((*taps, *buffers), points)
    for point in (fn.point,) if isinstance(fn, Add) else fn.points:
        try:
            places = every(point, points)
        except (InterventionError, LookupError):
            continue
        for _, loc in places:
            if loc.key not in reached:
                raise NotDeclaredError(at_user_line(f"{type(fn).__name__}: {loc} {has_no_tap(taps, buffers, point)}"))


class Taps:
    """The taps of one model: inserted once before it compiles, armed while some live intervention waits at them."""

    def __init__(
        self, model: torch.nn.Module, taps: Sequence[str], points: Points, buffers: Sequence[str] = ()
    ) -> None:
        self.names, self.buffers, self._points = list(taps), list(buffers), points
        self.locations = declared(taps, points)
        self._ids: dict[Key, torch.Tensor] = {}
        self._prefix: dict[Key, tuple[None, ...]] = {}
        for loc in self.locations:
            self._ids[loc.key] = new_id()
            self._prefix[loc.key] = (None,) * loc.site.index
            _insert(model, loc, self._ids[loc.key])
        self._armed: set[Key] = set()

    def attach(self, key: Key, il: Interleaver) -> None:
        """Arm the tap at `key`; NotDeclaredError for a place that has none."""
        if key in self._armed or key is LOGITS_KEY or key is SAMPLED_KEY:
            return
        if key not in self._ids:
            there = self._points.there(key)
            place = f"{key[0]} ({'input' if key[1] == 'in' else 'output'})"
            what, more = (f"{there[0]}, {place},", there[0].text) if there else (place, None)
            raise NotDeclaredError(at_user_line(f"{what} {has_no_tap(self.names, self.buffers, more)}"))
        id = int(self._ids[key])
        if id != self._ids[key].data_ptr():
            raise LoadError(
                f"{key[0]}: the memory of this model has been moved since it was loaded, and its taps with it"
            )
        prefix, visit, recorder = self._prefix[key], il.visit, il.recorder
        is_out = key[1] == "out"

        def armed(x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
            kept = None if recorder is None else recorder.kept
            if kept is not None:
                if kept.get(key, x) is None:  # wanted, and this is its first run in the pass
                    kept[key] = x.clone() if residual is None else x + residual
            elif is_out:
                visit(key, x if residual is None else (x, residual))
            else:
                visit(key, ((*prefix, x) if residual is None else (*prefix, x, residual), {}))

        _ARMED[id] = armed
        self._armed.add(key)

    def clear(self) -> None:
        """Disarm every tap; the operators stay in the graph."""
        for key in self._armed:
            _ARMED.pop(int(self._ids[key]), None)
        self._armed.clear()

    def __len__(self) -> int:
        return len(self._armed)


def _insert(model: torch.nn.Module, loc: Location, id: torch.Tensor) -> None:
    """Call the operator where the point is; its id is a buffer of the module there."""
    name = f"tapgrid_{loc.key[1]}"

    def operator(module: torch.nn.Module, found: torch.Tensor, second: torch.Tensor | None) -> None:
        if second is None:
            torch.ops.tapgrid.tap_(found, getattr(module, name))
        else:
            torch.ops.tapgrid.tap_pair_(found, second, getattr(module, name))

    hook(model, loc, operator).register_buffer(name, id, persistent=False)


def hook(model: torch.nn.Module, loc: Location, do: Callable[[Any, torch.Tensor, torch.Tensor | None], None]) -> Any:
    """Call `do` on what the model holds at `loc`, from a hook that the compiler traces. Returns the module there.

    `do` gets the module, the tensor, and the residual where the engine keeps that apart.
    """
    path, site = loc.key[0], loc.site
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise no_such_module(path, [n for n, _ in model.named_modules() if n]) from None

    def out(module: torch.nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            do(module, output, None)
        else:
            do(module, output[site.index], output[1] if site.form == "pair" else None)

    def into(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if site.arg is not None and site.arg in kwargs:
            do(module, kwargs[site.arg], kwargs.get("residual") if site.form == "pair" else None)
        else:
            second = args[site.index + 1] if site.form == "pair" and len(args) > site.index + 1 else None
            do(module, args[site.index], kwargs.get("residual") if site.form == "pair" and second is None else second)

    if loc.key[1] == "out":
        module.register_forward_hook(out)
    else:
        module.register_forward_pre_hook(into, with_kwargs=True)
    return module
