"""Canonical points of one model on one engine: names and layers -> locations, or the reason why there is none.

A point has one meaning everywhere. Where it lives is data (`families.py`); this file reads the sizes of a model
from its config and resolves names. Nothing here imports torch, so a config alone answers what a model has:

>>> bloom = {"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 64, "vocab_size": 9}
>>> points_of(bloom, "hf").why_not("attn_out", 0)[:60]
"attn_out[0] on bloom (hf): BLOOM's sublayers return their ou"
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from adapters.errors import PointRefusedError, UnknownPointError, at_user_line
from adapters.families import FAMILIES, WITHOUT_STREAM
from adapters.sites import Dimensions, Engine, Family, Location, Site, Sites

__all__ = [
    "AFTER",
    "BEFORE",
    "CANONICAL",
    "FAMILIES",
    "LOGITS_KEY",
    "PER_LAYER",
    "SAMPLED_KEY",
    "_STRIDE",
    "Dimensions",
    "Engine",
    "Family",
    "Location",
    "Points",
    "Site",
    "dimensions",
    "family_of",
    "points_of",
]

# In the model's order; an entry's place is what "already passed" is judged by.
PER_LAYER = ("resid_pre", "attn_in", "q", "k", "v", "pattern", "z", "attn_out", "resid_mid", "mlp_in", "router",
             "mlp_pre", "mlp_act", "mlp_out", "resid_post")  # fmt: skip
BEFORE = ("embed",)
AFTER = ("final_norm", "logits", "sampled")
CANONICAL = (*BEFORE, *PER_LAYER, *AFTER)
_STRIDE = 64
_LAST = 1 << 30
LOGITS_KEY = ("", "logits")
SAMPLED_KEY = ("", "sampled")
# Where an intervention waits for `m.unembed`, if several requests may share one product.
UNEMBED = Location("unembed", None, Site("", "out"), ("", "unembed"), _LAST)

_DENSE = "a dense layer has no router; the nearest point is mlp_in"


def _read(config: Any, *names: str, default: Any = None) -> Any:
    """The first of `names` that a config (an object or a mapping) has and that is not None."""
    for name in names:
        found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if found is not None:
            return found
    return default


def dimensions(config: Any) -> Dimensions:
    """The sizes and layer traits in a config (its text part, for multimodal ones): an object or a mapping.

    >>> dimensions({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 10}).d_mlp
    256
    """
    config = _read(config, "text_config", default=config)
    d_model = _read(config, "hidden_size", "n_embd", "d_model", default=0)
    heads = _read(config, "num_attention_heads", "n_head", "n_heads", default=1)
    nope, rope = _read(config, "qk_nope_head_dim"), _read(config, "qk_rope_head_dim")
    head_dim = nope + rope if nope and rope else _read(config, "head_dim", default=d_model // heads)
    layers = _read(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers", default=0)
    scale = _read(config, "residual_multiplier")
    return Dimensions(
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=_read(config, "num_key_value_heads", default=heads),
        head_dim=head_dim,
        d_mlp=_read(config, "shared_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", default=4 * d_model),
        vocab=_read(config, "vocab_size", default=0),
        v_head_dim=_read(config, "v_head_dim", default=head_dim),
        traits=tuple(_traits(config, layer) for layer in range(layers)),
        scales={"residual_multiplier": float(scale)} if scale is not None else {},
    )


def _traits(config: Any, layer: int) -> frozenset[str]:
    """What sets a layer apart. Names that a family's `kinds` may use; the others are ignored."""
    family = FAMILIES.get(_read(config, "model_type", default=""))

    def read(*names: str) -> Any:
        found = _read(config, *names)
        return found if found is not None or family is None else _read(family.defaults, *names)

    kinds = read("layer_types")
    every = read("full_attention_interval")
    linear = kinds[layer] in ("linear_attention", "mamba") if kinds else bool(every) and (layer + 1) % every != 0
    found = {
        "always": True,
        "linear": linear,
        "moe": _is_moe(read, layer),
        "parallel": read("use_parallel_residual"),
        "q_lora": read("q_lora_rank"),
        "post_ln": read("do_layer_norm_before") is False,
        "upcast": read("reorder_and_upcast_attn"),
        "resid_from_ln": read("apply_residual_connection_post_layernorm"),
    }
    return frozenset(name for name, present in found.items() if present)


