"""What a worker does with a booted engine: shows its text, checks its activations, times its rows.

An activation that failed in this process makes every number of this process INVALID: a fast wrong answer is no result.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from adapters.work import (
    AblateHead,
    Adapter,
    ForceToken,
    Nothing,
    Outcome,
    Refusal,
    Request,
    Settings,
    Shape,
    Steer,
    Work,
)
from harness import clock, fingerprint, workloads
from harness.models import ModelInfo
from harness.workloads import KINDS, WARM_UP, Row

# Prompt lengths of the activation check: unequal, and no multiple of a cache block, so that a row mix-up shows.
CHECK_LENGTHS, CHECK_NEW = (19, 33, 24), 6
TEXT_TOKENS = 8
# Runs of one process are within a few percent of each other. Those further apart than this were disturbed, whichever of
# them it was, and are done again, this often and as long as no more than these seconds have gone into it.
AGREE, AGAIN, AGAIN_SECONDS = 1.15, 3, 20.0


@dataclass
class Bench:
    """What lives as long as the process: the engine, the model's facts, the validator and what it has found so far."""

    send: Callable[..., None]
    adapter: Adapter
    settings: Settings
    model: Path
    info: ModelInfo
    ids: Sequence[int]
    runs: int
    seed: int
    metric: str = "cpu"
    validator: Any = None
    sequence: int = 0
    distrust: str | None = None  # why no number of this process may be believed
    write_failed: dict[str, str] = field(default_factory=dict)

    @property
    def children(self) -> bool:
        return self.settings.tensor_parallel > 1 or bool(getattr(self.adapter, "children", False))


def show_text(bench: Bench) -> None:
    """The greedy continuation of one known sentence: a column that babbles is seen at once."""
    if not (bench.model / "tokenizer.json").exists() or bench.adapter.refuses(Nothing(), Shape(8, TEXT_TOKENS)):
        return
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        print("no text check: the package `tokenizers` is not installed", file=sys.stderr)
        return
    tokenizer = Tokenizer.from_file(str(bench.model / "tokenizer.json"))
    ids = tokenizer.encode(workloads.EIFFEL).ids
    if bench.info.bos is not None and ids[:1] != [bench.info.bos]:
        ids = [bench.info.bos, *ids]
    outcome = bench.adapter.run([Request("text", tuple(ids), TEXT_TOKENS)], Nothing())[0]
    bench.send("text", prompt=workloads.EIFFEL, text=tokenizer.decode(list(outcome.token_ids)))


def validate(bench: Bench, rows: Sequence[Row], validator: str, cache: Path) -> None:
    """Before anything is timed: are this process's reads right, and do its writes land?"""
    bench.send("phase", phase="validate", row=None)
    start = time.perf_counter()
    try:
        module, _, name = validator.partition(":")
        bench.validator = getattr(importlib.import_module(module), name)(bench.model, bench.settings, cache)
    except Exception as error:
        traceback.print_exc()
        bench.distrust = f"nothing was validated: {validator} is not usable ({type(error).__name__}: {error})"
    if bench.validator:
        _check_reads(bench)  # of a plain engine too: it hands back no activation, but its tokens can be wrong
    if bench.validator and not bench.adapter.plain:
        for row in rows:
            _check_write(bench, row)
    bench.send("done", row=None, seconds=time.perf_counter() - start)


def _check_requests(bench: Bench) -> list[Request]:
    made = []
    for i, length in enumerate(CHECK_LENGTHS):
        row = Row("validate", prompt_tokens=min(length, bench.settings.max_model_len - CHECK_NEW), new_tokens=CHECK_NEW)
        made += workloads.requests_for(row, bench.info, bench.ids, run=i, seed=bench.seed)
    return made


def _check_reads(bench: Bench) -> None:
    found = _ask(bench, None, "read", lambda: bench.validator.check_reads(bench.adapter, _check_requests(bench)))
    failures = [f for f in found if f["verdict"] == "FAIL"]
    if failures:
        bench.distrust = f"{len(failures)} of {len(found)} reads failed validation, the first: {_sentence(failures[0])}"
    elif not found and not bench.adapter.plain:
        bench.distrust = "no activation of this process was validated"


def _check_write(bench: Bench, row: Row) -> None:
    work = workloads.work_for(row, bench.info, bench.ids, plain=False)
    if not isinstance(work, Steer | AblateHead | ForceToken) or bench.adapter.refuses(work, row.shape):
        return
    found = _ask(
        bench, row.name, "write", lambda: bench.validator.check_write(bench.adapter, work, _check_requests(bench))
    )
    if failure := next((f for f in found if f["verdict"] == "FAIL"), None):
        bench.write_failed[row.name] = f"its write failed validation: {_sentence(failure)}"


