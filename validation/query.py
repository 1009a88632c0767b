"""What can be asked of the reference, as plain data, and the name under which an answer is kept."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Raise it when the meaning of an answer changes: old cache entries are then never read again.
VERSION = 1
_WEIGHTS = {".safetensors", ".bin", ".pt"}


@dataclass(frozen=True)
class Write:
    """A change made to every token: `steer` adds `vector` at `point`, `ablate-head` zeroes a head of `z.<layer>`."""

    kind: str
    point: str = ""
    vector: tuple[float, ...] = ()
    layer: int = 0
    head: int = 0


@dataclass(frozen=True)
class Query:
    """One teacher-forced forward over `token_ids`, and what to keep of it.

    `points` are kept whole, except `logits`, kept from row `start` on. `targets` are the tokens that rows
    `start`, `start + 1`, ... chose: how far each lies below the top is kept. `lens` unembeds a point from row
    `start` on, `probe` projects one onto `direction`, `gradient` asks for a backward pass and nothing else.
    """

    token_ids: tuple[int, ...]
    dtype: str
    attention: str = "eager"
    points: tuple[str, ...] = ()
    start: int = 0
    targets: tuple[int, ...] = ()
    write: Write | None = None
    lens: str = ""
    probe: str = ""
    direction: tuple[float, ...] = ()
    gradient: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Query:
        """The inverse of `to_json` after a trip through JSON, where tuples became lists.

        >>> q = Query((1, 2), "float32", ("z.0",), write=Write("steer", "resid_post.0", (0.5,)))
        >>> Query.from_json(json.loads(json.dumps(q.to_json()))) == q
        True
        """
        write = data["write"]
        return Query(**{**_tuples(data), "write": None if write is None else Write(**_tuples(write))})


def _tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}


def folder_hash(model: Path) -> str:
    """A hash of a checkpoint: its JSON files whole, its weight files by size and by 64 blocks of each.

    Hashing all of a 16 GB checkpoint would take as long as booting the engine; retraining moves every block.
    """
    files = sorted(p for p in model.iterdir() if p.is_file() and p.suffix in {*_WEIGHTS, ".json"})
    if not any(p.suffix in _WEIGHTS for p in files) or not (model / "config.json").exists():
        raise FileNotFoundError(
            f"{model} is not a model folder in transformers format: no config.json with weights beside it"
        )
    h = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        h.update(f"{path.name}:{size};".encode())
        with path.open("rb") as f:
            if path.suffix == ".json":
                h.update(f.read())
                continue
            for k in range(64):
                f.seek(k * size // 64)
                h.update(f.read(65536))
    return h.hexdigest()


def key(model_hash: str, query: Query, device: str) -> str:
    """The cache key of an answer: everything that decides it.

    >>> a, b = Query((1, 2), "float32"), Query((1, 3), "float32")
    >>> key("m", a, "cpu") == key("m", a, "cpu"), key("m", a, "cpu") == key("m", b, "cpu")
    (True, False)
    """
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    text = json.dumps([VERSION, versions, model_hash, device, query.to_json()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]
