"""The command line's words, once for both: `tapgrid run GRID --tier quick`, `pytest --grid GRID --grid-tier quick`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.grid import UsageError
from harness.session import Options


@dataclass(frozen=True)
class Word:
    """One option. `parse` turns its text into a value, with a UsageError of its own; None makes it a flag."""

    name: str
    help: str
    metavar: str = ""
    parse: Callable[[str, str], Any] | None = None
    default: Any = None


def _text(name: str, text: str) -> str:
    return text


def _whole(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{name} wants a whole number of at least 1, not {text!r}")
    return int(text)


def minutes(name: str, text: str) -> float:
    """A duration in minutes.

    >>> minutes("--budget", "40m"), minutes("--budget", "2h"), minutes("--budget", "90s"), minutes("--budget", "15")
    (40.0, 120.0, 1.5, 15.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|)", text.strip())
    if not found or float(found[1]) == 0:
        raise UsageError(f"{name} wants a time such as 90s, 40m or 2h, not {text!r}")
    return float(found[1]) * {"s": 1 / 60, "h": 60.0}.get(found[2], 1.0)


@dataclass(frozen=True)
class Asked:
    """What the user said of the gate."""

    baseline: str | None = None
    rule: str | None = None
    strict: bool = False
    allow: str | None = None


SELECT = (
    Word("rows", "only these rows: names with commas between, * allowed", "ROWS", _text),
    Word(
        "columns",
        "only these columns; one that the grid leaves off may be named too; all: every one of this environment",
        "COLUMNS",
        _text,
    ),
)
PLANNING = (
    Word(
        "tier", "how many rounds and runs: quick, standard, publish, or one of the grid's own", "TIER", _text, "quick"
    ),
    *SELECT,
    Word("rounds", "this many rounds, whatever the tier says (a round boots every column once)", "N", _whole),
    Word("runs", "this many timed runs of each cell in a process", "N", _whole),
    Word("budget", "as many rounds as fit this time, from measured costs: 40m, 2h", "TIME", minutes),
    Word("store", "a store file (.jsonl), or the folder for stores (default .tapgrid)", "PATH", _text),
)
RUNNING = (
    Word(
        "report",
        "where report.html goes, with report.md beside it (default report.html; '': nowhere)",
        "PATH",
        _text,
        "report.html",
    ),
    Word("fresh", "start a new session even where an interrupted one could be resumed"),
    Word("add", "this many more rounds to the finished session of the same settings, shown as added", "N", _whole),
    Word("baseline", "a store, a baseline file or a git revision to compare with", "STORE", _text),
    Word("gate", 'what is a regression (exit code 1), such as "slower:3%%"', "RULE", _text),
    Word("strict", "with a gate: an inconclusive or a new cell is exit code 3 too"),
    Word(
        "allow", "with a gate: what is no reason for exit code 3, such as missing-baseline,other-machine", "WHAT", _text
    ),
)
DRY = Word("dry-run", "print the plan, its order and a time estimate; measure nothing")


def add(parser: Any, words: tuple[Word, ...], prefix: str = "--") -> None:
    """Add words to an argparse parser or to a group of pytest's."""
    put = parser.add_argument if isinstance(parser, argparse.ArgumentParser) else parser.addoption
    for word in words:
        common: dict[str, Any] = {"dest": dest(prefix, word.name), "help": word.help}
        if word.parse is None:
            put(prefix + word.name, action="store_true", default=False, **common)
        else:
            # The text is parsed later, by us: a bad value is then one sentence and exit code 2 in pytest as well.
            put(prefix + word.name, default=word.default, metavar=word.metavar, **common)


def dest(prefix: str, name: str) -> str:
    """Where argparse and pytest keep an option; not `grid`, which another plugin may be using.

    >>> dest("--", "dry-run"), dest("--grid-", "dry-run")
    ('dry_run', 'tapgrid_dry_run')
    """
    return ("tapgrid_" if prefix.startswith("--grid") else "") + name.replace("-", "_")


def values(found: Mapping[str, Any], words: tuple[Word, ...], prefix: str = "--") -> dict[str, Any]:
    """The parsed values of `words`, by name."""
    made = {}
    for word in words:
        value = found.get(dest(prefix, word.name), word.default)
        if isinstance(value, str) and word.parse is not None:
            value = word.parse(prefix + word.name, value)
        made[word.name] = value
    return made


def options(grid: str, found: Mapping[str, Any], prefix: str = "--") -> Options:
    """The session options that were given."""
    v = values(found, (*PLANNING, *RUNNING), prefix)
    return Options(
        grid=grid,
        tier=v["tier"],
        rows=v["rows"],
        columns=v["columns"],
        rounds=v["rounds"],
        runs=v["runs"],
        budget_minutes=v["budget"],
        store=v["store"],
        fresh=bool(v["fresh"]),
        add=v["add"],
    )


def asked(found: Mapping[str, Any], prefix: str = "--", baseline: str | None = None) -> Asked:
    """What was said of the gate; `baseline` where that is an argument of its own. Nonsense is a UsageError now."""
    v = values(found, RUNNING, prefix)
    made = Asked(baseline or v["baseline"], v["gate"], bool(v["strict"]), v["allow"])
    if made.rule or made.allow:
        from harness.gating import check  # brings the statistics in, which a plain listing does without

        check(made)
    return made
