"""A rich synthetic store and its cells, for the report's tests: thirteen rows, six columns, every verdict.

The numbers are drawn from a seed around planted shares and judged by the real judge.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import store as stores
from harness.judge import Cell, judge
from reports import html

ROWS = (
    "generate", "generate-x8", "capture-1", "capture-all", "capture-1-x8", "steer", "lens", "probe", "ablate-head",
    "force-token", "forward", "sweep", "sweep-installed",
)  # fmt: skip
COLUMNS = ("vanilla", "vanilla-eager", "tapgrid-eager", "tapgrid-hf", "hf", "nnsight-eager")
PLAIN = ("vanilla", "vanilla-eager", "hf")
PLAIN_ROWS = ("generate", "generate-x8", "forward", "sweep")
SECONDS = ("forward", "sweep", "sweep-installed")
EIFFEL = "The Eiffel Tower is in the city of"

# Planted speed of a column relative to vanilla, and what a row costs on top of it.
SPEED = {
    "vanilla": 1.0,
    "vanilla-eager": 1.06,
    "tapgrid-eager": 1.03,
    "tapgrid-hf": 0.31,
    "hf": 0.34,
    "nnsight-eager": 0.71,
}
COST = {
    "capture-1": 0.985, "capture-all": 0.86, "capture-1-x8": 0.95, "steer": 0.99, "lens": 0.8, "probe": 0.97,
    "ablate-head": 0.985, "force-token": 0.99, "sweep": 0.96, "sweep-installed": 0.99,
}  # fmt: skip
LEVEL = {"generate-x8": 94.0, "capture-1-x8": 94.0, "forward": 0.82, "sweep": 6.1, "sweep-installed": 6.1}


@dataclasses.dataclass(frozen=True)
class Spec:
    """How large a session is."""

    rounds: int = 6
    runs: int = 3
    columns: tuple[str, ...] = COLUMNS
    rows: tuple[str, ...] = ROWS
    grid: str = "smollm2"
    layers: int = 30


STANDARD = Spec()


@dataclasses.dataclass(frozen=True)
class Sample:
    """A store as it is read from disk, and its cells."""

    store: stores.Store
    cells: list[Cell]


def _refused(row: str, column: str) -> tuple[str, str] | None:
    if column in PLAIN and row not in PLAIN_ROWS:
        return "not-plain", "a plain engine has nothing attached"
    if column == "nnsight-eager" and row == "sweep-installed":
        return "not-expressible", "nnsight has no way to leave an intervention on its vLLM engine"
    if column == "tapgrid-hf" and row in ("generate-x8", "capture-1-x8"):
        return "not-expressible", "transformers' generate pads a batch: positions would not be the request's own"
    return None


def _session(rounds: int, runs: int, columns: Sequence[str], rows: Sequence[str], grid: str) -> dict[str, Any]:
    settings = {"dtype": "bfloat16", "threads": 1}
    resolved = {"name": grid, "model": grid, "metric": "cpu", "margin": 0.03, "alpha": 0.05, "settings": settings}
    machine = {
        "cpu": "Example CPU @ 2.60GHz", "cores": 2, "memory_bytes": 16 * 2**30, "kernel": "Linux 6.1", "gpu": None,
        "python": "3.11.7", "load": 0.41, "git_commit": "310a8ddf00d1", "git_dirty": True,
        "packages": {"torch": "2.11.0"},
    }  # fmt: skip
    return {
        "kind": "session", "schema": "1.0", "session": "s1", "tier": "standard", "rounds": rounds, "runs": runs,
        "columns": list(columns), "rows": list(rows), "plan": [list(columns)] * rounds, "key": "0" * 16,
        "started": "2025-11-03T09:12:44Z", "grid": resolved, "fingerprint": machine,
    }  # fmt: skip


def _process(r: int, order: int, column: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"dtype": "bfloat16", "seed": 0}
    packages = {"torch": "2.11.0", "numpy": "2.3.5", "transformers": "5.15.0"}
    if "hf" in column.split("-"):
        settings |= {"attn_implementation": "sdpa"}
    else:
        settings |= {"max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": column != "vanilla"}
        packages |= {"vllm": "0.27.1"}
    if column.startswith("nnsight"):
        packages |= {"nnsight": "0.8.1"}
    if column.startswith("tapgrid"):
        packages |= {"tapgrid": "0.1.0"}
    boot = (41.0 if column == "vanilla" else 6.4) + r * 0.1
    return {
        "kind": "process", "session": "s1", "process": f"p{r}-{column}", "round": r, "order": order, "column": column,
        "settings": settings, "env": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, "packages": packages,
        "boot_wall_seconds": boot, "boot_cpu_seconds": 5.0,
        "started": f"2025-11-03T{9 + r // 2:02d}:{12 + order:02d}:00Z",
    }  # fmt: skip


def _finding(base: dict[str, Any], point: str, layer: int | None, ratio: float, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "validation", **base, "row": None, "what": "read", "point": point, "layer": layer,
        "error": 0.003 * ratio, "yardstick": 0.003, "ratio": ratio, "slope": 1.0 + 1e-4 * ratio, "nearest_layer": layer,
        "verdict": "PASS", "reason": f"median token error 3.1e-03 is {ratio:.2f} x the yardstick's", **changes,
    }  # fmt: skip


def _findings(rng: random.Random, base: dict[str, Any], layers: int, broken: bool) -> list[dict[str, Any]]:
    """Reads of every layer, two writes, and where it is broken three layers of capture-all that are a layer off."""
    found = []
    for layer in [*range(layers), None]:
        ratio = 0.75 + 0.5 * rng.random()
        point = "logits" if layer is None else "resid_post"
        if base["column"].startswith("nnsight") and layer == 11:
            found.append(
                _finding(base, point, layer, 3.4, verdict="WARN", reason="error of the worst token (4) 1.2e-02")
            )
        else:
            found.append(_finding(base, point, layer, ratio))
    for row in ("steer", "ablate-head"):
        found.append(_finding(base, "resid_post", layers // 2, 0.9 + 0.2 * rng.random(), what="write", row=row))
    for layer in range(layers - 3, layers) if broken else ():
        wrong: dict[str, Any] = {"what": "value", "row": "capture-all", "verdict": "FAIL", "nearest_layer": layer - 1}
        reason = f"nearer to layer {layer - 1} than to its own layer {layer}"
        found.append(_finding(base, "resid_post", layer, 38.0, **(wrong | {"reason": reason})))
    return found


def _runs(row: str, rate: Callable[[], float], base: dict[str, Any], runs: int, wrong: bool) -> list[dict[str, Any]]:
    """The runs of one row of one process, `rate` times as fast as the row's level."""
    level, unit = LEVEL.get(row, 17.3), "s" if row in SECONDS else "tok/s"
    made = []
    for run in range(runs):
        cpu = level / rate() if unit == "s" else level * rate()
        made.append({
            "kind": "run", **base, "row": row, "run": run, "wall_seconds": 2.0, "cpu_seconds": 1.9, "tokens": 32,
            "unit": unit, "value_wall": cpu * (1.04 if unit == "s" else 0.96), "value_cpu": cpu, "validated": not wrong,
            "load": 0.5, "invalid_reason": "value at resid_post: a layer off" if wrong else None,
            "peak_rss_bytes": 2 * 10**9, "started": "2025-11-03T09:20:00Z", "sequence": run,
        })  # fmt: skip
    return made


