"""Where the run is and how long it will still take: a bar on a terminal, plain lines in a log. On stderr, always."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from harness.plan import duration


class Quiet:
    """Says nothing (and is what the others are built on)."""

    def start(self, title: str) -> None:
        """The session begins."""

    def at(self, where: str, left: float) -> None:
        """Now at `where`, with about `left` seconds to go."""

    def say(self, text: str) -> None:
        """A line worth keeping."""

    def stop(self) -> None:
        """The session is over, well or not."""


class Lines(Quiet):
    """For logs: one line whenever the place changes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = ""

    def start(self, title: str) -> None:
        self.say(title)

    def at(self, where: str, left: float) -> None:
        if where != self._last:
            self._last = where
            self.say(f"{where}  (about {duration(left)} left)")

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class Bar(Quiet):
    """For people: one bar, its time left always current."""

    def __init__(self, out: TextIO) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
        # Once a second: the bar shares the cores with what is being measured.
        self._bar = Progress(*columns, console=Console(file=out), transient=True, refresh_per_second=1)
        self._begin = time.monotonic()

    def start(self, title: str) -> None:
        self._bar.console.print(title, highlight=False, markup=False)
        self._task = self._bar.add_task("starting", total=1.0, left="")
        self._begin = time.monotonic()
        self._bar.start()

    def at(self, where: str, left: float) -> None:
        gone = time.monotonic() - self._begin
        self._bar.update(
            self._task, description=where, completed=gone / max(gone + left, 1e-9), left=f"{duration(left)} left"
        )

    def say(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        self._bar.stop()


def make(out: TextIO | None = None) -> Quiet:
    """The progress that suits `out` (stderr)."""
    out = out or sys.stderr
    return Bar(out) if out.isatty() else Lines(out)
