"""One column through every kind of work on a tiny model: `python -m tests.peer_conformance COLUMN NEW_TOKENS`.

A process of its own, because an engine leaves a process changed. Prints one JSON object: what failed, what was
refused and why, and what was checked.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adapters.columns import all_columns, make
from adapters.engines.settings import environment
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
    Shape,
    Steer,
    Work,
)
from harness.models import resolve
from tests.peer_reference import reference, sequence, worst

MODEL = "synthetic:llama"
SETTINGS = Settings(dtype="float32", max_model_len=256, max_concurrent=4)
# Float32 against float32; twenty times what any column here was off by.
CLOSE = 2e-4
FORCED = 77


@dataclass
class Report:
    failed: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)


def requests(new: int) -> list[Request]:
    """Three prompts of different lengths, so that padding and packing both show."""
    rng = np.random.default_rng(0)
    return [Request(f"r{n}", tuple(int(t) for t in rng.integers(3, 259, n)), new) for n in (17, 9, 12)]


def works() -> Iterator[tuple[str, Work]]:
    vector = np.random.default_rng(1).standard_normal(128).astype(np.float32)
    every = ("resid_post.0", "resid_post.1", "resid_post.2")
    yield "nothing", Nothing()
    yield "capture-1", Capture(("resid_post.1",))
    yield "capture-all", Capture(every)
    yield "capture-mixed", Capture(("logits", "resid_post.2", "z.1", "resid_post.0"))
    yield "probe", Probe("resid_post.1", vector)
    yield "lens", Lens("resid_post.1")
    yield "steer", Steer("resid_post.1", vector)
    yield "steer-watched", Steer("resid_post.1", vector, every)
    yield "ablate-head", AblateHead(1, 2)
    yield "ablate-head-watched", AblateHead(1, 2, (*every, "z.1"))
    yield "force-token", ForceToken(FORCED)
    yield "gradient", Gradient("resid_post.1")


def check(adapter: Adapter, name: str, work: Work, asked: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
    """Raise AssertionError where an outcome is not what the reference says."""
    assert len(outcomes) == len(asked), f"{len(outcomes)} outcomes for {len(asked)} requests"
    for request, outcome in zip(asked, outcomes, strict=True):
        if isinstance(work, Gradient):
            continue
        assert len(outcome.token_ids) == request.new_tokens, f"{len(outcome.token_ids)} tokens"
        if isinstance(work, ForceToken):
            assert set(outcome.token_ids) == {FORCED}, outcome.token_ids
            continue
        _check_values(work, request, outcome)


def _check_values(work: Work, request: Request, outcome: Outcome) -> None:
    import torch

    points = work.points if isinstance(work, Capture) else getattr(work, "watch", ())
    read = [p for p in points if p != "logits"]
    extra = [work.point] if isinstance(work, Lens | Probe) else []
    expected = reference(resolve(MODEL), sequence(request, outcome), work, [*read, *extra])
    last = len(request.token_ids) - 1
    chosen = expected["logits"][last:].argmax(-1).tolist()
    assert list(outcome.token_ids) == chosen, f"tokens {outcome.token_ids}, expected {chosen}"
    assert set(points) <= set(outcome.values), f"{points} asked, {sorted(outcome.values)} came back"
    for point in read:
        _close(point, outcome.values[point], expected[point])
    if "logits" in points:
        _close("logits", outcome.values["logits"], expected["logits"][last:])
    if isinstance(work, Lens):
        best = expected["unembed"](expected[work.point][last:]).argmax(-1)
        assert outcome.values["lens"].tolist() == best.tolist()
    if isinstance(work, Probe):
        line = expected[work.point] @ torch.from_numpy(work.direction)
        assert outcome.values["probe"].shape == line.shape
        assert (outcome.values["probe"] - line).abs().max() < 1e-3 * line.abs().max()


def _close(point: str, value: Any, expected: Any) -> None:
    assert value.shape == expected.shape, f"{point} is {tuple(value.shape)}, expected {tuple(expected.shape)}"
    assert value.device.type == "cpu"
    assert worst(value, expected) < CLOSE, f"{point} is off by {worst(value, expected):.1e}"


def conform(adapter: Adapter, new: int) -> Report:
    """Every work, one request and several, asked and installed; then nothing may be left on the engine."""
    report = Report()
    asked = requests(new)
    shape = Shape(max(len(r.token_ids) for r in asked), new, len(asked), concurrent=True)
    plain: list[tuple[int, ...]] | None = None
    for name, work in works():
        if refusal := adapter.refuses(work, shape):
            report.refused[name] = f"{refusal.code}: {refusal.sentence}"
            continue
        for few in (asked[:1], asked):
            _try(
                report, f"{name} x{len(few)}", lambda w=work, f=few, n=name: check(adapter, n, w, f, adapter.run(f, w))
            )
        if isinstance(work, Nothing):
            plain = [o.token_ids for o in adapter.run(asked, work)]
        else:
            _installed(report, adapter, name, work, asked)
    if plain is not None:
        _try(report, "unchanged after all", lambda: _unchanged(adapter, asked, plain))
    return report


def _installed(report: Report, adapter: Adapter, name: str, work: Work, asked: Sequence[Request]) -> None:
    try:
        adapter.install(work)
    except NotImplementedError as no:
        report.refused[f"{name} installed"] = str(no)
        return
    _try(report, f"{name} installed", lambda: check(adapter, name, work, asked, adapter.run(asked, Nothing())))
    adapter.remove()


def _unchanged(adapter: Adapter, asked: Sequence[Request], plain: Sequence[tuple[int, ...]]) -> None:
    outcomes = adapter.run(asked, Nothing())
    assert [o.token_ids for o in outcomes] == list(plain), "other tokens than before any work was done"
    assert not any(o.values for o in outcomes), "values came back that nobody asked for"


def _try(report: Report, what: str, run: Any) -> None:
    try:
        run()
    except Exception as error:  # every failure is a line of the report
        report.failed.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
    else:
        report.checked.append(what)


def main(argv: Sequence[str]) -> int:
    column, new = argv[0], int(argv[1])
    adapter = make(all_columns()[column])
    adapter.boot(resolve(MODEL), SETTINGS)
    try:
        report = conform(adapter, new)
        settings = json.loads(json.dumps(dict(adapter.engine_settings())))
    finally:
        adapter.close()
    print(json.dumps({**vars(report), "settings": settings}))
    return 0


if __name__ == "__main__":
    os.environ.update(environment(SETTINGS))
    sys.exit(main(sys.argv[1:]))
