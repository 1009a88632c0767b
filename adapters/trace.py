"""`trace` and `steps`: the model runs as the coroutine and the body is ordinary code in the caller's own frame.

The interleaver cannot tell: a body is a pass whose greenlet is the caller's, so a read switches to the model and the
model switches back when it gets there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent, greenlet

from adapters.errors import LoadError
from adapters.intervention import Pass

if TYPE_CHECKING:
    from adapters.runtime import Ask, Engine


@contextmanager
def trace_of(engine: Engine, ask: Ask, *, grad: bool) -> Iterator[Pass]:
    """One forward with the body of the `with` inside it."""
    if grad:
        raise LoadError("trace(grad=True) is not available yet on this engine")
    model = _model(engine, ask)
    m = _start(model)
    try:
        yield m
    except BaseException:
        _drain(model, m)
        raise
    _pass_done(model, m)
    _drain(model, m)


def steps_of(engine: Engine, ask: Ask) -> Iterator[Pass]:
    """A generation, one pass an iteration; leaving the loop early ends the generation with that pass."""
    model = _model(engine, ask)
    m = _start(model)
    try:
        while not model.dead:
            yield m
            _pass_done(model, m)
    finally:
        _drain(model, m)


def _model(engine: Engine, ask: Ask) -> Any:
    body = getcurrent()
    return greenlet(lambda: engine.run([replace(ask, body=body)]), body)


def _start(model: Any) -> Pass:
    """Run the model to the start of its first pass."""
    m = model.switch()
    if not isinstance(m, Pass):
        raise LoadError("the engine finished without a pass")
    return m


def _pass_done(model: Any, m: Pass) -> None:
    m._finish()
    if not model.dead:
        _raise_failure(model.switch(None))


def _raise_failure(result: Any) -> None:
    """What the engine returns when it ends carries the error of an installed intervention, if there was one."""
    if isinstance(result, list):
        for output in result:
            if output.error is not None:
                raise output.error


def _drain(model: Any, m: Pass) -> None:
    """Let the model finish its pass without the body, so that the engine is left whole."""
    m.live.stopped = True
    while not model.dead:
        model.switch(None)
    m._hub = None