def _ask(bench: Bench, row: str | None, what: str, check: Callable[[], Sequence[Any]]) -> list[dict[str, Any]]:
    """Run a check and report its findings. One that cannot be carried out is a finding too: it failed."""
    try:
        found = [asdict(f) | {"row": row} for f in check()]
    except Exception as error:
        traceback.print_exc()
        empty: dict[str, Any] = dict.fromkeys(("layer", "error", "yardstick", "ratio", "slope", "nearest_layer"))
        reason = f"the check raised {type(error).__name__}: {error}"
        found = [{"what": what, "point": "", **empty, "verdict": "FAIL", "reason": reason, "row": row}]
    for finding in found:
        bench.send("validation", **finding)
    return found


def _sentence(finding: Mapping[str, Any]) -> str:
    return f"{finding['what']} at {finding['point'] or 'no point'}: {finding['reason']}"


def ask(bench: Bench, row: Row) -> Work | None:
    """The row's work, or None where the column refuses it, which is then reported."""
    bench.send("phase", phase="ask", row=row.name)
    work = workloads.work_for(row, bench.info, bench.ids, plain=bench.adapter.plain)
    refusal = work if isinstance(work, Refusal) else bench.adapter.refuses(work, row.shape)
    if refusal is not None:
        bench.send("refusal", row=row.name, code=refusal.code, reason=refusal.sentence)
        return None
    assert not isinstance(work, Refusal)
    return work


def measure(bench: Bench, row: Row) -> None:
    """One cell in this process: asked first, warmed up, timed `runs` times back to back, then every run checked."""
    work = ask(bench, row)
    if work is None:
        return
    begin = time.perf_counter()
    bench.send("phase", phase="run", row=row.name)
    installed = KINDS[row.name].installed
    if installed and not _install(bench, row, work):
        return
    try:
        timed = Nothing() if installed else work
        _run(bench, row, timed, WARM_UP)
        before = bench.sequence
        runs = _agreeing(bench, row, timed)
    finally:
        if installed:
            bench.adapter.remove()
    bench.send("phase", phase="check", row=row.name)
    for run, (line, requests, outcomes) in enumerate(runs):
        problem = _problem(bench, row, work, requests, outcomes)
        bench.send("run", row=row.name, run=run, **line, validated=problem is None, invalid_reason=problem)
    bench.send("done", row=row.name, seconds=(time.perf_counter() - begin) / (1 + bench.sequence - before))


def _agreeing(bench: Bench, row: Row, work: Work) -> list[tuple[dict[str, Any], list[Request], list[Outcome]]]:
    """The timed runs, all of them again where they disagree. How fast they were plays no part in it, and what is not
    counted is stored all the same, as `disagreed`."""
    begin = time.perf_counter()
    for left in range(AGAIN, -1, -1):
        runs = [_run(bench, row, work, run) for run in range(bench.runs)]
        took = [line[f"{bench.metric}_seconds"] for line, _, _ in runs]
        if max(took) <= AGREE * min(took) or not left or time.perf_counter() - begin > AGAIN_SECONDS:
            break
        for run, (line, _, _) in enumerate(runs):
            bench.send("disagreed", row=row.name, run=run, **line)
    return runs


def _install(bench: Bench, row: Row, work: Work) -> bool:
    try:
        bench.adapter.install(work)
    except NotImplementedError as no:
        why = str(no) or "this column cannot leave work on its engine"
        bench.send("refusal", row=row.name, code="not-expressible", reason=why)
        return False
    return True


def _run(bench: Bench, row: Row, work: Work, run: int) -> tuple[dict[str, Any], list[Request], list[Outcome]]:
    requests = workloads.requests_for(row, bench.info, bench.ids, run=run, seed=bench.seed)
    adapter = bench.adapter
    gc.collect()  # what earlier rows left behind is not this row's to pay for
    started, load, before = fingerprint.now(), os.getloadavg()[0], clock.start(bench.children)
    if row.concurrent:
        outcomes = list(adapter.run(requests, work))
    else:
        outcomes = [o for r in requests for o in adapter.run([r], work)]
    took = clock.stop(before, bench.children)
    tokens = sum(len(o.token_ids) for o in outcomes)
    bench.sequence += 1
    line = {
        "wall_seconds": took.wall,
        "cpu_seconds": took.cpu,
        "tokens": tokens,
        "value_wall": workloads.value(row, tokens, took.wall),
        "value_cpu": workloads.value(row, tokens, took.cpu),
        "unit": KINDS[row.name].unit,
        "load": load,
        "peak_rss_bytes": _peak(bench.children),
        "started": started,
        "prompts": workloads.prompts_digest(requests),
        "sequence": bench.sequence,
    }
    return line, requests, outcomes


def _problem(
    bench: Bench, row: Row, work: Work, requests: Sequence[Request], outcomes: Sequence[Outcome]
) -> str | None:
    """Why this run may not be believed, or None. Every run is asked, outside the timing."""
    if wrong := workloads.count_problem(row, outcomes):
        return wrong
    if bench.distrust or row.name in bench.write_failed:
        return bench.distrust or bench.write_failed[row.name]
    found = _ask(bench, row.name, "value", lambda: bench.validator.check_row(row.name, work, requests, outcomes))
    failure = next((f for f in found if f["verdict"] == "FAIL"), None)
    return _sentence(failure) if failure else None


def _peak(children: bool) -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if children:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                peak += child.memory_info().rss
    return peak
