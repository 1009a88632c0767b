"""The eager backend: a module is listened to only while some live intervention names it.

What listens is a function in the place of the module's `forward`, in its own `__dict__`: torch goes past a hook on a
path that costs a dozen times as much. A module whose outputs the user's own hooks may change gets a hook behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from adapters import patterns
from adapters.handed import ALONE
from adapters.interleave import Interleaver, Key
from adapters.layouts import replaced
from adapters.modules import no_such_module
from adapters.points import LOGITS_KEY, SAMPLED_KEY


class _Ear:
    """What listens at one module: made once, put in and taken out again with every run.

    Attributes:
        name: what the module is called by the one directly around it, whose path is `around`.
        kind: the `forward` of its class; `before` is its own one, if it had any.
        hooked: whether it has hooks of the user's.
    """

    __slots__ = ("around", "before", "children", "hooked", "hooks", "kind", "module", "name", "ours", "own")

    def __init__(self, path: str, module: torch.nn.Module, il: Interleaver) -> None:
        self.around, _, self.name = path.rpartition(".")
        self.module, self.own, self.hooks = module, module.__dict__, module._forward_hooks
        self.children: dict[str, Any] = module._modules
        self.kind, self.before = type(module).forward, self.own.get("forward")
        self.hooked = bool(self.hooks or _GLOBAL)
        self.ours = (_before if self.hooked else _around)(path, module.forward, il)

    def fits(self, module: Any) -> bool:
        """Whether it was made for this very module as it is now."""
        return (
            module is self.module
            and self.own.get("forward") is self.before
            and type(module).forward is self.kind
            and self.hooked == bool(self.hooks or _GLOBAL)
        )


_GLOBAL = torch_module._global_forward_hooks


class Hooks:
    """What listens in one model. Nothing is there until `attach`, nothing is left after `clear`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._on: dict[str, _Ear] = {}
        self._seams: dict[Key, RemovableHandle | patterns.Seam] = {}
        # Kept from run to run.
        self._ears: dict[str, _Ear] = {}

    def attach(self, key: Key, il: Interleaver) -> None:
        """Call `il.visit(key, ...)` when the module runs: its output, or [args, kwargs] for its input."""
        path, side = key
        if side == "attention":
            self._attach_attention(key, il)
        elif path not in self._on and key is not LOGITS_KEY and key is not SAMPLED_KEY:
            ear = self._ears.get(path)
            if ear is not None:
                # What `_listen` comes to for a module that is as it was in an earlier run, in a third of the time.
                around, own = self._on.get(ear.around), ear.own
                if (
                    around is not None
                    and around.children.get(ear.name) is ear.module
                    and own.get("forward") is ear.before
                    and type(ear.module).forward is ear.kind
                    and not (ear.hooked or ear.hooks or _GLOBAL)
                ):
                    own["forward"] = ear.ours
                    self._on[path] = ear
                    return
            self._listen(path, il)

    def _attach_attention(self, key: Key, il: Interleaver) -> None:
        if key in self._seams:
            return
        visit = il.visit
        try:
            self._seams[key] = patterns.attach(
                self.model, key[0], lambda: key in il.waiting, lambda seen: visit(key, seen)
            )
        except AttributeError:
            raise self._missing(key[0]) from None

    def _listen(self, path: str, il: Interleaver) -> None:
        """Put ours in the place of the `forward` of the module at `path`, and of those around it.

        A call that began before ours was there never comes to it, so a module around a point that is first asked for
        from inside it has to listen before that.
        """
        if path:
            around, _, name = path.rpartition(".")
            if around not in self._on:
                self._found(path)
                self._listen(around, il)
            module = self._on[around].children.get(name)
            if module is None:
                module = self._found(path)
        else:
            module = self.model
        ear = self._ears.get(path)
        if ear is None or not ear.fits(module):
            ear = self._ears[path] = _Ear(path, module, il)
        ear.own["forward"] = ear.ours
        self._on[path] = ear
        if ear.hooked:
            self._seams[path, "out"] = module.register_forward_hook(_behind(path, il))

    def _found(self, path: str) -> torch.nn.Module:
        """A module that is no plain child on its way: one behind a wrapper that forwards attributes, or none at all."""
        try:
            return self.model.get_submodule(path)
        except AttributeError:
            raise self._missing(path) from None

    def _missing(self, path: str) -> Exception:
        return no_such_module(path, [n for n, _ in self.model.named_modules() if n])

    def clear(self) -> None:
        """Leave every module as it was."""
        for ear in self._on.values():
            if ear.own.get("forward") is not ear.ours:
                continue  # somebody has put his own around ours since: it is his to take off
            if ear.before is None:
                del ear.own["forward"]
            else:
                ear.own["forward"] = ear.before
        for seam in self._seams.values():
            seam.remove()
        self._on.clear()
        self._seams.clear()

    def __len__(self) -> int:
        return len(self._on) + len(self._seams)


def _around(path: str, forward: Callable[..., Any], il: Interleaver) -> Callable[..., Any]:
    """A module's `forward`, with a stop before and behind it for whoever waits there."""
    into, out, visit = (path, "in"), (path, "out"), il.visit

    def around(*args: Any, **kwargs: Any) -> Any:
        if into in il.waiting:
            args, kwargs = _entered(il, into, args, kwargs)
        output = forward(*args, **kwargs)
        if out in il.waiting:
            if il.lends and type(output) is Tensor:
                il.fresh = getrefcount(output) == ALONE and output._base is None
            instead = visit(out, output)
            il.fresh = False
            if instead is not None:
                return instead
        return output

    around.__wrapped__ = forward  # type: ignore[attr-defined]
    return around


def _before(path: str, forward: Callable[..., Any], il: Interleaver) -> Callable[..., Any]:
    """A module's `forward`, with a stop before it."""
    into = (path, "in")

    def before(*args: Any, **kwargs: Any) -> Any:
        if into in il.waiting:
            args, kwargs = _entered(il, into, args, kwargs)
        return forward(*args, **kwargs)

    before.__wrapped__ = forward  # type: ignore[attr-defined]
    return before


def _entered(il: Interleaver, key: Key, args: Any, kwargs: Any) -> Any:
    payload: list[Any] = [args, kwargs]
    instead = il.visit(key, payload)
    payload = payload if instead is None else instead
    return replaced(payload) if len(payload) > 2 else payload


def _behind(path: str, il: Interleaver) -> Callable[..., Any]:
    """A forward hook behind the user's own, which may give out something else than the module does."""
    key = (path, "out")

    def behind(module: torch.nn.Module, args: Any, output: Any) -> Any:
        return il.visit(key, output) if key in il.waiting else None

    return behind
