"""The `transformers` engine: its own generation loop, so that a pass, its rows and its sampled token are in plain sight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from adapters.eager import Hooks
from adapters.errors import LoadError
from adapters.interleave import Interleaver, Job, Key, Live
from adapters.layouts import finished
from adapters.points import LOGITS_KEY, SAMPLED_KEY, Location, Points, dimensions, family_of
from adapters.rows import Batch
from adapters.runtime import Ask, Output
from adapters.sampling import Sampling, draw


@dataclass
class Row:
    """One request in a batch: what went in, what has come out."""

    live: Live
    prompt: tuple[int, ...]
    sampling: Sampling
    new: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.live.ended or len(self.new) >= self.sampling.max_new_tokens or self.sampling.ends(self.new)


class HFEngine:
    """A `transformers` causal language model in this process, in eager mode."""

    in_process = True
    copies = False

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        config = model.config.get_text_config()
        self.points = Points(family_of(config.model_type), "hf", dimensions(config))
        self.hooks = Hooks(model)
        self.il = Interleaver(self)
        self.running = False
        self.eos_token_id = model.generation_config.eos_token_id

    # ---- what interventions borrow (interleave.Host)

    def attach(self, key: Key) -> None:
        self.hooks.attach(key, self.il)

    def weight(self, path: str) -> torch.Tensor:
        parameter: torch.Tensor = self.model.get_parameter(path).detach()
        return parameter

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.model.get_submodule(self.points.at("final_norm").key[0])(x)
        return normed

    def unembed(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.get_output_embeddings()(self.norm(x))
        return finished(logits, self.points.family.head, self.model.config.get_text_config())

    # ---- generation

    def run(self, asks: Sequence[Ask]) -> list[Output]:
        batch = [Row(self.il.live(a.id, a.fns, a.body), a.prompt, a.sampling) for a in asks]
        self.generate(batch)
        return [
            Output(r.live.id, r.prompt, tuple(r.new), r.live.saves, r.live.error, r.live.stopped, self.tokenizer)
            for r in batch
        ]

    def generate(self, batch: Sequence[Row], *, grad: bool = False) -> None:
        """Run a batch to its end: greedy or sampled, each sequence to its own length; fills `new` and the live requests."""
        if self.running:
            raise LoadError("this engine is already inside a run: an intervention cannot start another one on it")
        self.running = True
        try:
            with torch.set_grad_enabled(grad):
                self._generate(batch)
        finally:
            self.running = False
            self.il.abandon()
            self.hooks.clear()

    def _generate(self, batch: Sequence[Row]) -> None:
        device = self.model.device
        longest = max(len(s.prompt) for s in batch)
        pads = [longest - len(s.prompt) for s in batch]
        ids = torch.tensor([[0] * p + list(s.prompt) for p, s in zip(pads, batch, strict=True)], device=device)
        padded = any(pads)
        mask = torch.tensor([[0] * p + [1] * (longest - p) for p in pads], device=device) if padded else None
        positions = (
            (mask.cumsum(-1) - 1).clamp(min=0) if mask is not None else torch.arange(longest, device=device)[None]
        )
        cache, first, il = None, [0] * len(batch), self.il
        generators = [s.sampling.generator() for s in batch]
        while True:
            tokens = ids.shape[1]
            rows = Batch(len(batch), tokens, pads if cache is None else [0] * len(batch))
            prompt = cache is None
            running = {i for i, s in enumerate(batch) if not s.done}
            jobs = [
                Job(s.live, i, first[i], tokens - (pads[i] if prompt else 0), prompt)
                for i, s in enumerate(batch)
                if s.live.passes and i in running
            ]
            il.begin(rows, jobs)
            out = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
                             logits_to_keep=1)  # fmt: skip
            cache = out.past_key_values
            logits = out.logits[:, -1]
            il.visit(LOGITS_KEY, logits)
            drawn = draw(logits, [s.sampling for s in batch], generators)
            il.visit(SAMPLED_KEY, drawn)
            il.end()
            chosen = drawn.tolist()
            for i, s in enumerate(batch):
                if i not in running:
                    continue
                # What stopped itself keeps the token of this pass; what failed does not.
                if s.live.error is None:
                    s.new.append(chosen[i])
                first[i] += tokens - (pads[i] if prompt else 0)
            if all(s.done for s in batch):
                return
            ids = drawn[:, None]
            positions = positions[:, -1:] + 1
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(batch), 1)], 1)

    def declared(self) -> list[Location]:
        return []

    def describe(self) -> dict[str, Any]:
        """The settings that this engine runs with, as plain data."""
        return {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
            "device": str(self.model.device),
            "threads": torch.get_num_threads(),
        }

    def close(self) -> None:
        self.hooks.clear()
        self.model = None


def load_hf(
    path: Path, *, dtype: str, device: str | None = None, attention: str = "sdpa", threads: int | None = None
) -> HFEngine:
    """Load a local folder with `transformers`; `dtype` is a torch dtype's name."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if threads:
        torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention)
    model.requires_grad_(False)
    model.eval()
    if device or torch.cuda.is_available():
        model.to(device or "cuda")
    tokenizer = AutoTokenizer.from_pretrained(path) if any(Path(path).glob("tokenizer*")) else None
    return HFEngine(model, tokenizer)
