"""Other people's numbers -> stores: pytest-benchmark's JSON, and the published cells under `results/published/`.

What comes in has not been validated, and every run says so; a verdict on it is not ours to give.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.grid import UsageError
from harness.store import FILE, SCHEMA, StoreError, write
from harness.workloads import KINDS

# The published names -> ours. A name that is not here would be a silent loss, so it is an error.
ROWS = {
    "generate": "generate",
    "generate, 8 concurrent": "generate-x8",
    "generate, 32 concurrent": "generate-x32",
    "capture 1 layer, every step": "capture-1",
    "capture every layer, every step": "capture-all",
    "capture 1 layer, 8 concurrent": "capture-1-x8",
    "capture 1 layer, 32 concurrent": "capture-1-x32",
    "additive steering, 1 layer": "steer",
    "logit lens every step": "lens",
    "linear probe every step": "probe",
    "zero one attention head every step": "ablate-head",
    "override the sampled token every step": "force-token",
    "one forward over 512 tokens, capture 1 layer": "forward",
    "sweep: 1024 × 1 token, capture 1 layer, per request": "sweep",
    "sweep: 1024 × 1 token, capture 1 layer, edit() once": "sweep-installed",
}
COLUMNS = {
    "vanilla vLLM": "vanilla",
    "vanilla vLLM 0.20.2": "vanilla-0.20.2",
    "nnsight eager": "nnsight-eager",
    "nnsight taps (CUDA graphs)": "nnsight-taps",
    "interp-engine vllm": "interp-engine-vllm",
    "interp-engine vllm-static": "interp-engine-static",
    "vLLM-Lens": "vllm-lens",
    "TransformerLens (compile + CUDA graphs)": "transformerlens-vllm",
    "TransformerLens batched": "transformerlens-batched",
}
PUBLISHED = "published without samples and without validation"
UNVALIDATED = "imported: nothing is known of its activations"
Line = dict[str, Any]


def import_file(file: Path, folder: Path) -> list[Path]:
    """Turn `file` into one or more stores under `folder`; returns their paths. Existing stores are never touched."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    try:
        stores = list(_published(text) if file.suffix == ".jsonl" else _pytest_benchmark(json.loads(text), file))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{file} is neither pytest-benchmark's JSON nor published cells (.jsonl): {type(error).__name__}: {error}"
        ) from error
    paths = [folder / name / FILE for name, _ in stores]
    if taken := [p for p in paths if p.exists()]:
        raise StoreError(f"{taken[0]} exists, and a store is never rewritten; give another folder with --output")
    return [write(path, lines) for path, (_, lines) in zip(paths, stores, strict=True)]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _session(name: str, model: str, metric: str, rows: list[str], columns: list[str], runs: int, **more: Any) -> Line:
    grid = {
        "name": name, "model": model, "columns": columns, "metric": metric, "margin": 0.03, "alpha": 0.05,
        "rows": {},  # what was asked of each row is not known
    }  # fmt: skip
    return {
        "kind": "session", "session": f"imported-{_slug(name)}", "schema": SCHEMA, "grid": grid, "tier": "imported",
        "rounds": 1, "runs": runs, "columns": columns, "rows": rows, "plan": [columns], "key": "", **more,
    }  # fmt: skip


def _processes(session: Line) -> list[Line]:
    """A process a column: what judges and reports hang runs on. Nothing is known of it but its name."""
    at = {"kind": "process", "session": session["session"], "round": 0, "settings": {}, "env": {}, "packages": {}}
    return [{**at, "process": f"r0-0-{c}-0", "order": i, "column": c} for i, c in enumerate(session["columns"])]


def _run(session: Line, row: str, column: str, run: int, value: float, unit: str, metric: str, reason: str) -> Line:
    """One run of which only the judged number is known; what is not known is null."""
    line: Line = dict.fromkeys(
        ("cpu_seconds", "wall_seconds", "tokens", "value_cpu", "value_wall", "load", "peak_rss_bytes", "started")
    )
    if unit == "s":
        line[f"{metric}_seconds"] = value
    return line | {
        "kind": "run", "session": session["session"], "process": f"r0-0-{column}-0",
        "round": 0, "column": column, "row": row, "run": run,
        f"value_{metric}": value, "unit": unit, "validated": False, "invalid_reason": reason, "sequence": run + 1,
    }  # fmt: skip


def _published(text: str) -> Iterator[tuple[str, list[Line]]]:
    """A store a panel."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for number, data in enumerate(filter(None, text.splitlines()), 1):
        cell = json.loads(data)
        if cell["workload"] not in ROWS or cell["column"] not in COLUMNS:
            raise ValueError(f"line {number}: {cell['workload']!r} or {cell['column']!r} has no counterpart here")
        panels.setdefault(cell["panel"], []).append(cell)
    for panel, cells in panels.items():
        rows = sorted({ROWS[c["workload"]] for c in cells}, key=list(KINDS).index)
        columns = list(dict.fromkeys(COLUMNS[c["column"]] for c in cells))
        name = panel.partition(" (tok/s")[0]
        session = _session(
            name, name.partition(",")[0], "wall", rows, columns, 1, started="", fingerprint={}, imported=PUBLISHED
        )
        yield f"published-{_slug(name)}", [session, *_processes(session), *(_published_cell(session, c) for c in cells)]


def _published_cell(session: Line, cell: Mapping[str, Any]) -> Line:
    row, column = ROWS[cell["workload"]], COLUMNS[cell["column"]]
    if cell["status"] != "measured":
        code = "not-expressible" if cell["status"] == "cannot express" else "not-measured"
        at = {"session": session["session"], "process": None, "round": 0, "column": column, "row": row}
        return {"kind": "refusal", **at, "code": code, "reason": f"published as {cell['status']!r}"}
    value, unit = (cell["value"] / 1000, "s") if cell["unit"] == "ms" else (cell["value"], cell["unit"])
    return _run(session, row, column, 0, value, unit, "wall", PUBLISHED)


def _pytest_benchmark(data: Mapping[str, Any], file: Path) -> Iterator[tuple[str, list[Line]]]:
    """One store: a benchmark is a row (its parameters less `column` in its name), and one file is one process."""
    machine, commit = data.get("machine_info") or {}, data.get("commit_info") or {}
    found: list[tuple[str, str, list[float]]] = []
    for bench in data["benchmarks"]:
        column = str((bench.get("params") or {}).get("column") or "benchmark")
        row = str(bench["group"] if bench.get("group") and column != "benchmark" else bench["name"])
        # Without --benchmark-save-data only summaries are there; the mean is then the one number of the process.
        found.append((row, column, bench["stats"].get("data") or [bench["stats"]["mean"]]))
    rows, columns = list(dict.fromkeys(r for r, _, _ in found)), list(dict.fromkeys(c for _, c, _ in found))
    cpu = machine.get("cpu")
    facts = {
        "cpu": cpu.get("brand_raw") if isinstance(cpu, dict) else cpu,
        "python": machine.get("python_version"),
        "git_commit": commit.get("id"),
        "git_dirty": commit.get("dirty"),
    }
    most = max((len(v) for _, _, v in found), default=0)
    started = str(data.get("datetime") or "")
    session = _session(
        file.stem, file.name, "wall", rows, columns, most, started=started, fingerprint=facts, imported=UNVALIDATED
    )
    lines = [
        _run(session, r, c, i, v, "s", "wall", UNVALIDATED) for r, c, values in found for i, v in enumerate(values)
    ]
    yield f"imported-{_slug(file.stem)}", [session, *_processes(session), *lines]
