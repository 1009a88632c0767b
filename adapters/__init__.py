"""The runtime: run Python inside a model's forward. `load()` is the way in.

Names are looked up lazily, so that importing this package for its data tables does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES: dict[str, str] = {
    "load": "adapters.boot",
    "Runtime": "adapters.runtime",
    "Add": "adapters.declared",
    "Capture": "adapters.declared",
    "Output": "adapters.runtime",
    "Pass": "adapters.intervention",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
