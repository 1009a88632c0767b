"""tapgrid: run Python inside a model's forward, and measure and validate the engines that claim to.

    import tapgrid
    rt = tapgrid.load("smollm2")

and `python -m tapgrid` (or the `tapgrid` command) for the grid.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from adapters.engines.module import WrappedModule
    from adapters.runtime import Runtime

_HOMES = {
    "Add": "adapters.declared",
    "Capture": "adapters.declared",
    "Output": "adapters.runtime",
    "Pass": "adapters.intervention",
    "Runtime": "adapters.runtime",
}

__all__ = ["Add", "Capture", "Output", "Pass", "Runtime", "load", "wrap"]  # noqa: F822 (looked up lazily below)


def load(model: str | Path, **arguments: Any) -> Runtime:
    """Load a model on an engine, ready for interventions; see `adapters.boot.load` for every argument.

    `model` is a local folder, a hub id, or the name of an embedded model ("smollm2", "gemma3", "synthetic:llama").

    >>> rt = load("synthetic:llama", dtype="float32")
    >>> out = rt.run([[5, 7, 11]], lambda m: m.save("x", m.resid_post[1]), max_new_tokens=4)
    >>> out[0].cat("x").shape
    torch.Size([6, 128])
    >>> rt.close()
    """
    from adapters.boot import load as boot
    from harness.models import resolve

    return boot(model, resolve=resolve, **arguments)


def wrap(module: torch.nn.Module) -> WrappedModule:
    """Any torch module, its submodules reached by path: for models that are not language models, and for tests.

    >>> import torch
    >>> wrapped = wrap(torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU()))
    >>> with wrapped.trace(torch.tensor([[-1.0, 2.0]])) as m:
    ...     m.at("0").output *= -1
    ...     after = m.at("1").output
    >>> after
    tensor([[1., 0.]])
    """
    from adapters.engines.module import WrappedModule

    return WrappedModule(module)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tapgrid' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


if __name__ == "__main__":
    from harness.cli import main

    sys.exit(main())
