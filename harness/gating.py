"""From a command line's words to a gate's answer: finds the baseline, reads the limits, confirms on fresh rounds."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from harness import baseline
from harness.baseline import FullKey
from harness.gate import GateResult, gate, gate_from, parse_gate, to_markdown
from harness.grid import UsageError
from harness.limits import Gate
from harness.options import Asked
from harness.store import Store, StoreError, find, home, read, stores

# Measures the cells that an alarm is about once more: (row, column) of each -> the path of a store of fresh rounds.
Confirm = Callable[[Collection[tuple[str, str]]], Path]


def find_baseline(given: str, but: Path | None = None) -> Path:
    """The store or baseline file that a word means: a path, or a git revision that a store here was measured at.

    `but` is the store to be compared, which at that revision is no baseline of itself.
    """
    path = Path(given)
    if path.exists():
        return path if path.suffix == ".json" else find(path)
    commit = _commit(given)
    if commit is None:
        raise StoreError(f"no baseline {given!r}: neither a file nor a git revision of this folder")
    for file in stores(home()):
        if but is None or file.resolve() != but.resolve():
            facts = read(file).session["fingerprint"]
            if commit in (facts.get("project_commit"), facts.get("git_commit")):
                return file
    raise StoreError(f"no baseline: no store under {home()} was measured at {given} ({commit[:10]})")


def _commit(revision: str) -> str | None:
    if revision.startswith("-"):
        return None
    command = ["git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def rule_of(text: str | None, table: Mapping[str, Any]) -> Gate:
    """The limits: of the grid file, under what the command line says.

    >>> rule_of("slower:5%", {"slower": "3%", "limits": {"steer": "8%"}})
    Gate(slower=0.05, limits=(('steer', 0.08),))
    """
    if text is None:
        return gate_from(table)
    return gate_from({k: v for k, v in table.items() if k != "slower"}, parse_gate(text))


def check(asked: Asked) -> None:
    """Say at once, and not after hours of measuring, that the words make no sense."""
    from harness.gate import ALLOW

    if asked.rule is not None:
        parse_gate(asked.rule)
    for word in _words(asked.allow):
        if word not in ALLOW:
            raise UsageError(f"nothing called {word!r} can be allowed; known: {', '.join(ALLOW)}")


def ask(asked: Asked, after: Store, confirm: Confirm | None = None) -> GateResult:
    """The gate's result. An alarm is confirmed on fresh rounds where they can be measured."""
    rule = rule_of(asked.rule, after.session["grid"].get("gate") or {})
    allow = _words(asked.allow)
    before = None
    why = "name a store with --baseline"
    if asked.baseline:
        try:
            before = baseline.load(find_baseline(asked.baseline, but=after.path))
        except StoreError as error:
            why = str(error)
    if before is None:
        result = gate(None, after, rule, strict=asked.strict, allow=allow)
        return GateResult(result.exit_code, (*result.messages, why), None, result.strict)
    result = gate(before, after, rule, strict=asked.strict, allow=allow)
    slower = slower_in(result)
    if confirm is not None and slower and result.exit_code == 1:
        fresh = read(confirm([(k.row, k.column) for k in slower]))
        result = gate(before, after, rule, strict=asked.strict, allow=allow, fresh=fresh)
    return result


def slower_in(result: GateResult) -> list[FullKey]:
    return [c.key for c in result.comparison.changes if c.status == "slower"] if result.comparison else []


def lines(result: GateResult) -> list[str]:
    """The result for a terminal and for a pull request: Markdown is fit for both."""
    return to_markdown(result).rstrip().splitlines()


def _words(text: str | None) -> list[str]:
    return [w.strip() for w in (text or "").split(",") if w.strip()]
