"""The rows of every grid, written once against the adapter interface: what is asked, of how many tokens, the unit.

Nothing here imports torch: a row is data, and so is the work it asks for.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adapters.work import (
    AblateHead,
    Capture,
    ForceToken,
    Gradient,
    Lens,
    Nothing,
    Outcome,
    Probe,
    Refusal,
    Request,
    Shape,
    Steer,
    Vector,
    Work,
)
from harness.environments import base_of
from harness.models import ModelInfo

EIFFEL = "The Eiffel Tower is in the city of"
WARM_UP = -1  # the run number of the untimed run: prompts of its own

# Columns with nothing attached, known by name so that a plan can say without importing them what they will refuse.
PLAIN_COLUMNS = ("vanilla", "vanilla-eager", "hf")

TWIN = "~b"  # in a plan, the second arm of a column that is measured against itself


def column_of(slot: str) -> str:
    """The column that a place in a plan measures.

    >>> column_of("vanilla-eager~b")
    'vanilla-eager'
    """
    return slot.removesuffix(TWIN)


def is_plain(column: str) -> bool:
    """Whether nothing is attached to a column, by its name, in whatever environment it runs.

    >>> is_plain("vanilla@vllm-0.32"), is_plain("tapgrid-hf")
    (True, False)
    """
    return base_of(column_of(column)) in PLAIN_COLUMNS


@dataclass(frozen=True)
class Row:
    """A row with its knobs as the grid file sets them; None takes the row's default (`layer`: the middle one)."""

    name: str
    prompt_tokens: int = 64
    new_tokens: int = 32
    requests: int = 1
    concurrent: bool = False
    layer: int | None = None
    head: int = 0
    token: int | None = None
    scale: float = 4.0

    @property
    def shape(self) -> Shape:
        return Shape(self.prompt_tokens, self.new_tokens, self.requests, self.concurrent)


Make = Callable[[Row, ModelInfo, Sequence[int]], Work]


@dataclass(frozen=True)
class Kind:
    """What a row is. `plain` is the row that a plain engine runs as its denominator (None: it has none)."""

    about: str
    make: Make
    unit: str = "tok/s"
    plain: str | None = "generate"
    requests: int = 1
    new_tokens: int | None = None
    installed: bool = False


def _layer(row: Row, info: ModelInfo) -> int:
    layer = info.layers // 2 if row.layer is None else row.layer
    if not 0 <= layer < info.layers:
        raise ValueError(f"row {row.name}: layer = {layer}, but the model has layers 0 to {info.layers - 1}")
    return layer


def _point(row: Row, info: ModelInfo) -> str:
    return f"resid_post.{_layer(row, info)}"


