"""Our own columns: the eight kinds of work as interventions, one translation for every backend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from adapters import declared as stated
from adapters.boot import BackendName, EngineName, load
from adapters.errors import InterventionError
from adapters.intervention import Intervention, Pass
from adapters.points import BEFORE, PER_LAYER
from adapters.runtime import Output, Runtime
from adapters.work import (
    AblateHead,
    Capture,
    ForceToken,
    Gradient,
    Lens,
    MissingLibrary,
    Nothing,
    Outcome,
    Probe,
    Refusal,
    Request,
    Settings,
    Shape,
    Steer,
    Work,
    points_of,
    split,
)


def capture(points: Sequence[str]) -> Intervention:
    """Save every named point ("resid_post.15", "logits"), every pass."""
    return stated.Capture(*points) if points else _nothing


def steer(point: str, vector: torch.Tensor, watch: Sequence[str]) -> Intervention:
    """Add `vector` at `point` to every token, and save what `watch` names as that leaves it."""
    before, after = around(point, watch)
    parts: list[stated.Stated] = [*_captures(before), stated.Add(point, vector), *_captures(after)]
    return parts[0].then(*parts[1:]) if len(parts) > 1 else parts[0]


def around(point: str, watch: Sequence[str]) -> tuple[list[str], list[str]]:
    """What the model comes to before `point`, and from `point` on: it cannot be read the other way round.

    >>> around("z.1", ["resid_post.1", "resid_post.0", "z.1", "logits", "q.1", "embed"])
    (['resid_post.0', 'q.1', 'embed'], ['resid_post.1', 'z.1', 'logits'])
    """
    here = _place(point)
    return [p for p in watch if _place(p) < here], [p for p in watch if _place(p) >= here]


def _place(point: str) -> tuple[float, int]:
    name, layer = split(point)
    if layer is None:
        return (-1 if name in BEFORE else math.inf), 0
    return layer, PER_LAYER.index(name)


def _captures(points: Sequence[str]) -> list[stated.Stated]:
    return [stated.Capture(*points)] if points else []


def _nothing(m: Pass) -> None:
    """No point is asked for."""


def ablate_head(layer: int, head: int, watch: Sequence[str]) -> Intervention:
    """Zero one head's z, and save what `watch` names as that leaves it."""
    before, after = (capture(points) for points in around(f"z.{layer}", watch))

    def intervention(m: Pass) -> None:
        before(m)
        m.z[layer][:, head] = 0
        after(m)

    return intervention


def lens(point: str) -> Intervention:
    """The token that the residual at `point` would predict at the last row of each pass."""
    name, layer = split(point)

    def intervention(m: Pass) -> None:
        m.save("lens", m.unembed(getattr(m, name)[layer][-1:]).max(-1).indices)

    return intervention


def probe(point: str, direction: torch.Tensor) -> Intervention:
    """Every row's projection onto `direction`."""
    name, layer = split(point)

    def intervention(m: Pass) -> None:
        m.save("probe", getattr(m, name)[layer] @ direction)

    return intervention


def force_token(id: int) -> Intervention:
    """The same sampled token at every step."""

    def intervention(m: Pass) -> None:
        m.sampled[:] = id

    return intervention


def gradient(point: str, ids: Sequence[int]) -> Intervention:
    """The gradient at `point` of the summed log-probability of the prompt's own next tokens."""
    name, layer = split(point)
    following = torch.tensor(ids[1:])[:, None]

    def intervention(m: Pass) -> None:
        at = getattr(m, name)
        x = at if layer is None else at[layer]
        logits = m.unembed(m.resid_post[-1])[:-1]
        torch.log_softmax(logits.float(), -1).gather(1, following).sum().backward()
        m.save(point, x.grad)

    return intervention


def intervention_of(work: Work, dtype: torch.dtype) -> Intervention | None:
    """The intervention that does a piece of work; None for `Nothing`."""
    match work:
        case Nothing():
            return None
        case Capture(points):
            return capture(points)
        case Steer(point, vector, watch):
            return steer(point, torch.from_numpy(vector).to(dtype), watch)
        case AblateHead(layer, head, watch):
            return ablate_head(layer, head, watch)
        case Lens(point):
            return lens(point)
        case Probe(point, direction):
            return probe(point, torch.from_numpy(direction).to(dtype))
        case ForceToken(id):
            return force_token(id)
        case Gradient():
            raise NotImplementedError("a gradient has an intervention for each request: see `gradient`")


