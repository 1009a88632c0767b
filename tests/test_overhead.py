"""The overhead table: its arithmetic on planted numbers, and one short real measurement of both libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from adapters.engines.module import WrappedModule
from adapters.errors import NeverRanError, PointRefusedError, UnknownModuleError
from harness import overhead


def planted(scale: float) -> list[dict[str, float]]:
    return [{name: scale * (i + 1) * (1 + 0.01 * r) for i, name in enumerate(overhead.COSTS)} for r in range(9)]


def test_a_ratio_is_taken_inside_a_round() -> None:
    costs = [overhead._cost(name, planted(2.0), planted(8.0)) for name in overhead.COSTS]
    for cost in costs[:-1]:
        assert cost.ratio == pytest.approx(0.25)
        assert cost.low == pytest.approx(0.25)
        assert cost.high == pytest.approx(0.25)
    assert costs[-1].ratio is None, "an untouched forward costs nothing: a ratio to it would be noise"


def test_without_the_peer_ours_stands_alone() -> None:
    cost = overhead._cost("read", planted(2.0), None)
    assert cost.ours_us == pytest.approx(4.0 * 1.04)
    assert (cost.peer_us, cost.ratio, cost.low, cost.high) == (None, None, None, None)


def test_the_interval_holds_the_median_and_widens_with_spread() -> None:
    low, high = overhead._interval([0.2, 0.25, 0.3, 0.22, 0.28])
    assert low <= 0.25 <= high
    assert overhead._interval([0.25] * 5) == (0.25, 0.25)


def test_costs_subtract_the_bare_forward() -> None:
    costs = overhead._costs(
        bare=100, plain=101, empty=151, reads=151 + 192 * 5, edits=151 + 192 * 7, one=200, many=800, again=130
    )
    assert costs == {
        "empty trace": 50,
        "read": 5,
        "edit": 7,
        "extra prompt": pytest.approx((600 - 29) / 15),
        "untouched forward": 1,
    }


def a_round(**costs: float) -> dict[str, float]:
    return dict.fromkeys(overhead.COSTS, 1.0) | {name.replace("_", " "): cost for name, cost in costs.items()}


def test_a_round_that_was_disturbed_is_measured_again() -> None:
    rounds = [a_round(read=-0.2), a_round(empty_trace=0.0), a_round(read=3.0, untouched_forward=-0.1), a_round()]
    assert overhead._undisturbed("ours", lambda: rounds.pop(0))["read"] == 3.0
    assert len(rounds) == 1, "an untouched forward costs nothing: below zero is what noise does to it"


def test_a_machine_that_never_rests_is_an_error() -> None:
    tries: list[int] = []

    def disturbed() -> dict[str, float]:
        tries.append(1)
        return a_round(edit=-1.25, read=-0.5)

    with pytest.raises(RuntimeError, match=r"nnsight: 10 rounds in a row .* read -0.50 us, edit -1.25 us: .*too busy"):
        overhead._undisturbed("nnsight", disturbed)
    assert len(tries) == overhead.TRIES == 10


def test_arms_take_turns_and_the_least_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0], []

    def arm(name: str, *costs: int) -> Callable[[], None]:
        """The even calls are timed; the odd ones come before them, to warm the caches."""
        left = list(costs)

        def run() -> None:
            order.append(name)
            now[0] += 1000 * left.pop(0)

        return run

    monkeypatch.setattr(overhead.time, "process_time_ns", lambda: now[0])
    a, b = arm("a", 1, 9, 1, 5, 1, 7, 1, 8, 1, 9, 1, 9), arm("b", 99, 3, 99, 3, 99, 4, 99, 4, 99, 2, 99, 9)
    assert overhead._best(a, b) == [5, 2]
    assert "".join(order) == "aabb" * overhead.INNER


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_command_measures_and_prints_every_cost() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "overhead", "--rounds", "2", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr
    costs = json.loads(done.stdout)
    assert [c["cost"] for c in costs] == list(overhead.COSTS)
    assert set(costs[0]) == {"cost", "ours_us", "peer", "peer_us", "ratio", "low", "high"}
    assert all(c["ours_us"] > 0 for c in costs[:-1])


# ---- the engine that it measures on


@pytest.fixture
def stack() -> WrappedModule:
    torch.manual_seed(0)
    return WrappedModule(torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)]))


def test_a_wrapped_module_is_read_and_written(stack: WrappedModule) -> None:
    x = torch.randn(2, 4)
    plain = stack.model(x)
    with stack.trace(x) as m:
        given = m.at("1").input
        m.at("1").output *= 0
        after = m.at("2").output
    assert torch.equal(given, stack.model[0](x))
    assert torch.allclose(after, stack.model[2].bias.expand(2, 4))
    assert torch.equal(stack.model(x), plain)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in stack.model.modules())


def test_requests_of_one_batch_see_their_own_rows(stack: WrappedModule) -> None:
    inputs = [torch.randn(n, 4) for n in (1, 3, 2)]

    def double_the_second(m: object) -> None:
        if m.request == "1":  # type: ignore[attr-defined]
            m.at("0").output *= 2  # type: ignore[attr-defined]
        m.save("x", m.at("1").output)  # type: ignore[attr-defined]

    results = stack.forward(inputs, double_the_second)
    for i, (given, result) in enumerate(zip(inputs, results, strict=True)):
        assert result.error is None
        expected = stack.model[1](stack.model[0](given) * (2 if i == 1 else 1))
        assert torch.allclose(result.saves["x"][0], expected, atol=1e-6)
        assert torch.allclose(result.output, stack.model[2](expected), atol=1e-6)


def test_what_a_plain_module_lacks_is_refused(stack: WrappedModule) -> None:
    with pytest.raises(PointRefusedError, match="plain module"), stack.trace(torch.zeros(1, 4)) as m:
        m.resid_post[0]
    with pytest.raises(UnknownModuleError, match="no module '7'"), stack.trace(torch.zeros(1, 4)) as m:
        m.at("7").output  # noqa: B018


def test_reading_against_the_order_is_an_error(stack: WrappedModule) -> None:
    def backwards() -> None:
        with stack.trace(torch.zeros(1, 4)) as m:
            m.at("2").output  # noqa: B018
            m.at("0").output  # noqa: B018

    with pytest.raises(
        NeverRanError, match=r"0 \(output\) did not run.*already run when it was read.*test_overhead.py"
    ):
        backwards()
