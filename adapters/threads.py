"""Greenlets that run one intervention after another: a new one costs a dozen times what one that has run does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from threading import local
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent, greenlet

from adapters.errors import InterventionError
from adapters.stack_end import run_at_an_end

if TYPE_CHECKING:
    from adapters.intervention import Pass

# How many wait for their next job; more than that are let go of.
_IDLE = 256


class Threads(local):
    """Greenlets between two jobs. They belong to a thread of the system, so every one has its own.

    `runs` does one job, and says whether its greenlet may have another.
    """

    def __init__(self, runs: Callable[[Any], bool]) -> None:
        self.runs = runs
        self.idle: list[Any] = []

    def one(self, hub: Any) -> Any:
        """A greenlet that does the job that it is first switched to with, and then comes back to `hub`."""
        if self.idle:
            thread = self.idle.pop()
        else:
            thread = greenlet(partial(run_at_an_end, partial(_one_after_another, self.runs, self.idle)))
            thread.switch()  # what a greenlet is started with it keeps, and that would be its first job
        thread.parent, thread.gr_context = hub, None
        return thread


def _one_after_another(runs: Callable[[Any], bool], idle: list[Any]) -> None:
    thread = getcurrent()
    job = thread.parent.switch(None)
    while runs(job) and len(idle) < _IDLE:
        del job
        idle.append(thread)
        job = thread.parent.switch(None)


def runs_function(m: Pass) -> bool:
    """Run the function of `m`; whether it came to its end."""
    try:
        assert m.fn is not None
        returned = m.fn(m)
        if returned is not None and (inspect.isgenerator(returned) or inspect.iscoroutine(returned)):
            returned.close()
            raise InterventionError(
                f"{m.fn!r} is a generator or a coroutine function: calling it runs nothing. An intervention is a plain "
                "function that is called once a pass"
            )
        m._finish()
    except GreenletExit:
        return False  # ended without a word; a greenlet would hand the exception over as what it returned
    finally:
        m._end()
    return True
