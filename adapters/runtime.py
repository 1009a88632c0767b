"""The runtime: `load` an engine, `run` prompts with an intervention on it, `install` one for every later request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import torch

from adapters.errors import LoadError
from adapters.intervention import Intervention, Pass
from adapters.points import Location, Points
from adapters.sampling import Sampling
from adapters.trace import steps_of, trace_of

Prompt = str | Sequence[int]


@dataclass(repr=False)
class Output:
    """What one request gave back.

    `saves[name]` is everything that was saved under `name`, in order, one entry a `m.save`; `cat(name)` joins them
    along the first axis: one row per token, in position order, prompt first.
    """

    request: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    saves: Mapping[str, list[Any]] = field(default_factory=dict)
    error: BaseException | None = None
    stopped: bool = False
    tokenizer: Any = None

    @property
    def text(self) -> str | None:
        """The new tokens as text, without special tokens; None where the model has no tokenizer."""
        if self.tokenizer is None:
            return None
        decoded: str = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        return decoded

    def __repr__(self) -> str:
        kept = ", ".join(f"{name} x{len(entries)}" for name, entries in self.saves.items()) or "nothing"
        ended = f", error={self.error!r}" if self.error is not None else ", stopped" if self.stopped else ""
        return f"Output({self.request}: {len(self.prompt_token_ids)} + {len(self.token_ids)} tokens, {self.text!r}, saved {kept}{ended})"

    def cat(self, name: str) -> torch.Tensor:
        """All saves of `name` joined along their first axis; scalars are stacked."""
        if name not in self.saves:
            raise KeyError(f"nothing was saved under {name!r}; saved: {', '.join(sorted(self.saves)) or 'nothing'}")
        kept = [s if isinstance(s, torch.Tensor) else torch.as_tensor(s) for s in self.saves[name]]
        return torch.stack(kept) if kept[0].dim() == 0 else torch.cat(kept) if len(kept) > 1 else kept[0]


@dataclass(frozen=True)
class Ask:
    """One request as an engine gets it; `body` is the greenlet of a `trace` or `steps` body."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    fns: tuple[Intervention, ...]
    body: Any = None


class Engine(Protocol):
    """What a backend offers to the runtime."""

    points: Points
    tokenizer: Any
    in_process: bool

    def run(self, asks: Sequence[Ask]) -> list[Output]: ...

    def describe(self) -> dict[str, Any]: ...

    def declared(self) -> list[Location]:
        """The tapped locations of a compiled engine, in the model's order."""

    def close(self) -> None: ...


class Runtime:
    """An engine with interventions. Made by `load`; usable as a context manager, which closes it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._installed: dict[str, Intervention] = {}
        self._count = 0

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
    ) -> list[Output]:
        """Generate from every prompt at once, with `intervention` called once per forward pass of each request.

        Args:
            prompts: text or token ids, one or a list of them.
            intervention: one function for all prompts, or a list with one (or None) per prompt.
            edits: names of installed interventions to use; None is all of them, [] none. They run before `intervention`.
            on_error: an intervention's error ends its own request only. "raise" raises the first one after the others have
                finished, with all outputs in its `outputs` attribute; "return" leaves it in `Output.error`.

        Returns one Output per prompt, in order.
        """
        asked = self._prompts(prompts)
        own = self._own(intervention, len(asked))
        shared = self._edits(edits)
        stops = () if ignore_eos else self._eos()
        sampling = Sampling(max_new_tokens, temperature, seed, stops)
        asks = [
            Ask(self._next_id(), ids, sampling, (*shared, *((f,) if f else ())))
            for ids, f in zip(asked, own, strict=True)
        ]
        outputs = self.engine.run(asks)
        failed = next((o.error for o in outputs if o.error is not None), None)
        if failed is not None and on_error == "raise":
            failed.outputs = outputs  # type: ignore[attr-defined]
            raise failed
        return outputs

    @contextmanager
    def trace(self, prompt: Prompt, *, grad: bool = False) -> Iterator[Pass]:
        """One forward pass with the body of the `with` as its intervention: ordinary code with live tensors."""
        with trace_of(self.engine, self._ask(prompt, 1), grad=grad) as m:
            yield m

    def steps(self, prompt: Prompt, *, max_new_tokens: int = 16) -> Iterator[Pass]:
        """A generation as a loop: the body runs inside each forward pass in turn."""
        return steps_of(self.engine, self._ask(prompt, max_new_tokens))

    def install(self, intervention: Intervention, *, name: str) -> None:
        """Leave `intervention` on the engine for every later request, after those already installed."""
        if name in self._installed:
            raise ValueError(f"an intervention named {name!r} is already installed; remove({name!r}) takes it off")
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

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def close(self) -> None:
        """Free the engine; hooks and patches are gone after it."""
        self.engine.close()

    # ---- reading arguments

    def _next_id(self) -> str:
        self._count += 1
        return f"tapgrid-{self._count}"

    def _ask(self, prompt: Prompt, max_new_tokens: int) -> Ask:
        if not self.engine.in_process:
            raise LoadError("trace() and steps() need the engine in this process; use run() with a function instead")
        return Ask(
            self._next_id(), self._ids(prompt), Sampling(max_new_tokens, stop_token_ids=self._eos()), self._edits(None)
        )

    def _prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[tuple[int, ...]]:
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            return [self._ids(cast(Prompt, prompts))]
        return [self._ids(p) for p in cast(Sequence[Prompt], prompts)]

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer: give prompts as token ids")
            prompt = self.tokenizer(prompt)["input_ids"]
        ids = tuple(int(t) for t in prompt)
        vocab = self.engine.points.dims.vocab
        bad = next((t for t in ids if not 0 <= t < vocab), None)
        if not ids or bad is not None:
            raise ValueError(
                "a prompt needs at least one token"
                if not ids
                else f"token id {bad} is outside the vocabulary of {vocab}"
            )
        return ids

    def _own(self, given: Intervention | Sequence[Intervention | None] | None, n: int) -> list[Intervention | None]:
        if given is None or callable(given):
            return [given] * n
        if len(given) != n:
            raise ValueError(f"{len(given)} interventions for {n} prompts: give one for all, or one per prompt")
        return list(given)

    def _edits(self, names: Sequence[str] | None) -> tuple[Intervention, ...]:
        if names is None:
            return tuple(self._installed.values())
        missing = [n for n in names if n not in self._installed]
        if missing:
            raise KeyError(f"edits={missing}: not installed; installed: {', '.join(self._installed) or 'none'}")
        return tuple(self._installed[n] for n in names)

    def _eos(self) -> tuple[int, ...]:
        eos: Any = getattr(self.engine, "eos_token_id", None)
        return () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
