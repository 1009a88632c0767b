"""What travels between the client and the worker of an engine: the interventions of a request, and what it left."""

from __future__ import annotations

import io
import marshal
import traceback
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, ClassVar

import cloudpickle
import torch

from adapters.saves import Joined, Saves, held


@dataclass(frozen=True)
class Carried:
    """What a request carries to its worker; `body` is the greenlet of a `trace`, which stays in its process."""

    fns: tuple[Any, ...]
    check_finite: bool = False
    body: Any = None
    check_ranks: bool = False

    def packed(self) -> bytes:
        """As bytes: functions by value where they are the user's, by name where they are importable."""
        buffer = io.BytesIO()
        _Pickler(buffer).dump(self)
        return buffer.getvalue()


def _code(code: CodeType) -> tuple[Any, tuple[bytes]]:
    return marshal.loads, (marshal.dumps(code),)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, but code keeps its file's name, which is what an error of the user's is found by. The worker runs on
    this very interpreter, so its own format for code will do."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _code}, cloudpickle.Pickler.dispatch_table)


@dataclass(frozen=True)
class Kept:
    """What a request left: its saves, its error, whether it stopped itself, and how many of its tokens it keeps.

    `trail` is what one rank of several did for it, to be compared with the others' (`adapters/ranks.py`).
    """

    saves: Mapping[str, Any]
    error: Any
    stopped: bool
    tokens: int
    trail: tuple[tuple[str, int], ...] = ()

    def packed(self) -> Kept:
        """Ready for the wire: a name whose entries are rows of one kind becomes one tensor and its lengths."""
        return replace(self, saves={n: _join(held(self.saves, n)) for n in self.saves}, error=_portable(self.error))

    def unpacked(self) -> Kept:
        """As it was packed.

        >>> kept = Kept({"x": [torch.zeros(2, 3), torch.ones(1, 3)], "n": [1]}, None, False, 2)
        >>> [tuple(e.shape) for e in kept.packed().unpacked().saves["x"]]
        [(2, 3), (1, 3)]
        """
        return replace(
            self,
            saves=Saves(self.saves),
            error=None if self.error is None else cloudpickle.loads(self.error),
        )


def _join(entries: list[Any] | Joined) -> list[Any] | Joined:
    if isinstance(entries, Joined):
        return Joined(entries.rows.cpu(), entries.lengths)
    alike = all(
        isinstance(e, torch.Tensor) and e.dim() and e.dtype == entries[0].dtype and e.shape[1:] == entries[0].shape[1:]
        for e in entries
    )
    if alike:
        return Joined(torch.cat(entries).cpu(), [e.shape[0] for e in entries])
    return [e.cpu() if isinstance(e, torch.Tensor) else e for e in entries]


def _portable(error: BaseException | None) -> bytes | None:
    """An exception as bytes, with its traceback as a note, since frames do not travel."""
    if error is None:
        return None
    error.add_note("in the worker:\n" + "".join(traceback.format_exception(error)))
    try:
        return bytes(cloudpickle.dumps(error))
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.__notes__ = error.__notes__
        return bytes(cloudpickle.dumps(plain))