def direction(name: str, size: int) -> Vector:
    """A fixed direction of unit variance per element, the same on every machine."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), size])
    return rng.standard_normal(size, dtype=np.float32)


def _nothing(row: Row, info: ModelInfo, ids: Sequence[int]) -> Work:
    return Nothing()


def _capture(row: Row, info: ModelInfo, ids: Sequence[int]) -> Work:
    return Capture((_point(row, info),))


def _capture_all(row: Row, info: ModelInfo, ids: Sequence[int]) -> Work:
    return Capture(tuple(f"resid_post.{i}" for i in range(info.layers)))


def _steer(row: Row, info: ModelInfo, ids: Sequence[int]) -> Work:
    return Steer(_point(row, info), direction("steer", info.d_model) * np.float32(row.scale))


def _lens(row: Row, info: ModelInfo, ids: Sequence[int]) -> Work:
    return Lens(_point(row, info))


def _probe(row: Row, info: ModelInfo, ids: Sequence[int]) -> Work:
    v = direction("probe", info.d_model)
    return Probe(_point(row, info), v / np.float32(np.linalg.norm(v)))


def _ablate(row: Row, info: ModelInfo, ids: Sequence[int]) -> Work:
    if not 0 <= row.head < info.heads:
        raise ValueError(f"row {row.name}: head = {row.head}, but the model has heads 0 to {info.heads - 1}")
    return AblateHead(_layer(row, info), row.head)


def _force(row: Row, info: ModelInfo, ids: Sequence[int]) -> Work:
    token = ids[len(ids) // 2] if row.token is None else row.token
    if not 0 <= token < info.vocab:
        raise ValueError(f"row {row.name}: token = {token}, but the vocabulary has {info.vocab} ids")
    return ForceToken(token)


def _gradient(row: Row, info: ModelInfo, ids: Sequence[int]) -> Work:
    return Gradient(_point(row, info))


# Canonical order: every listing, table and report follows it.
KINDS: dict[str, Kind] = {
    "generate": Kind("plain generation", _nothing),
    "generate-x8": Kind("plain generation, 8 requests at once", _nothing, plain="generate-x8", requests=8),
    "generate-x32": Kind("plain generation, 32 requests at once", _nothing, plain="generate-x32", requests=32),
    "capture-1": Kind("hand back one layer's residual at every step", _capture),
    "capture-all": Kind("hand back every layer's residual at every step", _capture_all),
    "capture-1-x8": Kind("capture one layer, 8 requests at once", _capture, plain="generate-x8", requests=8),
    "capture-1-x32": Kind("capture one layer, 32 requests at once", _capture, plain="generate-x32", requests=32),
    "capture-all-x8": Kind("capture every layer, 8 requests at once", _capture_all, plain="generate-x8", requests=8),
    "steer": Kind("add a vector at one layer, every token", _steer),
    "steer-x8": Kind("steer, 8 requests at once", _steer, plain="generate-x8", requests=8),
    "lens": Kind("unembed one layer at every step", _lens),
    "lens-x8": Kind("unembed one layer, 8 requests at once", _lens, plain="generate-x8", requests=8),
    "probe": Kind("project one layer on a direction, every token", _probe),
    "probe-x8": Kind("project one layer, 8 requests at once", _probe, plain="generate-x8", requests=8),
    "ablate-head": Kind("zero one attention head, every token", _ablate),
    "ablate-head-x8": Kind("zero one head, 8 requests at once", _ablate, plain="generate-x8", requests=8),
    "force-token": Kind("override the sampled token at every step", _force),
    "force-token-x8": Kind("override the token, 8 requests at once", _force, plain="generate-x8", requests=8),
    "forward": Kind("one forward, capture one layer", _capture, "s", "forward", new_tokens=1),
    "sweep": Kind(
        "many one-token requests, capture one layer, each with its own intervention", _capture, "s", "sweep", 64, 1
    ),
    "sweep-installed": Kind(
        "the sweep with the intervention installed once", _capture, "s", "sweep", 64, 1, installed=True
    ),
    "gradient": Kind("one forward and backward, gradient at one layer", _gradient, "s", None, new_tokens=1),
}


def row_from(name: str, row: Row) -> Row:
    """The row with what its kind fixes filled in: how many requests, and that several go at once.

    >>> row_from("capture-1-x8", Row("capture-1-x8")).shape
    Shape(prompt_tokens=64, new_tokens=32, requests=8, concurrent=True)
    """
    kind, default = KINDS[name], Row(name)
    requests = kind.requests if row.requests == default.requests else row.requests
    new = kind.new_tokens if kind.new_tokens and row.new_tokens == default.new_tokens else row.new_tokens
    return dataclasses.replace(row, requests=requests, new_tokens=new, concurrent=row.concurrent or requests > 1)


def work_for(row: Row, info: ModelInfo, ids: Sequence[int], *, plain: bool) -> Work | Refusal:
    """What this row asks of a column: its work; of a plain one `Nothing`, or the reason why it has no such row.

    >>> info = ModelInfo(layers=4, d_model=8, heads=2, kv_heads=1, head_dim=4, vocab=100, bos=None, family="llama")
    >>> work_for(Row("lens"), info, range(100), plain=False)
    Lens(point='resid_post.2')
    >>> work_for(Row("lens"), info, range(100), plain=True).code
    'not-plain'
    """
    if not plain:
        return KINDS[row.name].make(row, info, ids)
    if KINDS[row.name].plain == row.name:
        return Nothing()
    return Refusal("not-plain", f"a plain engine has nothing attached that could do {row.name}")


def ordinary_ids(model: Path, info: ModelInfo) -> tuple[int, ...]:
    """The ids that a prompt may be made of: the tokenizer's vocabulary less its special and added tokens."""
    return _ordinary_ids(model / "tokenizer.json", info.vocab)


