"""One adapter through every kind of work on a tiny model: what holds, what it refuses and why, and what is wrong.

`tapgrid adapter check my_module` runs it, and CI runs it for every column of ours. One line a kind of work and a way
of asking: one request, three at once, left on the engine (`installed`). The truth is `conformance_reference`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

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
    Refusal,
    Request,
    Settings,
    Shape,
    Steer,
    Work,
)
from validation.conformance_reference import gradient, reference, sequence, worst

MODEL = "synthetic:llama"
SETTINGS = Settings(dtype="float32", max_model_len=256, max_concurrent=4)
# Float32 against float32; twenty times what any column of ours was off by.
CLOSE = 2e-4
FORCED = 77
WIDTH = 128  # of the tiny model
CODES = ("not-expressible", "no-library", "no-device", "model", "not-plain")
METHODS = ("boot", "close", "refuses", "run", "install", "remove", "engine_settings")
Verdict = Literal["holds", "refused", "wrong"]


@dataclass(frozen=True)
class Line:
    """One line of the table. `reason` is the refusal's sentence, or what is wrong."""

    what: str
    verdict: Verdict
    reason: str = ""


def requests(new: int) -> list[Request]:
    """Three prompts of different lengths, so that padding and packing both show."""
    rng = np.random.default_rng(0)
    return [Request(f"r{n}", tuple(int(t) for t in rng.integers(3, 259, n)), new) for n in (17, 9, 12)]


def works() -> Iterator[tuple[str, Work]]:
    """Every kind of work, by name; the writes also with what they leave read back."""
    vector = np.random.default_rng(1).standard_normal(WIDTH).astype(np.float32)
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


def conform(adapter: Adapter, model: Path, new: int, say: Callable[[Line], None] = lambda line: None) -> list[Line]:
    """Put a booted adapter through every work; `say` hears every line as it comes. Nothing may be left behind."""
    found: list[Line] = []

    def note(what: str, verdict: Verdict, reason: str = "") -> None:
        found.append(Line(what, verdict, reason))
        say(found[-1])

    def attempt(what: str, run: Callable[[], object]) -> bool:
        try:
            run()
        except Exception as error:  # every failure is a line of the table
            said = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            note(what, "wrong", said.strip()[:300] or type(error).__name__)
            return False
        note(what, "holds")
        return True

    asked = requests(new)
    shape = Shape(max(len(r.token_ids) for r in asked), new, len(asked), concurrent=True)
    plain: list[tuple[int, ...]] | None = None
    attempt("protocol", lambda: _protocol(adapter))
    for name, work in works():
        refusal = adapter.refuses(work, shape)
        if refusal is not None:
            bad = _bad_refusal(refusal)
            note(name, "wrong" if bad else "refused", bad or f"{refusal.code}: {refusal.sentence}")
            continue
        for few in (asked[:1], asked):
            attempt(f"{name} x{len(few)}", lambda w=work, f=few: check(model, w, f, adapter.run(f, w)))  # type: ignore[misc]
        if isinstance(work, Nothing):
            attempt("nothing, again", lambda: _same(plain_tokens(adapter, asked), plain_tokens(adapter, asked)))
            plain = plain_tokens(adapter, asked)
        else:
            _installed(adapter, model, name, work, asked, note, attempt)
    if plain is not None:
        attempt("unchanged after all", lambda: _unchanged(adapter, asked, plain))
    return found


