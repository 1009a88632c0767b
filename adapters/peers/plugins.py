"""vLLM plugins that patch every engine of any process that can see them: each lies in a folder of its own, which only
its own column puts on the path."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from adapters.work import MissingLibrary

FOLDER = Path(sys.prefix) / "tapgrid-peers"


def site(name: str) -> Path:
    """Where a plugin of this environment lies.

    >>> site("vllm-lens").name
    'vllm-lens'
    """
    return FOLDER / name


def install_line(name: str, version: str) -> str:
    """What to run for a plugin that is missing.

    >>> install_line("vllm-lens", "1.2.1").startswith("pip install --no-deps --ignore-requires-python --target ")
    True
    """
    return f"pip install --no-deps --ignore-requires-python --target {site(name)} {name}=={version}"


def make_visible(name: str, module: str, install: str) -> None:
    """Put a plugin on the path, where vLLM finds it by its metadata; engines' own processes inherit PYTHONPATH."""
    folder = str(site(name))
    if folder not in sys.path:
        sys.path.append(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
    importlib.invalidate_caches()
    if importlib.util.find_spec(module) is None:
        raise MissingLibrary(f"{name} is not importable: {install}")
