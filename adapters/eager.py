"""The eager backend: a module gets a hook only while some live intervention names it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from adapters import patterns
from adapters.interleave import Interleaver, Key
from adapters.layouts import replaced
from adapters.modules import no_such_module
from adapters.points import LOGITS_KEY, SAMPLED_KEY


class Hooks:
    """The hooks of one model. Nothing is attached until `attach`, nothing is left after `clear`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._handles: dict[Key, RemovableHandle | patterns.Seam] = {}
        self._around: dict[str, RemovableHandle] = {}

    def attach(self, key: Key, il: Interleaver) -> None:
        """Call `il.visit(key, ...)` when the module runs: its output, or [args, kwargs] for its input."""
        if key in self._handles or key is LOGITS_KEY or key is SAMPLED_KEY:
            return
        path, side = key
        visit = il.visit
        if side == "attention":
            try:
                self._handles[key] = patterns.attach(
                    self.model, path, lambda: key in il.waiting, lambda seen: visit(key, seen)
                )
            except AttributeError:
                raise no_such_module(path, [n for n, _ in self.model.named_modules() if n]) from None
            return
        try:
            module = self.model.get_submodule(path)
        except AttributeError:
            raise no_such_module(path, [n for n, _ in self.model.named_modules() if n]) from None
        self._hold_open(path)

        def out(module: torch.nn.Module, args: Any, output: Any) -> Any:
            return visit(key, output) if key in il.waiting else None

        def into(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            if key not in il.waiting:
                return None
            payload: list[Any] = [args, kwargs]
            instead = visit(key, payload)
            payload = payload if instead is None else instead
            if len(payload) > 2:
                return replaced(payload)
            return None if instead is None else tuple(instead)

        self._handles[key] = (
            module.register_forward_hook(out)
            if side == "out"
            else module.register_forward_pre_hook(into, with_kwargs=True)
        )

    def _hold_open(self, path: str) -> None:
        """Keep the modules around `path` listening. A module that starts a call without hooks never looks for one again
        in that call, so a point on it that is first asked for from inside it would never fire."""
        parts = path.split(".")
        for depth in range(len(parts)):
            around = ".".join(parts[:depth])
            if around not in self._around:
                self._around[around] = self.model.get_submodule(around).register_forward_hook(_nothing)

    def clear(self) -> None:
        """Take every hook off again."""
        for handle in (*self._handles.values(), *self._around.values()):
            handle.remove()
        self._handles.clear()
        self._around.clear()

    def __len__(self) -> int:
        return len(self._handles)


def _nothing(module: torch.nn.Module, args: Any, output: Any) -> None:
    pass
