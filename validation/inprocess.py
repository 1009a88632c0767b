"""Validation inside the process that is timed: `Validator`, which the harness's worker calls.

    with Validator(model, settings, cache) as validator:
        validator.check_reads(adapter, requests)                      # before anything is timed
        validator.check_write(adapter, Steer(point, vector), requests)
        validator.check_row("capture-1", work, requests, outcomes)    # every run, what was timed

The reference runs in a process of its own (`reference.py`), and only while one of these calls waits for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from adapters.work import (
    AblateHead,
    Adapter,
    Capture,
    ForceToken,
    Gradient,
    Lens,
    Nothing,
    Outcome,
    Probe,
    Request,
    Settings,
    Steer,
    Work,
)
from validation import tokens, values
from validation.finding import Finding, What, failed, finding, noted
from validation.reference import References
from validation.truth import Truth, passes
from validation.writes import check_write, forced, shape_for, write_of

__all__ = ["Finding", "Validator", "chosen"]

# Tokens of a run whose values are compared with the reference: enough that a metric's noise is small.
VALUE_TOKENS = 288


class Validator:
    """Checks one adapter's reads, writes and timed outcomes against `transformers`."""

    def __init__(self, model: Path, settings: Settings, cache: Path) -> None:
        self.settings = settings
        self.refs = References(model, cache, threads=settings.threads)
        self.truth = Truth(self.refs, settings.dtype)

    def check_reads(self, adapter: Adapter, requests: Sequence[Request]) -> list[Finding]:
        """`resid_post` of every layer and the logits, prompt and generated rows, all requests in flight together.

        A plain engine hands nothing back: there the tokens are checked, and the finding says so.
        """
        self.truth.first = _shared_first(requests)
        points = tuple(f"resid_post.{n}" for n in range(self.truth.shape.layers))
        refused = None
        for work, less in (
            (Capture((*points, "logits")), "fewer tokens were asked for"),
            (Capture(points), "logits not read"),
            (Nothing(), "only tokens were checked"),
        ):
            for asked in _smaller(requests):
                refusal = adapter.refuses(work, shape_for(asked))
                if refusal is None:
                    what: What = "value" if isinstance(work, Nothing) else "read"
                    found = self._checked(what, work, asked, adapter.run(asked, work))
                    return found if refused is None else [*found[:-1], noted(found[-1], f"{less}: {refused}")]
                refused = refused or refusal.sentence
        raise RuntimeError(f"there is nothing to check this column by: {refused}")

    def check_write(
        self, adapter: Adapter, work: Steer | AblateHead | ForceToken, requests: Sequence[Request]
    ) -> list[Finding]:
        """The change that the write causes at points after it, against the change it causes in the reference."""
        return check_write(adapter, work, requests, self.truth)

    def check_row(
        self, row: str, work: Work, requests: Sequence[Request], outcomes: Sequence[Outcome]
    ) -> list[Finding]:
        """What one timed run handed back: all of it for shape, finiteness and mix-ups, `chosen` of it for values."""
        return [replace(f, row=row) for f in self._checked("value", work, requests, outcomes)]

    def _checked(
        self, what: What, work: Work, requests: Sequence[Request], outcomes: Sequence[Outcome]
    ) -> list[Finding]:
        shape = self.truth.shape
        if isinstance(work, ForceToken):
            return [forced(what, work, requests, outcomes, shape.vocab)]
        if isinstance(work, Gradient):
            return values.gradient(work, requests, outcomes, self.truth)
        if bad := tokens.trouble(requests, outcomes, shape.vocab):
            return [failed("value", "tokens", bad)]
        if wrong := values.guards(what, work, requests, outcomes, shape):
            return wrong
        picked = range(len(requests)) if what == "read" else chosen(requests)
        note = "" if len(picked) == len(requests) else f"values of {len(picked)} of {len(requests)} requests compared"
        return self._compared(what, work, [requests[k] for k in picked], [outcomes[k] for k in picked], note)

    def _compared(
        self, what: What, work: Work, requests: Sequence[Request], outcomes: Sequence[Outcome], note: str
    ) -> list[Finding]:
        sequences = [passes(r, o) for r, o in zip(requests, outcomes, strict=True)]
        shape, found = self.truth.shape, []
        match work:
            case Capture(points):
                answers = self.truth.ask(sequences, values.with_neighbours(points, shape.layers))
                found = values.captured(what, points, outcomes, answers, note)
            case Lens(point):
                answers = self.truth.ask(sequences, lens=point)
                verdict = tokens.plausible_choice(answers, "lens", [o.values["lens"] for o in outcomes])
                found = [finding(what, point, verdict, note="the lens's choice")]
            case Probe(point, direction):
                answers = self.truth.ask(sequences, probe=point, direction=tuple(float(x) for x in direction))
                found = [values.projected(what, point, outcomes, answers, shape.d_model)]
            case Steer() | AblateHead():
                answers = self.truth.ask(sequences, write=write_of(work))
                note = "; ".join(filter(None, [note, "under the written reference"]))
            case _:
                answers = self.truth.ask(sequences)
        return [*found, finding("value", "tokens", tokens.plausible(answers), note=note)]

    def close(self) -> None:
        """End the reference's process."""
        self.refs.close()

    def __enter__(self) -> Validator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def chosen(requests: Sequence[Request]) -> list[int]:
    """Which requests' values are compared with the reference: all, or as many as hold about VALUE_TOKENS tokens.

    Evenly spaced, from a start that the first request's id decides, so that another run checks others.

    >>> len(chosen([Request(f"sweep/0/{k}", tuple(range(16)), 1) for k in range(64)]))
    18
    """
    longest = max(len(r.token_ids) + r.new_tokens - 1 for r in requests)
    many = max(2, VALUE_TOKENS // longest)
    if many >= len(requests):
        return list(range(len(requests)))
    start = zlib.crc32(requests[0].id.encode()) % len(requests)
    return sorted({(start + k * len(requests) // many) % len(requests) for k in range(many)})


def _shared_first(requests: Sequence[Request]) -> int | None:
    """The token that all of several prompts begin with: <bos>, for the first ordinary tokens are all different."""
    first = {r.token_ids[0] for r in requests}
    return first.pop() if len(first) == 1 and len(requests) > 1 else None


def _smaller(requests: Sequence[Request]) -> list[Sequence[Request]]:
    """What is asked for, and what a library that cannot do that may still do: one new token, one prompt at a time."""
    one_token = [replace(r, new_tokens=1) for r in requests]
    return [requests, one_token, one_token[:1]]
