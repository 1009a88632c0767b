"""Does a write land, everywhere and as written?

Twice over. The engine generates with the write on, watching the written point and some after it: those values,
prompt and generated, against the reference with the same write. Then the tokens that came of it go through as
prompts, with the write and without: the difference is the change that the write causes, against the change it
causes in the reference. Both sides of that difference have the same shape, so that the engine's rounding
before the write cancels, as it does in the yardstick; between decode and prefill it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from adapters.work import AblateHead, Adapter, Capture, ForceToken, Outcome, Request, Shape, Steer, split
from validation import errors as E
from validation import tokens, values
from validation.finding import Finding, What, failed, finding
from validation.query import Write
from validation.truth import Answers, Passes, Truth, passes, pooled
from validation.verdict import Verdict, judge

# A change that the yardstick itself gets wrong by half cannot be told from no change.
VISIBLE = 0.5


def write_of(work: Steer | AblateHead) -> Write:
    """The reference's form of a write.

    >>> write_of(AblateHead(3, 1))
    Write(kind='ablate-head', point='', vector=(), layer=3, head=1)
    """
    if isinstance(work, Steer):
        return Write("steer", work.point, tuple(float(x) for x in work.vector))
    return Write("ablate-head", layer=work.layer, head=work.head)


def watch_for(work: Steer | AblateHead, layers: int) -> tuple[str, ...]:
    """Where to look: the written point, then the residual after its layer, the next, and the last.

    >>> watch_for(AblateHead(3, 1), 8)
    ('z.3', 'resid_post.3', 'resid_post.4', 'resid_post.7')
    """
    own = work.point if isinstance(work, Steer) else f"z.{work.layer}"
    layer = split(own)[1] or 0
    after = [f"resid_post.{n}" for n in (layer, layer + 1, layers - 1) if n < layers]
    return tuple(dict.fromkeys([own, *after]))


def shape_for(requests: Sequence[Request]) -> Shape:
    """The shape of some requests in flight together."""
    return Shape(
        max(len(r.token_ids) for r in requests), max(r.new_tokens for r in requests), len(requests), len(requests) > 1
    )


def check_write(
    adapter: Adapter, work: Steer | AblateHead | ForceToken, requests: Sequence[Request], truth: Truth
) -> list[Finding]:
    """Findings on one write; what it cannot see, it says."""
    if isinstance(work, ForceToken):
        return [forced("write", work, requests, adapter.run(requests, work), truth.shape.vocab)]
    watching = replace(work, watch=watch_for(work, truth.shape.layers))
    refusal = adapter.refuses(watching, shape_for(requests))
    if refusal:
        watching = replace(work, watch=())  # the tokens are all there is to see
    outcomes = adapter.run(requests, watching)
    if bad := tokens.trouble(requests, outcomes, truth.shape.vocab):
        return [failed("write", "tokens", bad)]
    sequences = [passes(r, o) for r, o in zip(requests, outcomes, strict=True)]
    written = truth.ask(sequences, watching.watch, elsewhere=False, write=write_of(work))
    note = "under the written reference" + (f"; nothing else was checked: {refusal.sentence}" if refusal else "")
    found = [finding("write", "tokens", tokens.plausible(written), note=note)]
    if not watching.watch:
        return found
    if wrong := values.guards("write", Capture(watching.watch), requests, outcomes, truth.shape):
        return [*found, *wrong]
    if isinstance(work, AblateHead):
        found.append(_head_is_zero(work, outcomes))
    found += values.captured("write", watching.watch, outcomes, written, "the written values")
    return found + _changes(adapter, watching, sequences, written, truth)


def forced(
    what: What, work: ForceToken, requests: Sequence[Request], outcomes: Sequence[Outcome], vocab: int
) -> Finding:
    """Every new token is the forced one, or a failure that names the first that is not."""
    if bad := tokens.trouble(requests, outcomes, vocab):
        return failed(what, "tokens", bad)
    for request, outcome in zip(requests, outcomes, strict=True):
        for k, token in enumerate(outcome.token_ids):
            if int(token) != work.id:
                return failed(
                    what, "tokens", f"request {request.id}: new token {k} is {int(token)}, forced was {work.id}"
                )
    count = sum(len(o.token_ids) for o in outcomes)
    return finding(what, "tokens", Verdict("PASS", f"all {count} new tokens are {work.id}", 0.0))


def _changes(
    adapter: Adapter, work: Steer | AblateHead, sequences: Sequence[Passes], written: Answers, truth: Truth
) -> list[Finding]:
    whole = [Request(f"whole/{k}", s.ids, 1) for k, s in enumerate(sequences)]
    plain = truth.ask(sequences, work.watch, elsewhere=False)
    sides = [adapter.run(whole, what) for what in (work, Capture(work.watch))]
    for outcomes in sides:
        if wrong := values.guards("write", Capture(work.watch), whole, outcomes, truth.shape):
            return wrong
    found = []
    for point in work.watch:
        on, off = (np.concatenate([E.rows(o.values[point]) for o in side]) for side in sides)
        found.append(_change(point, on - off, written, plain, truth.dtype))
    return found


def _change(point: str, change: E.Array, written: Answers, plain: Answers, dtype: str) -> Finding:
    reference = _difference(written.exact, plain.exact, point)
    if dtype == "float32":
        held = _float32_change(written, plain, point, reference)
    else:
        held = E.largest(
            [E.measure(_difference(w, p, point), reference) for w, p in zip(written.own, plain.own, strict=True)]
        )
    verdict = judge(change, reference, held, dtype=dtype)
    note = "the change against the reference's change"
    if verdict.verdict == "PASS" and held.median > VISIBLE:
        verdict = replace(
            verdict, verdict="WARN", reason=f"the yardstick's own error is {held.median:.2f} of it; {verdict.reason}"
        )
    return finding("write", point, verdict, note=note)


def _difference(written: Sequence[object], plain: Sequence[object], point: str) -> E.Array:
    on, off = (pooled(side, lambda a: E.rows(a[point])) for side in (written, plain))  # type: ignore[arg-type]
    return on - off


def _float32_change(written: Answers, plain: Answers, point: str, change: E.Array) -> E.Errors:
    """Two float32 values may each be off by the bound: relative to a small change, that is more."""
    bound = plain.held(point)
    size = np.linalg.norm(E.rows(plain.value(point)), axis=1) + np.linalg.norm(E.rows(written.value(point)), axis=1)
    each = bound.median * size / np.maximum(np.linalg.norm(change, axis=1), 1e-300)
    total = bound.median * float(np.linalg.norm(size)) / float(np.linalg.norm(change))
    return E.Errors(float(np.median(each)), float(each.max()), total, 1.0 + float(np.median(each)), 0, len(each))


def _head_is_zero(work: AblateHead, outcomes: Sequence[Outcome]) -> Finding:
    point = f"z.{work.layer}"
    for k, outcome in enumerate(outcomes):
        head = E.as_array(outcome.values[point])[:, work.head]
        if head.any():
            row = int(head.any(axis=1).argmax())
            return failed("write", point, f"request {k}, row {row}: head {work.head} is not zero after it was ablated")
    return finding("write", point, Verdict("PASS", f"head {work.head} reads back as exactly zero", 0.0))
