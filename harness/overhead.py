"""What the runtime itself costs, beside nnsight's, in one process: `python -m harness.overhead`.

The model is 192 x Linear(8, 8), so small that the forward hardly counts; the bare forward is subtracted. Both libraries
are measured in turn, round after round, by CPU time, and the ratio is taken inside a round. Costs are differences: a
round that some work crossed can come out below zero, which nothing costs, and is measured again.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

LAYERS, WIDTH, INNER = 192, 8, 6
PROMPTS = 16
ROUNDS = 15
TRIES = 10
COSTS = ("empty trace", "read", "edit", "extra prompt", "untouched forward")


@dataclass(frozen=True)
class Cost:
    """One cost: ours and the peer's in microseconds, the ratio ours / peer with its 95 % interval over rounds."""

    cost: str
    ours_us: float
    peer: str
    peer_us: float | None
    ratio: float | None
    low: float | None
    high: float | None


def measure(rounds: int = ROUNDS, peer: bool = True) -> list[Cost]:
    """Measure every cost on both libraries, interleaved; without the peer, ours alone."""
    arms: dict[str, Callable[[], dict[str, float]]] = {"ours": _ours()}
    if peer:
        arms["nnsight"] = _nnsight()
    for run in arms.values():
        run()
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for r in range(rounds):
        for name in list(arms) if r % 2 == 0 else list(reversed(arms)):
            seen[name].append(_undisturbed(name, arms[name]))
    return [_cost(name, seen["ours"], seen.get("nnsight")) for name in COSTS]


def in_a_process(rounds: int) -> tuple[list[dict[str, Any]], int]:
    """Measure in a fresh single-threaded process: the costs as plain data, and the exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "harness.overhead", str(rounds)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if not done.stdout:
        raise RuntimeError(f"measuring the overhead ended with exit code {done.returncode} and no numbers; see above")
    costs: list[dict[str, Any]] = json.loads(done.stdout)
    return costs, done.returncode


def line(cost: Mapping[str, Any]) -> str:
    """One cost for a terminal.

    >>> line({"cost": "read", "ours_us": 2, "peer": "nnsight", "peer_us": 8, "ratio": 0.25, "low": 0.2, "high": 0.3})
    'read                   2.0 us   nnsight      8.0 us   ratio 0.25 [0.20, 0.30]'
    """
    peer = f"   {cost['peer']} {cost['peer_us']:8.1f} us" if cost["peer_us"] is not None else ""
    ratio = f"   ratio {cost['ratio']:.2f} [{cost['low']:.2f}, {cost['high']:.2f}]" if cost["ratio"] is not None else ""
    return f"{cost['cost']:18} {cost['ours_us']:7.1f} us{peer}{ratio}"


def _cost(name: str, ours: list[dict[str, float]], theirs: list[dict[str, float]] | None) -> Cost:
    mine = statistics.median(r[name] for r in ours)
    if theirs is None:
        return Cost(name, mine, "nnsight", None, None, None, None)
    other = statistics.median(r[name] for r in theirs)
    if name == "untouched forward":
        return Cost(name, mine, "nnsight", other, None, None, None)
    ratios = [a[name] / b[name] for a, b in zip(ours, theirs, strict=True)]
    low, high = _interval(ratios)
    return Cost(name, mine, "nnsight", other, statistics.median(ratios), low, high)


def _interval(ratios: list[float]) -> tuple[float, float]:
    """Percentile bootstrap of the median, seeded."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def _best(*runs: Callable[[], object]) -> list[float]:
    """Microseconds of CPU of each: the least of a few repeats, in turn, since what interrupts only ever adds."""
    best = [float("inf")] * len(runs)
    for _ in range(INNER):
        for i, run in enumerate(runs):
            run()  # another's turn leaves the caches cold
            start = time.process_time_ns()
            run()
            best[i] = min(best[i], (time.process_time_ns() - start) / 1000)
    return best


