"""Canonical points, and where each lives in each family on each engine.

A point has one meaning everywhere. Where it lives is data: a `Site` names a module, the side of it that is
read, and how the tensor is laid out there. A new family is a row of `FAMILIES`, not code. Layouts:

    tensor   one tensor; what is handed out is a live view of the request's rows
    pair     (hidden, residual) of an engine that fuses the residual add into the next norm: the point is
             their sum. Handed out as a sum, written back as (0, value) for edited rows only, which the next
             norm adds up to exactly that value
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from adapters.errors import PointRefusedError, UnknownPointError, at_user_line

Engine = Literal["hf", "vllm"]

# In the model's order; an entry's place is what "already passed" is judged by.
PER_LAYER = ("resid_pre", "attn_in", "q", "k", "v", "pattern", "z", "attn_out", "resid_mid", "mlp_in", "router", "mlp_pre",
             "mlp_act", "mlp_out", "resid_post")  # fmt: skip
BEFORE = ("embed",)
AFTER = ("final_norm", "logits", "sampled")
CANONICAL = (*BEFORE, *PER_LAYER, *AFTER)
_STRIDE = 64
_LAST = 1 << 30


@dataclass(frozen=True)
class Site:
    """Where a point lives: a module path (`{l}` is the layer), the side of it, and the layout there.

    `index` picks from a tuple or from positional arguments, `arg` is the keyword an input may be passed by.
    `columns` is a slice of a fused projection; `heads` splits the last axis into [heads, head_dim].
    """

    path: str
    side: Literal["in", "out"]
    form: Literal["tensor", "pair"] = "tensor"
    index: int = 0
    arg: str | None = None
    columns: Literal["q", "k", "v", "gate"] | None = None
    heads: Literal["q", "kv"] | None = None


@dataclass(frozen=True)
class Dimensions:
    """The sizes that points are cut by, read from a model's config."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_mlp: int
    vocab: int


@dataclass(frozen=True)
class Family:
    """One architecture: its sites on each engine, and what it refuses with the reason and the nearest point."""

    name: str
    hf: Mapping[str, Site]
    vllm: Mapping[str, Site]
    refused: Mapping[str, str]


@dataclass(frozen=True)
class Location:
    """A point at a layer of a particular model: its site with the layer filled in, and its place in the order.

    `key` is what hooks and taps are keyed by; points that share a key are served in one visit.
    """

    name: str
    layer: int | None
    site: Site
    key: tuple[str, str]
    rank: int
    lo: int = 0
    hi: int = 0
    head_dim: int = 0

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name}[{self.layer}]"


LOGITS_KEY = ("", "logits")
SAMPLED_KEY = ("", "sampled")


def _out(path: str, **k: Any) -> Site:
    return Site(path, "out", **k)


def _in(path: str, **k: Any) -> Site:
    return Site(path, "in", **k)


_L = "model.layers.{l}"
_OUTSIDE = {"logits": Site("", "out"), "sampled": Site("", "out")}

LLAMA_HF = {
    "embed": _out("model.embed_tokens"),
    "resid_pre": _in(_L, arg="hidden_states"),
    "attn_in": _in(f"{_L}.self_attn", arg="hidden_states"),
    "q": _out(f"{_L}.self_attn.q_proj", heads="q"),
    "k": _out(f"{_L}.self_attn.k_proj", heads="kv"),
    "v": _out(f"{_L}.self_attn.v_proj", heads="kv"),
    "z": _in(f"{_L}.self_attn.o_proj", heads="q"),
    "attn_out": _out(f"{_L}.self_attn"),
    "resid_mid": _in(f"{_L}.post_attention_layernorm"),
    "mlp_in": _in(f"{_L}.mlp"),
    "mlp_pre": _out(f"{_L}.mlp.gate_proj"),
    "mlp_act": _in(f"{_L}.mlp.down_proj"),
    "mlp_out": _out(f"{_L}.mlp"),
    "resid_post": _out(_L),
    "final_norm": _out("model.norm"),
    **_OUTSIDE,
}
LLAMA_VLLM = {
    "embed": _out("model.embed_tokens"),
    "resid_pre": _in(_L, form="pair", index=1),
    "attn_in": _in(f"{_L}.self_attn", index=1, arg="hidden_states"),
    "q": _out(f"{_L}.self_attn.qkv_proj", columns="q", heads="q"),
    "k": _out(f"{_L}.self_attn.qkv_proj", columns="k", heads="kv"),
    "v": _out(f"{_L}.self_attn.qkv_proj", columns="v", heads="kv"),
    "z": _in(f"{_L}.self_attn.o_proj", heads="q"),
    "attn_out": _out(f"{_L}.self_attn"),
    "resid_mid": _in(f"{_L}.post_attention_layernorm", form="pair"),
    "mlp_in": _in(f"{_L}.mlp"),
    "mlp_pre": _out(f"{_L}.mlp.gate_up_proj", columns="gate"),
    "mlp_act": _in(f"{_L}.mlp.down_proj"),
    "mlp_out": _out(f"{_L}.mlp"),
    "resid_post": _out(_L, form="pair"),
    "final_norm": _out("model.norm"),
    **_OUTSIDE,
}
_DENSE = {
    "pattern": "attention probabilities are not materialised by this engine's attention kernel; the nearest points are q, k and z",
    "router": "a dense model has no router; the nearest point is mlp_in",
}
# Norms after the sublayers: what is added to the residual is the norm's output, so attn_out and mlp_out are that.
_POST_NORMS_HF = {
    "attn_out": _out(f"{_L}.post_attention_layernorm"),
    "resid_mid": _in(f"{_L}.pre_feedforward_layernorm"),
    "mlp_out": _out(f"{_L}.post_feedforward_layernorm"),
}
_POST_NORMS_VLLM = {
    "attn_out": _out(f"{_L}.post_attention_layernorm"),
    "resid_mid": _in(f"{_L}.pre_feedforward_layernorm", form="pair"),
    "mlp_out": _out(f"{_L}.post_feedforward_layernorm"),
}

