"""What a gate lets pass: how much slower a cell may get, in words as users write them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.grid import UsageError


@dataclass(frozen=True)
class Gate:
    """How much slower a cell may get: a fraction, and others for cells that match a pattern (the last match counts)."""

    slower: float = 0.03
    limits: tuple[tuple[str, float], ...] = ()

    def limit(self, row: str, column: str) -> float:
        """The limit of one cell.

        >>> parse_gate("slower:3%, slower:8%@capture-*").limit("capture-all", "hf")
        0.08
        """
        fitting = [v for p, v in self.limits if fnmatch.fnmatchcase(f"{row}/{column}", p if "/" in p else f"{p}/*")]
        return fitting[-1] if fitting else self.slower


def parse_gate(text: str) -> Gate:
    """`slower:3%`, or with limits of single cells: `slower:3%,slower:8%@capture-*,slower:10%@generate/tapgrid-hf`.

    >>> parse_gate("slower:3%")
    Gate(slower=0.03, limits=())
    """
    slower, limits = None, []
    for part in (p.strip() for p in text.split(",")):
        found = re.fullmatch(r"(\w[\w-]*)\s*:\s*([^@]+?)\s*(?:@\s*(\S+))?", part)
        if not found:
            raise UsageError(f"gate {part!r} is not of the form slower:3% or slower:8%@ROW/COLUMN")
        word, amount, pattern = found.groups()
        if word != "slower":
            raise UsageError(f"gate {part!r}: there is no rule {word!r}, only 'slower'")
        if pattern:
            limits.append((pattern, _fraction(part, amount)))
        elif slower is not None:
            raise UsageError(f"gate {text!r} gives the general limit twice; a limit of some cells ends in @ROW/COLUMN")
        else:
            slower = _fraction(part, amount)
    return Gate(Gate.slower if slower is None else slower, tuple(limits))


def gate_from(table: Mapping[str, Any], default: Gate | None = None) -> Gate:
    """The `[gate]` of a grid file: `slower = "3%"` and `[gate.limits]` with `"capture-*/nnsight-eager" = "8%"`.

    >>> gate_from({"slower": "5%", "limits": {"steer": 0.1}})
    Gate(slower=0.05, limits=(('steer', 0.1),))
    """
    default = default or Gate()
    if unknown := set(table) - {"slower", "limits"}:
        raise UsageError(f"[gate] has no setting {sorted(unknown)[0]!r}; known: slower, limits")
    slower = _fraction("[gate] slower", str(table["slower"])) if "slower" in table else default.slower
    limits = tuple((p, _fraction(f"[gate.limits] {p}", str(v))) for p, v in table.get("limits", {}).items())
    return Gate(slower, limits + default.limits)


def _fraction(where: str, amount: str) -> float:
    number, percent = (amount[:-1], True) if amount.endswith("%") else (amount, False)
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        raise UsageError(f"{where!r}: {amount!r} is not a number; say 3% or 0.03") from None
    if not 0 < value < 1:
        raise UsageError(f"{where!r}: {amount} is not between 0 and 100 %; 3 % is written 3% or 0.03")
    return value
