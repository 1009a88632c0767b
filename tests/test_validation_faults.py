"""The validator catches every fault that we know engines to have had, and accuses no honest engine.

The catch tables are printed (`-s` shows them): of the points that a fault happened to, how many failed and warned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.work import AblateHead, Adapter, Capture, ForceToken, Nothing, Outcome, Request, Settings, Steer, Work
from tests.validation_adapter import HooksAdapter, LocalServer, make_model, some_requests, works
from validation.faults import FAULTS, READS, WRITES, Caught, Faulty, catch_table, count, wrap
from validation.finding import Finding, failed
from validation.inprocess import Validator

torch = pytest.importorskip("torch")
WORKS = works()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Validator, Any]:
    folder, settings = tmp_path_factory.mktemp("model"), Settings(dtype=request.param)
    make_model("llama", folder, layers=8)
    validator, adapter = Validator(folder, settings, tmp_path_factory.mktemp("cache")), HooksAdapter()
    validator.refs.server = LocalServer()
    adapter.boot(folder, settings)
    return validator, adapter


def show(table: Sequence[Caught]) -> None:
    print()
    for c in table:
        print(f"{c.fault:16s} {c.points:3d} points: {c.failed:3d} FAIL {c.warned:3d} WARN")


def check_heads(validator: Validator, adapter: Adapter) -> list[Finding]:
    """Reads of z, which `check_reads` does not look at but a row may."""
    requests = some_requests()
    work = Capture(tuple(f"z.{n}" for n in range(validator.truth.shape.layers)))
    return validator.check_row("capture-z", work, requests, adapter.run(requests, work))


@pytest.mark.parametrize("fault", [f for f in READS if FAULTS[f].at != ("z",)])
def test_a_fault_in_what_is_read_fails_at_most_points(bench: tuple[Validator, Any], fault: str) -> None:
    validator, adapter = bench
    (caught,) = catch_table(lambda a: validator.check_reads(a, some_requests()), adapter, [fault])
    show([caught])
    assert caught.caught
    # One per cent is near what bfloat16 itself does to a value: there a warning at most layers is what can be had.
    enough = caught.failed + caught.warned if fault == "scaled-1.01" else caught.failed
    assert enough >= 0.8 * caught.points


@pytest.mark.parametrize("fault", ["swapped-heads", "half-rank", "shifted-token", "neighbours-rows"])
def test_a_fault_in_attention_heads(bench: tuple[Validator, Any], fault: str) -> None:
    validator, adapter = bench
    (caught,) = catch_table(lambda a: check_heads(validator, a), adapter, [fault])
    assert caught.failed == caught.points == 8


def rewritten(fault: str, work: Work) -> Work:
    rewrite = FAULTS[fault].rewrite
    assert rewrite is not None
    return rewrite(work)


PAIRS = [
    (r, f) for r in ("steer", "ablate-head", "force-token") for f in WRITES if rewritten(f, WORKS[r]) is not WORKS[r]
]


@pytest.mark.parametrize(("row", "fault"), PAIRS)
def test_a_fault_in_what_is_written(bench: tuple[Validator, Any], row: str, fault: str) -> None:
    validator, adapter = bench
    work: Any = WORKS[row]
    findings = validator.check_write(wrap(adapter, fault), work, some_requests())
    assert "FAIL" in {f.verdict for f in findings}


def test_no_honest_engine_is_accused(bench: tuple[Validator, Any]) -> None:
    validator, sdpa = bench
    eager = HooksAdapter(attention="eager")
    eager.boot(validator.refs.model, validator.settings)
    words = []
    for adapter in (sdpa, eager):
        for seed in range(2, 6):
            requests = some_requests((37, 21), new=8, seed=seed)
            words += [f.verdict for f in validator.check_reads(adapter, requests)]
        words += [f.verdict for f in check_heads(validator, adapter)]
    assert words.count("FAIL") == 0
    assert words.count("WARN") <= 0.01 * len(words)


class Numbers:
    """An adapter that answers with its request's number, so that what a fault does is seen exactly."""

    plain = False

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def run(self, requests: Sequence[Request], work: Any) -> list[Outcome]:
        self.asked.append(work)
        points = work.points if isinstance(work, Capture) else getattr(work, "watch", ())
        return [
            Outcome((1, 2), {p: 100 * k + np.arange(12.0).reshape(3, 2, 2) + 1000 * (p[0] != "r") for p in points})
            for k in range(len(requests))
        ]

    def install(self, work: Any) -> None:
        self.asked.append(work)

    def remove(self) -> None:
        self.asked.append(None)