def _undisturbed(arm: str, run: Callable[[], dict[str, float]]) -> dict[str, float]:
    """One round of `run`, again as long as something costs nothing or less (an untouched forward may)."""
    for _ in range(TRIES):
        costs = run()
        impossible = {name: cost for name, cost in costs.items() if cost <= 0 and name != "untouched forward"}
        if not impossible:
            return costs
    raise RuntimeError(
        f"{arm}: {TRIES} rounds in a row came out below zero somewhere, the last at "
        f"{', '.join(f'{name} {cost:.2f} us' for name, cost in impossible.items())}: "
        "this machine is too busy to measure on; end what else runs, and run it again"
    )


def _stack() -> Any:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).eval()


def _costs(
    bare: float, plain: float, empty: float, reads: float, edits: float, one: float, many: float, again: float
) -> dict[str, float]:
    return {
        "empty trace": empty - plain,
        "read": (reads - empty) / LAYERS,
        "edit": (edits - empty) / LAYERS,
        "extra prompt": (many - one - (again - plain)) / (PROMPTS - 1),
        "untouched forward": plain - bare,
    }


def _ours() -> Callable[[], dict[str, float]]:
    import torch

    from adapters.engines.module import WrappedModule

    bare = _stack()
    model = _stack()
    wrapped = WrappedModule(model)
    x, xs = torch.randn(1, WIDTH), [torch.randn(1, WIDTH) for _ in range(PROMPTS)]
    paths = [str(i) for i in range(LAYERS)]

    def empty() -> None:
        with wrapped.trace(x):
            pass

    def reads() -> None:
        with wrapped.trace(x) as m:
            for p in paths:
                m.at(p).output  # noqa: B018

    def edits() -> None:
        with wrapped.trace(x) as m:
            for p in paths:
                m.at(p).output += 1.0

    def keep(m: Any) -> None:
        m.save("x", m.at("100").output)

    def run() -> dict[str, float]:
        with torch.no_grad():
            batch = torch.cat(xs)
            arms = (
                lambda: bare(x),
                lambda: model(x),
                empty,
                reads,
                edits,
                lambda: wrapped.forward(xs[:1], keep),
                lambda: wrapped.forward(xs, keep),
                lambda: model(batch),
            )
            return _costs(*_best(*arms))

    return run


def _nnsight() -> Callable[[], dict[str, float]]:
    import torch
    from nnsight import NNsight

    class Stack(NNsight):  # type: ignore[misc]
        """Its base class leaves open how inputs are batched."""

        def _batch_size(self, *inputs: torch.Tensor, **kwargs: object) -> int:
            return inputs[0].shape[0] if inputs else 0

        def _batch(self, invokes: list[tuple], fn: object) -> tuple:  # type: ignore[type-arg]
            return (torch.cat([args[0] for args, _ in invokes]),), {}

    bare = _stack()
    inner = _stack()
    model = Stack(inner)
    x, xs = torch.randn(1, WIDTH), [torch.randn(1, WIDTH) for _ in range(PROMPTS)]
    layers = [model[i] for i in range(LAYERS)]

    def empty() -> None:
        with model.trace(x):
            pass

    def reads() -> None:
        with model.trace(x):
            for layer in layers:
                layer.output  # noqa: B018

    def edits() -> None:
        with model.trace(x):
            for layer in layers:
                layer.output += 1.0

    def prompts(given: list[torch.Tensor]) -> None:
        with model.trace() as tracer:
            for one in given:
                with tracer.invoke(one):
                    layers[100].output.save()

    def run() -> dict[str, float]:
        with torch.no_grad():
            batch = torch.cat(xs)
            arms = (
                lambda: bare(x),
                lambda: inner(x),
                empty,
                reads,
                edits,
                lambda: prompts(xs[:1]),
                lambda: prompts(xs),
                lambda: inner(batch),
            )
            return _costs(*_best(*arms))

    return run


def main(argv: list[str]) -> int:
    """Print the costs as JSON; exit code 3 where nnsight is not installed, with ours all the same."""
    rounds = int(argv[0]) if argv else ROUNDS
    try:
        import nnsight  # noqa: F401

        peer = True
    except ImportError:
        print("nnsight is not installed: ours alone. Run `make install`", file=sys.stderr)
        peer = False
    print(json.dumps([asdict(c) for c in measure(rounds, peer)], indent=1))
    return 0 if peer else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
