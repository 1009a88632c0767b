"""The values that a run handed back, kind by kind, against the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from adapters.work import Capture, Gradient, Lens, Outcome, Probe, Request, Work, split
from validation import errors as E
from validation.finding import Finding, What, failed, finding
from validation.truth import Answers, ModelShape, Passes, Truth, comparable, pooled
from validation.verdict import compare, judge

_WIDE = {"embed", "resid_pre", "attn_in", "attn_out", "resid_mid", "mlp_in", "mlp_out", "resid_post", "final_norm"}


def expected_shape(point: str, request: Request, shape: ModelShape) -> tuple[int, ...] | None:
    """The shape of a point's values for one request; None where only the reference knows it.

    >>> expected_shape("resid_post.3", Request("a", (1, 2, 3), 2), ModelShape(4, 8, 100, 2, 4))
    (4, 8)
    """
    rows = len(request.token_ids) + request.new_tokens - 1
    name = split(point)[0]
    if name == "logits":
        return (request.new_tokens, shape.vocab)
    if name == "z":
        return (rows, shape.heads, shape.head_dim)
    return (rows, shape.d_model) if name in _WIDE else None


def guards(
    what: What, work: Work, requests: Sequence[Request], outcomes: Sequence[Outcome], shape: ModelShape
) -> list[Finding]:
    """What can be said of every request without a reference: nothing missing, right shapes, finite, no mix-up."""
    match work:
        case Capture(points):
            expected = {p: [expected_shape(p, r, shape) for r in requests] for p in points}
        case Lens():
            expected = {"lens": [(r.new_tokens,) for r in requests]}
        case Probe():
            expected = {"probe": [(len(r.token_ids) + r.new_tokens - 1,) for r in requests]}
        case _:
            return []
    found = []
    for point, shapes in expected.items():
        bad = next(
            (b for r, o, s in zip(requests, outcomes, shapes, strict=True) if (b := _trouble(point, r, o, s))), None
        )
        bad = bad or (_mixed_up(point, requests, outcomes) if isinstance(work, Capture) else None)
        if bad:
            found.append(failed(what, point, bad))
    return found


def _trouble(point: str, request: Request, outcome: Outcome, shape: tuple[int, ...] | None) -> str | None:
    if point not in outcome.values:
        return f"request {request.id} came back without {point}; it has {', '.join(outcome.values) or 'no values'}"
    value = E.as_array(outcome.values[point])
    if shape is None:
        shape = value.shape
    if point == "lens":
        bad = None if value.shape == shape else f"shape {value.shape}, expected {shape}"
    else:
        bad = E.trouble(value, shape)
    return f"request {request.id}: {bad}" if bad else None


def _mixed_up(point: str, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> str | None:
    """Two requests with different tokens and the same values: one of them has been handed the other's."""
    seen: dict[bytes, Request] = {}
    for request, outcome in zip(requests, outcomes, strict=True):
        twin = seen.setdefault(E.as_array(outcome.values[point]).tobytes(), request)
        if twin.token_ids != request.token_ids:
            return f"requests {twin.id} and {request.id} have different prompts and the very same values"
    return None


def with_neighbours(points: Sequence[str], layers: int) -> tuple[str, ...]:
    """The points and, of each, the layer before and after, which tell a wrong layer from a wrong value.

    >>> with_neighbours(("resid_post.0", "logits"), 4)
    ('resid_post.0', 'logits', 'resid_post.1')
    """
    near = []
    for point in points:
        name, layer = split(point)
        if layer is not None:
            near += [f"{name}.{n}" for n in (layer - 1, layer + 1) if 0 <= n < layers]
    return tuple(dict.fromkeys([*points, *near]))


def captured(
    what: What, points: Sequence[str], outcomes: Sequence[Outcome], answers: Answers, note: str = ""
) -> list[Finding]:
    """A finding for each captured point, over all requests' rows at once."""
    layers: dict[str, dict[int, E.Array]] = {}
    for point in answers.exact[0]:
        name, layer = split(point)
        if layer is not None and name in {split(p)[0] for p in points}:
            layers.setdefault(name, {})[layer] = answers.value(point)
    return [_captured(what, point, outcomes, answers, layers, note) for point in points]


def _captured(
    what: What,
    point: str,
    outcomes: Sequence[Outcome],
    answers: Answers,
    layers: Mapping[str, Mapping[int, E.Array]],
    note: str,
) -> Finding:
    name, layer = split(point)
    parts = [E.as_array(o.values[point]) for o in outcomes]
    wanted = [a[point].shape for a in answers.exact]
    wrong = next((k for k, (p, w) in enumerate(zip(parts, wanted, strict=True)) if p.shape != w), None)
    if wrong is not None:
        return failed(what, point, f"request {wrong}: shape {parts[wrong].shape}, expected {wanted[wrong]}")
    value, reference = np.concatenate(parts), answers.value(point)
    if name == "logits":
        note = "; ".join(filter(None, [note, _offset_note(value, reference, answers)]))
    value, reference = comparable(point, value), comparable(point, reference)
    verdict = judge(value, reference, answers.held(point), dtype=answers.dtype, layer=layer, others=layers.get(name))
    return finding(what, point, verdict, note=note)


def _offset_note(value: E.Array, reference: E.Array, answers: Answers) -> str:
    """A constant that log-softmax takes out is not an error, but it is said."""
    constant = E.offset(value, reference)
    own = max((abs(E.offset(pooled(o, lambda a: a["logits"]), reference)) for o in answers.own), default=0.0)
    if abs(constant) <= 5 * own + 1e-3:
        return ""
    return f"compared after log-softmax: the logits carry a constant offset of {constant:.3g}"


def projected(what: What, point: str, outcomes: Sequence[Outcome], answers: Answers, width: int) -> Finding:
    """The finding on a probe: one number a token."""
    size = pooled(answers.exact, lambda a: a["probe.size"])

    def measure(value: E.Array, reference: E.Array) -> E.Errors:
        return E.measure_projection(value, reference, size, width)

    value, reference = np.concatenate([E.as_array(o.values["probe"]) for o in outcomes]), answers.value("probe")
    if bad := E.trouble(value, reference.shape, None):
        return failed(what, point, bad)
    held = answers.held_by(lambda a: a["probe"], (split(point)[1] or 0) + 1, measure)
    return finding(what, point, compare(measure(value, reference), held, answers.dtype), note="its projection")


def gradient(work: Gradient, requests: Sequence[Request], outcomes: Sequence[Outcome], truth: Truth) -> list[Finding]:
    """The findings on a gradient, against float32 autograd."""
    if len(outcomes) != len(requests):
        return [failed("value", work.point, f"{len(outcomes)} outcomes for {len(requests)} requests")]
    for request, outcome in zip(requests, outcomes, strict=True):
        shape = (len(request.token_ids), truth.shape.d_model)
        got = E.as_array(outcome.values[work.point]).shape if work.point in outcome.values else None
        if got != shape:
            return [failed("value", work.point, f"request {request.id}: {got or 'no value'}, expected shape {shape}")]
    answers = truth.ask([Passes(r.token_ids, 0) for r in requests], gradient=work.point)
    key = f"gradient.{work.point}"
    value = np.concatenate([E.as_array(o.values[work.point]) for o in outcomes])
    held = answers.held_by(lambda a: a[key], truth.shape.layers + 1)
    return [
        finding("value", work.point, judge(value, answers.value(key), held, dtype=answers.dtype), note="the gradient")
    ]
