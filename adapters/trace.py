"""`trace` and `steps`: the model runs as the coroutine and the body is ordinary code in the caller's own frame.

The interleaver cannot tell: a body is a pass whose greenlet is the caller's, so a read switches to the model and the
model switches back when it gets there.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from greenlet import getcurrent, greenlet

from adapters.errors import LoadError
from adapters.intervention import Pass
from adapters.modes import cross

if TYPE_CHECKING:
    from adapters.runtime import Ask, Engine

# Models that are suspended in a body right now.
_OPEN: WeakKeyDictionary[Any, Pass] = WeakKeyDictionary()


@contextmanager
def trace_of(engine: Engine, ask: Ask) -> Iterator[Pass]:
    """One forward with the body of the `with` inside it."""
    model, m = _start(engine, ask)
    try:
        yield m
        _finish_pass(model, m)
    finally:
        if not model.dead:
            _drain(model, m)


def steps_of(engine: Engine, ask: Ask) -> Iterator[Pass]:
    """A generation, one pass an iteration; leaving the loop early ends the generation with that pass."""
    model, m = _start(engine, ask)
    try:
        while not model.dead:
            yield m
            _finish_pass(model, m)
    finally:
        if not model.dead:
            _drain(model, m)


def _start(engine: Engine, ask: Ask) -> tuple[Any, Pass]:
    """Run the model to the start of its first pass."""
    body = getcurrent()
    model = greenlet(lambda: engine.run([replace(ask, body=body)]), body)
    m = cross(model.switch)
    if not isinstance(m, Pass):
        _raise_failure(m)
        raise LoadError("the engine finished without a pass")
    _OPEN[model] = m
    return model, m


@atexit.register
def _close_all() -> None:
    """A model that is suspended in the middle of a pass when the interpreter goes down would take it down hard."""
    for model, m in list(_OPEN.items()):
        _drain(model, m)


def _finish_pass(model: Any, m: Pass) -> None:
    m._finish()
    m._end()
    if not model.dead:
        _raise_failure(cross(model.switch, None))


def _raise_failure(result: Any) -> None:
    """What the engine returns when it ends carries the error of an installed intervention, if there was one."""
    if isinstance(result, list):
        for output in result:
            if output.error is not None:
                raise output.error


def _drain(model: Any, m: Pass) -> None:
    """Let the model finish its pass without the body, so that the engine is left whole."""
    m._end()
    m.live.stopped = True
    while not model.dead:
        cross(model.switch, None)
