"""When things ran: processes in order, rounds as ranges of it, and every run as a change from its cell's median."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from reports.numbers import finite
from reports.view import Line, View

RoundKey = tuple[object, object]  # session, round


@dataclass(frozen=True)
class Round:
    """A range of slots. `dropped` says why it counts for no column."""

    key: RoundKey
    first: int
    slots: int
    name: str
    dropped: str | None = None


@dataclass(frozen=True)
class Timeline:
    """Processes in the order in which they ran, each with a slot of width one."""

    slots: Mapping[object, int]
    rounds: tuple[Round, ...]

    @property
    def width(self) -> int:
        return max(1, sum(r.slots for r in self.rounds))


@dataclass(frozen=True)
class Point:
    """A run, or the mean of a process: its place in slots, and its speed relative to its own cell's median."""

    slot: float
    change: float
    valid: bool


def _number(line: Line, key: str) -> int:
    return int(finite(line.get(key)) or 0)


def timeline(view: View) -> Timeline:
    """Sessions in the order of the store, then rounds, then the order inside a round."""
    place = {s.get("session"): i for i, s in enumerate(view.sessions)}
    dropped = {
        (line.get("session"), line.get("round")): str(line.get("reason") or "contaminated")
        for line in getattr(view.store, "other", ())
        if line.get("kind") == "contaminated"
    }
    ordered = sorted(
        view.store.processes, key=lambda p: (place.get(p.get("session"), 0), _number(p, "round"), _number(p, "order"))
    )
    rounds: dict[RoundKey, Round] = {}
    for i, p in enumerate(ordered):
        key = (p.get("session"), p.get("round"))
        before = rounds.get(key)
        first, slots = (before.first, before.slots) if before else (i, 0)
        rounds[key] = Round(key, first, slots + 1, str(_number(p, "round") + 1), dropped.get(key))
    return Timeline({p.get("process"): i for i, p in enumerate(ordered)}, tuple(rounds.values()))


def speed(run: Line, metric: str) -> float | None:
    """A run's value turned so that more is faster, None when it has none.

    >>> speed({"value_cpu": 0.5, "unit": "s"}, "cpu"), speed({"value_cpu": None, "unit": "tok/s"}, "cpu")
    (2.0, None)
    """
    value = finite(run.get(f"value_{metric}"))
    if value is None or value <= 0:
        return None
    return 1 / value if run.get("unit") == "s" else value


def points(runs: Sequence[Line], metric: str, line: Timeline, whole: bool) -> list[Point]:
    """The runs of one cell; `whole` gives one point a process instead."""
    known = [(r, s) for r in runs if (s := speed(r, metric)) is not None and r.get("process") in line.slots]
    if not known:
        return []
    middle = median(s for _, s in known)
    by_process: dict[object, list[tuple[Line, float]]] = {}
    for r, s in known:
        by_process.setdefault(r.get("process"), []).append((r, s))
    found: list[Point] = []
    for process, own in by_process.items():
        start = line.slots[process]
        if whole:
            mean = math.exp(sum(math.log(s) for _, s in own) / len(own))
            found.append(Point(start + 0.5, mean / middle - 1, all(r.get("validated") for r, _ in own)))
        else:
            step = 1 / (len(own) + 1)
            found += [
                Point(start + (i + 1) * step, s / middle - 1, bool(r.get("validated"))) for i, (r, s) in enumerate(own)
            ]
    return found


def probe_changes(probes: Sequence[Line], metric: str) -> dict[RoundKey, float]:
    """How much longer the probe of each round took than the median of all of them."""
    times = {(p.get("session"), p.get("round")): t for p in probes if (t := finite(p.get(f"{metric}_seconds")))}
    middle = median(times.values()) if times else 1.0
    return {key: t / middle - 1 for key, t in times.items()}