REQUESTS = [Request("a", (1, 2), 2), Request("b", (3, 4), 2)]


def spoilt(fault: str, point: str = "resid_post.3") -> Any:
    return wrap(Numbers(), fault).run(REQUESTS, Capture((point,)))[0].values[point]  # type: ignore[arg-type]


class TestEachFault:
    clean = np.arange(12.0).reshape(3, 2, 2)

    @pytest.mark.parametrize(
        ("fault", "expected"),
        [
            ("shifted-token", clean[[0, 0, 1]]),
            ("scaled-1.05", clean * 1.05),
            ("scaled-1.01", clean * 1.01),
            ("neighbours-rows", clean + 100),
            ("stale-step", clean[[0, 1, 1]]),
            ("half-rank", clean * [1, 0]),
        ],
    )
    def test_does_what_it_says(self, fault: str, expected: np.ndarray) -> None:
        assert np.allclose(spoilt(fault), expected)

    def test_swapped_heads_only_where_there_are_heads(self) -> None:
        assert np.array_equal(spoilt("swapped-heads", "z.3"), self.clean[:, [1, 0]] + 1000)
        assert np.array_equal(spoilt("swapped-heads"), self.clean)

    @pytest.mark.parametrize(
        ("fault", "other"),
        [("wrong-layer", "resid_post.2"), ("missing-mlp", "mlp_out.3"), ("missing-attn", "attn_out.3")],
    )
    def test_those_made_of_other_points_ask_for_them_and_keep_them(self, fault: str, other: str) -> None:
        inner = Numbers()
        (outcome, _) = wrap(inner, fault).run(REQUESTS, Capture(("resid_post.3",)))  # type: ignore[arg-type]
        assert set(inner.asked[0].points) == {"resid_post.3", other}
        assert list(outcome.values) == ["resid_post.3"]
        assert inner.asked[0].points == tuple(
            sorted(inner.asked[0].points, key=lambda p: (p[-1], p[0] == "r"))
        )  # the model's order

    def test_a_faulty_read_is_faulty_in_what_a_write_watches(self) -> None:
        steer = Steer("resid_post.3", np.ones(2, np.float32), watch=("resid_post.3",))
        (outcome, _) = wrap(Numbers(), "stale-step").run(REQUESTS, steer)  # type: ignore[arg-type]
        assert np.array_equal(outcome.values["resid_post.3"], self.clean[[0, 1, 1]])

    @pytest.mark.parametrize(
        ("fault", "work", "done"),
        [
            ("write-dropped", AblateHead(2, 1), Nothing()),
            ("write-dropped", AblateHead(2, 1, ("z.2",)), Capture(("z.2",))),
            ("write-dropped", ForceToken(3), Nothing()),
            ("write-elsewhere", AblateHead(2, 1), AblateHead(2, 0)),
            ("write-elsewhere", AblateHead(2, 0), AblateHead(2, 1)),
            ("write-halved", AblateHead(2, 1), AblateHead(2, 1)),
        ],
    )
    def test_writes_become_other_writes(self, fault: str, work: Any, done: Any) -> None:
        inner = Numbers()
        wrap(inner, fault).run(REQUESTS, work)  # type: ignore[arg-type]
        assert inner.asked == [done]

    def test_a_steer_is_halved_or_moved(self) -> None:
        inner = Numbers()
        work = Steer("resid_post.3", np.ones(2, np.float32))
        wrap(inner, "write-halved").run(REQUESTS, work)  # type: ignore[arg-type]
        wrap(inner, "write-elsewhere").run(REQUESTS, work)  # type: ignore[arg-type]
        assert inner.asked[0].vector.tolist() == [0.5, 0.5]
        assert inner.asked[1].point == "resid_post.2"

    def test_installed_work_is_spoilt_too(self) -> None:
        inner = Numbers()
        faulty = wrap(inner, "scaled-1.05")  # type: ignore[arg-type]
        faulty.install(Capture(("resid_post.3",)))
        inner.run = lambda requests, work: Numbers.run(inner, requests, inner.asked[0])  # type: ignore[method-assign]
        assert np.allclose(faulty.run(REQUESTS, Nothing())[0].values["resid_post.3"], self.clean * 1.05)

    def test_everything_else_is_the_adapters_own(self) -> None:
        faulty: Any = Faulty(Numbers(), "half-rank")  # type: ignore[arg-type]
        assert faulty.plain is False
        assert faulty.asked == []


