"""Whether a session may pass beside a baseline: `tapgrid gate A B`, `pytest --grid-baseline A --grid-gate slower:3%`.

Exit codes: 0 fine, 1 a regression or a failed validation, 3 cannot judge (no baseline, a vanished cell, another
machine, other settings, too few rounds; with `strict` also an inconclusive or a new cell). Words that make no sense
are a UsageError: 2. Never 0 with nothing judged.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from harness.baseline import Side, side
from harness.compare import NO_NUMBER, STATUSES, Change, Comparison, compare
from harness.grid import UsageError
from harness.limits import Gate, gate_from, parse_gate
from harness.store import Store

__all__ = [
    "ALLOW", "Change", "Comparison", "Gate", "GateResult", "compare", "gate", "gate_from", "parse_gate", "to_json",
    "to_markdown",
]  # fmt: skip

ALLOW = ("other-machine", "other-settings", "missing-baseline", "vanished")


@dataclass(frozen=True)
class GateResult:
    """`exit_code` and why, in sentences."""

    exit_code: int
    messages: tuple[str, ...]
    comparison: Comparison | None
    strict: bool = False


def gate(
    before: Store | Side | None,
    after: Store | Side,
    rule: Gate | None = None,
    *,
    strict: bool = False,
    fresh: Store | Side | None = None,
    allow: Collection[str] = (),
) -> GateResult:
    """Whether `after` may pass. With `fresh`, rounds measured after an alarm, a regression has to show there again.

    `allow` takes back what would be exit 3: any of `ALLOW`.
    """
    if unknown := [a for a in allow if a not in ALLOW]:
        raise UsageError(f"nothing called {unknown[0]!r} can be allowed; known: {', '.join(ALLOW)}")
    new = after if isinstance(after, Side) else side(after)
    if before is None:
        bad = [c for c in new.cells.values() if c.verdict == "INVALID"]
        said = tuple(f"{c.row} / {c.column} failed validation: {c.reason}" for c in bad)
        code = 1 if bad else 0 if "missing-baseline" in allow else 3
        return GateResult(code, (*said, "no baseline to compare with: nothing was judged"), None, strict)
    comparison = compare(before, new, rule, other_settings="other-settings" in allow)
    if fresh is not None:
        comparison = _confirmed(comparison, fresh if isinstance(fresh, Side) else side(fresh))
    return _result(comparison, strict, allow)


def _confirmed(comparison: Comparison, fresh: Side) -> Comparison:
    """A regression that the fresh rounds do not show beyond the limit is not confirmed."""
    done = []
    for c in comparison.changes:
        cell = fresh.cells.get(c.key)
        again = cell.share if cell and cell.verdict not in ("INVALID", *NO_NUMBER) else None
        if c.status == "slower" and again is not None and c.before is not None:
            now = again / c.before - 1
            held = math.log1p(now) < -math.log1p(c.limit)
            status, how = ("slower", "confirmed by") if held else ("unconfirmed", "but not in")
            c = dataclasses.replace(c, status=status, reason=f"slower, {how} fresh rounds ({100 * now:+.1f} %)")
        done.append(c)
    return dataclasses.replace(comparison, changes=tuple(done))


def _result(comparison: Comparison, strict: bool, allow: Collection[str]) -> GateResult:
    pardoned = {"no-baseline": "missing-baseline", "vanished": "vanished"}
    fails, blind = [], []
    for c in comparison.changes:
        effect = STATUSES[c.status][0]
        if effect == "fail":
            fails.append(f"{c.key}: {_by(c)}{c.reason}")
        elif (effect == "blind" and pardoned.get(c.status) not in allow) or (effect == "strict" and strict):
            blind.append(f"{c.key}: {_by(c)}{c.reason}")
    if comparison.machine and "other-machine" not in allow:
        # A difference between machines proves nothing about the code; only a failed validation still does.
        fails = [f"{c.key}: {c.reason}" for c in comparison.changes if c.status == "invalid"]
        blind.insert(0, f"measured on another machine: {comparison.machine}")
    if not any(c.p is not None for c in comparison.changes):
        blind.append("no cell could be compared: nothing was judged")
    code = 1 if fails else 3 if blind else 0
    return GateResult(code, (*fails, *blind), comparison, strict)


def _by(change: Change) -> str:
    return f"{100 * change.change:+.1f} %, " if change.change is not None else ""


_WORDS = {0: "Pass", 1: "Fail", 3: "Cannot judge"}


def to_markdown(result: GateResult, *, unchanged: bool = False) -> str:
    """The result for a pull request: the outcome, why, and every changed cell by size, improvements too."""
    lines = [f"### tapgrid gate: {_WORDS[result.exit_code]}", ""]
    lines += [f"- {_safe(m)}" for m in result.messages]
    comparison = result.comparison
    if comparison is None:
        return "\n".join(lines) + "\n"
    told = ", ".join(f"{n} {s}" for s, n in comparison.counts().items())
    lines += [""] * bool(result.messages) + [f"{len(comparison.changes)} cells: {told}.", ""]
    shown = [c for c in comparison.changes if c.change is not None and (unchanged or c.status != "same")]
    if shown:
        lines += [
            "| row | column | share of plain | change | 95 % interval | adjusted p | |",
            "|---|---|---|---|---|---|---|",
            *(_line(c) for c in shown),
            "",
        ]
    rest = [c for c in comparison.changes if c.change is None and STATUSES[c.status][0]]
    if rest:
        lines += ["| row | column | |", "|---|---|---|"]
        lines += [f"| {_safe(c.key.row)} | {_safe(c.key.column)} | {c.status}: {_safe(c.reason)} |" for c in rest] + [
            ""
        ]
    names = f"{_safe(comparison.before)} → {_safe(comparison.after)}"
    lines.append(f"<sub>{names}; shares are of each session's own plain engine</sub>")
    return "\n".join(lines) + "\n"


def _line(c: Change) -> str:
    assert None not in (c.before, c.after, c.change, c.low, c.high, c.p_adjusted)
    interval = f"{_percent(c.low)} to {_percent(c.high)}"
    mark = f"**{c.status}** (limit {100 * c.limit:.2g} %)" if STATUSES[c.status][0] == "fail" else c.status
    cells = [_safe(c.key.row), _safe(c.key.column), f"{c.before:.3f} → {c.after:.3f}", _percent(c.change), interval]
    return f"| {' | '.join(cells)} | {c.p_adjusted:.2g} | {mark} |"


def _percent(fraction: float | None) -> str:
    return "" if fraction is None or math.isnan(fraction) else f"{100 * fraction:+.1f} %"


def _safe(text: str) -> str:
    """Text that cannot end a table cell or become markup."""
    return html.escape(text, quote=False).replace("|", "&#124;").replace("\n", " ").replace("`", "'")


def to_json(result: GateResult) -> dict[str, Any]:
    """The result as plain data."""
    comparison = result.comparison
    return {
        "exit_code": result.exit_code,
        "outcome": _WORDS[result.exit_code],
        "messages": list(result.messages),
        "before": comparison.before if comparison else None,
        "after": comparison.after if comparison else None,
        "machine": comparison.machine if comparison else None,
        "counts": comparison.counts() if comparison else {},
        "cells": [
            dataclasses.asdict(c.key) | {k: v for k, v in dataclasses.asdict(c).items() if k != "key"}
            for c in comparison.changes
        ]
        if comparison
        else [],
    }
