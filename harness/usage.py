"""What a user asked for and does not exist: one class, one sentence with the nearest names. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """What the user asked for does not exist or does not fit; exit code 2."""


def nearest(what: str, wanted: str, known: Iterable[str]) -> str:
    """One sentence about a name that does not exist.

    >>> nearest("row", "ster", ["steer", "lens"])
    "no row 'ster'; did you mean 'steer'? Known: steer, lens"
    """
    known = list(known)
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? Known" if near else "known"
    return f"no {what} {wanted!r}; {hint}: {', '.join(known)}"
