"""What the harness asks of a system under test: eight kinds of work, as plain data, and the adapter that does them.

This file imports neither torch nor any engine, so that a grid can be listed and planned on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Nothing:
    """Plain generation: no activation is read or written."""


@dataclass(frozen=True)
class Capture:
    """Hand back every named point, every pass: `values[point]` is [prompt + new - 1, ...point shape].

    >>> Capture(("resid_post.15",)).points
    ('resid_post.15',)
    """

    points: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Steer:
    """Add `vector` [d_model] at `point` to every token, prompt and new.

    `watch` names points to hand back as `Capture` does; validation uses it to show that the write
    landed, timed runs leave it empty.
    """

    point: str
    vector: Vector
    watch: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lens:
    """Unembed `point` (final norm, head) at the last token of every pass: `values["lens"]` is [new] int64,
    the highest-scoring token id. Every column finds it with `max`, which on a CPU takes a third of `argmax`'s time."""

    point: str


@dataclass(frozen=True, eq=False)
class Probe:
    """Project `point` onto `direction` [d_model]: `values["probe"]` is [prompt + new - 1] float."""

    point: str
    direction: Vector


@dataclass(frozen=True)
class AblateHead:
    """Set head `head` of `z.<layer>` (the attention output before its output projection) to zero, every token."""

    layer: int
    head: int
    watch: tuple[str, ...] = ()


@dataclass(frozen=True)
class ForceToken:
    """Override the sampled token with `id` at every step."""

    id: int


@dataclass(frozen=True)
class Gradient:
    """One forward and backward of the summed log-probability of the prompt's own next tokens:
    `values[point]` is the gradient at `point`, [prompt, d_model]."""

    point: str


Work = Nothing | Capture | Steer | Lens | Probe | AblateHead | ForceToken | Gradient


def split(point: str) -> tuple[str, int | None]:
    """A point's name and layer; None where it has none.

    >>> split("resid_post.15"), split("logits"), split("model.norm")
    (('resid_post', 15), ('logits', None), ('model.norm', None))
    """
    name, dot, layer = point.rpartition(".")
    return (name, int(layer)) if dot and layer.isdigit() else (point, None)


def layer_of(point: str) -> int:
    """The layer of a point that has one.

    >>> layer_of("resid_post.15")
    15
    """
    layer = split(point)[1]
    if layer is None:
        raise ValueError(f"{point!r} names no layer: write it as in 'resid_post.15'")
    return layer


def not_among(points: Sequence[str], known: Sequence[str]) -> str | None:
    """The first point that a column does not translate, or None: `known` are names without layers.

    >>> not_among(("resid_post.1", "pattern.2"), ("resid_post", "z"))
    'pattern.2'
    """
    return next((p for p in points if split(p)[0] not in known), None)


def points_of(work: Work) -> tuple[str, ...]:
    """Every point that a work names.

    >>> points_of(Lens("resid_post.3"))
    ('resid_post.3',)
    """
    own = (work.point,) if isinstance(work, Steer | Lens | Probe | Gradient) else ()
    return (*own, *(work.points if isinstance(work, Capture) else ()), *getattr(work, "watch", ()))


@dataclass(frozen=True)
class Shape:
    """How much a row asks for: token counts per request, how many requests, and whether they are in flight together."""

    prompt_tokens: int
    new_tokens: int
    requests: int = 1
    concurrent: bool = False


@dataclass(frozen=True)
class Request:
    """One prompt, by token id: what one library's tokenizer adds, no other's may leave out."""

    id: str
    token_ids: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True)
class Outcome:
    """What came back for one request: the new token ids, and the values that the work asked for (CPU tensors)."""

    token_ids: tuple[int, ...]
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """Why a column cannot do a piece of work. `code` is stable and short, `sentence` is for people.

    Codes: `not-expressible` (the library has no way to say it), `no-library` (not installed; the sentence
    holds the install line), `no-device` (needs a GPU), `model` (this model lacks the point), `not-plain`
    (a plain engine has nothing attached).
    """

    code: str
    sentence: str


@dataclass(frozen=True)
class Settings:
    """What every column of a grid boots with, alike."""

    dtype: str = "bfloat16"
    max_model_len: int = 1024
    max_concurrent: int = 8
    threads: int = 1
    seed: int = 0
    tensor_parallel: int = 1


class Adapter(Protocol):
    """One system under test. A file under `adapters/peers/` holds nothing but this translation.

    `plain` marks an engine with nothing attached (`vanilla`, `vanilla-eager`, `hf`): rows that have a plain
    counterpart run it there with `Nothing`, as the denominator of everyone's share.
    """

    plain: bool

    def boot(self, model: Path, settings: Settings) -> None:
        """Load `model` (a local folder in `transformers` format) and be ready to serve."""

    def close(self) -> None:
        """Free the engine. Called once, also after an error."""

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        """Why this work cannot be done in this shape, or None. Asked before anything is timed; after `boot`."""

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        """Do `work` on all `requests` at once (one is a batch of one); greedy, ignoring end-of-sequence."""

    def install(self, work: Work) -> None:
        """Leave `work` on the engine: later `run(requests, Nothing())` calls do it and hand its values back."""

    def remove(self) -> None:
        """Take installed work off again."""

    def engine_settings(self) -> Mapping[str, Any]:
        """The engine arguments actually used, as JSON-able data: stored with every process and printed."""


class BootRefused(Exception):
    """Raised by `boot` when the column can do nothing with this model; the message is the refusal's sentence."""

    code = "model"


class MissingLibrary(BootRefused):
    """Raised by `boot` when the column's library is not importable; the message is the install line."""

    code = "no-library"


class MissingDevice(BootRefused):
    """Raised by `boot` when the column needs hardware that this machine lacks; the message says what, and why."""

    code = "no-device"
