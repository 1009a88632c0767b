"""One engine for many coroutines: `rt.arun(...)` and `rt.stream(...)`.

The engine runs in a thread of its own. What is asked while a batch runs makes up the next one, so coroutines that ask
at the same time share their forward passes, and none of them sees anything of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from adapters.intervention import Pass
    from adapters.runtime import Ask, Engine, Output

_Asked = tuple[Sequence["Ask"], "Future[list[Output]]"]


class Driver:
    """The thread in which one engine runs what coroutines ask of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        # vLLM's kernels refuse a thread that has another number of OpenMP threads than the one that booted them.
        self._threads = torch.get_num_threads()
        self._thread = Thread(target=self._work, name="tapgrid", daemon=True)
        self._thread.start()

    def submit(self, asks: Sequence[Ask]) -> Future[list[Output]]:
        """Hand requests over; the future's result is their outputs, in order."""
        future: Future[list[Output]] = Future()
        self._asked.put((asks, future))
        return future

    def close(self) -> None:
        """Finish what was asked for, then end."""
        self._asked.put(None)
        self._thread.join()

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        open = True
        while open:
            asked = [self._asked.get()]
            with suppress(Empty):
                while True:
                    asked.append(self._asked.get_nowait())
            open = None not in asked
            wanted = [a for a in asked if a is not None and a[1].set_running_or_notify_cancel()]
            for grad in (False, True):  # gradients are a matter of the whole batch
                self._run([a for a in wanted if any(ask.grad for ask in a[0]) is grad])

    def _run(self, asked: Sequence[_Asked]) -> None:
        if not asked:
            return
        try:
            outputs = self.engine.run([ask for asks, _ in asked for ask in asks])
        except BaseException as error:
            for _, future in asked:
                future.set_exception(error)
            return
        for asks, future in asked:
            future.set_result(outputs[: len(asks)])
            del outputs[: len(asks)]


class Piece(NamedTuple):
    """One token of a `Stream`: its id, and the text that it added ("" while a character is not complete).

    >>> Piece(7, " Paris").text
    ' Paris'
    """

    token_id: int
    text: str


_END = -1


class Stream:
    """The tokens of one generation as they are drawn; made by `Runtime.stream`. `output` is there when it has ended.

    >>> import asyncio, tapgrid
    >>> async def main():
    ...     with tapgrid.load("synthetic:llama", dtype="float32") as rt:
    ...         stream = rt.stream([5, 6, 7], lambda m: m.save("post", m.resid_post[1]), max_new_tokens=3)
    ...         ids = [piece.token_id async for piece in stream]
    ...         return ids == list(stream.output.token_ids), tuple(stream.output.cat("post").shape)
    >>> asyncio.run(main())
    (True, (5, 128))
    """

    def __init__(self, driver: Driver, ask: Ask, tokenizer: Any, finish: Callable[[list[Output]], list[Output]]):
        self._driver, self._ask, self._tokenizer, self._finish = driver, ask, tokenizer, finish
        self._left = Event()
        self._drawn: list[int] = []
        self._text = ""
        self._tokens: asyncio.Queue[int] | None = None
        self._future: Future[list[Output]] | None = None
        self.output: Output | None = None

    def stop(self) -> None:
        """End the generation with the pass that is under way."""
        self._left.set()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Piece:
        if self._tokens is None:
            self._tokens = self._start()
        if self.output is not None:
            raise StopAsyncIteration
        token = await self._tokens.get()
        if token == _END:
            assert self._future is not None
            self.output = self._finish(self._future.result())[0]
            raise StopAsyncIteration
        return Piece(token, self._added(token))

    def _start(self) -> asyncio.Queue[int]:
        loop, tokens, left = asyncio.get_running_loop(), asyncio.Queue[int](), self._left

        def watch(m: Pass) -> None:
            if m.draws:
                loop.call_soon_threadsafe(tokens.put_nowait, int(m.sampled))
                if left.is_set():
                    m.stop()

        self._future = self._driver.submit([replace(self._ask, fns=(*self._ask.fns, watch))])
        self._future.add_done_callback(lambda _: loop.call_soon_threadsafe(tokens.put_nowait, _END))
        return tokens

    def _added(self, token: int) -> str:
        self._drawn.append(token)
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(self._drawn, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        added, self._text = text[len(self._text) :], text
        return added