_LLAMA = Family("llama", LLAMA_HF, LLAMA_VLLM, _DENSE)
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, name="mistral"),
    "qwen2": replace(_LLAMA, name="qwen2"),
    "qwen3": replace(_LLAMA, name="qwen3"),
    "gemma2": Family("gemma2", LLAMA_HF | _POST_NORMS_HF, LLAMA_VLLM | _POST_NORMS_VLLM, _DENSE),
    "gemma3_text": Family("gemma3_text", LLAMA_HF | _POST_NORMS_HF, LLAMA_VLLM | _POST_NORMS_VLLM, _DENSE),
}


def dimensions(config: Any) -> Dimensions:
    """The sizes in a `transformers` config (its text part, for multimodal ones)."""
    config = getattr(config, "text_config", None) or config
    heads = config.num_attention_heads
    return Dimensions(
        layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        d_mlp=config.intermediate_size,
        vocab=config.vocab_size,
    )


def family_of(model_type: str) -> Family:
    """The family of a config's `model_type`; refused by name when there is no table entry for it."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    raise PointRefusedError(
        f"no points are declared for the architecture {model_type!r}; known: {', '.join(sorted(FAMILIES))}. "
        "m.at(path).input and .output reach its modules"
    )


class Points:
    """The points of one model on one engine: resolves `(name, layer)` to a `Location`, once each.

    >>> config = Dimensions(layers=4, d_model=64, heads=4, kv_heads=2, head_dim=16, d_mlp=128, vocab=100)
    >>> points = Points(FAMILIES["llama"], "vllm", config)
    >>> points.at("resid_post", -1).key
    ('model.layers.3', 'out')
    >>> points.parse("z.2").site.heads
    'q'
    """

    def __init__(self, family: Family, engine: Engine, dims: Dimensions) -> None:
        self.family, self.engine, self.dims = family, engine, dims
        self.sites: Mapping[str, Site] = getattr(family, engine)
        self._known: dict[tuple[str, int | None], Location] = {}

    def names(self) -> tuple[str, ...]:
        """Every point that can be read and written here, in the model's order."""
        return tuple(n for n in CANONICAL if n in self.sites)

    def why_not(self, name: str, layer: int | None = None) -> str | None:
        """Why a point is refused here, or None when it is not."""
        try:
            self.at(name, layer if layer is not None else (0 if name in PER_LAYER else None))
        except (PointRefusedError, UnknownPointError, IndexError) as refused:
            return str(refused)
        return None

    def at(self, name: str, layer: int | None = None) -> Location:
        """The location of a point; errors name the layer range, the reason, or near names."""
        found = self._known.get((name, layer))
        return found if found is not None else self._resolve(name, layer)

    def parse(self, text: str) -> Location:
        """`"resid_post.15"` or `"logits"` -> its location."""
        name, _, layer = text.partition(".")
        if layer and not layer.lstrip("-").isdigit():
            raise UnknownPointError(
                f"{text!r} is not a point: the part after the dot is a layer number, as in 'resid_post.15'"
            )
        return self.at(name, int(layer) if layer else None)

    def _resolve(self, name: str, layer: int | None) -> Location:
        if name not in CANONICAL:
            near = difflib.get_close_matches(name, CANONICAL, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; points: {', '.join(self.names())}"
            raise UnknownPointError(at_user_line(f"there is no point {name!r}{hint}"))
        if name not in self.sites:
            why = self.family.refused.get(name, "this family has no such point")
            raise PointRefusedError(at_user_line(f"{name} on {self.family.name} ({self.engine}): {why}"))
        layered = name in PER_LAYER
        if layered != (layer is not None):
            raise UnknownPointError(
                at_user_line(
                    f"{name} is one per layer: write m.{name}[layer]"
                    if layered
                    else f"{name} has no layers: write m.{name}"
                )
            )
        n = self.dims.layers
        if layer is not None and not -n <= layer < n:
            raise IndexError(at_user_line(f"{name}[{layer}]: the model has layers 0 to {n - 1}"))
        at = layer % n if layer is not None else None
        # One object a place, however it is spelt: a second read of a point is recognised by identity.
        location = self._known.get((name, at)) or self._build(name, at, self.sites[name])
        self._known[name, layer] = self._known[name, at] = location
        return location

    def _build(self, name: str, layer: int | None, site: Site) -> Location:
        if name in BEFORE:
            rank = 0
        elif name in AFTER:
            rank = _LAST + AFTER.index(name)
        else:
            assert layer is not None
            rank = 1 + layer * _STRIDE + PER_LAYER.index(name)
        if name in ("logits", "sampled"):
            return Location(name, None, site, LOGITS_KEY if name == "logits" else SAMPLED_KEY, rank)
        path = site.path.format(l=layer)
        lo, hi = self._columns(site)
        return Location(
            name,
            layer,
            replace(site, path=path),
            (path, site.side),
            rank,
            lo,
            hi,
            self.dims.head_dim if site.heads else 0,
        )

    def _columns(self, site: Site) -> tuple[int, int]:
        d = self.dims
        q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
        cuts = {None: (0, 0), "q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv), "gate": (0, d.d_mlp)}
        return cuts[site.columns]

    def module(self, path: str, side: Literal["in", "out"]) -> Location:
        """A module by path, for what has no canonical name; its place in the order is its layer's, as far as known."""
        return Location(
            f"at({path!r}).{'input' if side == 'in' else 'output'}", None, Site(path, side), (path, side), -1
        )
