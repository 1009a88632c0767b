"""One column through every kind of work on a tiny model: `python -m tests.peer_conformance COLUMN NEW_TOKENS`.

A process of its own, because an engine leaves a process changed. Prints one JSON object: what failed, what was
refused and why, what was checked, and what the engine says of itself. The suite itself is `validation.conformance`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from adapters.columns import all_columns, make
from adapters.engines.settings import environment
from adapters.work import Adapter, Outcome, Request, Work
from harness import engine_facts
from harness.models import resolve
from validation import conformance
from validation.conformance import CLOSE, FORCED, MODEL, SETTINGS, requests, works

__all__ = ["CLOSE", "FORCED", "MODEL", "SETTINGS", "Report", "check", "conform", "main", "requests", "works"]


@dataclass
class Report:
    failed: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)


def check(adapter: Adapter, name: str, work: Work, asked: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
    """Raise AssertionError where an outcome is not what the reference says."""
    conformance.check(resolve(MODEL), work, asked, outcomes)


def conform(adapter: Adapter, new: int) -> Report:
    """Every work, one request and several, asked and installed; then nothing may be left on the engine."""
    found = conformance.conform(adapter, resolve(MODEL), new)
    return Report(
        [f"{line.what}: {line.reason}" for line in found if line.verdict == "wrong"],
        {line.what: line.reason for line in found if line.verdict == "refused"},
        [line.what for line in found if line.verdict == "holds"],
    )


def main(argv: Sequence[str]) -> int:
    column, new = argv[0], int(argv[1])
    adapter = make(all_columns()[column])
    adapter.boot(resolve(MODEL), SETTINGS)
    try:
        engine = engine_facts.facts(adapter)
        report = conform(adapter, new)
        settings = json.loads(json.dumps(dict(adapter.engine_settings())))
    finally:
        adapter.close()
    print(json.dumps({**vars(report), "settings": settings, "engine": engine}))
    return 0


if __name__ == "__main__":
    os.environ.update(environment(SETTINGS))
    sys.exit(main(sys.argv[1:]))