def test_counting_looks_only_where_the_fault_happened() -> None:
    found = [
        failed("read", "resid_post.1", "x"),
        failed("read", "z.1", "x"),
        replace(failed("read", "z.2", "x"), verdict="WARN"),
    ]
    assert count("swapped-heads", found) == Caught("swapped-heads", 2, 1, 1)
    assert count("half-rank", [*found, failed("value", "tokens", "x")]).points == 3
    assert not count("half-rank", [replace(found[0], verdict="WARN")]).caught


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Validator, Any]]:
    models = pytest.importorskip("harness.models")
    try:
        folder: Path = models.resolve("smollm2")
    except models.UnknownModel as missing:
        pytest.skip(str(missing))
    settings = Settings()
    validator, adapter = Validator(folder, settings, tmp_path_factory.mktemp("cache")), HooksAdapter()
    adapter.boot(folder, settings)
    yield validator, adapter
    validator.close()
    adapter.close()


@pytest.mark.engine
class TestSmolLM2:
    """The same on a pretrained model, whose massive activations hide from most metrics."""

    @staticmethod
    def requests(seed: int) -> list[Request]:
        return [
            replace(r, token_ids=tuple(t + 300 for t in r.token_ids))
            for r in some_requests((33, 19), seed=seed, vocab=48_000)
        ]

    def test_honest_reads_pass(self, engine: tuple[Validator, Any]) -> None:
        validator, adapter = engine
        for seed in range(3):
            found = validator.check_reads(adapter, self.requests(seed))
            assert {f.verdict for f in found} == {"PASS"}, [f for f in found if f.verdict != "PASS"]

    def test_every_fault_is_caught(self, engine: tuple[Validator, Any]) -> None:
        validator, adapter = engine
        table = catch_table(lambda a: validator.check_reads(a, self.requests(0)), adapter)
        show(table)
        for caught in table:
            if FAULTS[caught.fault].at != ("z",):
                assert caught.caught, caught
                assert caught.failed + caught.warned >= 0.95 * caught.points, caught

    def test_honest_writes_pass_and_faulty_ones_do_not(self, engine: tuple[Validator, Any]) -> None:
        validator, adapter = engine
        vector = (4 * np.random.default_rng(0).standard_normal(576)).astype(np.float32)
        for work, fault in ((Steer("resid_post.15", vector), "write-halved"), (AblateHead(15, 0), "write-elsewhere")):
            found = validator.check_write(adapter, work, self.requests(0))
            assert {f.verdict for f in found} == {"PASS"}, found
            found = validator.check_write(wrap(adapter, fault), work, self.requests(0))
            assert "FAIL" in {f.verdict for f in found}, (work, fault)
