"""Every column a grid can name: where its adapter lives, in which environment it runs, and what it is.

A table and nothing else; nothing here imports an engine. Third parties add rows by the entry point
group `tapgrid.adapters` (name = "package.module:Class").
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adapters.work import Adapter

ENTRY_POINTS = "tapgrid.adapters"


@dataclass(frozen=True)
class Column:
    """One system under test. `engine` is the plain column that it is read against: "vanilla" or "hf"."""

    name: str
    target: str
    about: str
    compiled: bool = False
    environment: str = "default"


_OWN = [
    Column("vanilla", "adapters.peers.vanilla:Vanilla", "vLLM, compiled, nothing attached", compiled=True),
    Column("vanilla-eager", "adapters.peers.vanilla:VanillaEager", "vLLM with enforce_eager, nothing attached"),
    Column("hf", "adapters.peers.vanilla:PlainHF", "transformers, nothing attached"),
    Column("tapgrid-eager", "adapters.ours:TapgridEager", "our runtime on eager vLLM"),
    Column("tapgrid-taps", "adapters.ours:TapgridTaps", "our runtime inside compiled vLLM", compiled=True),
    Column("tapgrid-hf", "adapters.ours:TapgridHF", "our runtime on transformers"),
    Column("tapgrid-hf-taps", "adapters.ours:TapgridHFTaps", "our runtime inside compiled transformers", compiled=True),
    Column("nnsight-eager", "adapters.peers.nnsight:NNsightEager", "nnsight on eager vLLM"),
    Column("nnsight-taps", "adapters.peers.nnsight:NNsightTaps", "nnsight on vLLM, its locations declared at boot"),
    Column("nnsight-hf", "adapters.peers.nnsight_hf:NNsightHF", "nnsight on transformers"),
    Column("interp-engine-vllm", "adapters.peers.interp_engine:InterpEngineVLLM", "interp-engine on eager vLLM"),
    Column(
        "interp-engine-static",
        "adapters.peers.interp_engine:InterpEngineStatic",
        "interp-engine on vLLM, resid_post baked in",
    ),
    Column(
        "transformerlens-vllm",
        "adapters.peers.transformerlens_vllm:TransformerLensVLLM",
        "TransformerLens in compiled vLLM, one prompt a call",
        compiled=True,
    ),
    Column(
        "transformerlens-batched",
        "adapters.peers.transformerlens_vllm:TransformerLensBatched",
        "TransformerLens on eager vLLM, batched",
    ),
    Column("transformerlens-hf", "adapters.peers.transformerlens:TransformerLensHF", "TransformerLens on transformers"),
    Column("vllm-lens", "adapters.peers.vllm_lens:VLLMLens", "vLLM-Lens, which makes vLLM eager"),
]


def all_columns() -> dict[str, Column]:
    """Name -> Column, ours and those of installed third parties, in display order.

    >>> list(all_columns())[:2]
    ['vanilla', 'vanilla-eager']
    """
    found = {c.name: c for c in _OWN}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if point.name in found:
            raise ValueError(f"entry point {point.value!r} claims the column name {point.name!r}, which is taken")
        found[point.name] = Column(
            point.name, point.value, f"from {point.dist.name if point.dist else 'an entry point'}"
        )
    return found


def make(column: Column) -> Adapter:
    """Import the column's adapter class and make one; no engine boots yet."""
    module, _, cls = column.target.partition(":")
    adapter: Adapter = getattr(importlib.import_module(module), cls)()
    return adapter
