"""What the reference says about a set of sequences: exact values, and how far an honest engine may be from them.

    truth = Truth(refs, "bfloat16").ask([passes(request, outcome)], ["resid_post.15"])
    truth.exact("resid_post.15")     # float32, all sequences' rows one after the other
    truth.held("resid_post.15")      # the yardstick's errors at that point

The yardstick is `transformers` in the engine's dtype. One run of it is one draw of its rounding error, and the
worst token, or the one token whose massive activations are most of the Frobenius norm, is a draw of one. On
SmolLM2 that alone put 4 % of the points of an honest vLLM above 2.5. So the yardstick is taken, metric by
metric, as the largest of three honest figures: eager attention on these very tokens, `sdpa` attention on
these very tokens, and both on a fixed set of other tokens (the median over its groups).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adapters.work import Outcome, Request, split
from validation import errors as E
from validation.query import Query
from validation.reference import References
from validation.verdict import PASS_AT, float32_yardstick

Arrays = Mapping[str, E.Array]
Pick = Callable[[Arrays], E.Array]
Measure = Callable[[E.Array, E.Array], E.Errors]
ATTENTION = ("eager", "sdpa")
# Other tokens for the yardstick: groups of the size of a check, random so that no tokenizer is needed.
_GROUPS, _LENGTHS, _LOGIT_ROWS, _SEED = 6, (49, 31), 8, 20240901


@dataclass(frozen=True)
class Passes:
    """What a request's forward passes saw, as one sequence: its rows, where sampling began, what was sampled."""

    ids: tuple[int, ...]
    start: int
    targets: tuple[int, ...] = ()


def passes(request: Request, outcome: Outcome) -> Passes:
    """The rows of a request: its prompt and all new tokens but the last, which no pass has seen.

    >>> passes(Request("a", (5, 6, 7), 2), Outcome((8, 9)))
    Passes(ids=(5, 6, 7, 8), start=2, targets=(8, 9))
    """
    new = tuple(int(t) for t in outcome.token_ids)
    return Passes((*request.token_ids, *new[:-1]), len(request.token_ids) - 1, new)


@dataclass(frozen=True)
class ModelShape:
    """What the checks need of a model, from its config.json."""

    layers: int
    d_model: int
    vocab: int
    heads: int
    head_dim: int


