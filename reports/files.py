"""Writing a file whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace(path: Path, content: str) -> None:
    """Leaves at `path` either what was there or all of `content`, also when the disk is full."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(content, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
