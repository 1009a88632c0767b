"""TransformerLens's bridge on `transformers`: hooks by name, during its own `generate`.

A hook sees [batch, rows, ...] of a left-padded batch; which rows are padding is sorted out afterwards, from the
prompts' lengths.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapters.peers.vanilla import left_padded, version_of
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

INSTALL = "pip install transformer-lens==4.3.0"
Hook = tuple[str, Callable[..., Any]]
Kept = dict[str, list[Any]]


def hook_name(point: str) -> str:
    """TransformerLens's own name of a point.

    >>> hook_name("resid_post.3"), hook_name("z.3")
    ('blocks.3.hook_out', 'blocks.3.attn.hook_z')
    """
    name, layer = split(point)
    if name == "logits":
        return "unembed.hook_out"
    return {"resid_post": f"blocks.{layer}.hook_out", "z": f"blocks.{layer}.attn.hook_z"}[name]


def unknown(work: Work, known: Sequence[str]) -> Refusal | None:
    """The refusal of a point that is not translated here."""
    point = not_among(points_of(work), known)
    return Refusal("not-expressible", f"this column translates {', '.join(known)}, not {point}") if point else None


class TransformerLensHF:
    """The column `transformerlens-hf`."""

    plain = False

    def boot(self, model: Path, settings: Settings) -> None:
        try:
            import torch
            from transformer_lens.model_bridge import TransformerBridge
        except ImportError as error:
            raise MissingLibrary(f"TransformerLens is not importable ({error}): {INSTALL}") from error
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._dtype = getattr(torch, settings.dtype)
        where = "cuda" if torch.cuda.is_available() else "cpu"
        self._bridge = TransformerBridge.boot_transformers(str(model), dtype=self._dtype, device=where)
        for parameter in self._bridge.parameters():
            parameter.requires_grad_(False)
        self._device = where
        self._installed: Kept | None = None

    def close(self) -> None:
        self.__dict__.pop("_bridge", None)
        gc.collect()

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        return unknown(work, ("resid_post", "z", "logits"))

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        if isinstance(work, Gradient):
            return [self._gradient(r, work.point) for r in requests]
        step = self._settings.max_concurrent
        return [o for i in range(0, len(requests), step) for o in self._batch(requests[i : i + step], work)]

    def _batch(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        batch = left_padded(requests, self._device)
        new = max(r.new_tokens for r in requests)
        if isinstance(work, Nothing):
            kept = {} if self._installed is None else self._installed
            for rows in kept.values():
                rows.clear()
            ids = self._generate(batch, new)
        else:
            kept = {}
            with self._bridge.hooks(fwd_hooks=self._hooks(work, kept)):
                ids = self._generate(batch, new)
        return _outcomes(requests, ids[:, -new:].tolist(), kept)

    def _generate(self, batch: Mapping[str, Any], new: int) -> Any:
        even = bool(batch["attention_mask"].all())
        return self._bridge.generate(
            batch["input_ids"],
            max_new_tokens=new,
            do_sample=False,
            stop_at_eos=False,
            return_type="tokens",
            verbose=False,
            attention_mask=None if even else batch["attention_mask"],
        )

    def _hooks(self, work: Work, kept: Kept) -> list[Hook]:
        """The one place where a work becomes TransformerLens: hooks by name, what they keep in `kept`."""
        match work:
            case Capture(points):
                return [keep(p, kept) for p in points]
            case Steer(point, vector, watch):
                v = self._tensor(vector)
                return [(hook_name(point), lambda value, hook: value + v), *(keep(p, kept) for p in watch)]
            case AblateHead(layer, head, watch):

                def zero(value: Any, hook: Any) -> Any:
                    value[:, :, head] = 0
                    return value

                return [(hook_name(f"z.{layer}"), zero), *(keep(p, kept) for p in watch)]
            case Probe(point, direction):
                w = self._tensor(direction).float()
                return [keep(point, kept, "probe", lambda value: value.float() @ w)]
            case Lens(point):
                norm, head = self._bridge.ln_final.original_component, self._bridge.unembed.original_component
                return [keep(point, kept, "lens", lambda value: head(norm(value[:, -1:])).max(-1).indices)]
            case ForceToken(token):

                def only(value: Any, hook: Any) -> Any:
                    value[...] = float("-inf")
                    value[..., token] = 0
                    return value

                return [("unembed.hook_out", only)]
        raise NotImplementedError(f"{type(work).__name__} is no work of a pass")

    def _tensor(self, array: Any) -> Any:
        import torch

        return torch.from_numpy(array.copy()).to(self._device, self._dtype)

    def _gradient(self, request: Request, point: str) -> Outcome:
        ids = left_padded([request], self._device)["input_ids"]
        found: dict[str, Any] = {}

        def start(value: Any, hook: Any) -> Any:
            found["value"] = value.detach().requires_grad_()
            return found["value"]

        with self._bridge.hooks(fwd_hooks=[(hook_name(point), start)]):
            logits = self._bridge(ids, return_type="logits")
        chosen = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
        chosen.sum().backward()
        return Outcome((), {point: found["value"].grad[0].cpu()})

    def install(self, work: Work) -> None:
        self.remove()
        if isinstance(work, Gradient):
            raise NotImplementedError("a gradient needs a backward pass of its own, which no hook can add")
        self._installed = {}
        for name, hook in self._hooks(work, self._installed):
            self._bridge.add_perma_hook(name, hook)

    def remove(self) -> None:
        self._bridge.reset_hooks(including_permanent=True)
        self._installed = None

    def engine_settings(self) -> Mapping[str, Any]:
        return {
            "library": "transformer-lens",
            "version": version_of("transformer-lens"),
            "engine": version_of("transformers"),
            "dtype": self._settings.dtype,
            "attention": self._bridge.original_model.config._attn_implementation,
            "max_concurrent": self._settings.max_concurrent,
            "device": self._device,
        }


def keep(point: str, kept: Kept, name: str = "", of: Callable[[Any], Any] | None = None) -> Hook:
    """A hook that keeps `of(value)` of every pass under `name`; the value itself under its point by default."""

    def hooked(value: Any, hook: Any) -> None:
        # A copy: what comes after may write in place, and a view would keep the whole buffer.
        kept.setdefault(name or point, []).append(of(value) if of else value.clone())

    return hook_name(point), hooked


def _outcomes(requests: Sequence[Request], new_ids: Sequence[Sequence[int]], kept: Kept) -> list[Outcome]:
    import torch

    longest = max(len(r.token_ids) for r in requests)
    whole = {name: torch.cat([v[:, -1:] if name == "logits" else v for v in parts], 1) for name, parts in kept.items()}
    outcomes = []
    for i, r in enumerate(requests):
        values = {}
        for name, value in whole.items():
            one_a_pass = name in ("logits", "lens")
            first = 0 if one_a_pass else longest - len(r.token_ids)
            count = r.new_tokens if one_a_pass else len(r.token_ids) + r.new_tokens - 1
            values[name] = value[i, first : first + count].cpu()
        outcomes.append(Outcome(tuple(new_ids[i][: r.new_tokens]), values))
    return outcomes
