"""One worker, seen from the parent: in a process group of its own, read with a deadline, surely gone at the end."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from harness import environments
from harness.fingerprint import ROOT
from harness.grid import Limits

GRACE = 20.0  # seconds that a worker which has said its last line, or was killed, may take to be gone


class Hang(Exception):
    """A worker did not finish a phase within its limit; it has been killed."""


class Died(Exception):
    """A worker ended before its time, by a crash, a signal or an exception of its adapter."""


class Worker:
    """A started worker. Iterate over its lines; `kill` it at any time. `module` is what the child runs.

    The limit of a cell is on the sum of its runs, warm-up included and checks not.
    """

    def __init__(
        self,
        python: str,
        spec: Mapping[str, Any],
        env: Mapping[str, str],
        log: Path,
        limits: Limits,
        module: str = "harness.worker",
    ) -> None:
        self.log, self.limits = log, limits
        self.phase, self.row = "start", ""
        self._spent: dict[str, float] = {}
        self._since = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._out, fd = os.pipe()
        try:
            with log.open("ab") as sink:
                self.process = subprocess.Popen(
                    # -P: the working directory of a user may hold a folder called `harness` or `adapters`
                    [python, "-P", "-m", module],
                    stdin=subprocess.PIPE,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    env=_environment(env, elsewhere=python != sys.executable),
                    pass_fds=[fd],
                    start_new_session=True,
                )
        finally:
            os.close(fd)
        stdin = self.process.stdin
        assert stdin is not None
        self._stdin: IO[bytes] = stdin
        with contextlib.suppress(BrokenPipeError):  # it died at once; reading says so
            self._stdin.write(json.dumps({"path": [], **spec, "fd": fd}).encode() + b"\n")
            self._stdin.flush()

    @property
    def cell(self) -> str | None:
        """The row that it is in, which is lost if it ends now; None before the first and after the last."""
        return self.row if self.phase in ("ask", "run", "check") else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The worker's lines as they come. Raises Hang or Died; returning means that it ended well."""
        for line in self._lines():
            if line["kind"] == "phase":
                self._enter(line["phase"], line["row"])
            elif line["kind"] == "done":
                self._enter("between rows", None)  # what ends it now costs no cell that is whole
            elif line["kind"] == "error":
                raise Died(line["reason"])
            yield line
        try:
            code = self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            raise Hang(f"did not exit within {GRACE:.0f} s of its last line") from None
        if code:
            raise Died(f"ended with {_code(code)}")

    def kill(self) -> None:
        """End the worker and everything that it started, and see that it is gone. Safe to call more than once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        # What it started is nobody's child here, and on a busy machine outlives the signal for a while: the next engine
        # would boot beside it.
        until = time.monotonic() + GRACE
        while _lives(self.process.pid):
            if time.monotonic() > until:
                raise RuntimeError(
                    f"what worker {self.process.pid} started (its process group) is still running {GRACE:.0f} s after "
                    "it was killed: no engine may be measured beside it. End it; the same command goes on"
                )
            time.sleep(0.01)
        with contextlib.suppress(OSError):
            self._stdin.close()
        if self._out >= 0:
            os.close(self._out)
            self._out = -1

    def _enter(self, phase: str, row: str | None) -> None:
        now = time.monotonic()
        if self.phase == "run":
            self._spent[self.row] = self._spent.get(self.row, 0.0) + now - self._since
        self.phase, self.row, self._since = phase, row or "", now

    def _limit(self) -> float:
        if self.phase == "run":
            return self.limits.cell - self._spent.get(self.row, 0.0)
        return {"start": self.limits.boot, "boot": self.limits.boot, "close": 3 * GRACE}.get(
            self.phase, self.limits.validate
        )

    def _lines(self) -> Iterator[dict[str, Any]]:
        pending = b""
        with selectors.DefaultSelector() as ready:
            ready.register(self._out, selectors.EVENT_READ)
            while True:
                left = self._since + self._limit() - time.monotonic()
                if left <= 0:
                    self.kill()
                    what = {"run": "timed runs", "check": "value check"}.get(self.phase, self.phase)
                    raise Hang(
                        f"hung: {what} took longer than {self._limit() + self._spent.get(self.row, 0.0):.0f} s; killed"
                    )
                if not ready.select(min(left, 0.5)):
                    if self.process.poll() is None:
                        continue
                    # It is gone, but a process that it forked may still hold the pipe: take what is there.
                    if not ready.select(0):
                        return
                data = os.read(self._out, 1 << 16)
                if not data:
                    return
                *whole, pending = (pending + data).split(b"\n")
                yield from (json.loads(line) for line in whole)


def _lives(group: int) -> bool:
    """Whether a process of this group is still running; one that only waits to be reaped is not."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _environment(env: Mapping[str, str], *, elsewhere: bool = False) -> dict[str, str]:
    """The parent's environment, the column settings' variables, and this tapgrid first on the path.

    In an environment of its own (`elsewhere`) a worker sees of this one's path nothing but tapgrid: the packages that
    somebody has put there are not its own, and may be plugins.
    """
    own = [str(environments.source())] if elsewhere else [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **env, "PYTHONPATH": os.pathsep.join(own), "PYTHONUNBUFFERED": "1"}


def _code(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log, for a message; the path is printed beside it."""
    try:
        text = log.read_bytes()[-20000:].decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