def check(model: Path, work: Work, asked: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
    """Raise AssertionError where an outcome is not what the reference says."""
    assert len(outcomes) == len(asked), f"{len(outcomes)} outcomes for {len(asked)} requests"
    for request, outcome in zip(asked, outcomes, strict=True):
        if isinstance(work, Gradient):
            assert work.point in outcome.values, f"{work.point} asked, {sorted(outcome.values)} came back"
            _close(work.point, outcome.values[work.point], gradient(model, request.token_ids, work.point))
            continue
        count = len(outcome.token_ids)
        assert count == request.new_tokens, f"{count} tokens came back, {request.new_tokens} were asked for"
        if isinstance(work, ForceToken):
            assert set(outcome.token_ids) == {work.id}, f"tokens {outcome.token_ids}, all should be {work.id}"
            continue
        _check_values(model, work, request, outcome)


def _check_values(model: Path, work: Work, request: Request, outcome: Outcome) -> None:
    import torch

    points = work.points if isinstance(work, Capture) else getattr(work, "watch", ())
    read = [p for p in points if p != "logits"]
    extra = [work.point] if isinstance(work, Lens | Probe) else []
    expected = reference(model, sequence(request, outcome), work, [*read, *extra])
    last = len(request.token_ids) - 1
    chosen = expected["logits"][last:].argmax(-1).tolist()
    assert list(outcome.token_ids) == chosen, f"tokens {list(outcome.token_ids)}, expected {chosen}"
    assert set(points) <= set(outcome.values), f"{points} asked, {sorted(outcome.values)} came back"
    for point in read:
        _close(point, outcome.values[point], expected[point])
    if "logits" in points:
        _close("logits", outcome.values["logits"], expected["logits"][last:])
    if isinstance(work, Lens):
        best = expected["unembed"](expected[work.point][last:]).argmax(-1).tolist()
        lens = outcome.values["lens"].tolist()
        assert lens == best, f"lens {lens}, expected {best}"
    if isinstance(work, Probe):
        line = expected[work.point] @ torch.from_numpy(work.direction)
        probe = outcome.values["probe"]
        assert probe.shape == line.shape, f"probe is {tuple(probe.shape)}, expected {tuple(line.shape)}"
        off = float((probe - line).abs().max() / line.abs().max())
        assert off < 1e-3, f"probe is off by {off:.1e}"


def _close(point: str, value: Any, expected: Any) -> None:
    assert value.shape == expected.shape, f"{point} is {tuple(value.shape)}, expected {tuple(expected.shape)}"
    assert value.device.type == "cpu", f"{point} came back on {value.device}, not on the CPU"
    assert worst(value, expected) < CLOSE, (
        f"{point} is off by {worst(value, expected):.1e}, at most {CLOSE:.0e} is right"
    )


def _installed(
    adapter: Adapter,
    model: Path,
    name: str,
    work: Work,
    asked: Sequence[Request],
    note: Callable[[str, Verdict, str], None],
    attempt: Callable[[str, Callable[[], object]], bool],
) -> None:
    try:
        adapter.install(work)
    except NotImplementedError as no:
        note(f"{name} installed", "refused", str(no))
        return
    attempt(f"{name} installed", lambda: check(model, work, asked, adapter.run(asked, Nothing())))
    adapter.remove()


def plain_tokens(adapter: Adapter, asked: Sequence[Request]) -> list[tuple[int, ...]]:
    return [tuple(o.token_ids) for o in adapter.run(asked, Nothing())]


def _same(one: object, other: object) -> None:
    assert one == other, "other tokens for the same prompts: sampling is not greedy, or something is left over"


def _unchanged(adapter: Adapter, asked: Sequence[Request], plain: Sequence[tuple[int, ...]]) -> None:
    outcomes = adapter.run(asked, Nothing())
    assert [tuple(o.token_ids) for o in outcomes] == list(plain), "other tokens than before any work was done"
    assert not any(o.values for o in outcomes), "values came back that nobody asked for"


def _protocol(adapter: Adapter) -> None:
    missing = [m for m in METHODS if not callable(getattr(adapter, m, None))]
    assert not missing, f"it has no {', '.join(missing)}"
    assert isinstance(getattr(adapter, "plain", None), bool), "`plain` is True or False: is nothing attached?"
    settings = dict(adapter.engine_settings())
    try:
        json.dumps(settings, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"engine_settings() is not plain data: {error}") from None
    assert settings.get("dtype") == SETTINGS.dtype, (
        f"engine_settings() has dtype {settings.get('dtype')!r}, not float32"
    )


def _bad_refusal(refusal: object) -> str:
    if not isinstance(refusal, Refusal):
        return f"refuses() returned a {type(refusal).__name__}, not a Refusal or None"
    if refusal.code not in CODES:
        return f"refusal code {refusal.code!r} is none of {', '.join(CODES)}"
    return "" if refusal.sentence.strip() else "a refusal without a sentence that says why"
