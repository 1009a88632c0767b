"""The runtime: `load` an engine, `run` prompts with an intervention on it, `install` one for every later request."""

from __future__ import annotations

from asyncio import wrap_future
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from adapters.asynchronous import Driver, Stream
from adapters.declared import one_by_one
from adapters.errors import LoadError
from adapters.intervention import Intervention, Pass
from adapters.points import Location, Points
from adapters.prompts import Prompt, prompts_of
from adapters.sampling import LOGPROBS, Sampling, keep_logprobs
from adapters.saves import Saves, held, whole
from adapters.taps import refuse_undeclared
from adapters.trace import steps_of, trace_of

if TYPE_CHECKING:
    from adapters.sharded import Sharding


@dataclass(repr=False)
class Output:
    """What one request gave back.

    `saves[name]` is everything that was saved under `name`, in order, one entry a `m.save`; `cat(name)` joins them
    along the first axis: one row per token, in position order, prompt first. On taps, rows of `Capture` lie joined and
    are cut into entries when `saves[name]` is asked for. `logprobs` has one entry a new token, where they were asked
    for.

    >>> out = Output("r", (5, 6), (7,), {"probe": [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]})
    >>> out.cat("probe").tolist(), out.text
    ([1.0, 2.0, 3.0], None)
    """

    request: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    saves: Mapping[str, list[Any]] = field(default_factory=dict)
    error: BaseException | None = None
    stopped: bool = False
    tokenizer: Any = None
    logprobs: tuple[float, ...] | None = None

    @property
    def text(self) -> str | None:
        """The new tokens as text, without special tokens; None where the model has no tokenizer."""
        if self.tokenizer is None:
            return None
        decoded: str = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        return decoded

    def __repr__(self) -> str:
        kept = ", ".join(f"{name} x{len(held(self.saves, name))}" for name in self.saves) or "nothing"
        ended = f", error={self.error!r}" if self.error is not None else ", stopped" if self.stopped else ""
        tokens = f"{len(self.prompt_token_ids)} + {len(self.token_ids)} tokens"
        return f"Output({self.request}: {tokens}, {self.text!r}, saved {kept}{ended})"

    def cat(self, name: str) -> torch.Tensor:
        """All saves of `name` joined along their first axis; scalars are stacked."""
        if name not in self.saves:
            raise KeyError(f"nothing was saved under {name!r}; saved: {', '.join(sorted(self.saves)) or 'nothing'}")
        return whole(self.saves, name)


@dataclass(frozen=True)
class Ask:
    """One request as an engine gets it; `body` is the greenlet of a `trace` or `steps` body."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    fns: tuple[Intervention, ...]
    body: Any = None
    check_finite: bool = False
    grad: bool = False
    check_ranks: bool = False

    @property
    def work(self) -> bool:
        """Whether any intervention takes part."""
        return bool(self.fns) or self.body is not None


class Engine(Protocol):
    """What a backend offers to the runtime.

    Attributes:
        in_process: whether the model runs in this process, which `trace` and `steps` need.
        gradients: whether it can run with gradients.
        max_tokens: how many tokens a request may have, prompt and new; None where the model sets no limit.
        taps: the points that functions reach, where only declared ones are live; None where every place is.
        buffers: the points at which the graph does what is stated.
    """

    points: Points
    tokenizer: Any
    in_process: bool
    max_tokens: int | None

    @property
    def gradients(self) -> bool: ...

    @property
    def taps(self) -> Sequence[str] | None: ...

    @property
    def buffers(self) -> Sequence[str]: ...

    def run(self, asks: Sequence[Ask]) -> list[Output]: ...

    def describe(self) -> dict[str, Any]: ...

    def declared(self) -> list[Location]:
        """The tapped locations of a compiled engine, in the model's order."""

    def close(self) -> None: ...


