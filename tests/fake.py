"""A simulated engine with simulated time: seeded noise, planted speeds, planted crashes, hangs and wrong values.

No model and no torch. Time is a clock of its own (put into `harness.clock`), so a session of minutes passes in none.
What is planted comes as JSON in TAPGRID_FAKE, by column name; `plant` writes it:

    plant(monkeypatch, **{"fake-a": {"speed": 0.9, "crash": "steer"}, "fake-b": {"wrong": "shift"}})

speed         share of the vanilla speed (1.0)                     noise   sd of the log time of a run (0.01)
process_noise sd of the log time of a process (0.02)               missing the install line of a missing library
no_device     what hardware is missing
crash, raise, hang    the row (or "boot", "close") in which to die, raise, sleep for ever
wrong         "shift" (values of the token before), "nan", "short" (a token too few), "write" (writes do not land)
refuse        names of kinds of work to refuse                      rounds  only in these rounds (default: all)
host          log speed of the host at each process, by the start of its name ("r0-1"): drift
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from adapters.work import (
    AblateHead,
    Capture,
    ForceToken,
    Gradient,
    Lens,
    MissingDevice,
    MissingLibrary,
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
from harness import clock

LAYERS, D_MODEL, HEADS, VOCAB = 4, 8, 2, 512
VARIABLE = "TAPGRID_FAKE"


def model_folder(path: Path) -> Path:
    """A folder that `harness.models.info` can read."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "fake",
        "num_hidden_layers": LAYERS,
        "hidden_size": D_MODEL,
        "num_attention_heads": HEADS,
        "vocab_size": VOCAB,
    }
    if not (path / "config.json").exists():  # its time is part of the key of a session
        (path / "config.json").write_text(json.dumps(config))
    return path


GRID = """
name = "fake"
model = "{model}"
columns = [{columns}]
validator = "tests.fake:Validator"
{top}
[settings]
max_model_len = 128
[limits]
boot = {limit}
validate = {limit}
cell = {limit}
[adapters]
vanilla = "tests.fake:Vanilla"
vanilla-eager = "tests.fake:VanillaEager"
fake-a = "tests.fake:A"
fake-b = "tests.fake:B"
fake-c = "tests.fake:C"
{rows}
"""


def grid_file(
    folder: Path,
    columns: Sequence[str] = ("vanilla", "fake-a", "fake-b"),
    rows: Sequence[str] = ("generate", "capture-1", "steer"),
    limit: float = 30,
    top: str = "",
) -> Path:
    """A grid over fake columns, with its model, in `folder`."""
    model = model_folder(folder / "model")
    tables = "\n".join(
        f"[rows.{r}]\nprompt_tokens = 6\nnew_tokens = {1 if r[0] == 's' and 'sweep' in r else 4}" for r in rows
    )
    text = GRID.format(model=model, columns=", ".join(f'"{c}"' for c in columns), rows=tables, limit=limit, top=top)
    path = folder / "fake.toml"
    path.write_text(text)
    return path


def planted(**columns: Mapping[str, Any]) -> dict[str, str]:
    """The environment variable that plants `columns`."""
    return {VARIABLE: json.dumps(columns)}


# What the fake model computes: any function of (token, layer) that tells tokens, layers and neighbours apart.


