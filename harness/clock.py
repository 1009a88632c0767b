"""Wall and CPU time of this process and, where an engine has worker processes, of those too.

A module of its own so that a simulated engine can put a simulated clock here (`SOURCE`), and nothing else can.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Reading:
    """Seconds; only differences mean something."""

    wall: float
    cpu: float


def _children_cpu() -> float:
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            spent = child.cpu_times()
        except psutil.Error:
            continue  # it ended between the listing and the asking
        total += spent.user + spent.system
    return total


def real(children: bool, *, ending: bool) -> Reading:
    """The clocks, read in the order that keeps the bookkeeping outside what is timed."""
    if ending:
        wall, cpu = time.perf_counter(), time.process_time()
        return Reading(wall, cpu + (_children_cpu() if children else 0.0))
    others = _children_cpu() if children else 0.0
    cpu = time.process_time() + others
    return Reading(time.perf_counter(), cpu)


SOURCE: Callable[..., Reading] = real


def start(children: bool = False) -> Reading:
    """Read just before the work. `children`: count the CPU time of child processes (tensor parallel engines)."""
    return SOURCE(children, ending=False)


def stop(since: Reading, children: bool = False) -> Reading:
    """What has passed since `since`, read just after the work."""
    now = SOURCE(children, ending=True)
    return Reading(now.wall - since.wall, now.cpu - since.cpu)