def _is_moe(read: Any, layer: int) -> bool:
    if not read("num_experts", "num_local_experts", "n_routed_experts"):
        return False
    dense_first, step = read("first_k_dense_replace") or 0, read("decoder_sparse_step") or 1
    return layer >= dense_first and (layer + 1) % step == 0 and layer not in (read("mlp_only_layers") or ())


def family_of(model_type: str) -> Family:
    """The family of a config's `model_type`. One that has no table entry refuses every point of the model by name.

    >>> family_of("qwen3").name
    'qwen3'
    >>> family_of("bert").hf["resid_mid"][:40]
    "'bert' has no residual stream of the kin"
    """
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    reach = "m.at(path).input and .output reach its modules"
    why = WITHOUT_STREAM.get(model_type)
    reason = (
        f"{model_type!r} has no residual stream of the kind that this point is part of: {why}; {reach}"
        if why
        else f"no points are declared for the architecture {model_type!r}; {reach}. "
        f"Declared: {', '.join(sorted(FAMILIES))}"
    )
    sites: Sites = dict.fromkeys(CANONICAL, reason) | {n: Site("", "out") for n in ("logits", "sampled")}
    return Family(model_type, sites, sites)


def points_of(config: Any, engine: Engine) -> Points:
    """The points of a model by its config alone: a folder or a config.json, its content, or a `transformers` config.

    >>> small = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 4, "hidden_size": 64,
    ...          "num_attention_heads": 4, "vocab_size": 9}
    >>> points_of(small, "vllm").parse("router.1").key
    ('model.layers.1.block_sparse_moe.gate', 'out')
    """
    if isinstance(config, (str, Path)):
        path = Path(config)
        config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    text = _read(config, "text_config", default=config)
    return Points(family_of(_read(text, "model_type", default="unknown")), engine, dimensions(text))


# What a multimodal model's text modules begin with, and what stands there instead.
_WRAPPED: dict[Engine, tuple[str, str]] = {"hf": ("model.", "model.language_model."), "vllm": ("", "language_model.")}