def residual(tokens: Sequence[int], layer: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    t = np.asarray(tokens, dtype=np.float64)[:, None]
    return np.sin(t * 0.37 + (layer + 1) * (np.arange(D_MODEL) + 1)).astype(np.float32)


def next_token(tokens: Sequence[int]) -> int:
    return (sum(tokens) * 31 + len(tokens) * 7) % VOCAB


def continue_(request: Request, force: int | None = None) -> tuple[int, ...]:
    tokens = list(request.token_ids)
    for _ in range(request.new_tokens):
        tokens.append(next_token(tokens) if force is None else force)
    return tuple(tokens)


def value_of(work: Work, tokens: Sequence[int], new: int) -> dict[str, Any]:
    """What the work should hand back for a request whose tokens became `tokens`."""
    seen, layer = tokens[: len(tokens) - 1], _layer(work)
    match work:
        case Capture(points):
            return {p: residual(seen, int(p.split(".")[1])) for p in points}
        case Steer(_, vector, watch):
            return {p: residual(seen, int(p.split(".")[1])) + vector for p in watch}
        case Lens():
            return {"lens": np.asarray([int(abs(residual([t], layer).sum()) * 50) for t in seen[-new:]])}
        case Probe(_, direction):
            return {"probe": residual(seen, layer) @ direction}
        case Gradient(point):
            return {point: residual(tokens, layer)}
    return {}


def _layer(work: Work) -> int:
    return int(work.point.split(".")[1]) if isinstance(work, Steer | Lens | Probe | Gradient) else 0


@dataclass
class _Clock:
    """Starts at the real time, because the boot was begun under the real clock."""

    wall: float = field(default_factory=time.perf_counter)
    cpu: float = field(default_factory=time.process_time)

    def __call__(self, children: bool, *, ending: bool) -> clock.Reading:
        return clock.Reading(self.wall, self.cpu)

    def advance(self, seconds: float) -> None:
        self.wall += seconds * 1.1
        self.cpu += seconds


class Fake:
    """The adapter; a subclass a column."""

    name = "fake"
    plain = False
    speed = 1.0

    def __init__(self) -> None:
        plan = json.loads(os.environ.get(VARIABLE, "{}")).get(self.name, {})
        process = os.environ.get("TAPGRID_PROCESS", "r0-0-x-0")
        if "rounds" in plan and int(process.partition("-")[0][1:]) not in plan["rounds"]:
            plan = {"speed": plan["speed"]} if "speed" in plan else {}
        self.plan: dict[str, Any] = plan
        self.rng = np.random.default_rng([zlib.crc32(process.encode()), plan.get("seed", 0)])
        self.clock = _Clock()
        self.installed: Work | None = None
        host = plan.get("host", {}).get("-".join(process.split("-")[:2]), 0.0)
        self.pace = float(np.exp(self.rng.normal(0, plan.get("process_noise", 0.02)) - host))

    def boot(self, model: Path, settings: Settings) -> None:
        print("fake engine booting on stdout")
        clock.SOURCE = self.clock
        if "missing" in self.plan:
            raise MissingLibrary(self.plan["missing"])
        if "no_device" in self.plan:
            raise MissingDevice(self.plan["no_device"])
        self._note_who_is_alive()
        self._trap("boot")
        self.clock.advance(5)

    def close(self) -> None:
        self._trap("close")

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        if self.plain and not isinstance(work, Nothing):
            return Refusal("not-plain", f"{self.name} is plain")
        if type(work).__name__ in self.plan.get("refuse", []):
            return Refusal("not-expressible", f"{self.name} has no way to say {type(work).__name__}")
        return None

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        if "TAPGRID_FAKE_ORDER" in os.environ:  # the tests of "never the same prompt twice" look here
            with open(os.environ["TAPGRID_FAKE_ORDER"], "a") as f:
                print(*(json.dumps([self.name, r.id, r.token_ids]) for r in requests), sep="\n", file=f)
        self._trap(requests[0].id.partition("/")[0])
        tokens = sum(r.new_tokens for r in requests)
        noise = float(np.exp(self.rng.normal(0, self.plan.get("noise", 0.01))))
        work = self.installed or work
        self.clock.advance(
            0.05 * tokens / (self.plan.get("speed", self.speed) * len(requests) ** 0.5) * noise * self.pace
        )
        return [self._outcome(r, work) for r in requests]

    def _outcome(self, request: Request, work: Work) -> Outcome:
        tokens = continue_(request, work.id if isinstance(work, ForceToken) else None)
        wrong, new = self.plan.get("wrong"), request.new_tokens
        values = value_of(work, tokens, new)
        if wrong == "shift":
            values = {k: np.roll(v, 1, axis=0) for k, v in values.items()}
        if wrong == "nan":
            values = {k: v * np.nan for k, v in values.items()}
        if wrong == "write" and isinstance(work, Steer):
            values = value_of(Capture(work.watch), tokens, new)
        answer = tokens[len(request.token_ids) :]
        return Outcome(answer[:-1] if wrong == "short" else answer, values)

    def install(self, work: Work) -> None:
        if "Install" in self.plan.get("refuse", []):
            raise NotImplementedError(f"{self.name} cannot leave work on its engine")
        self.installed = work

    def remove(self) -> None:
        self.installed = None

    def engine_settings(self) -> Mapping[str, Any]:
        return {
            "fake": True,
            "speed": self.plan.get("speed", self.speed),
            "bad": float("nan") if "nan_setting" in self.plan else 1.0,
        }

    def _note_who_is_alive(self) -> None:
        """Write how many processes of earlier workers there are, then perhaps leave one behind (as an engine core)."""
        if "TAPGRID_FAKE_ALIVE" not in os.environ:
            return
        file = os.environ["TAPGRID_FAKE_ALIVE"]
        # Workers of this session, and what they left: the tests' own process has children that are neither (torch's
        # compiler keeps a pool of them).
        earlier = [
            p
            for p in psutil.process_iter(["pid", "ppid", "cmdline"])
            if file in (said := p.info["cmdline"] or [])
            or ("harness.worker" in said and p.info["ppid"] == os.getppid() and p.info["pid"] != os.getpid())
        ]
        with open(file, "a") as f:
            print(self.name, len(earlier), file=f)
        if self.plan.get("straggler"):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", file])

    def _trap(self, where: str) -> None:
        if self.plan.get("raise") == where:
            raise RuntimeError(f"planted error in {where}")
        if self.plan.get("crash") == where:
            print(f"planted crash in {where}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.plan.get("hang") == where:
            print("hanging", file=sys.stderr, flush=True)  # into the log of the worker, where a test can wait for it
            time.sleep(1e6)
        if self.plan.get("slow_boot") and where == "boot":
            time.sleep(self.plan["slow_boot"])


class Vanilla(Fake):
    name, plain = "vanilla", True


class VanillaEager(Fake):
    name, plain, speed = "vanilla-eager", True, 0.8


class A(Fake):
    name, speed = "fake-a", 0.9


class B(Fake):
    name, speed = "fake-b", 0.7


class C(Fake):
    name, speed = "fake-c", 1.2


@dataclass(frozen=True)
class Finding:
    """The same fields as validation.inprocess.Finding."""

    what: str
    point: str
    layer: int | None
    error: float | None
    yardstick: float | None
    ratio: float | None
    slope: float | None
    nearest_layer: int | None
    verdict: str
    reason: str
    row: str | None = None


def _judge(what: str, point: str, got: Any, wanted: Any) -> Finding:
    layer = int(point.split(".")[1]) if "." in point else None
    if got is None or np.shape(got) != np.shape(wanted):
        return Finding(
            what,
            point,
            layer,
            None,
            None,
            None,
            None,
            None,
            "FAIL",
            f"shape {np.shape(got)}, wanted {np.shape(wanted)}",
        )
    error = float(np.max(np.abs(np.asarray(got, dtype=np.float64) - wanted)))
    good = error < 1e-5  # NaN is not
    return Finding(
        what,
        point,
        layer,
        error,
        1e-6,
        error / 1e-6,
        1.0,
        layer,
        "PASS" if good else "FAIL",
        "" if good else f"error {error:.3g}",
    )


class Validator:
    """Knows what the fake model computes, and has the interface of validation.inprocess.Validator."""

    def __init__(self, model: Path, settings: Settings, cache: Path) -> None:
        assert (model / "config.json").exists()

    def check_reads(self, adapter: Any, requests: Sequence[Request]) -> list[Finding]:
        work = Capture(tuple(f"resid_post.{i}" for i in range(LAYERS)))
        if adapter.refuses(work, Shape(8, 4)):
            return []
        return self._values("read", work, requests, adapter.run(requests, work))

    def check_write(self, adapter: Any, work: Work, requests: Sequence[Request]) -> list[Finding]:
        if isinstance(work, Steer):
            work = Steer(work.point, work.vector, watch=(work.point,))
        if isinstance(work, AblateHead):
            return []
        outcomes = adapter.run(requests, work)
        if isinstance(work, ForceToken):
            return [
                _judge("write", "sampled", o.token_ids, [work.id] * r.new_tokens)
                for r, o in zip(requests, outcomes, strict=True)
            ]
        return self._values("write", work, requests, outcomes)

    def check_row(
        self, row: str, work: Work, requests: Sequence[Request], outcomes: Sequence[Outcome]
    ) -> list[Finding]:
        return self._values("value", work, requests, outcomes)

    def _values(self, what: str, work: Work, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> list[Finding]:
        found = []
        for r, o in zip(requests, outcomes, strict=True):
            wanted = value_of(work, (*r.token_ids, *o.token_ids), r.new_tokens)
            found += [_judge(what, p, o.values.get(p), v) for p, v in wanted.items()]
        return found


__all__ = ["Fake", "Nothing", "Validator", "grid_file", "model_folder", "planted"]
