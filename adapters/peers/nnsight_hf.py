"""nnsight on `transformers`. A work is one function of this file, called once a pass inside a `generate` trace.

A trace gets its batch as one encoding, left-padded, and so its block sees [batch, rows, ...] of all requests at once;
which rows are padding is sorted out afterwards, from the prompts' lengths.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.peers.nnsight import INSTALL, at
from adapters.peers.vanilla import ignore_end_of_sequence, left_padded, version_of
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


@dataclass(frozen=True)
class Site:
    """A point: nnsight's handle of the module, the side of it, and its place in the model's order."""

    envoy: Any
    side: str  # "output"; "input"; "last": the output at the last position
    rank: float


# --- the works, one pass each ------------------------------------------------------------------------------------


def read(site: Site) -> Any:
    if site.side == "input":
        return site.envoy.input
    return site.envoy.output[:, -1:] if site.side == "last" else site.envoy.output


def capture(sites: Sequence[Site]) -> list[Any]:
    return [read(s) for s in sites]


def steer(site: Site, vector: Any, before: Sequence[Site], after: Sequence[Site]) -> list[Any]:
    kept = capture(before)
    site.envoy.output[:] += vector
    return kept + capture(after)


def ablate(out: Any, columns: slice, before: Sequence[Site], after: Sequence[Site]) -> list[Any]:
    kept = capture(before)
    out.input[..., columns] = 0
    return kept + capture(after)


def lens(site: Site, head: Any, norm: Any) -> list[Any]:
    return [head(norm(read(site)[:, -1:])).max(-1).indices]


def probe(site: Site, direction: Any) -> list[Any]:
    return [read(site).float() @ direction]


def force(head: Any, token: int) -> list[Any]:
    """Sampling happens inside `generate`, where no block is: the logits are made to leave it no choice."""
    head.output[..., :] = float("-inf")
    head.output[..., token] = 0
    return []


# --- where the points are, in transformers' classes --------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    layers: str = "model.layers"
    attention_out: str = "self_attn.o_proj"
    norm: str = "model.norm"
    head: str = "lm_head"


_LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "qwen2_moe", "mixtral")
FAMILIES = {name: Family() for name in (*_LIKE_LLAMA, "olmo2", "granite", "qwen3_moe")} | {
    "gpt2": Family("transformer.h", "attn.c_proj", "transformer.ln_f"),
    "gpt_neox": Family("gpt_neox.layers", "attention.dense", "gpt_neox.final_layer_norm", "embed_out"),
}


@dataclass(frozen=True)
class Program:
    """A work, ready for the block: the function, its arguments, and the names of what it returns."""

    body: Callable[..., list[Any]]
    args: tuple[Any, ...]
    names: tuple[str, ...] = ()


class NNsightHF:
    """The column `nnsight-hf`."""

    plain = False

    def boot(self, model: Path, settings: Settings) -> None:
        try:
            import torch
            from nnsight import TransformersModel
        except ImportError as error:
            raise MissingLibrary(f"nnsight is not importable ({error}): {INSTALL}") from error
        torch.set_num_threads(settings.threads)
        self._settings = settings
        where = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = TransformersModel(
            str(model),
            task="text-generation",
            dtype=getattr(torch, settings.dtype),
            device_map=where,
            dispatch=True,
        )
        ignore_end_of_sequence(self._model.pipeline.model)
        self._model.pipeline.model.requires_grad_(False)
        config = self._model.pipeline.model.config
        self._family, self._model_type = FAMILIES.get(config.model_type), config.model_type
        self._heads = config.num_attention_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._device = self._model.pipeline.model.device
        self._installed: tuple[Program, list[Any]] | None = None

    def close(self) -> None:
        self.__dict__.pop("_model", None)
        gc.collect()

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        if isinstance(work, Nothing):
            return None
        if self._family is None:
            return Refusal("model", f"this column knows no module names of the family {self._model_type!r}")
        if unknown := not_among(points_of(work), ("resid_post", "z", "logits")):
            return Refusal("not-expressible", f"this column translates resid_post, z and logits, not {unknown}")
        return None

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        if isinstance(work, Gradient):
            return [self._gradient(r, work) for r in requests]
        step = self._settings.max_concurrent
        return [o for i in range(0, len(requests), step) for o in self._batch(requests[i : i + step], work)]

    def _batch(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        batch = left_padded(requests, self._device)
        new = max(r.new_tokens for r in requests)
        if not isinstance(work, Nothing):
            program = self._program(work)
            ids, passes = _trace(self._model, batch, new, program.body, program.args)
        elif self._installed is not None:
            program, passes = self._installed
            passes.clear()
            ids = _trace_installed(self._model, batch, new)
        else:
            program, passes = Program(capture, ((),)), []
            ids = self._model.generate(**batch, max_new_tokens=new, do_sample=False)
        return self._outcomes(requests, ids[:, -new:].tolist(), program, passes)

    def _outcomes(self, requests: Any, new_ids: Any, program: Program, passes: Any) -> list[Outcome]:
        import torch

        rows = [torch.cat(parts, dim=1).cpu() for parts in zip(*passes, strict=True)]
        longest = max(len(r.token_ids) for r in requests)
        outcomes = []
        for i, r in enumerate(requests):
            values = {}
            for name, value in zip(program.names, rows, strict=True):
                one_a_pass = name in ("logits", "lens")
                first = 0 if one_a_pass else longest - len(r.token_ids)
                count = r.new_tokens if one_a_pass else len(r.token_ids) + r.new_tokens - 1
                mine = value[i, first : first + count]
                values[name] = mine.unflatten(-1, (self._heads, self._head_dim)) if name.startswith("z.") else mine
            outcomes.append(Outcome(tuple(new_ids[i][: r.new_tokens]), values))
        return outcomes

    def install(self, work: Work) -> None:
        self.remove()
        if isinstance(work, Gradient):
            raise NotImplementedError("a gradient needs a backward pass of its own, which no edit can add")
        program, passes = self._program(work), list[Any]()
        _edit(self._model, program.body, program.args, passes)
        self._installed = program, passes

    def remove(self) -> None:
        self._model.clear_edits()
        self._installed = None

    def engine_settings(self) -> Mapping[str, Any]:
        return {
            "library": "nnsight",
            "version": version_of("nnsight"),
            "engine": version_of("transformers"),
            "dtype": self._settings.dtype,
            "attention": self._model.pipeline.model.config._attn_implementation,
            "max_concurrent": self._settings.max_concurrent,
            "device": str(self._device),
        }

    def _site(self, point: str) -> Site:
        assert self._family is not None
        name, layer = split(point)
        if layer is None:
            return Site(at(self._model, self._family.head), "last", float("inf"))
        block = at(self._model, self._family.layers)[layer]
        if name == "z":
            return Site(at(block, self._family.attention_out), "input", layer + 0.2)
        return Site(block, "output", layer + 0.9)

    def _program(self, work: Work) -> Program:
        """The one place where a work becomes nnsight."""
        assert self._family is not None
        head, norm = at(self._model, self._family.head), at(self._model, self._family.norm)
        match work:
            case Capture(points):
                names, sites = self._ordered(points)
                return Program(capture, (sites,), names)
            case Lens(point):
                return Program(lens, (self._site(point), head, norm), ("lens",))
            case Probe(point, direction):
                return Program(probe, (self._site(point), self._tensor(direction).float()), ("probe",))
            case Steer(point, vector, watch):
                site = self._site(point)
                names, before, after = self._around(site.rank, watch)
                return Program(steer, (site, self._tensor(vector), before, after), names)
            case AblateHead(layer, number, watch):
                site = self._site(f"z.{layer}")
                columns = slice(number * self._head_dim, (number + 1) * self._head_dim)
                names, before, after = self._around(site.rank, watch)
                return Program(ablate, (site.envoy, columns, before, after), names)
            case ForceToken(token):
                return Program(force, (head, token))
        raise NotImplementedError(f"{type(work).__name__} is no work of a pass")

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

        return torch.from_numpy(array.copy()).to(self._device, getattr(torch, self._settings.dtype))

    def _gradient(self, request: Request, work: Gradient) -> Outcome:
        assert self._family is not None
        ids = left_padded([request], self._device)["input_ids"]
        grad = _trace_gradient(self._model, ids, self._site(work.point).envoy, at(self._model, self._family.head))
        return Outcome((), {work.point: grad[0].cpu()})


# --- the blocks: nnsight reads their source ----------------------------------------------------------------------


def _trace(model: Any, batch: Any, new: int, body: Any, args: Any) -> tuple[Any, list[Any]]:
    with model.generate(**batch, max_new_tokens=new, do_sample=False) as tr:
        passes = save([])
        for _ in tr.iter[:new]:
            passes.append(body(*args))
        ids = tr.result.save()
    return ids, passes


def _trace_installed(model: Any, batch: Any, new: int) -> Any:
    with model.generate(**batch, max_new_tokens=new, do_sample=False) as tr:
        ids = tr.result.save()
    return ids  # noqa: RET504  # the block runs elsewhere: it cannot return


def _edit(model: Any, body: Any, args: Any, passes: list[Any]) -> None:
    with model.edit(inplace=True) as tr:
        for _ in tr.iter[:]:
            passes.append(body(*args))


def _trace_gradient(model: Any, ids: Any, layer: Any, head: Any) -> Any:
    with model.trace(input_ids=ids):
        hidden = layer.output
        hidden.requires_grad_()
        chosen = head.output[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
        with chosen.sum().backward():
            grad = hidden.grad.save()
    return grad


def save(value: Any) -> Any:
    import nnsight

    return nnsight.save(value)
