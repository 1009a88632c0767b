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
    """One system under test.

    `needs` are the modules without which it cannot boot. `plugins` are the vLLM plugins that its workers may load,
    None for all that are installed: a plugin patches every engine of a process, so a plain engine must see none.
    `environment` is the one that its workers run in, "default" for this interpreter's. `gpu`: it runs on no CPU.
    `ahead`: its vLLM loads on a CPU what it compiled ahead of time at an earlier boot (`engines/ahead.py`).
    """

    name: str
    target: str
    about: str
    compiled: bool = False
    environment: str = "default"
    needs: tuple[str, ...] = ()
    plugins: tuple[str, ...] | None = None
    gpu: bool = False
    ahead: bool = False


def _own(
    name: str,
    target: str,
    about: str,
    *,
    library: str = "",
    compiled: bool = False,
    plugin: str = "",
    gpu: bool = False,
    ahead: bool = False,
) -> Column:
    needs = ("torch", "transformers" if "hf" in name.split("-") else "vllm", library)
    plugins = (plugin,) if plugin else ()
    return Column(
        name,
        f"adapters.{target}",
        about,
        compiled,
        needs=tuple(filter(None, needs)),
        plugins=plugins,
        gpu=gpu,
        ahead=ahead,
    )


_OWN = [
    _own("vanilla", "peers.vanilla:Vanilla", "vLLM, compiled, nothing attached", compiled=True),
    _own("vanilla-eager", "peers.vanilla:VanillaEager", "vLLM with enforce_eager, nothing attached"),
    _own("hf", "peers.vanilla:PlainHF", "transformers, nothing attached"),
    _own("tapgrid-eager", "ours:TapgridEager", "our runtime on eager vLLM"),
    _own("tapgrid-taps", "ours:TapgridTaps", "our runtime inside compiled vLLM", compiled=True, ahead=True),
    _own("tapgrid-hf", "ours:TapgridHF", "our runtime on transformers"),
    _own("tapgrid-hf-taps", "ours:TapgridHFTaps", "our runtime inside compiled transformers", compiled=True),
    _own("tapgrid-sharded", "ours_sharded:TapgridSharded", "our runtime on eager vLLM over several ranks"),
    _own(
        "tapgrid-sharded-taps",
        "ours_sharded:TapgridShardedTaps",
        "our runtime inside compiled vLLM over several ranks",
        compiled=True,
        ahead=True,
    ),
    _own("nnsight-eager", "peers.nnsight:NNsightEager", "nnsight on eager vLLM", library="nnsight"),
    _own(
        "nnsight-taps",
        "peers.nnsight:NNsightTaps",
        "nnsight on vLLM, its locations declared at boot",
        library="nnsight",
    ),
    _own("nnsight-hf", "peers.nnsight_hf:NNsightHF", "nnsight on transformers", library="nnsight"),
    _own(
        "interp-engine-vllm",
        "peers.interp_engine:InterpEngineVLLM",
        "interp-engine on eager vLLM",
        library="interp_engine",
    ),
    _own(
        "interp-engine-static",
        "peers.interp_engine:InterpEngineStatic",
        "interp-engine on vLLM, resid_post baked in",
        library="interp_engine",
    ),
    _own(
        "interp-engine-hf",
        "peers.interp_engine_hf:InterpEngineHF",
        "interp-engine on transformers, one prompt a call",
        library="interp_engine",
    ),
    _own(
        "transformerlens-vllm",
        "peers.transformerlens_vllm:TransformerLensVLLM",
        "TransformerLens in compiled vLLM, one prompt a call",
        library="transformer_lens",
        compiled=True,
        plugin="tl_vllm_capture",
    ),
    _own(
        "transformerlens-batched",
        "peers.transformerlens_vllm:TransformerLensBatched",
        "TransformerLens on eager vLLM, batched",
        library="transformer_lens",
        plugin="tl_vllm_capture",
    ),
    _own(
        "transformerlens-hf",
        "peers.transformerlens:TransformerLensHF",
        "TransformerLens on transformers",
        library="transformer_lens",
    ),
    _own("vllm-lens", "peers.vllm_lens:VLLMLens", "vLLM-Lens, which makes vLLM eager", plugin="activations"),
    _own(
        "vllm-extract",
        "peers.vllm_extract:VLLMExtract",
        "compiled vLLM, its own extraction of every layer's hidden states",
        compiled=True,
    ),
    _own(
        "hotwire",
        "peers.hotwire:Hotwire",
        "hotwire in compiled vLLM on a GPU, steering only",
        compiled=True,
        plugin="hotwire",
        gpu=True,
    ),
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