def _has(model: Any, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


class Points:
    """The points of one model on one engine: resolves `(name, layer)` to a `Location`, once each.

    >>> config = Dimensions(layers=4, d_model=64, heads=4, kv_heads=2, head_dim=16, d_mlp=128, vocab=100)
    >>> points = Points(FAMILIES["llama"], "vllm", config)
    >>> points.at("resid_post", -1).key
    ('model.layers.3', 'out')
    >>> points.parse("z.2").head_dim
    16
    """

    def __init__(self, family: Family, engine: Engine, dims: Dimensions) -> None:
        self.family, self.engine, self.dims = family, engine, dims
        traits = dims.traits or (frozenset(),) * dims.layers
        tables = {t: self._table(t) for t in (*traits, frozenset.intersection(*traits) if traits else frozenset())}
        self._layers = tuple(tables[t] for t in traits)
        self._whole = tables[frozenset.intersection(*traits) if traits else frozenset()]
        self.sites: Mapping[str, Site] = {n: s for n, s in self._whole.items() if isinstance(s, Site)}
        self._known: dict[tuple[str, int | None], Location] = {}
        self._there: dict[tuple[str, str], list[Location]] = {}
        self._stem = ("", "")

    def _table(self, traits: frozenset[str]) -> Sites:
        table = dict(getattr(self.family, self.engine))
        for trait, kind in self.family.kinds.items():
            if trait in traits:
                table |= getattr(kind, self.engine)
        return table

    def within(self, model: Any) -> Points:
        """These points where `model`'s modules lie: a multimodal wrapper keeps its text model one level further down.

        >>> points_of({"model_type": "llama", "num_hidden_layers": 1}, "hf").within(None).at("resid_post", 0).key[0]
        'model.layers.0'
        """
        plain = self.at("resid_post", 0).key[0] if self.layers("resid_post") else ""
        for stem in (("", ""), _WRAPPED[self.engine]):
            path = stem[1] + plain.removeprefix(stem[0])
            if model is not None and plain.startswith(stem[0]) and _has(model, path):
                self._stem = stem
                self._known.clear()
                self._there.clear()
                break
        return self

    def names(self) -> tuple[str, ...]:
        """Every point that can be read and written here at some layer, in the model's order."""
        return tuple(n for n in CANONICAL if (self.layers(n) if n in PER_LAYER else n in self.sites))

    def layers(self, name: str) -> tuple[int, ...]:
        """The layers that have point `name`."""
        return tuple(i for i, table in enumerate(self._layers) if isinstance(table.get(name), Site))

    def why_not(self, name: str, layer: int | None = None) -> str | None:
        """Why a point is refused here, or None when it is not; without a layer, whether every layer refuses it."""
        if layer is None and name in PER_LAYER:
            layer = next(iter(self.layers(name)), 0)
        try:
            self.at(name, layer)
        except (PointRefusedError, UnknownPointError, IndexError) as refused:
            return str(refused)
        return None

    def at(self, name: str, layer: int | None = None) -> Location:
        """The location of a point; errors name the layer range, the reason, or near names."""
        found = self._known.get((name, layer))
        return found if found is not None else self._resolve(name, layer)

    def there(self, key: tuple[str, str]) -> list[Location]:
        """The points that lie at a place (`Location.key`), in the model's order: a fused projection has three.

        >>> points = points_of({"model_type": "llama", "num_hidden_layers": 1}, "vllm")
        >>> [str(loc) for loc in points.there(points.at("k", 0).key)], points.there(("lm_head", "in"))
        (['q[0]', 'k[0]', 'v[0]'], [])
        """
        if not self._there:
            for name in self.names():
                for layer in self.layers(name) if name in PER_LAYER else (None,):
                    loc = self.at(name, layer)
                    self._there.setdefault(loc.key, []).append(loc)
        return self._there.get(key, [])

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
        if (name in PER_LAYER) != (layer is not None):
            form = f"one per layer: write m.{name}[layer]" if layer is None else f"not one per layer: write m.{name}"
            raise UnknownPointError(at_user_line(f"{name} is {form}"))
        n = self.dims.layers
        if layer is not None and not -n <= layer < n:
            raise IndexError(at_user_line(f"{name}[{layer}]: the model has layers 0 to {n - 1}"))
        at = layer % n if layer is not None else None
        table = self._whole if at is None else self._layers[at]
        entry = table.get(name, _DENSE if name == "router" else "this family has no such point")
        if isinstance(entry, str):
            raise PointRefusedError(at_user_line(self._refusal(name, at, entry)))
        # One object a place, however it is spelt: a second read of a point is recognised by identity.
        location = self._known.get((name, at)) or self._build(name, at, entry)
        self._known[name, layer] = self._known[name, at] = location
        return location

    def _refusal(self, name: str, layer: int | None, reason: str) -> str:
        where = name if layer is None else f"{name}[{layer}]"
        others = self.layers(name)
        elsewhere = f". Layers that have it: {', '.join(map(str, others))}" if others else ""
        return f"{where} on {self.family.name} ({self.engine}): {reason}{elsewhere}"

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
        d, path = self.dims, self._stem[1] + site.path.format(l=layer).removeprefix(self._stem[0])
        lo, hi = self._columns(site)
        width = {None: 0, "q": d.head_dim, "kv": d.head_dim, "v": d.v_head_dim or d.head_dim}[site.heads]
        scale = d.scales.get(site.scale, 1.0) if site.scale else 1.0
        return Location(name, layer, replace(site, path=path), (path, site.side), rank, lo, hi, width, scale)

    def _columns(self, site: Site) -> tuple[int, int]:
        d = self.dims
        q, kv = d.heads * d.head_dim * site.query_parts, d.kv_heads * d.head_dim
        cuts = {None: (0, 0), "q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv), "gate": (0, d.d_mlp)}
        return cuts[site.columns]

    def module(self, path: str, side: Literal["in", "out"]) -> Location:
        """A module by path, for what has no canonical name; its place in the order is its layer's, as far as known."""
        return Location(
            f"at({path!r}).{'input' if side == 'in' else 'output'}", None, Site(path, side), (path, side), -1
        )
