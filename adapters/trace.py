"""`trace` and `steps`: the model runs as the coroutine and the body is ordinary code in the caller's own frame.

The interleaver cannot tell: a body is a pass whose greenlet is the caller's, so a read switches to the model and the
model switches back when it gets there.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent

from adapters.errors import LoadError
from adapters.intervention import Pass
from adapters.modes import cross
from adapters.threads import Threads

if TYPE_CHECKING:
    from adapters.runtime import Ask, Engine


class _Run:
    """One run of an engine in a greenlet of its own, beside the body that is inside its passes."""

    __slots__ = ("ask", "ended", "engine", "m", "outputs", "thread")

    def __init__(self, engine: Engine, ask: Ask) -> None:
        self.engine, self.ask, self.ended = engine, ask, False
        self.outputs: list[Any] = []
        self.m: Any = None
        self.thread: Any = None

    def go_on(self, value: Any = None) -> Any:
        """Let the model go on to the next pass, or to its end; an installed intervention's error is raised there."""
        try:
            found = cross(self.thread.switch, value)
        finally:
            if self.ended:
                _OPEN.discard(self)
        if self.ended:
            # What the engine returns carries the error of an installed intervention, if there was one.
            error = next((o.error for o in self.outputs if o.error is not None), None)
            if error is not None:
                raise error
        return found


def _runs(run: _Run) -> bool:
    try:
        run.outputs = run.engine.run([run.ask])
    finally:
        run.ended = True
    return True


_THREADS = Threads(_runs)
# Runs that are suspended in a body right now.
_OPEN: set[_Run] = set()


@contextmanager
def trace_of(engine: Engine, ask: Callable[[Any], Ask]) -> Iterator[Pass]:
    """One forward with the body of the `with` inside it; `ask` makes the request, given the body's greenlet."""
    run = _start(engine, ask)
    try:
        yield run.m
        _finish_pass(run)
    finally:
        if not run.ended:
            _drain(run)


def steps_of(engine: Engine, ask: Callable[[Any], Ask]) -> Iterator[Pass]:
    """A generation, one pass an iteration; leaving the loop early ends the generation with that pass."""
    run = _start(engine, ask)
    try:
        while not run.ended:
            yield run.m
            _finish_pass(run)
    finally:
        if not run.ended:
            _drain(run)


def _start(engine: Engine, ask: Callable[[Any], Ask]) -> _Run:
    """Run the model to the start of its first pass."""
    body = getcurrent()
    run = _Run(engine, ask(body))
    run.thread = _THREADS.one(body)
    run.m = run.go_on(run)
    if run.ended:
        raise LoadError("the engine finished without a pass")
    _OPEN.add(run)
    return run


@atexit.register
def _close_all() -> None:
    """A model that is suspended in the middle of a pass when the interpreter goes down would take it down hard."""
    for run in list(_OPEN):
        _drain(run)


def _finish_pass(run: _Run) -> None:
    run.m._finish()
    run.m._end()
    if not run.ended:
        run.go_on()


def _drain(run: _Run) -> None:
    """Let the model finish its pass without the body, so that the engine is left whole."""
    run.m._end()
    run.m.live.stopped = True
    try:
        while not run.ended:
            cross(run.thread.switch, None)
    finally:
        _OPEN.discard(run)