def shape_of(model: Path) -> ModelShape:
    """Read it, with the names that the families use for the same number."""
    top = json.loads((model / "config.json").read_text())
    config = {**top, **top.get("text_config", {})}

    def first(*names: str) -> int:
        found = next((config[n] for n in names if config.get(n)), None)
        if found is None:
            raise ValueError(f"{model / 'config.json'}: none of {', '.join(names)}")
        return int(found)

    d_model, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head")
    head_dim = int(config.get("head_dim") or d_model // heads)
    return ModelShape(first("num_hidden_layers", "n_layer"), d_model, first("vocab_size"), heads, head_dim)


@dataclass(frozen=True)
class Answers:
    """The reference's answers for some sequences: `exact` in float32, `own` in the engine's dtype, once an attention.

    `elsewhere` holds, by point, the yardstick's errors on other tokens.
    """

    dtype: str
    depth: int
    exact: Sequence[Arrays]
    own: Sequence[Sequence[Arrays]]
    elsewhere: Mapping[str, E.Errors] = field(default_factory=dict)

    def value(self, point: str) -> E.Array:
        """The float32 reference at `point`: all sequences' rows, one after the other."""
        return pooled(self.exact, lambda a: a[point])

    def held(self, point: str) -> E.Errors:
        """The yardstick's errors at `point`."""
        here = self.held_by(lambda a: comparable(point, a[point]), self._depth(point))
        other = self.elsewhere.get(point)
        return here if other is None or self.dtype == "float32" else E.largest([here, other])

    def held_by(self, pick: Pick, depth: int = 1, measure: Measure = E.measure) -> E.Errors:
        """The yardstick's errors, on these tokens, in whatever `pick` makes of the answers to a sequence."""
        exact = pooled(self.exact, pick)
        if self.dtype == "float32":
            return float32_yardstick(depth, len(exact))
        return _honest([measure(pooled(own, pick), exact) for own in self.own])

    def _depth(self, point: str) -> int:
        layer = split(point)[1]
        return self.depth if layer is None else layer + 1


def comparable(point: str, value: Any) -> E.Array:
    """The form in which a point's values are compared: logits as log-probabilities."""
    return E.log_softmax(value) if point in ("logits", "lens") else E.rows(value)


def _honest(errors: Sequence[E.Errors]) -> E.Errors:
    """The first computation's errors, made larger by those others that pass against it.

    Some families compute something else under another attention kernel (no soft cap): that is no yardstick.
    """
    first, *rest = errors
    return E.largest([first, *(e for e in rest if e.median <= PASS_AT * first.median)])


def pooled(sequences: Sequence[Arrays], pick: Pick) -> E.Array:
    """Every sequence's rows in one array."""
    return np.concatenate([pick(a) for a in sequences])


class Truth:
    """Asks the reference about sequences, for an engine of one dtype.

    `first` is the token that every prompt begins with, where the model wants one (<bos>).
    """

    def __init__(self, refs: References, dtype: str, first: int | None = None) -> None:
        self.refs, self.dtype, self.first, self.shape = refs, dtype, first, shape_of(refs.model)
        self._elsewhere: dict[str, E.Errors] = {}

    def ask(
        self, sequences: Sequence[Passes], points: Sequence[str] = (), *, elsewhere: bool = True, **more: Any
    ) -> Answers:
        """Answers for `sequences` at `points`; `more` are fields of `Query` (write, lens, probe, direction, gradient).

        The yardstick at `points` is also taken on other tokens, unless `elsewhere` is off: those know no write.
        """
        exact, own = self._get(sequences, points, **more)
        other = self._errors_elsewhere(points) if elsewhere else {}
        return Answers(self.dtype, self.shape.layers + 1, exact, own, other)

    def _get(
        self, sequences: Sequence[Passes], points: Sequence[str], **more: Any
    ) -> tuple[list[Arrays], list[list[Arrays]]]:
        ways = [("float32", "eager")]
        if self.dtype != "float32":
            ways += [(self.dtype, attention) for attention in ATTENTION]
        queries = [
            Query(s.ids, dtype, attention, tuple(points), s.start, s.targets, **more)
            for dtype, attention in ways
            for s in sequences
        ]
        found, n = self.refs.get(queries), len(sequences)
        exact, *own = [list(found[k : k + n]) for k in range(0, len(found), n)]
        return list(exact), [list(o) for o in own]

    def _errors_elsewhere(self, points: Sequence[str]) -> Mapping[str, E.Errors]:
        missing = [p for p in points if p not in self._elsewhere]
        if missing and self.dtype != "float32":
            exact, own = self._get([s for group in self._groups() for s in group], missing)
            size = len(_LENGTHS)
            groups = [
                Answers(self.dtype, 0, exact[k : k + size], [o[k : k + size] for o in own])
                for k in range(0, len(exact), size)
            ]
            # Only the errors are kept: the arrays would be a hundred megabytes in a process that is being timed.
            self._elsewhere.update({p: E.typical([g.held(p) for g in groups]) for p in missing})
        return self._elsewhere

    def _groups(self) -> list[list[Passes]]:
        rng = np.random.default_rng(_SEED)
        low = min(256, self.shape.vocab // 4)  # special tokens are mostly the first ids
        return [[self._random(rng.integers(low, self.shape.vocab, n)) for n in _LENGTHS] for _ in range(_GROUPS)]

    def _random(self, ids: E.Array) -> Passes:
        start = () if self.first is None else (self.first,)
        return Passes((*start, *(int(t) for t in ids[len(start) :])), len(ids) - _LOGIT_ROWS)
