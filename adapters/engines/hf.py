"""The `transformers` engine: our own generation loop, so that a pass, its rows and its token are in plain sight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from adapters.eager import Hooks
from adapters.errors import LoadError
from adapters.interleave import Interleaver, Key
from adapters.layouts import finished
from adapters.live import Job, Live
from adapters.modules import parameter
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
    computed: int = 0

    @property
    def done(self) -> bool:
        return self.live.ended or len(self.new) >= self.sampling.max_new_tokens or self.sampling.ends(self.new)

    def job(self, index: int, tokens: int) -> Job:
        return Job(self.live, index, self.computed, tokens, self.computed < len(self.prompt))

    def passed(self, tokens: int, token: int) -> None:
        """A pass is over. What stopped itself keeps its token; what failed does not."""
        self.computed += tokens
        if self.live.error is None:
            self.new.append(token)

    def output(self, tokenizer: Any) -> Output:
        live = self.live
        return Output(live.id, self.prompt, tuple(self.new), live.saves, live.error, live.stopped, tokenizer)


class HFEngine:
    """A `transformers` causal language model in this process, in eager mode."""

    in_process = True
    taps: Sequence[str] | None = None
    buffers: Sequence[str] = ()

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        config = model.config.get_text_config()
        self.points = Points(family_of(config.model_type), "hf", dimensions(config)).within(model)
        self.hooks = Hooks(model)
        self.il = Interleaver(self)
        self.running = False
        # As an index and not as the number 1: a slice of a batch is one row here and one there, for which the head's
        # product copies its weights once a row (8 x 16 tokens of SmolLM2 in bfloat16: 1.07 s against 0.21 s).
        self._last = torch.tensor([-1], device=model.device)
        self.eos_token_id = model.generation_config.eos_token_id
        self.max_tokens: int | None = getattr(config, "max_position_embeddings", None)

    @property
    def gradients(self) -> bool:
        """A compiled model's taps are no part of autograd's graph."""
        return isinstance(self.hooks, Hooks)

    # ---- what interventions borrow (interleave.Host)

    def attach(self, key: Key) -> None:
        self.hooks.attach(key, self.il)

    def weight(self, path: str) -> torch.Tensor:
        return parameter(self.model, path)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.model.get_submodule(self.points.at("final_norm").key[0])(x)
        return normed

    def unembed(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.get_output_embeddings()(self.norm(x))
        return finished(logits, self.points.family.head, self.model.config.get_text_config())

    # ---- generation

    def run(self, asks: Sequence[Ask]) -> list[Output]:
        if self.running:
            raise LoadError("this engine is already inside a run: an intervention cannot start another one on it")
        grad = any(a.grad for a in asks)
        batch = [Row(self.il.live(a.id, a.fns, a.body, a.check_finite), a.prompt, a.sampling) for a in asks]
        self.running, self.il.grad = True, grad
        try:
            with torch.set_grad_enabled(grad):
                # Losses of one batch would share a graph, which the first backward frees: with gradients, one by one.
                for together in [[row] for row in batch] if grad else [batch]:
                    self._generate(together)
        finally:
            self.il.abandon()
            self.hooks.clear()
            self.running = self.il.grad = False
            for row in batch:
                row.live.close()
        return [row.output(self.tokenizer) for row in batch]

    def _generate(self, batch: Sequence[Row]) -> None:
        """Run a batch to its end, each sequence to its own length; fills `new` and the live requests."""
        device = self.model.device
        longest = max(len(s.prompt) for s in batch)
        pads = [longest - len(s.prompt) for s in batch]
        ids = torch.tensor([[0] * p + list(s.prompt) for p, s in zip(pads, batch, strict=True)], device=device)
        mask = torch.tensor([[0] * p + [1] * (longest - p) for p in pads], device=device) if any(pads) else None
        positions = (
            (mask.cumsum(-1) - 1).clamp(min=0) if mask is not None else torch.arange(longest, device=device)[None]
        )
        cache = self._cache(len(batch), longest + max(s.sampling.max_new_tokens for s in batch))
        generators = [s.sampling.generator() for s in batch]
        while True:
            # Rows that have ended go on as padding: nobody is given them.
            running = [i for i, s in enumerate(batch) if not s.done]
            if not running:
                return
            jobs = [batch[i].job(i, ids.shape[1] - pads[i]) for i in running if batch[i].live.passes]
            self.il.begin(Batch(len(batch), ids.shape[1], pads), jobs)
            logits, cache = self._forward(ids, mask, positions, cache)
            drawn = self._draw(logits, batch, generators)
            chosen = drawn.tolist()
            for i in running:
                batch[i].passed(ids.shape[1] - pads[i], chosen[i])
            ids, pads, positions = drawn[:, None], [0] * len(batch), positions[:, -1:] + 1
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(batch), 1)], 1)

    def _draw(self, logits: torch.Tensor, batch: Sequence[Row], generators: Sequence[Any]) -> torch.Tensor:
        """The end of a pass: interventions see the logits, then the tokens that were drawn."""
        il = self.il
        instead = il.visit(LOGITS_KEY, logits)
        drawn = draw(logits if instead is None else instead, [s.sampling for s in batch], generators)
        il.visit(SAMPLED_KEY, drawn)
        il.end()
        if il.interrupt is not None:
            interrupt, il.interrupt = il.interrupt, None
            raise interrupt
        return drawn

    def _cache(self, batch: int, tokens: int) -> Any:
        """The key-value cache of a batch that grows to `tokens`; None lets the model make its own."""
        return None

    def _forward(self, ids: Any, mask: Any, positions: Any, cache: Any) -> tuple[torch.Tensor, Any]:
        """One forward: the last position's logits [batch, vocab], and the cache."""
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=self._last,
        )
        return out.logits[:, -1], out.past_key_values

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
        self.hooks = Hooks(torch.nn.Module())


def kernel_for(config: Any) -> str:
    """The attention kernel of `transformers` that computes what the family means: "sdpa", but for families whose code
    has none, and for those that cap their scores, which that kernel leaves out without a word."""
    from transformers import AutoModelForCausalLM

    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    known = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return "eager" if capped or not getattr(known, "_supports_sdpa", True) else "sdpa"


def load_hf(
    path: Path, *, dtype: str, device: str | None = None, attention: str | None = None, threads: int | None = None
) -> HFEngine:
    """Load a local folder with `transformers`; `dtype` is a torch dtype's name, `attention` a kernel's ("sdpa")."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if threads:
        torch.set_num_threads(threads)
    attention = attention or kernel_for(AutoConfig.from_pretrained(path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention)
    model.requires_grad_(False)
    model.eval()
    if device or torch.cuda.is_available():
        model.to(device or "cuda")
    tokenizer = AutoTokenizer.from_pretrained(path) if any(Path(path).glob("tokenizer*")) else None
    return HFEngine(model, tokenizer)
