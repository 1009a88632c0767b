"""One mark for every column: hue and shape say the library, filled is compiled, a centre dot is `transformers`.

Hues follow Okabe and Ito's colour-blind safe set, darkened or lightened in `report.css` until they read on
paper and on black; whoever sees no hue at all still has the shapes and the names beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.environments import base_of

# Outlines around (0, 0), about nine units across, equal in visual weight rather than in width.
SHAPES: dict[str, str] = {
    "square": "M-3.9-3.9h7.8v7.8h-7.8z",
    "diamond": "M0-5.4 5.4 0 0 5.4-5.4 0z",
    "circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "up": "M0-5.3 5.1 3.9H-5.1z",
    "down": "M0 5.3 5.1-3.9H-5.1z",
    "hexagon": "M0-5 4.4-2.5V2.5L0 5-4.4 2.5V-2.5z",
    "pentagon": "M0-5 4.8-1.4 3 4.2H-3L-4.8-1.4z",
    "plus": "M-1.8-5H1.8V-1.8H5V1.8H1.8V5H-1.8V1.8H-5V-1.8H-1.8z",
    "bow": "M-5-4.4 0-1.2 5-4.4V4.4L0 1.2-5 4.4z",
    "cross": "M-3.6-5 0-1.4 3.6-5 5-3.6 1.4 0 5 3.6 3.6 5 0 1.4-3.6 5-5 3.6-1.4 0-5-3.6z",
}

# Small versions for the run scatter: relative, so that a whole column's runs are one path.
SMALL: dict[str, str] = {
    "square": "m-2-2h4v4h-4z",
    "diamond": "m0-2.7 2.7 2.7-2.7 2.7-2.7-2.7z",
    "circle": "m-2 0a2 2 0 104 0 2 2 0 10-4 0",
    "up": "m0-2.6 2.6 4.6h-5.2z",
    "down": "m0 2.6 2.6-4.6h-5.2z",
    "hexagon": "m-2-1 2-1.5 2 1.5v2l-2 1.5-2-1.5z",
    "pentagon": "m0-2.6 2.5 1.9-1 2.9h-3l-1-2.9z",
    "plus": "m-2.4 0h4.8m-2.4-2.4v4.8",
    "bow": "m-2.4-2.2 4.8 4.4v-4.4l-4.8 4.4z",
    "cross": "m-2-2 4 4m0-4-4 4",
}


DOT = "h0"  # a stroke of no length with round ends


@dataclass(frozen=True)
class Library:
    """A family of columns that share hue and shape."""

    key: str
    name: str
    shape: str


@dataclass(frozen=True)
class Mark:
    """How a column is drawn. `hue` is a CSS class, `id` names the drawing in the page, `mode` is what was compiled."""

    id: str
    library: Library
    mode: str
    transformers: bool

    @property
    def hue(self) -> str:
        return f"hue-{self.library.key}"

    @property
    def compiled(self) -> bool:
        return self.mode == "compiled"

    @property
    def engine(self) -> str:
        return "transformers" if self.transformers else "vLLM"


_PREFIXES: tuple[tuple[str, Library], ...] = (
    ("vanilla", Library("vllm", "plain vLLM", "square")),
    ("hf", Library("hf", "plain transformers", "pentagon")),
    ("tapgrid", Library("tapgrid", "tapgrid", "circle")),
    ("nnsight", Library("nnsight", "nnsight", "diamond")),
    ("interp-engine", Library("interp", "interp-engine", "up")),
    ("vllm-lens", Library("lens", "vLLM-Lens", "down")),
    ("transformerlens", Library("tlens", "TransformerLens", "hexagon")),
)
# Who asks for no eager engine and yet has nothing compiled: vLLM's breakable graphs turn the compiler off.
_NEVER = ("nnsight", "interp-engine")
_OTHERS = ("plus", "bow", "cross")


def _library(base: str, strangers: list[str]) -> Library:
    for prefix, library in _PREFIXES:
        if base == prefix or base.startswith(prefix + "-"):
            return library
    family = base.split("-")[0]
    if family not in strangers:
        strangers.append(family)
    at = strangers.index(family) % len(_OTHERS)
    return Library(f"other{at}", family, _OTHERS[at])


def _mode(column: str, settings: Mapping[str, Any]) -> str:
    """What the engine really booted with decides; a column that never booted is told by its name."""
    base = base_of(column)
    eager = settings.get("eager", settings.get("enforce_eager"))
    if eager is False and settings.get("compilation", "NONE" if base.startswith(_NEVER) else None) == "NONE":
        graphs = {None: "not compiled", "NONE": "neither compiled nor graphs"}
        return graphs.get(settings.get("cudagraph_mode"), "graphs, not compiled")
    told = not eager if isinstance(eager, bool) else settings.get("compiled")
    named = base == "vanilla" or (base.startswith("tapgrid") and base.endswith("-taps")) or base.endswith("-compiled")
    return "compiled" if (told if isinstance(told, bool) else named) else "eager"


def marks(columns: Iterable[str], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Mark]:
    """A mark for every column, given the engine settings of those that booted.

    >>> found = marks(["vanilla", "tapgrid-hf", "acme-fast"], {"acme-fast": {"enforce_eager": False}})
    >>> found["vanilla"].mode, found["tapgrid-hf"].engine, found["acme-fast"].library.shape
    ('compiled', 'transformers', 'plus')
    """
    strangers: list[str] = []
    return {
        c: Mark(f"k{i}", _library(base_of(c), strangers), _mode(c, settings.get(c, {})), "hf" in base_of(c).split("-"))
        for i, c in enumerate(columns)
    }