def _points_of(work: Work) -> tuple[str, ...]:
    """Every point that the work's intervention reads: a head is ablated at its layer's z."""
    return (f"z.{work.layer}", *points_of(work)) if isinstance(work, AblateHead) else points_of(work)


class Tapgrid:
    """Our runtime as a column. Subclasses say which engine and backend; nothing else differs."""

    plain = False
    engine: EngineName
    backend: BackendName = "eager"
    taps: tuple[str, ...] | None = None

    def __init__(self) -> None:
        self.rt: Runtime | None = None
        self._works: dict[Work, Intervention | None] = {}

    def boot(self, model: Path, settings: Settings) -> None:
        self.settings = settings
        self.dtype = getattr(torch, settings.dtype)
        arguments: dict[str, Any] = {"settings": settings} if self.engine == "vllm" else {"threads": settings.threads}
        if self.backend == "sharded":
            arguments["tp"] = settings.tensor_parallel
        try:
            self.rt = load(
                model, engine=self.engine, backend=self.backend, taps=self.taps, dtype=settings.dtype, **arguments
            )
        except ImportError as missing:
            raise MissingLibrary(f"{missing}: run `make install`") from missing

    def close(self) -> None:
        if self.rt is not None:
            self.rt.close()
            self.rt = None

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        if isinstance(work, Gradient) and not self._runtime.engine.gradients:
            why = "vLLM computes none" if self.engine == "vllm" else "a compiled model's taps are no part of the graph"
            return Refusal("not-expressible", f"no gradients on {self.engine} with the {self.backend} backend: {why}")
        try:
            for point in _points_of(work):
                self._runtime.engine.points.parse(point)
        except (InterventionError, IndexError) as refused:
            return Refusal("model", str(refused))
        return None

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        if isinstance(work, Gradient):
            return self._gradients(requests, work)
        outputs = self._runtime.run(
            [r.token_ids for r in requests],
            self._intervention(work),
            max_new_tokens=requests[0].new_tokens,
            ignore_eos=True,
        )
        return [_outcome(o) for o in outputs]

    def _gradients(self, requests: Sequence[Request], work: Gradient) -> list[Outcome]:
        outputs = self._runtime.run(
            [r.token_ids for r in requests],
            [gradient(work.point, r.token_ids) for r in requests],
            max_new_tokens=1,
            ignore_eos=True,
            grad=True,
        )
        return [_outcome(o) for o in outputs]

    def install(self, work: Work) -> None:
        intervention = self._intervention(work)
        if intervention is not None:
            self._runtime.install(intervention, name="work")

    def remove(self) -> None:
        self._runtime.remove("work")

    def engine_settings(self) -> Mapping[str, Any]:
        return {"engine": self.engine, "backend": self.backend, **self._runtime.engine.describe()}

    @property
    def _runtime(self) -> Runtime:
        assert self.rt is not None, "boot() comes first"
        return self.rt

    def _intervention(self, work: Work) -> Intervention | None:
        # Work is made once a row and run many times: so is its function, which is then pickled for one call alike.
        if work not in self._works:
            self._works[work] = intervention_of(work, self.dtype)
        return self._works[work]


def _outcome(output: Output) -> Outcome:
    return Outcome(output.token_ids, {name: output.cat(name) for name in output.saves})


class TapgridEager(Tapgrid):
    engine: EngineName = "vllm"


class TapgridTaps(Tapgrid):
    """Compiled vLLM; every residual stream and every head output is live, which is what the rows need."""

    engine: EngineName = "vllm"
    backend: BackendName = "taps"
    taps = ("resid_post.*", "z.*")


class TapgridHF(Tapgrid):
    engine: EngineName = "hf"


class TapgridHFTaps(Tapgrid):
    """Compiled `transformers` with the same points live."""

    engine: EngineName = "hf"
    backend: BackendName = "taps"
    taps = ("resid_post.*", "z.*")