@functools.lru_cache(maxsize=4)
def _ordinary_ids(file: Path, vocab: int) -> tuple[int, ...]:
    if not file.exists():
        # Without a tokenizer all that is known is that the special ids are few and at the start.
        return tuple(range(min(8, vocab // 2), vocab))
    data = json.loads(file.read_text(encoding="utf-8"))
    entries = data["model"]["vocab"]
    listed = entries.values() if isinstance(entries, dict) else range(len(entries))
    added = {t["id"] for t in data.get("added_tokens", [])}
    return tuple(sorted(i for i in listed if i < vocab and i not in added))


def requests_for(row: Row, info: ModelInfo, ids: Sequence[int], *, run: int, seed: int = 0) -> list[Request]:
    """The prompts of one run: token-exact, distinct, the same on every machine, column and round.

    Each begins with <bos> where the model has one, then with a token that no other request of the run begins
    with, so that a row mix-up shows; and no prompt comes twice in a process, so that no cache can help.

    >>> info = ModelInfo(layers=4, d_model=8, heads=2, kv_heads=1, head_dim=4, vocab=100, bos=1, family="llama")
    >>> [len(r.token_ids) for r in requests_for(Row("generate", prompt_tokens=5), info, range(8, 100), run=0)]
    [5]
    """
    pool = np.asarray(ids)
    start = () if info.bos is None else (info.bos,)
    rng = np.random.default_rng([seed, zlib.crc32(row.name.encode()), run + 1])
    if row.requests > len(pool):
        raise ValueError(
            f"row {row.name}: {row.requests} requests need as many first tokens, the vocabulary has {len(pool)}"
        )
    first = rng.choice(pool, size=row.requests, replace=False)
    made = []
    for i in range(row.requests):
        rest = rng.choice(pool, size=max(row.prompt_tokens - len(start) - 1, 0))
        tokens = (*start, int(first[i]), *(int(t) for t in rest))[: row.prompt_tokens]
        made.append(Request(f"{row.name}/{run}/{i}", tokens, row.new_tokens))
    return made


def prompts_digest(requests: Sequence[Request]) -> str:
    """A hash of what was asked, token by token: the same for every column's run of a row.

    >>> a, b = Request("x", (1, 23), 4), Request("x", (12, 3), 4)
    >>> prompts_digest([a]) == prompts_digest([a]), prompts_digest([a]) == prompts_digest([b])
    (True, False)
    """
    asked = json.dumps([[r.token_ids, r.new_tokens] for r in requests])
    return f"{zlib.crc32(asked.encode()):08x}"


def count_problem(row: Row, outcomes: Sequence[Outcome]) -> str | None:
    """What is wrong with the number of answers or of their tokens; None when it is what was asked for."""
    if len(outcomes) != row.requests:
        return f"{len(outcomes)} outcomes for {row.requests} requests"
    if row.name == "gradient":
        return None  # a backward pass generates nothing
    for i, outcome in enumerate(outcomes):
        if len(outcome.token_ids) != row.new_tokens:
            return f"request {i} came back with {len(outcome.token_ids)} new tokens, {row.new_tokens} were asked for"
    return None


def value(row: Row, tokens: int, seconds: float) -> float | None:
    """The number of the cell: tokens a second or seconds; None where that is not a number (no token, no time).

    >>> value(Row("generate"), 32, 0.5), value(Row("forward"), 1, 0.5), value(Row("generate"), 0, 0.5)
    (64.0, 0.5, None)
    """
    if seconds <= 0:
        return None
    if KINDS[row.name].unit == "s":
        return seconds
    return tokens / seconds if tokens else None