def _noisy(rng: random.Random, share: float) -> float:
    return share * math.exp(rng.gauss(0, 0.004))


def _column(rng: random.Random, r: int, order: int, column: str, drift: float, spec: Spec) -> list[dict[str, Any]]:
    """One process from boot to end."""
    process = _process(r, order, column)
    base = {"session": "s1", "process": process["process"], "round": r, "column": column}
    said = " Paris. The Eiffel Tower is" if column == "hf" else " Paris, the capital of France."
    made = [process, {"kind": "text", **base, "prompt": EIFFEL, "text": said}]
    if column not in PLAIN:
        made += _findings(rng, base, spec.layers, broken=column == "nnsight-eager" and r == 3)
    effect = math.exp(rng.gauss(0, 0.008)) * drift
    for row in spec.rows:
        if refused := _refused(row, column):
            made.append({"kind": "refusal", **base, "row": row, "code": refused[0], "reason": refused[1]})
        elif column == "nnsight-eager" and row == "lens":
            log = f".tapgrid/logs/{r}-{column}.err"
            made.append({"kind": "failed", **base, "row": row, "reason": "the worker died (signal 9)", "stderr": log})
        else:
            share = (
                SPEED.get(column, 0.5 + 0.4 * rng.random()) * (1 if column in PLAIN else COST.get(row, 1.0)) * effect
            )
            wrong = column == "nnsight-eager" and row == "capture-all" and r == 3
            made += _runs(row, functools.partial(_noisy, rng, share), base, spec.runs, wrong)
    return [*made, {"kind": "process_end", **base, "clean": True}]


def lines(spec: Spec = STANDARD) -> list[dict[str, Any]]:
    """Every line of a session: drift over time, noise by process and by run, one crash, one failed validation."""
    rng = random.Random(7)
    made = [_session(spec.rounds, spec.runs, spec.columns, spec.rows, spec.grid)]
    for r in range(spec.rounds):
        drift = 1 - 0.02 * math.sin(r) - (0.06 if r == spec.rounds - 2 else 0)
        times = {"wall_seconds": 0.4 / drift, "cpu_seconds": 0.39 / drift}
        made.append({"kind": "probe", "session": "s1", "round": r, "order": 0, **times})
        turn = r % len(spec.columns)
        for order, column in enumerate([*spec.columns[turn:], *spec.columns[:turn]]):
            made += _column(rng, r, order, column, drift, spec)
    return [*made, {"kind": "session_end", "session": "s1"}]


def store_of(made: Sequence[dict[str, Any]], folder: Path) -> stores.Store:
    """Lines, written and read back. (`stores.write` syncs every line to the disk, which takes a minute here.)"""
    path = folder / "store.jsonl"
    path.write_bytes(b"".join(map(stores.dump, made)))
    return stores.read(path)


@functools.cache
def rich() -> Sample:
    """The store of this file and its cells, once a test session."""
    with tempfile.TemporaryDirectory() as folder:
        found = store_of(lines(), Path(folder))
    return Sample(found, judge(found))


@functools.cache
def page() -> str:
    """Its report."""
    return html.render(rich().store, rich().cells)


def test_the_sample_holds_every_verdict() -> None:
    assert {c.verdict for c in rich().cells} == {
        "FASTER", "SLOWER", "SAME", "UNCLEAR", "REFERENCE", "UNSUPPORTED", "MISSING", "INVALID",
    }  # fmt: skip
    assert len(rich().cells) == len(ROWS) * len(COLUMNS)
