"""The rule: where PASS ends and WARN ends, what fails at once, and that no fault hides behind another metric."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pytest

from adapters.work import split
from validation import errors as E
from validation.finding import failed, finding, noted
from validation.verdict import FLOAT32_BOUND, Verdict, compare, float32_yardstick, grade, judge

RNG = np.random.default_rng(3)
R = RNG.normal(size=(60, 48))
Y = R + 0.01 * RNG.normal(size=R.shape)
HELD = E.measure(Y, R)


def other(level: float, seed: int = 11) -> E.Array:
    return R + level * np.random.default_rng(seed).normal(size=R.shape)


@pytest.mark.parametrize(
    ("ratio", "word"),
    [
        (0.0, "PASS"),
        (2.5, "PASS"),
        (2.5001, "WARN"),
        (5.0, "WARN"),
        (5.001, "FAIL"),
        (math.inf, "FAIL"),
        (math.nan, "FAIL"),
    ],
)
def test_grades(ratio: float, word: str) -> None:
    assert grade(ratio) == word


@pytest.mark.parametrize(("level", "word"), [(0.01, "PASS"), (0.02, "PASS"), (0.035, "WARN"), (0.08, "FAIL")])
def test_noise_is_judged_as_a_multiple_of_the_yardsticks(level: float, word: str) -> None:
    assert judge(other(level), R, HELD, dtype="bfloat16").verdict == word


@pytest.mark.parametrize("metric", E.METRICS)
def test_each_metric_alone_can_fail(metric: str) -> None:
    good = {"median": 0.01, "worst": 0.02, "frobenius": 0.01, "slope": 1.0}
    bad = {**good, metric: 0.2 if metric != "slope" else 1.2}
    held = E.Errors(0.01, 0.02, 0.01, 1.002, 0, 60)
    verdict = compare(E.Errors(**bad, worst_token=4, tokens=60), held, "bfloat16")
    assert verdict.verdict == "FAIL"
    assert {"median": "median", "worst": "worst token (4)", "frobenius": "Frobenius", "slope": "scale"}[
        metric
    ] in verdict.reason


def test_a_nan_metric_is_the_worst_of_all() -> None:
    verdict = compare(E.Errors(0.01, math.nan, 0.01, 1.0, 0, 60), HELD, "bfloat16")
    assert verdict.verdict == "FAIL"
    assert "worst token" in verdict.reason


def test_the_reason_gives_the_number_and_what_it_is_held_against() -> None:
    verdict = judge(other(0.08), R, HELD, dtype="bfloat16")
    assert verdict.ratio is not None
    assert f"{verdict.ratio:.2f} x the yardstick's" in verdict.reason
    assert verdict.yardstick == HELD.median


def test_scale_errors_that_cosine_cannot_see() -> None:
    for scale, word in ((1.05, "FAIL"), (0.22, "FAIL"), (1.0, "PASS")):
        v = Y * scale
        cosine = float((v * R).sum() / np.linalg.norm(v) / np.linalg.norm(R))
        assert cosine > 0.999
        assert judge(v, R, HELD, dtype="bfloat16").verdict == word


def test_a_constant_shift_is_an_error() -> None:
    assert judge(Y + 0.2, R, HELD, dtype="bfloat16").verdict == "FAIL"


@pytest.mark.parametrize(
    "value", [R[:-1], np.where(np.arange(60)[:, None] == 1, np.nan, R), R * 0, R * 0 + 1, np.repeat(R[:1], 60, 0)]
)
def test_what_fails_at_once_needs_no_error(value: E.Array) -> None:
    verdict = judge(value, R, HELD, dtype="bfloat16")
    assert (verdict.verdict, verdict.error) == ("FAIL", None)


class TestNearestLayer:
    layers: ClassVar[dict[int, E.Array]] = {
        n: R + 0.03 * n * np.random.default_rng(n).normal(size=R.shape) for n in range(4)
    }

    def test_the_wrong_layer_fails_even_within_the_error(self) -> None:
        loose = E.Errors(1.0, 1.0, 1.0, 2.0, 0, 60)  # a yardstick so bad that no error would fail
        verdict = judge(self.layers[2], self.layers[1], loose, dtype="bfloat16", layer=1, others=self.layers)
        assert (verdict.verdict, verdict.nearest_layer) == ("FAIL", 2)
        assert "nearer to layer 2 than to its own layer 1" in verdict.reason

    def test_the_right_layer_is_named(self) -> None:
        verdict = judge(other(0.01), self.layers[0], HELD, dtype="bfloat16", layer=0, others=self.layers)
        assert (verdict.verdict, verdict.nearest_layer) == ("PASS", 0)

    def test_a_layer_that_changes_nothing_is_as_near_as_its_neighbour(self) -> None:
        same = {0: R, 1: R.copy()}
        assert judge(Y, R, HELD, dtype="bfloat16", layer=1, others=same).verdict == "PASS"


class TestFloat32:
    @pytest.mark.parametrize("depth", [1, 4, 30])
    def test_passes_up_to_the_bound_and_warns_up_to_twice(self, depth: int) -> None:
        bound = FLOAT32_BOUND * math.sqrt(depth)
        held = float32_yardstick(depth, 60)
        for times, word in ((0.98, "PASS"), (1.05, "WARN"), (1.95, "WARN"), (2.1, "FAIL")):
            assert judge(R * (1 + times * bound), R, held, dtype="float32").verdict == word

    def test_bfloat16_does_not_pass_for_float32(self) -> None:
        assert judge(Y, R, float32_yardstick(30, 60), dtype="float32").verdict == "FAIL"


class TestFinding:
    def test_a_verdict_at_a_point(self) -> None:
        f = finding("read", "resid_post.3", Verdict("WARN", "why", 0.1, 0.2, 0.5, 1.01, 3), note="and this")
        assert (f.point, f.layer, f.verdict, f.reason, f.nearest_layer) == ("resid_post", 3, "WARN", "why; and this", 3)
        assert f.row is None

    def test_infinities_do_not_reach_the_store(self) -> None:
        f = finding("read", "z.0", Verdict("FAIL", "why", math.inf, 0.1, math.nan, 1.0))
        assert (f.error, f.ratio, f.yardstick) == (None, None, 0.1)

    def test_failures_without_a_number(self) -> None:
        f = failed("value", "tokens", "7 of 8")
        assert (f.point, f.layer, f.error, f.verdict) == ("tokens", None, None, "FAIL")

    def test_notes(self) -> None:
        assert noted(failed("read", "z.1", "a"), "b").reason == "a; b"
        assert noted(failed("read", "z.1", "a"), "").reason == "a"

    @pytest.mark.parametrize(
        ("point", "parts"),
        [("resid_post.12", ("resid_post", 12)), ("logits", ("logits", None)), ("a.b", ("a.b", None))],
    )
    def test_split(self, point: str, parts: tuple[str, int | None]) -> None:
        assert split(point) == parts
