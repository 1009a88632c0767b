"""Canonical points on a plain `transformers` model, by ordinary torch hooks.

Written for the reference alone and sharing nothing with the runtime in `adapters/`: a reference that took
its points from the code under test would agree with every mistake in it.

A family is a row of `LAYOUTS`; its attribute names are those of `transformers`' modelling files.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adapters.work import split

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Layout:
    """Where one family keeps things. `attn_out` and `mlp_out` are the modules whose output joins the residual."""

    blocks: str
    embed: str
    final_norm: str
    attn_norm: str
    attn_out: str
    z: str
    mlp_norm: str
    mlp_out: str


_LLAMA = Layout(
    blocks="model.layers", embed="model.embed_tokens", final_norm="model.norm", attn_norm="input_layernorm",
    attn_out="self_attn", z="self_attn.o_proj", mlp_norm="post_attention_layernorm", mlp_out="mlp",
)  # fmt: skip
_GEMMA = Layout(
    blocks="model.layers", embed="model.embed_tokens", final_norm="model.norm", attn_norm="input_layernorm",
    attn_out="post_attention_layernorm", z="self_attn.o_proj",
    mlp_norm="pre_feedforward_layernorm", mlp_out="post_feedforward_layernorm",
)  # fmt: skip
_GPT2 = Layout(
    blocks="transformer.h", embed="transformer.wte", final_norm="transformer.ln_f", attn_norm="ln_1",
    attn_out="attn", z="attn.c_proj", mlp_norm="ln_2", mlp_out="mlp",
)  # fmt: skip
LAYOUTS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "mixtral", "qwen3_moe", "phi3"), _LLAMA),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
    "gpt2": _GPT2,
}


class UnknownPoint(ValueError):
    """A point that the reference cannot read or write; the message lists those it can."""


def layout(model: Any) -> Layout:
    """The layout of a loaded model, or an error that names the families there are."""
    kind = model.config.model_type
    if kind not in LAYOUTS:
        raise UnknownPoint(f"the reference has no layout for model type {kind!r}; it has {', '.join(sorted(LAYOUTS))}")
    return LAYOUTS[kind]


def head_shape(model: Any) -> tuple[int, int]:
    """(heads, head_dim) of the attention output."""
    config = model.config
    heads = config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _with_first(output: Any, new: Any) -> Any:
    return (new, *output[1:]) if isinstance(output, tuple) else new


@dataclass(frozen=True)
class Site:
    """One place in the model: a module, and whether the point is its input or its output."""

    module: Any
    side: str

    def hook(self, visit: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
        """Call `visit` on the tensor at each forward; what it returns, if anything, takes its place."""
        if self.side == "output":

            def after(_module: Any, _args: Any, output: Any) -> Any:
                new = visit(_first(output))
                return None if new is None else _with_first(output, new)

            return self.module.register_forward_hook(after)

        def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # A block is called with its hidden states first or by name, by family and release.
            new = visit(args[0] if args else kwargs["hidden_states"])
            if new is None:
                return None
            return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

        return self.module.register_forward_pre_hook(before, with_kwargs=True)


def site(model: Any, point: str) -> Site:
    """Where `point` lives in `model`."""
    at = layout(model)
    name, layer = split(point)
    whole = {"embed": (at.embed, "output"), "final_norm": (at.final_norm, "output")}
    if layer is None:
        if name not in whole:
            raise UnknownPoint(
                f"the reference has no point {point!r}; without a layer it has {', '.join(whole)}, logits"
            )
        path, side = whole[name]
        return Site(model.get_submodule(path), side)
    blocks = model.get_submodule(at.blocks)
    if not 0 <= layer < len(blocks):
        raise UnknownPoint(f"{point!r}: the model has layers 0 to {len(blocks) - 1}")
    inside = {
        "resid_pre": ("", "input"), "attn_in": (at.attn_norm, "output"), "z": (at.z, "input"),
        "attn_out": (at.attn_out, "output"), "resid_mid": (at.mlp_norm, "input"), "mlp_in": (at.mlp_norm, "output"),
        "mlp_out": (at.mlp_out, "output"), "resid_post": ("", "output"),
    }  # fmt: skip
    if name not in inside:
        raise UnknownPoint(f"the reference has no point {point!r}; in a layer it has {', '.join(inside)}")
    path, side = inside[name]
    return Site(blocks[layer].get_submodule(path), side)


def read(model: Any, point: str, found: dict[str, torch.Tensor], stack: ExitStack, *, grad: bool = False) -> None:
    """Leave a hook that puts `point` of the next forward into `found`, [tokens, ...], until `stack` closes.

    With `grad` it is [1, tokens, ...] and a leaf: what comes before it takes no part in the backward pass.
    """

    def keep(x: torch.Tensor) -> torch.Tensor | None:
        if grad:
            found[point] = x.detach().requires_grad_()
            return found[point]
        row = x[0].detach().clone()
        found[point] = row.reshape(len(row), *head_shape(model)) if split(point)[0] == "z" else row
        return None

    stack.callback(site(model, point).hook(keep).remove)


def add(model: Any, point: str, vector: torch.Tensor, stack: ExitStack) -> None:
    """Leave a hook that adds `vector` at `point` to every token. Hook it before reading, to read what was written."""
    stack.callback(site(model, point).hook(lambda x: x + vector.to(x.dtype)).remove)


def zero_head(model: Any, layer: int, head: int, stack: ExitStack) -> None:
    """Leave a hook that sets one head of `z.<layer>` to zero."""
    heads, size = head_shape(model)
    if not 0 <= head < heads:
        raise UnknownPoint(f"head {head}: the model has heads 0 to {heads - 1}")

    def zero(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[..., head * size : (head + 1) * size] = 0
        return y

    stack.callback(site(model, f"z.{layer}").hook(zero).remove)
