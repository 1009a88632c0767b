"""Points and modules as attributes of a `Pass`: `m.resid_post[16]`, `m.logits`, `m.at(path).output`."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

from adapters.errors import UnknownPointError, WriteError, at_user_line

if TYPE_CHECKING:
    from adapters.intervention import Pass


class Layered:
    """`m.resid_post`: indexed by layer, read and written."""

    __slots__ = ("_m", "_name")

    def __init__(self, m: Pass, name: str) -> None:
        self._m, self._name = m, name

    def __getitem__(self, layer: int) -> Any:
        m, name = self._m, self._name
        return m._read(m._points.at(name, layer if type(layer) is int else _number(name, layer)))

    def __setitem__(self, layer: int, value: Any) -> None:
        m, name = self._m, self._name
        loc = m._points.at(name, layer if type(layer) is int else _number(name, layer))
        if loc is not m._loc or value is not m._value:
            m._write(loc, value)

    def __getattr__(self, name: str) -> Any:
        raise UnknownPointError(at_user_line(f"m.{self._name} is one per layer: write m.{self._name}[layer].{name}"))


class Module:
    """`m.at(path)`: what a module takes in and gives out, read and written.

    `input` is its first floating-point tensor, or its first tensor where it has none; a tuple where others of the same
    shape stand beside it (an engine that keeps the residual apart passes two). `output` is a tuple where it is several.
    """

    __slots__ = ("_m", "_path")

    def __init__(self, m: Pass, path: str) -> None:
        self._m, self._path = m, path

    @property
    def input(self) -> Any:
        m, path = self._m, self._path
        return m._read(m._il.inputs.get(path) or m._il.module_location(path, "in"))

    @input.setter
    def input(self, value: Any) -> None:
        self._m._write(self._m._il.module_location(self._path, "in"), value)

    @property
    def output(self) -> Any:
        m, path = self._m, self._path
        return m._read(m._il.outputs.get(path) or m._il.module_location(path, "out"))

    @output.setter
    def output(self, value: Any) -> None:
        m = self._m
        loc = m._il.outputs.get(self._path) or m._il.module_location(self._path, "out")
        if loc is not m._loc or value is not m._value:  # else it was edited in place: `m.at(path).output += 1`
            m._write(loc, value)

    def __getattr__(self, name: str) -> Any:
        if name in ("input", "output"):  # an AttributeError inside of the property itself lands here: let it come out
            return type(self).__dict__[name].__get__(self)
        raise UnknownPointError(at_user_line(f"m.at({self._path!r}) has .input and .output, not .{name}"))


def layered(name: str) -> property:
    """The attribute of a point that is one per layer."""

    def write(m: Pass, value: Any) -> None:
        raise WriteError(at_user_line(f"m.{name} is one per layer: write m.{name}[layer] = ..."))

    return property(lambda m: Layered(m, name), write, doc=f"`m.{name}[layer]`: read and written by layer.")


def single(name: str) -> property:
    """The attribute of a point that is one a pass."""

    def read(m: Pass) -> Any:
        return m._read(m._points.at(name))

    def write(m: Pass, value: Any) -> None:
        m._write(m._points.at(name), value)

    return property(read, write, doc=f"`m.{name}`: one a pass, read and written.")


def _number(name: str, layer: Any) -> int:
    try:
        return index(layer)
    except TypeError:
        raise UnknownPointError(
            at_user_line(f"m.{name}[layer] takes one layer number, not {layer!r}: a read is one place in the model")
        ) from None
