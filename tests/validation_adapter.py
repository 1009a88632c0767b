"""An adapter on plain `transformers`, and small random models for it: what the validation tests validate.

Written apart from `validation/hooks.py`, so that the two can disagree: greedy decoding with a cache, request by
request, and its own module paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from adapters.work import (
    AblateHead,
    Capture,
    ForceToken,
    Gradient,
    Lens,
    Nothing,
    Outcome,
    Probe,
    Refusal,
    Request,
    Settings,
    Shape,
    Steer,
    Work,
)
from validation.reference import ReferenceFailed, Server, answer_file

VOCAB = 256


def make_model(kind: str, folder: Path, *, layers: int = 6, seed: int = 0) -> Path:
    """A small random model of a family in `folder`, with weights large enough for its layers to matter."""
    import transformers as t

    small = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    made: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**small, tie_word_embeddings=False)),
        "gemma3": lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**small, sliding_window=16, query_pre_attn_scalar=16)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=layers, n_head=4)),
    }
    torch.manual_seed(seed)
    model = made[kind]()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=1.0 if "embed" in name or "wte" in name else 1.5 / weight.shape[-1] ** 0.5)
            elif "norm" in name or "ln_" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder


def some_requests(
    lengths: Sequence[int] = (33, 19, 26), new: int = 6, seed: int = 1, vocab: int = VOCAB
) -> list[Request]:
    """Random prompts, each with a first token of its own."""
    g = torch.Generator().manual_seed(seed)
    first = torch.randperm(vocab, generator=g).tolist()
    return [
        Request(f"r{k}", (first[k], *torch.randint(0, vocab, (n - 1,), generator=g).tolist()), new)
        for k, n in enumerate(lengths)
    ]


class LocalServer(Server):
    """The reference computed in the test's own process, which has torch already: no second import to wait for."""

    def ask(self, request: Path) -> None:
        try:
            answer_file(request)
        except Exception as error:
            raise ReferenceFailed(f"{type(error).__name__}: {error}") from error


