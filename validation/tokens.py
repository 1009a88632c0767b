"""Are the tokens that an engine chose the ones that the reference could have chosen?

Two right engines choose different tokens where two logits are closer than rounding. So a token is not compared
with the reference's token but by how far its reference logit lies below the top one, in units of the
yardstick's own error on a difference of two logits. Each token is judged given those before it, so that one
legitimate difference does not condemn what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from adapters.work import Outcome, Request
from validation import errors as E
from validation.truth import Answers, Arrays, pooled
from validation.verdict import FLOAT32_BOUND, PASS_AT, Verdict, grade

_DIFFERENCE = np.sqrt(2.0)  # of two logits, each with its own error


def trouble(requests: Sequence[Request], outcomes: Sequence[Outcome], vocab: int) -> str | None:
    """What is wrong with the number of outcomes, tokens, or their ids; None if nothing is.

    >>> trouble([Request("a", (1, 2), 2)], [Outcome((5,))], 10)
    'request a: 1 new tokens, 2 were asked for'
    """
    if len(outcomes) != len(requests):
        return f"{len(outcomes)} outcomes for {len(requests)} requests"
    for request, outcome in zip(requests, outcomes, strict=True):
        ids = [int(t) for t in outcome.token_ids]
        if len(ids) != request.new_tokens:
            return f"request {request.id}: {len(ids)} new tokens, {request.new_tokens} were asked for"
        strange = next((t for t in ids if not 0 <= t < vocab), None)
        if strange is not None:
            return f"request {request.id}: token id {strange} is not in the vocabulary of {vocab}"
    return None


def plausible(answers: Answers) -> Verdict:
    """The verdict on the tokens (`targets`) of the sequences that were asked about."""
    gap = pooled(answers.exact, lambda a: a["tokens.gap"])
    sample = pooled(answers.exact, _sample)
    return _judge(gap, _spread(answers, sample, _sample))


def plausible_choice(answers: Answers, point: str, chosen: Sequence[Any]) -> Verdict:
    """The verdict on token ids chosen as the highest-scoring of the logits at `point`, a list for each sequence."""
    logits = answers.value(point)
    ids = np.concatenate([E.as_array(c).ravel() for c in chosen]).astype(np.int64)
    if ids.shape != (len(logits),):
        return Verdict("FAIL", f"{len(ids)} ids for {len(logits)} passes")
    if ((ids < 0) | (ids >= logits.shape[1])).any():
        return Verdict("FAIL", f"id {int(ids[(ids < 0) | (ids >= logits.shape[1])][0])} is not in the vocabulary")
    gap = logits.max(axis=1) - logits[np.arange(len(ids)), ids]
    return _judge(gap, _spread(answers, _centred(logits), lambda a: _centred(a[point])))


def _sample(answer: Arrays) -> E.Array:
    return _centred(answer["tokens.sample"])


def _centred(logits: E.Array) -> E.Array:
    return np.asarray(logits - logits.mean(axis=1, keepdims=True))


def _spread(answers: Answers, exact: E.Array, pick: Any) -> E.Array:
    """For each pass, the yardstick's root-mean-square error on a difference of two logits."""
    rms = np.sqrt(np.mean(exact**2, axis=1))
    if answers.dtype == "float32":
        return np.asarray(_DIFFERENCE * FLOAT32_BOUND * np.sqrt(answers.depth) / PASS_AT * rms)
    each = np.stack([np.sqrt(np.mean((pooled(own, pick) - exact) ** 2, axis=1)) for own in answers.own])
    # A pass is a draw of one: at least the typical error of all of them, and never below rounding.
    floor = np.maximum(np.median(each), E.UNIT_ROUNDOFF[answers.dtype] * rms)
    return np.asarray(_DIFFERENCE * np.maximum(each.max(axis=0), floor))


def _judge(gap: E.Array, spread: E.Array) -> Verdict:
    ratio = gap / spread
    k = int(ratio.argmax())
    other = int((gap > 0).sum())
    reason = (
        f"token {k}, the least likely of {len(gap)}, is {gap[k]:.3f} below the reference's top logit, "
        f"{ratio[k]:.2f} x the yardstick's error on such a difference ({other} are not the reference's own choice)"
    )
    return Verdict(grade(float(ratio[k])), reason, float(gap[k]), float(spread[k]), float(ratio[k]))
