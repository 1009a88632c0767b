"""A rich synthetic store and its cells, for the report's tests: thirteen rows, six columns, every verdict.

The numbers are drawn from a seed around planted shares; the verdicts are planted too, so that a report can be
compared with what is known instead of with what the judge happens to say.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import store as stores

ROWS = (
    "generate", "generate-x8", "capture-1", "capture-all", "capture-1-x8", "steer", "lens", "probe", "ablate-head",
    "force-token", "forward", "sweep", "sweep-installed",
)  # fmt: skip
COLUMNS = ("vanilla", "vanilla-eager", "tapgrid-eager", "tapgrid-hf", "hf", "nnsight-eager")
PLAIN = ("vanilla", "vanilla-eager", "hf")
PLAIN_ROWS = ("generate", "generate-x8", "forward", "sweep")
SECONDS = ("forward", "sweep", "sweep-installed")
EIFFEL = "The Eiffel Tower is in the city of"
LAYERS = 30

# Planted speed of a column relative to vanilla, and what a row costs on top of it.
SPEED = {"vanilla": 1.0, "vanilla-eager": 1.06, "tapgrid-eager": 1.03, "tapgrid-hf": 0.31, "hf": 0.34, "nnsight-eager": 0.71}
COST = {
    "generate": 1.0, "generate-x8": 1.0, "capture-1": 0.985, "capture-all": 0.86, "capture-1-x8": 0.95, "steer": 0.99, "lens": 0.8,
    "probe": 0.97, "ablate-head": 0.985, "force-token": 0.99, "forward": 1.0, "sweep": 0.96, "sweep-installed": 0.99,
}  # fmt: skip
LEVEL = {"generate-x8": 94.0, "capture-1-x8": 94.0, "forward": 0.82, "sweep": 6.1, "sweep-installed": 6.1}


@dataclasses.dataclass(frozen=True)
class FakeCell:
    """The fields of `harness.judge.Cell` that a report reads."""

    grid: str = "smollm2"
    row: str = "generate"
    column: str = "tapgrid-eager"
    verdict: str = "UNCLEAR"
    reason: str = ""
    value: float | None = None
    unit: str = "tok/s"
    metric: str = "cpu"
    value_other: float | None = None
    share_vanilla: float | None = None
    share_eager: float | None = None
    share_hf: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    runs: int = 0
    p: float | None = None
    p_adjusted: float | None = None
    validated: bool = False
    code: str | None = None
    smallest_detectable: float | None = None
    rounds_needed: int | None = None
    against: str | None = "vanilla"
    process_values: tuple[float, ...] = ()
    process_shares: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sample:
    """A store as it is read from disk, and its cells."""

    store: Any
    cells: list[Any]


def _refused(row: str, column: str) -> tuple[str, str] | None:
    if column in PLAIN and row not in PLAIN_ROWS:
        return "not-plain", "a plain engine has nothing attached"
    if column == "nnsight-eager" and row == "sweep-installed":
        return "not-expressible", "nnsight has no way to leave an intervention on its vLLM engine"
    if column == "tapgrid-hf" and row in ("generate-x8", "capture-1-x8"):
        return "not-expressible", "transformers' generate pads a batch: positions would not be the request's own"
    return None


def _gmean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _session(rounds: int, runs: int, columns: Sequence[str], rows: Sequence[str], grid: str) -> dict[str, Any]:
    return {
        "kind": "session", "schema": "1.0", "session": "s1", "tier": "standard", "rounds": rounds, "runs": runs,
        "columns": list(columns), "rows": list(rows), "plan": [list(columns)] * rounds, "key": "0" * 16,
        "started": "2025-11-03T09:12:44Z",
        "grid": {"name": grid, "model": grid, "metric": "cpu", "margin": 0.03, "alpha": 0.05, "settings": {"dtype": "bfloat16", "threads": 1}},
        "fingerprint": {
            "cpu": "Example CPU @ 2.60GHz", "cores": 2, "memory_bytes": 16 * 2**30, "kernel": "Linux 6.1", "python": "3.11.7", "gpu": None,
            "load": 0.41, "git_commit": "310a8ddf00d1", "git_dirty": True, "packages": {"torch": "2.11.0"},
        },
    }  # fmt: skip


def _process(r: int, order: int, column: str) -> dict[str, Any]:
    vllm = column not in ("hf", "tapgrid-hf")
    settings: dict[str, Any] = {"dtype": "bfloat16", "seed": 0}
    packages = {"torch": "2.11.0", "numpy": "2.3.5", "transformers": "5.15.0"}
    if vllm:
        settings |= {"max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": column != "vanilla", "enable_prefix_caching": False}
        packages |= {"vllm": "0.27.1"}
    else:
        settings |= {"attn_implementation": "sdpa"}
    if column.startswith("nnsight"):
        packages |= {"nnsight": "0.8.1"}
    if column.startswith("tapgrid"):
        packages |= {"tapgrid": "0.1.0"}
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return {
        "kind": "process", "session": "s1", "process": f"p{r}-{column}", "round": r, "order": order, "column": column, "settings": settings,
        "env": env, "packages": packages, "boot_wall_seconds": {"vanilla": 41.0}.get(column, 6.4) + r * 0.1, "boot_cpu_seconds": 5.0,
        "started": f"2025-11-03T{9 + r // 2:02d}:{12 + order:02d}:00Z",
    }  # fmt: skip


def _findings(rng: random.Random, column: str, base: dict[str, Any], layers: int, broken: bool) -> list[dict[str, Any]]:
    found = []
    for layer in [*range(layers), None]:
        ratio = 0.75 + 0.5 * rng.random() + (0.5 if column == "nnsight-eager" and layer and layer > layers - 4 else 0)
        verdict, reason, nearest = "PASS", f"median token error 3.1e-03 is {ratio:.2f} x the yardstick's", layer
        if column == "nnsight-eager" and layer == 11:
            ratio, verdict, reason = 3.4, "WARN", "error of the worst token (4) 1.2e-02 is 3.40 x the yardstick's"
        if broken and layer is not None and layer >= layers - 3:
            ratio, verdict, reason, nearest = 38.0, "FAIL", f"nearer to layer {layer - 1} than to its own layer {layer}", layer - 1
        point = "logits" if layer is None else "resid_post"
        found.append({
            "kind": "validation", **base, "row": None, "what": "read", "point": point, "layer": layer, "error": 0.003 * ratio, "yardstick": 0.003,
            "ratio": ratio, "slope": 1.0 + 1e-4 * ratio, "nearest_layer": nearest, "verdict": verdict, "reason": reason,
        })  # fmt: skip
    for row, point in (("steer", "resid_post"), ("ablate-head", "resid_post")):
        found.append({
            "kind": "validation", **base, "row": row, "what": "write", "point": point, "layer": layers // 2, "error": 0.002, "yardstick": 0.002,
            "ratio": 0.9 + 0.2 * rng.random(), "slope": 1.0, "nearest_layer": None, "verdict": "PASS", "reason": "",
        })  # fmt: skip
    return found


def lines(
    *, rounds: int = 6, runs: int = 3, columns: Sequence[str] = COLUMNS, rows: Sequence[str] = ROWS, grid: str = "smollm2", layers: int = LAYERS
) -> list[dict[str, Any]]:
    """Every line of a session: drift over time, noise by process and by run, one crash, one failed validation."""
    rng = random.Random(7)
    made = [_session(rounds, runs, columns, rows, grid)]
    for r in range(rounds):
        drift = 1 - 0.02 * math.sin(r) - (0.06 if r == rounds - 2 else 0)
        made.append({"kind": "probe", "session": "s1", "round": r, "order": 0, "wall_seconds": 0.4 / drift, "cpu_seconds": 0.39 / drift})
        for order, column in enumerate([*columns[r % len(columns):], *columns[: r % len(columns)]]):
            process = _process(r, order, column)
            base = {"session": "s1", "process": process["process"], "round": r, "column": column}
            made.append(process)
            said = " Paris, the capital of France." if column != "hf" else " Paris. The Eiffel Tower is"
            made.append({"kind": "text", **base, "prompt": EIFFEL, "text": said})
            if column not in PLAIN:
                made += _findings(rng, column, base, layers, broken=column == "nnsight-eager" and r == 3)
            effect = math.exp(rng.gauss(0, 0.008)) * drift
            sequence = 0
            for row in rows:
                if refused := _refused(row, column):
                    made.append({"kind": "refusal", **base, "row": row, "code": refused[0], "reason": refused[1]})
                    continue
                if column == "nnsight-eager" and row == "lens":
                    reason = "the worker died (signal 9) while running lens"
                    made.append({"kind": "failed", **base, "row": row, "reason": reason, "stderr": f".tapgrid/logs/{r}-nnsight-eager.err"})
                    continue
                share = SPEED.get(column, 0.5 + 0.4 * rng.random()) * (1 if column in PLAIN else COST.get(row, 0.9))
                for run in range(runs):
                    rate = share * effect * math.exp(rng.gauss(0, 0.004))
                    level, unit = LEVEL.get(row, 17.3), "s" if row in SECONDS else "tok/s"
                    cpu = level / rate if unit == "s" else level * rate
                    wrong = column == "nnsight-eager" and row == "capture-all" and r == 3
                    sequence += 1
                    made.append({
                        "kind": "run", **base, "row": row, "run": run, "wall_seconds": 2.0, "cpu_seconds": 1.9, "tokens": 32, "unit": unit,
                        "value_wall": cpu * (1.04 if unit == "s" else 0.96), "value_cpu": cpu, "validated": not wrong,
                        "invalid_reason": "read at resid_post: nearer to layer 28 than to its own layer 29" if wrong else None,
                        "load": 0.5, "peak_rss_bytes": 2 * 10**9, "started": process["started"], "sequence": sequence,
                    })  # fmt: skip
            made.append({"kind": "process_end", **base, "clean": True})
    return made


def _cell(row: str, column: str, store: Any, grid: str) -> FakeCell:
    unit = "s" if row in SECONDS else "tok/s"
    base: dict[str, Any] = {"grid": grid, "row": row, "column": column, "unit": unit}
    if refused := _refused(row, column):
        return FakeCell(**base, verdict="UNSUPPORTED", code=refused[0], reason=refused[1])
    own = [r for r in store.runs if r["row"] == row and r["column"] == column]
    if not own:
        return FakeCell(**base, verdict="MISSING", reason="the worker died (signal 9) while running lens")
    plain = row if row in PLAIN_ROWS else {"capture-1-x8": "generate-x8", "sweep-installed": "sweep"}.get(row, "generate")

    def by_round(r: str, c: str) -> dict[int, float]:
        found: dict[int, list[float]] = {}
        for run in store.runs:
            if run["row"] == r and run["column"] == c:
                found.setdefault(run["round"], []).append(run["value_cpu"])
        return {k: _gmean(v) for k, v in found.items()}

    mine = by_round(row, column)

    def shares(of: str) -> list[float]:
        theirs = by_round(plain, of)
        return [theirs[k] / v if unit == "s" else v / theirs[k] for k, v in mine.items() if k in theirs]

    to_vanilla, to_eager, to_hf = shares("vanilla"), shares("vanilla-eager"), shares("hf")
    logs = [math.log(s) for s in to_vanilla]
    mean, n = sum(logs) / len(logs), len(logs)
    spread = math.sqrt(sum((x - mean) ** 2 for x in logs) / max(1, n - 1))
    half = 2.6 * spread / math.sqrt(n)
    share = math.exp(mean)
    verdict, reason = "UNCLEAR", "the interval reaches beyond the margin on both sides"
    if column == "vanilla":
        verdict, reason = "REFERENCE", "vanilla is what others are compared with"
    elif row == "capture-all" and column == "nnsight-eager":
        verdict, reason = "INVALID", "read at resid_post.29: nearer to layer 28 than to its own layer 29"
    elif math.exp(mean - half) > 1.03:
        verdict, reason = "FASTER", "adjusted p < 0.05 and beyond the margin"
    elif math.exp(mean + half) < 0.97:
        verdict, reason = "SLOWER", "adjusted p < 0.05 and beyond the margin"
    elif 0.97 < math.exp(mean - half) and math.exp(mean + half) < 1.03:
        verdict, reason = "SAME", "the whole interval lies within the margin"
    reference = verdict == "REFERENCE"
    return FakeCell(
        **base, verdict=verdict, reason=reason, value=_gmean(list(mine.values())), value_other=_gmean(list(mine.values())) * 0.96,
        share_vanilla=share, share_eager=_gmean(to_eager) if to_eager else None, share_hf=_gmean(to_hf) if to_hf and "hf" in column else None,
        low=None if reference else math.exp(mean - half), high=None if reference else math.exp(mean + half), rounds=n, runs=3,
        p=None if reference else 2 / 2**n, p_adjusted=None if reference else 2.4 / 2**n, validated=verdict != "INVALID",
        smallest_detectable=None if reference else 2.2 * half, rounds_needed=9 if verdict == "UNCLEAR" else None,
        against="hf" if "hf" in column else "vanilla", process_values=tuple(mine.values()), process_shares=tuple(to_vanilla),
    )  # fmt: skip


def sample(folder: Path, **changes: Any) -> Sample:
    """The store, written and read back, and a cell for every row and column of it."""
    made = lines(**changes)
    found = stores.read(stores.write(folder / "store.jsonl", made))
    head = made[0]
    return Sample(found, [_cell(row, column, found, head["grid"]["name"]) for row in head["rows"] for column in head["columns"]])


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return sample(tmp_path_factory.mktemp("rich"))


def test_the_sample_holds_every_verdict(rich: Sample) -> None:
    assert {c.verdict for c in rich.cells} == {
        "FASTER", "SLOWER", "SAME", "UNCLEAR", "REFERENCE", "UNSUPPORTED", "MISSING", "INVALID",
    }  # fmt: skip
    assert len(rich.cells) == len(ROWS) * len(COLUMNS)