class HooksAdapter:
    """The eight kinds of work by torch hooks; `without` names points that it refuses to capture."""

    plain = False

    def __init__(self, *, attention: str = "sdpa", without: Sequence[str] = ()) -> None:
        self.attention, self.without = attention, tuple(without)
        self.installed: Work | None = None

    def boot(self, model: Path, settings: Settings) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings.threads)
        dtype = getattr(torch, settings.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation=self.attention).eval()
        config = self.model.config
        self.heads = config.num_attention_heads
        self.old = config.model_type == "gpt2"
        self.blocks = self.model.transformer.h if self.old else self.model.model.layers

    def close(self) -> None:
        del self.model

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        asked = work.points if isinstance(work, Capture) else getattr(work, "watch", ())
        refused = next((p for p in asked if p.partition(".")[0] in self.without), None)
        return Refusal("model", f"no {refused} here") if refused else None

    def install(self, work: Work) -> None:
        self.installed = work

    def remove(self) -> None:
        self.installed = None

    def engine_settings(self) -> Mapping[str, Any]:
        return {"attention": self.attention}

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        work = self.installed or work
        if isinstance(work, Gradient):
            return [self._gradient(r, work.point) for r in requests]
        with torch.no_grad():
            return [self._generate(r, work) for r in requests]

    def _generate(self, request: Request, work: Work) -> Outcome:
        from transformers import DynamicCache

        cache, rows, new, values = DynamicCache(), list(request.token_ids), [], {}
        for _ in range(request.new_tokens):
            found: dict[str, torch.Tensor] = {}
            with ExitStack() as stack:
                self._attach(work, found, stack)
                logits = self.model(input_ids=torch.tensor([rows]), past_key_values=cache, use_cache=True).logits[
                    0, -1:
                ]
            for name, value in self._values(work, found, logits).items():
                values.setdefault(name, []).append(value)
            new.append(work.id if isinstance(work, ForceToken) else int(logits.argmax()))
            rows = new[-1:]
        return Outcome(tuple(new), {name: torch.cat(parts) for name, parts in values.items()})

    def _attach(self, work: Work, found: dict[str, torch.Tensor], stack: ExitStack) -> None:
        if isinstance(work, Steer):
            vector = torch.from_numpy(work.vector).to(self.model.dtype)
            self._hook(work.point, lambda x: x + vector, stack)
        if isinstance(work, AblateHead):
            size = self._z_module(work.layer).in_features // self.heads if not self.old else 64 // self.heads
            mask = torch.ones(size * self.heads, dtype=self.model.dtype)
            mask[work.head * size : (work.head + 1) * size] = 0
            self._hook(f"z.{work.layer}", lambda x: x * mask, stack)
        points = work.points if isinstance(work, Capture) else getattr(work, "watch", ())
        if isinstance(work, Lens | Probe):
            points = (work.point,)
        for point in points:
            if point != "logits":
                self._hook(point, lambda x, point=point: found.__setitem__(point, x[0].clone()), stack)  # type: ignore[misc]

    def _values(self, work: Work, found: dict[str, torch.Tensor], logits: torch.Tensor) -> dict[str, torch.Tensor]:
        if isinstance(work, Lens):
            norm = self.model.transformer.ln_f if self.old else self.model.model.norm
            return {"lens": self.model.lm_head(norm(found[work.point][-1:])).argmax(-1)}
        if isinstance(work, Probe):
            return {"probe": found[work.point] @ torch.from_numpy(work.direction).to(self.model.dtype)}
        values = {p: x.reshape(len(x), self.heads, -1) if p.startswith("z.") else x for p, x in found.items()}
        wanted = work.points if isinstance(work, Capture) else ()
        return {**values, **({"logits": logits} if "logits" in wanted else {})}

    def _z_module(self, layer: int) -> Any:
        block = self.blocks[layer]
        return block.attn.c_proj if self.old else block.self_attn.o_proj

    def _hook(self, point: str, change: Callable[[torch.Tensor], torch.Tensor | None], stack: ExitStack) -> None:
        name, _, layer = point.partition(".")
        block = self.blocks[int(layer)]
        gemma = hasattr(block, "pre_feedforward_layernorm")
        outputs = {
            "resid_post": block,
            "attn_out": block.post_attention_layernorm if gemma else block.attn if self.old else block.self_attn,
            "mlp_out": block.post_feedforward_layernorm if gemma else block.mlp,
        }
        if name == "z":

            def before(_m: Any, args: Any) -> Any:
                new = change(args[0])
                return None if new is None else (new,)

            stack.callback(self._z_module(int(layer)).register_forward_pre_hook(before).remove)
            return

        def after(_m: Any, _a: Any, out: Any) -> Any:
            new = change(out[0] if isinstance(out, tuple) else out)
            return None if new is None else (new, *out[1:]) if isinstance(out, tuple) else new

        stack.callback(outputs[name].register_forward_hook(after).remove)

    def _gradient(self, request: Request, point: str) -> Outcome:
        ids, kept = torch.tensor([request.token_ids]), []
        with ExitStack() as stack:
            self._hook(point, lambda x: (x.retain_grad(), kept.append(x))[2:] or None, stack)  # type: ignore[func-returns-value]
            logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            logits.log_softmax(-1).gather(1, ids[0, 1:, None]).sum().backward()
        return Outcome((), {point: kept[0].grad[0].clone()})


def works(d_model: int = 64, layer: int = 2) -> dict[str, Work]:
    """One of every kind of work, by row name."""
    rng = torch.Generator().manual_seed(5)
    vector = torch.randn(d_model, generator=rng)
    return {
        "generate": Nothing(),
        "capture-1": Capture((f"resid_post.{layer}",)),
        "steer": Steer(f"resid_post.{layer}", (4 * vector).numpy()),
        "lens": Lens(f"resid_post.{layer}"),
        "probe": Probe(f"resid_post.{layer}", (vector / vector.norm()).numpy()),
        "ablate-head": AblateHead(layer, 1),
        "force-token": ForceToken(7),
        "gradient": Gradient(f"resid_post.{layer}"),
    }
