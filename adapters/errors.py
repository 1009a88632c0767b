"""Every way an intervention can go wrong: a class each, and messages with the point, the shapes and the user's line."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

# Whose code runs a model.
_MODELS = ("torch", "transformers", "vllm")
_HERE = str(Path(__file__).resolve().parent) + os.sep


class InterventionError(Exception):
    """Base of every error that the runtime raises about an intervention."""


class PassedError(InterventionError):
    """The model had already gone past this point in this pass."""


class NeverRanError(InterventionError):
    """The pass ended and this location had not run."""


class UnknownPointError(InterventionError, AttributeError):
    """No point of that name; the message suggests near ones."""


class UnknownModuleError(InterventionError, LookupError):
    """No module or parameter at that path; the message suggests near ones."""


class PointRefusedError(InterventionError):
    """The family or the engine lacks this point, or the name would mean something else there."""


class WriteError(InterventionError, ValueError):
    """A write of another shape, dtype or device; nothing was written."""


class StaleWriteError(InterventionError):
    """A value was edited in place after the model had gone past its point, so the edit could not take part."""


class BadCaptureError(InterventionError):
    """A saved activation is empty, all zero, constant or not finite, and the intervention did not make it so."""


class NotInRowsError(InterventionError, ValueError):
    """A tensor there is not laid out in tokens, so nobody can say which part of it belongs to which request."""


class NonFiniteError(InterventionError):
    """A read or a write holds NaN or infinity, and the run was asked to check for that."""


class NotDeclaredError(InterventionError):
    """The point is not among the taps that the engine was loaded with."""


class ShardingError(InterventionError):
    """A tensor of a model that is split over ranks, and nothing in the engine's plan says how: it cannot be whole."""


class RanksDivergedError(InterventionError):
    """An intervention did something else on another rank, so there is no one value to read or to write."""


class LoadError(Exception):
    """The engine cannot be loaded this way; the message says what to change."""


def user_line() -> str:
    """`file:line` of the innermost frame outside this package: where the user's code stands.

    Empty when there is none: the library calls itself, or the model calls it at a point.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    inside = frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _MODELS
    return "" if inside else _line(frame)


def line_of(thread: Any) -> str:
    """`file:line` where a parked greenlet of the user's stands."""
    return _line(getattr(thread, "gr_frame", None))


def _line(frame: FrameType | None) -> str:
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_HERE) and name != contextlib.__file__:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def at_line(message: str, line: str) -> str:
    """`message` with a file and line, where there is one."""
    return f"{message} (at {line})" if line else message


def at_user_line(message: str) -> str:
    """`message` with the user's file and line, where there is one."""
    return at_line(message, user_line())
