"""interp-engine on `transformers`: its free functions, one prompt a call (its generation has no batch).

It generates first and captures in one more forward over what came out, as its own `capture_generation` does; that one
stops at the end of the sequence and has no argument against it, so its two steps are called here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from adapters.peers.interp_engine import INSTALL, NO_INSTALL
from adapters.peers.vanilla import import_transformers, version_of
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
    layer_of,
    not_among,
    points_of,
    split,
)

NAMES = {"resid_post": "resid_post", "z": "z", "logits": "lm_head"}


class InterpEngineHF:
    """The column `interp-engine-hf`."""

    plain = False

    def boot(self, model: Path, settings: Settings) -> None:
        import_transformers()
        try:
            import interp_engine
        except ImportError as error:
            raise MissingLibrary(f"interp-engine is not importable ({error}): {INSTALL}") from error
        import torch

        torch.set_num_threads(settings.threads)
        self._settings, self._engine = settings, interp_engine
        self._model = interp_engine.load_model(
            str(model),
            backend="eager",
            dtype=settings.dtype,
            device="cuda" if torch.cuda.is_available() else "cpu",
            # Its own default is eager attention, for the probabilities, which no row asks for: every column's kernel.
            attn_implementation="sdpa",
            # Captures of a frozen model refuse to keep a graph. Nothing else builds one: all but gradients is no_grad.
            requires_grad=True,
        )

    def close(self) -> None:
        self.__dict__.pop("_model", None)
        gc.collect()

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        if unknown := not_among(points_of(work), tuple(NAMES)):
            return Refusal("not-expressible", f"this column translates {', '.join(NAMES)}, not {unknown}")
        return None

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        return [self._one(r, work) for r in requests]

    def _one(self, request: Request, work: Work) -> Outcome:
        """The one place where a work becomes interp-engine."""
        match work:
            case Nothing():
                return Outcome(self._generate(request))
            case Capture(points):
                return self._captured(request, points)
            case Steer(point, vector, watch):
                return self._captured(request, watch, lambda: self._steering(point, vector))
            case AblateHead(layer, head, watch):
                return self._captured(request, watch, lambda: self._ablation(layer, head))
            case Probe(point, direction):
                found = self._captured(request, [point])
                rows = found.values[point].float()
                return Outcome(found.token_ids, {"probe": rows @ _tensor(direction)})
            case Lens(point):
                return self._lens(request, point)
            case ForceToken(token):
                with self._forcing(token):
                    return Outcome(self._generate(request))
            case Gradient(point):
                return self._gradient(request, point)

    def _generate(self, request: Request) -> tuple[int, ...]:
        steps = self._engine.generate_stream(
            self._model, list(request.token_ids), max_tokens=request.new_tokens, temperature=0.0, stop_at_eos=False
        )
        return tuple(s.token_id for s in steps)

    def _captured(
        self,
        request: Request,
        points: Sequence[str],
        writing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Outcome:
        """Generate under a write, then capture under the same one. Each gets a context of its own: its steering counts
        the positions that it has seen."""
        with writing():
            new = self._generate(request)
        if not points:
            return Outcome(new)
        with writing():
            cache = self._engine.run_with_cache(
                self._model, [*request.token_ids, *new[:-1]], [_address(p) for p in points]
            )
        last = len(request.token_ids) - 1
        values = {p: cache[_address(p)][0].cpu() for p in points}
        for point in points:
            if point == "logits":
                values[point] = self._engine.apply_logit_transform(values[point][last:], **self._after_the_head())
            elif split(point)[0] == "z":
                values[point] = values[point].unflatten(-1, (self._model.n_heads, self._model.head_dim))
        return Outcome(new, values)

    def _steering(self, point: str, vector: Any) -> AbstractContextManager[Any]:
        engine, name = self._engine, split(point)[0]
        add = engine.AddSpec(vector=_tensor(vector), scale=1.0)
        spec = engine.SteeringSpec(layers={layer_of(point): engine.LayerSteeringSpec([add])}, point=NAMES[name])
        manager: AbstractContextManager[Any] = engine.steer(self._model, spec)
        return manager

    def _ablation(self, layer: int, head: int) -> AbstractContextManager[Any]:
        """None of its steering operations zeroes a head; its hooks do, which are as public."""
        size = self._model.head_dim

        def zero(z: Any) -> Any:
            z = z.clone()
            z[..., head * size : (head + 1) * size] = 0
            return z

        return self._writing(f"z.{layer}", zero)

    def _forcing(self, token: int) -> AbstractContextManager[Any]:
        """It samples from the logits that the model returns: they are made to leave it no choice."""

        def only(logits: Any) -> Any:
            logits = logits.new_full(logits.shape, float("-inf"))
            logits[..., token] = 0
            return logits

        return self._writing("logits", only)

    def _writing(self, point: str, function: Callable[[Any], Any]) -> AbstractContextManager[Any]:
        name, layer = split(point)
        module, side = self._model.resolve_point(NAMES[name], layer)
        manager = self._engine.HookManager()
        manager.write(module, function, point=side)
        found: AbstractContextManager[Any] = manager
        return found

    def _lens(self, request: Request, point: str) -> Outcome:
        found = self._captured(request, [point])
        rows = found.values[point][len(request.token_ids) - 1 :]
        logits = self._engine.decode_residuals(self._model, rows, **self._after_the_head())
        return Outcome(found.token_ids, {"lens": logits.max(-1).indices.cpu()})

    def _after_the_head(self) -> dict[str, Any]:
        """What some families do to their logits after the head, which its own points leave to the caller."""
        return {"softcap": self._model.final_logit_softcapping, "multiplier": self._model.logit_multiplier}

    def _gradient(self, request: Request, point: str) -> Outcome:
        import torch

        ids = torch.tensor([request.token_ids], device=self._model.device)
        cache = self._engine.run_with_cache(self._model, ids, [_address(point)], detach=False)
        chosen = cache.output.logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
        (grad,) = torch.autograd.grad(chosen.sum(), cache[_address(point)])
        return Outcome((), {point: grad[0].cpu()})

    def install(self, work: Work) -> None:
        raise NotImplementedError(NO_INSTALL)

    def remove(self) -> None:
        """Nothing was ever installed."""

    def engine_settings(self) -> Mapping[str, Any]:
        return {
            "library": "interp-engine",
            "version": version_of("interp-engine"),
            "engine": version_of("transformers"),
            "dtype": self._settings.dtype,
            "attention": self._model.attn_implementation,
            "max_concurrent": 1,
            "device": str(self._model.device),
        }


def _address(point: str) -> str:
    """interp-engine's own name of a point.

    >>> _address("z.3"), _address("logits")
    ('z.3', 'lm_head')
    """
    name, layer = split(point)
    return NAMES[name] if layer is None else f"{NAMES[name]}.{layer}"


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)