class Runtime:
    """An engine with interventions. Made by `load`; usable as a context manager, which closes it.

    >>> import tapgrid
    >>> rt = tapgrid.load("synthetic:llama", dtype="float32")
    >>> def steer(m):
    ...     m.resid_post[1] += 1.0
    ...     m.save("post", m.resid_post[2])
    >>> out = rt.run([[5, 6, 7], [8, 9]], steer, max_new_tokens=4, ignore_eos=True)
    >>> [tuple(o.cat("post").shape) for o in out]  # a row a token: prompt and new ones, but for the last drawn
    [(6, 128), (5, 128)]

    The same without a function, on an engine in this process:

    >>> with rt.trace([5, 6, 7]) as m:
    ...     norm = m.resid_post[2].norm(dim=-1)
    >>> norm.shape
    torch.Size([3])
    >>> [m.tokens for m in rt.steps([5, 6, 7], max_new_tokens=3)]
    [3, 1, 1]

    Left on the engine, for every later request:

    >>> rt.install(steer, name="steer")
    >>> list(rt.run([5, 6, 7], max_new_tokens=1)[0].saves), list(rt.run([5, 6, 7], max_new_tokens=1, edits=[])[0].saves)
    (['post'], [])
    >>> rt.remove("steer")

    What there is to read, and why something is not:

    >>> rt.points()[-4:], rt.why_not("router", 0)[:60]
    (('resid_post', 'final_norm', 'logits', 'sampled'), 'router[0] on llama (hf): a dense layer has no router; the ne')
    >>> rt.tokenizer.decode([5]), rt.close()
    (..., None)
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._installed: dict[str, Intervention] = {}
        self._count = 0
        self._closed = False
        self._thread: Driver | None = None

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(
        self,
        prompts: Prompt | Sequence[Prompt],
        intervention: Intervention | Sequence[Intervention | None] | None = None,
        *,
        max_new_tokens: int = 16,
        temperature: float = 0.0,
        seed: int | None = None,
        ignore_eos: bool = False,
        edits: Sequence[str] | None = None,
        on_error: Literal["raise", "return"] = "raise",
        check_finite: bool = False,
        grad: bool = False,
        check_ranks: bool = False,
        n: int = 1,
        logprobs: bool = False,
    ) -> list[Output]:
        """Generate from every prompt at once, with `intervention` called once per forward pass of each request.

        Args:
            prompts: text, token ids or chat messages (`[{"role": "user", "content": "..."}]`), one or a list of them.
            intervention: one function for all prompts, or a list with one (or None) per prompt.
            edits: names of installed interventions to use; None is all of them, [] none. They run before
                `intervention`.
            on_error: an intervention's error ends its own request only. "raise" raises the first one after the others
                have finished, with all outputs in its `outputs` attribute; "return" leaves it in `Output.error`.
            check_finite: whether a read or a write that holds NaN or infinity is an error, and an edit that torch does
                not count (through `.data` or a NumPy array).
            grad: whether reads are part of autograd's graph, so that `.grad` of what was read is there after a
                `backward()` inside the intervention. Each prompt is then computed alone; `max_new_tokens` must be 1.
            check_ranks: whether everything that is read and saved is compared between the ranks of a model that is
                split over several; a difference is an error that names the point.
            n: samples a prompt, each a request of its own; a `seed` is that of the first, the next has the next.
            logprobs: whether to keep the log-probability of each new token: of the one that was written, where an
                intervention writes `sampled`, and under the logits that it left.

        Returns one Output per prompt, in order; with `n`, the samples of a prompt one after the other.
        """
        asks = self._asks(
            prompts,
            intervention,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=ignore_eos,
            edits=edits,
            on_error=on_error,
            check_finite=check_finite,
            grad=grad,
            check_ranks=check_ranks,
            n=n,
            logprobs=logprobs,
        )
        return _finished(self.engine.run(asks), on_error)

    async def arun(
        self,
        prompts: Prompt | Sequence[Prompt],
        intervention: Intervention | Sequence[Intervention | None] | None = None,
        *,
        on_error: Literal["raise", "return"] = "raise",
        **options: Any,
    ) -> list[Output]:
        """`run` for coroutines, with the same arguments. What is asked for at the same time runs as one batch.

        >>> import asyncio, tapgrid
        >>> async def main():
        ...     with tapgrid.load("synthetic:llama", dtype="float32") as rt:
        ...         keep = lambda m: m.save("post", m.resid_post[1])
        ...         asked = [rt.arun([5] * n, keep, max_new_tokens=1) for n in (2, 4)]
        ...         return [tuple(out.cat("post").shape) for [out] in await asyncio.gather(*asked)]
        >>> asyncio.run(main())
        [(2, 128), (4, 128)]
        """
        asks = self._asks(prompts, intervention, on_error=on_error, **options)
        return _finished(await wrap_future(self._driver().submit(asks)), on_error)

    def stream(
        self, prompt: Prompt, intervention: Intervention | Sequence[Intervention | None] | None = None, **options: Any
    ) -> Stream:
        """The tokens of one prompt as they are drawn, with `run`'s arguments.

        >>> import asyncio, tapgrid
        >>> async def main():
        ...     with tapgrid.load("synthetic:llama", dtype="float32") as rt:
        ...         return [piece.token_id async for piece in rt.stream([5, 6], max_new_tokens=3, ignore_eos=True)]
        >>> len(asyncio.run(main()))
        3
        """
        self._check_in_process("stream()")
        asks = self._asks(prompt, intervention, **options)
        if len(asks) != 1:
            raise ValueError(f"stream() takes one prompt and one sample, not {len(asks)}: arun() takes many")
        on_error = options.get("on_error", "raise")
        return Stream(self._driver(), asks[0], self.tokenizer, lambda outputs: _finished(outputs, on_error))

    def _asks(
        self,
        prompts: Prompt | Sequence[Prompt],
        intervention: Intervention | Sequence[Intervention | None] | None,
        *,
        max_new_tokens: int = 16,
        temperature: float = 0.0,
        seed: int | None = None,
        ignore_eos: bool = False,
        edits: Sequence[str] | None = None,
        on_error: str = "raise",
        check_finite: bool = False,
        grad: bool = False,
        check_ranks: bool = False,
        n: int = 1,
        logprobs: bool = False,
    ) -> list[Ask]:
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error={on_error!r}: there are 'raise' and 'return'")
        if n < 1:
            raise ValueError(f"n={n}: at least one sample a prompt")
        asked = self._prompts(prompts, max_new_tokens)
        own = _one_each(intervention, len(asked))
        shared = self._edits(edits)
        sampling = Sampling(max_new_tokens, temperature, seed, () if ignore_eos else self._eos())
        if grad:
            self._check_grad(max_new_tokens)
        self._refuse_undeclared(own)
        samplings = [replace(sampling, seed=None if seed is None else seed + i) for i in range(n)]
        last = (keep_logprobs,) if logprobs else ()
        return [
            Ask(self._next_id(), ids, each, (*shared, *one_by_one(f), *last), None, check_finite, grad, check_ranks)
            for ids, f in zip(asked, own, strict=True)
            for each in samplings
        ]

    @contextmanager
    def trace(self, prompt: Prompt, *, grad: bool = False) -> Iterator[Pass]:
        """One forward pass with the body of the `with` as its intervention: ordinary code with live tensors.

        With `grad`, what the body reads is part of autograd's graph, and `.grad` of it is there after a `backward()`.
        """
        if grad:
            self._check_grad(1)
        ask = self._ask(prompt, 1, grad)
        with trace_of(self.engine, lambda body: replace(ask, body=body)) as m:
            yield m

    def steps(self, prompt: Prompt, *, max_new_tokens: int = 16) -> Iterator[Pass]:
        """A generation as a loop: the body runs inside each forward pass in turn."""
        ask = self._ask(prompt, max_new_tokens, False)
        return steps_of(self.engine, lambda body: replace(ask, body=body))

    def install(self, intervention: Intervention, *, name: str) -> None:
        """Leave `intervention` on the engine for every later request, after those already installed."""
        if not callable(intervention):
            raise TypeError(f"an intervention is a function of one argument, not {intervention!r}")
        if name in self._installed:
            raise ValueError(f"an intervention named {name!r} is already installed; remove({name!r}) takes it off")
        self._refuse_undeclared([intervention])
        self._installed[name] = intervention

    def remove(self, name: str) -> None:
        """Take an installed intervention off; later requests run as if it had never been there."""
        if name not in self._installed:
            raise KeyError(
                f"no intervention named {name!r} is installed; installed: {', '.join(self._installed) or 'none'}"
            )
        del self._installed[name]

    def points(self) -> tuple[str, ...]:
        """The points that this model has on this engine, in the model's order."""
        return self.engine.points.names()

    def why_not(self, name: str, layer: int | None = None) -> str | None:
        """Why a point cannot be read here, or None when it can."""
        return self.engine.points.why_not(name, layer)

    def sharding(self) -> Sharding:
        """Which modules are split over which ranks, as the engine's own plan says; printing it lists them.

        LoadError for an engine that is not split.

        >>> import tapgrid
        >>> with tapgrid.load("synthetic:llama") as rt:
        ...     rt.sharding()
        Traceback (most recent call last):
            ...
        adapters.errors.LoadError: this model is on one rank, so nothing is split: load(..., backend='sharded', tp=2)
        """
        found: Sharding | None = getattr(self.engine, "sharding", None)
        if found is None:
            raise LoadError("this model is on one rank, so nothing is split: load(..., backend='sharded', tp=2)")
        return found

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None where it has none."""
        return self.engine.tokenizer

    def close(self) -> None:
        """Free the engine; hooks and patches are gone after it. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            if self._thread is not None:
                self._thread.close()
            self.engine.close()

    # ---- reading arguments

    def _next_id(self) -> str:
        self._count += 1
        return f"tapgrid-{self._count}"

    def _driver(self) -> Driver:
        if self._thread is None:
            self._thread = Driver(self.engine)
        return self._thread

    def _check_in_process(self, what: str) -> None:
        if not self.engine.in_process:
            raise LoadError(f"{what} needs the engine in this process; use run() with a function instead")

    def _ask(self, prompt: Prompt, max_new_tokens: int, grad: bool) -> Ask:
        self._check_in_process("trace() or steps()")
        asked = self._prompts(prompt, max_new_tokens)
        if len(asked) > 1:
            raise ValueError(f"trace() and steps() take one prompt, not {len(asked)}: run() takes many")
        sampling = Sampling(max_new_tokens, stop_token_ids=self._eos())
        return Ask(self._next_id(), asked[0], sampling, self._edits(None), grad=grad)

    def _prompts(self, prompts: Prompt | Sequence[Prompt], max_new_tokens: int) -> list[tuple[int, ...]]:
        if self._closed:
            raise LoadError("this runtime is closed: load() another")
        engine = self.engine
        return prompts_of(prompts, engine.tokenizer, engine.points.dims.vocab, engine.max_tokens, max_new_tokens)

    def _check_grad(self, max_new_tokens: int) -> None:
        if not self.engine.gradients:
            raise LoadError("this engine computes no gradients: load(..., engine='hf') with the eager backend does")
        if max_new_tokens != 1:
            raise ValueError(f"grad=True is one forward pass: max_new_tokens=1, not {max_new_tokens}")

    def _edits(self, names: Sequence[str] | None) -> tuple[Intervention, ...]:
        if names is None:
            names = tuple(self._installed)
        names = [names] if isinstance(names, str) else names
        missing = [n for n in names if n not in self._installed]
        if missing:
            raise KeyError(f"edits={missing}: not installed; installed: {', '.join(self._installed) or 'none'}")
        return tuple(fn for n in names for fn in one_by_one(self._installed[n]))

    def _refuse_undeclared(self, given: Sequence[Intervention | None]) -> None:
        """What is stated says where, so a place that this engine cannot reach is refused before anything runs."""
        taps = self.engine.taps
        if taps is not None:
            for fn in {id(fn): fn for each in given for fn in one_by_one(each)}.values():
                refuse_undeclared(fn, self.engine.points, taps, self.engine.buffers)

    def _eos(self) -> tuple[int, ...]:
        eos: Any = getattr(self.engine, "eos_token_id", None)
        return () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)


