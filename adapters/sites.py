"""What a point is made of: where it lives (`Site`), the sizes it is cut by (`Dimensions`), and a `Family` of both.

Plain data without torch: the table in `families.py` is written in these words, `points.py` resolves them for one
model, and `layouts.py` reads and writes tensors by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Engine = Literal["hf", "vllm"]
Form = Literal["tensor", "pair", "replaced", "router", "pattern"]


@dataclass(frozen=True)
class Site:
    """Where a point lives: a module path (`{l}` is the layer), the side of it, and the layout there.

    `form` says how a tensor there is read and written:

        tensor    the request's rows of a tensor, written back where they lie
        pair      (hidden, residual) of an engine that fuses the residual add into the next norm: the point is
                  their sum. Written back as (0, value), which the next norm adds up to exactly that value
        replaced  an input that something else reads as well (the norm that parallel attention and MLP share): an
                  edit gives the module an argument of its own and leaves the tensor alone
        router    the logits of a router that has already chosen: an edit makes it choose again
        pattern   attention probabilities: an edit is mixed into the values again

    `index` picks from a tuple or from positional arguments, `arg` is the keyword an input may be passed by.
    `columns` is a slice of a fused projection, `part` the i-th of n equal parts inside every head, `query_parts` how
    many head widths the queries take in a fused projection. `heads` splits the last axis into [heads, head_dim].
    `lead` drops a leading axis of one. `scale` names the config's factor that the engine multiplies by afterwards.
    `held` is an input that the model keeps for later as well (the stream that goes past the MLP): with gradients too,
    an edit has to land in that very tensor.
    """

    path: str
    side: Literal["in", "out", "attention"]
    form: Form = "tensor"
    index: int = 0
    arg: str | None = None
    columns: Literal["q", "k", "v", "gate"] | None = None
    heads: Literal["q", "kv", "v"] | None = None
    part: tuple[int, int] | None = None
    query_parts: int = 1
    lead: bool = False
    scale: str | None = None
    held: bool = False

    @property
    def in_place(self) -> bool:
        """Whether a write lands in the memory that the model holds there, which is all that a tap can do."""
        return self.form in ("tensor", "pair")


# What a table says of a point: where it is, or why there is none and which is the nearest.
Sites = Mapping[str, Site | str]


@dataclass(frozen=True)
class Head:
    """What follows the head's matrix product, as names of config entries: a factor, a divisor, a soft cap."""

    times: str | None = None
    over: str | None = None
    cap: str | None = "final_logit_softcapping"


@dataclass(frozen=True)
class Kind:
    """How a kind of layer (or of config) differs from the family's table: entries that replace those there."""

    hf: Sites = field(default_factory=dict)
    vllm: Sites = field(default_factory=dict)

    def __or__(self, other: Kind) -> Kind:
        return Kind({**self.hf, **other.hf}, {**self.vllm, **other.vllm})


@dataclass(frozen=True)
class Family:
    """One architecture: its sites on each engine (a string is a refusal: the reason and the nearest point).

    `kinds` are differences by trait (`Dimensions.traits`), applied in the order in which they are listed here.
    `defaults` are values of config entries that a config.json may leave out.
    """

    name: str
    hf: Sites
    vllm: Sites
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    head: Head = Head()
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Dimensions:
    """The sizes that points are cut by, and what sets layers apart, read from a model's config."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_mlp: int
    vocab: int
    v_head_dim: int = 0
    # One set a layer; empty means that no layer has any.
    traits: tuple[frozenset[str], ...] = ()
    scales: Mapping[str, float] = field(default_factory=dict)


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
    scale: float = 1.0
    # Of a module by its path: the rank below which everything has run when it does, as far as that is known.
    floor: int = -1

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name}[{self.layer}]"

    @property
    def text(self) -> str:
        """The point as `load(taps=...)` and `Capture` name it: "resid_post.15"."""
        return self.name if self.layer is None else f"{self.name}.{self.layer}"
