"""A walk over the C stack ends where a greenlet's frames do: torch walks it for every error that it raises."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from greenlet import GreenletExit, getcurrent, greenlet

from adapters import stack_end
from adapters.stack_end import run_at_an_end
from adapters.threads import Threads
from tests.engines import assert_clean, hf, prompts, run
from tests.test_runtime_clean import python

__all__ = ["hf"]  # a fixture

SIZE = 64
here = pytest.mark.skipif(stack_end._through() is None, reason="no machine code for this machine")


def walk() -> list[int]:
    """Return addresses of the C stack, innermost first, as torch asks for them."""
    libc = ctypes.PyDLL(None)
    frames = (ctypes.c_void_p * 512)()
    return [address or 0 for address in frames[: libc.backtrace(frames, len(frames))]]


def the_end() -> range:
    address = ctypes.cast(stack_end._through(), ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address
    return range(address, address + SIZE)


# ---- where walks end


@here
def test_a_walk_ends_in_the_machine_code_and_not_before() -> None:
    found: list[list[int]] = []
    run_at_an_end(lambda: found.append(walk()))
    run_at_an_end(lambda: run_at_an_end(lambda: found.append(walk())))
    for frames in found:
        assert frames[-1] in the_end()
        assert sum(frame in the_end() for frame in frames) == 1
        assert len(frames) > 5, "the frames of the function itself are seen"
    assert not set(walk()) & set(the_end())


@here
def test_walks_of_greenlets_end_whoever_they_are_resumed_by() -> None:
    """One that has run another's job before, resumed from other depths than it was started at."""
    found: list[list[int]] = []

    def runs(job: str) -> bool:
        for _ in range(4):
            found.append(walk())
            getcurrent().parent.switch()
        return True

    threads = Threads(runs)

    def at_depth(n: int, f: Callable[[], Any]) -> Any:
        return f() if n == 0 else max((0,), key=lambda _: at_depth(n - 1, f) or 0)

    made: list[Any] = []
    for job in range(3):
        at_depth(job, lambda: made.append(threads.one(getcurrent())))
        thread = made[-1]
        at_depth(3 - job, lambda job=job, thread=thread: thread.switch(job))
        for depth in (5, 0, 2, 7):
            at_depth(depth, thread.switch)
        assert len(threads.idle) == 1
    assert len(found) == 12
    assert all(frames[-1] in the_end() for frames in found)
    assert len({len(frames) for frames in found}) == 1, "nothing of who resumed it is in its walk"


@here
def test_every_function_of_an_intervention_runs_there(hf: Any) -> None:
    ends = []

    def fn(m: Any) -> None:
        for layer in range(3):
            m.resid_post[layer]
            ends.append(walk()[-1] in the_end())

    run(hf, prompts(3), fn)
    assert len(ends) == 3 * 3 * 4
    assert all(ends)


STRESS = """
import functools, random
import torch
from greenlet import getcurrent
from adapters.threads import Threads

def runs(job):
    while True:
        try:
            torch.zeros(2).view(3)
        except RuntimeError:
            getcurrent().parent.switch()

def deep(n, f):
    if n == 0:
        return f()
    way = random.randrange(4)
    if way == 0:
        return next(map(lambda _: deep(n - 1, f), (0,)))
    if way == 1:
        return max([0], key=lambda _: deep(n - 1, f) or 0)
    if way == 2:
        return functools.reduce(lambda a, b: deep(n - 1, f), (0, 1))
    return eval("deep(n - 1, f)", {"deep": deep, "n": n, "f": f})

class Model(torch.nn.Module):
    def forward(self, n, f):
        return deep(n, f)

random.seed(1)
model, threads, parked = Model(), Threads(runs), []

def start():
    thread = threads.one(getcurrent())
    parked.append(thread)
    thread.switch("job")

def resume():
    thread = random.choice(parked)
    thread.parent = getcurrent()
    thread.switch()

for _ in range(1000):
    model(random.randrange(12), start)
    if len(parked) > 40:
        parked.pop(random.randrange(40))
    for _ in range(20):
        model(random.randrange(12), resume)
print("alive")
"""


def test_twenty_thousand_errors_of_torch_are_survived() -> None:
    """Without the end a process is dead after some ten thousand."""
    assert python(STRESS, PYTHONFAULTHANDLER="1").strip() == "alive"


# ---- what goes through


def test_what_is_raised_comes_out_with_its_own_traceback() -> None:
    def inner() -> None:
        raise KeyError("mine")

    for kind, function in ((KeyError, inner), (GreenletExit, lambda: getcurrent().throw(GreenletExit))):
        with pytest.raises(kind) as caught:
            run_at_an_end(function)
        assert caught.traceback[-1].path == Path(__file__)
    with pytest.raises(KeyboardInterrupt), pytest.raises(KeyError):
        run_at_an_end(lambda: (_ for _ in ()).throw(KeyboardInterrupt()))


def test_an_error_thrown_in_from_outside_arrives() -> None:
    seen = []

    def body() -> None:
        try:
            getcurrent().parent.switch()
        except ValueError as error:
            seen.append(str(error))
            raise

    thread = greenlet(lambda: run_at_an_end(body))
    thread.switch()
    with pytest.raises(ValueError, match="from outside"):
        thread.throw(ValueError("from outside"))
    assert seen == ["from outside"]
    assert thread.dead


def test_a_greenlet_that_is_let_go_of_unwinds() -> None:
    left = []

    def body() -> None:
        try:
            getcurrent().parent.switch()
        finally:
            left.append(True)

    thread = greenlet(lambda: run_at_an_end(body))
    thread.switch()
    del thread
    gc.collect()
    assert left == [True]


def test_nothing_is_kept_of_what_ran() -> None:
    class Thing:
        pass

    kept = []

    def fails() -> None:
        thing = Thing()
        kept.append(weakref.ref(thing))
        raise RuntimeError

    for _ in range(2):
        with suppress(RuntimeError):
            run_at_an_end(fails)
    assert [ref() for ref in kept] == [None, None]

    def runs(job: Thing) -> bool:
        kept.append(weakref.ref(job))
        return True

    threads = Threads(runs)
    threads.one(getcurrent()).switch(Thing())
    assert kept[-1]() is None, "the first job of a greenlet that waits for its next one"


def test_without_machine_code_a_function_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_end, "_CODE", {})
    stack_end._through.cache_clear()
    try:
        assert stack_end._through() is None
        ran: list[bool] = []
        run_at_an_end(lambda: ran.append(True))
        assert ran == [True]
        with pytest.raises(ZeroDivisionError):
            run_at_an_end(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    finally:
        stack_end._through.cache_clear()


def test_errors_of_torch_in_interventions_end_their_request_only(hf: Any) -> None:
    def wrong(m: Any) -> None:
        m.resid_post[1].view(-1, 7)

    def caught(m: Any) -> None:
        for layer in range(3):
            with pytest.raises(RuntimeError, match="invalid for input of size"):
                m.resid_post[layer].view(-1, 7)
            m.save("kept", m.resid_post[layer])

    wanted = run(hf, prompts(3), lambda m: [m.save("kept", m.resid_post[layer]) for layer in range(3)] and None)
    for _ in range(30):
        got = run(hf, prompts(3), caught)
        assert all(torch.equal(a.cat("kept"), b.cat("kept")) for a, b in zip(got, wanted, strict=True))
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            run(hf, prompts(1), wrong)
    assert_clean(hf)