def _one_each(
    given: Intervention | Sequence[Intervention | None] | None, prompts: int
) -> Sequence[Intervention | None]:
    if given is None or callable(given):
        return [given] * prompts
    if len(given) != prompts:
        raise ValueError(f"{len(given)} interventions for {prompts} prompts: give one for all, or one per prompt")
    odd = next((f for f in given if f is not None and not callable(f)), None)
    if odd is not None:
        raise TypeError(f"an intervention is a function of one argument, not {odd!r}")
    return given


def _finished(outputs: list[Output], on_error: str) -> list[Output]:
    """Take log-probabilities out of the saves, and raise what is to be raised."""
    for output in outputs:
        if LOGPROBS in output.saves:
            kept = output.saves if isinstance(output.saves, Saves) else dict(output.saves)
            output.logprobs = tuple(float(x) for x in kept.pop(LOGPROBS))[: len(output.token_ids)]
            output.saves = kept
    if on_error == "raise":
        _raise_first(outputs)
    return outputs


def _raise_first(outputs: list[Output]) -> None:
    """Raise the first error of a run, with all outputs on it."""
    failed = next((o.error for o in outputs if o.error is not None), None)
    if failed is None:
        return
    failed.outputs = outputs  # type: ignore[attr-defined]
    try:
        raise failed
    finally:
        # The traceback holds this frame: without its locals there is one cycle less to wait for the collector.
        del failed, outputs
