"""The column `acme`: transformers with forward hooks, as an example of an adapter. Replace its engine by yours.

Nothing heavy is imported at the top: a grid is listed and planned on machines that have none of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapters.work import (
    Capture,
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
)

INSTALL = "pip install torch transformers"


class Acme:
    """One system under test. tapgrid makes it without arguments, in a fresh process."""

    plain = False  # True only for an engine with nothing attached

    def __init__(self) -> None:
        self._model: Any = None
        self._installed: Work = Nothing()

    def boot(self, model: Path, settings: Settings) -> None:
        """Load `model`, a local folder, with exactly these settings: every column of a grid boots with the same."""
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise MissingLibrary(f"{error}: {INSTALL}") from error
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=settings.dtype).eval()

    def close(self) -> None:
        """Also before any boot, and after an error."""
        self._model = None
        gc.collect()

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        """What the library has no word for, said before anything is timed. Never approximate."""
        if not isinstance(work, Nothing | Capture | Steer | Probe):
            return Refusal("not-expressible", f"acme has no words for {type(work).__name__}")
        if other := [p for p in points_of(work) if not p.startswith("resid_post.")]:
            return Refusal("not-expressible", f"acme reaches the outputs of layers, not {other[0]}")
        return None

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        """Greedy, exactly `new_tokens` each, whatever the end-of-sequence token says; an outcome for each request.

        A library that batches does all of them at once here.
        """
        work = self._installed if isinstance(work, Nothing) else work
        return [self._one(request, work) for request in requests]

    def install(self, work: Work) -> None:
        """Later `run(requests, Nothing())` calls do it. Raise NotImplementedError where the library cannot."""
        self._installed = work

    def remove(self) -> None:
        self._installed = Nothing()

    def engine_settings(self) -> Mapping[str, Any]:
        """What the engine really booted with, as plain data: printed beside every number."""
        from importlib.metadata import version

        return {
            "library": "transformers",
            "version": version("transformers"),
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "threads": self._settings.threads,
        }

    # ---- the translation: what tapgrid's words mean here

    def _one(self, request: Request, work: Work) -> Outcome:
        import torch

        kept: dict[str, list[Any]] = {}
        handles = self._attach(work, kept)
        ids, tokens, cache = torch.tensor([request.token_ids]), [], None
        try:
            with torch.no_grad():
                for _ in range(request.new_tokens):
                    out = self._model(input_ids=ids, past_key_values=cache, use_cache=True)
                    cache = out.past_key_values
                    tokens.append(int(out.logits[0, -1].argmax()))
                    ids = torch.tensor([[tokens[-1]]])
        finally:
            for handle in handles:
                handle.remove()
        return Outcome(tuple(tokens), self._values(work, {k: torch.cat(v) for k, v in kept.items()}))

    def _attach(self, work: Work, kept: dict[str, list[Any]]) -> list[Any]:
        """Hooks for what is written first, and then for what is read: a point that is both is read as it was left."""
        import torch

        handles = []
        if isinstance(work, Steer):
            vector = torch.from_numpy(work.vector).to(self._model.dtype)
            handles.append(self._on(work.point, lambda hidden: hidden + vector))
        read = work.points if isinstance(work, Capture) else getattr(work, "watch", ())
        for point in (*read, *([work.point] if isinstance(work, Probe) else [])):

            def keep(hidden: Any, point: str = point) -> None:
                kept.setdefault(point, []).append(hidden[0].clone())

            handles.append(self._on(point, keep))
        return handles

    def _on(self, point: str, see: Callable[[Any], Any]) -> Any:
        """`see` gets a layer's output, [1, tokens of this pass, d_model], and may return another."""
        layer = self._model.model.layers[int(point.partition(".")[2])]

        def hook(module: Any, args: Any, out: Any) -> Any:
            hidden = out[0] if isinstance(out, tuple) else out
            changed = see(hidden)
            if changed is None:
                return None
            return (changed, *out[1:]) if isinstance(out, tuple) else changed

        return layer.register_forward_hook(hook)

    def _values(self, work: Work, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Rows are the prompt's tokens and all new ones but the last, in order, on the CPU."""
        import torch

        if isinstance(work, Probe):
            direction = torch.from_numpy(work.direction).to(self._model.dtype)
            return {"probe": kept[work.point] @ direction}
        return dict(kept)
