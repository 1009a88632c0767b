"""What is known to be wrong in the libraries that are measured here: data, in `known_issues.toml` beside this file.

An entry says where, in which version, by which measurement and on which input. `tests/test_known_issues.py` shows each
on the installed library, and says so when a release has fixed one.
"""

from __future__ import annotations

import datetime
import functools
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class KnownIssue:
    """One entry. `where` is a point, a row or a call; `columns` those that run the library; `here` what the column does
    about it, so that its cells are right all the same."""

    id: str
    library: str
    version: str
    columns: tuple[str, ...]
    where: str
    wrong: str
    measured: str
    input: str
    date: datetime.date
    here: str


class Fixed(AssertionError):
    """A newer release no longer shows a known issue: its entry is to be removed."""


@functools.cache
def known_issues(file: Path = FILE) -> tuple[KnownIssue, ...]:
    """Every entry, in the order of the file.

    >>> known_issues()[0].library
    'interp-engine'
    """
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["issue"]
    found = tuple(_entry(e, file) for e in entries)
    twice = {i.id for i in found if sum(j.id == i.id for j in found) > 1}
    if twice:
        raise ValueError(f"{file}: the id {min(twice)!r} is there more than once")
    return found


def _entry(table: dict[str, object], file: Path) -> KnownIssue:
    wanted = {f.name for f in fields(KnownIssue)}
    if set(table) != wanted:
        off = ", ".join(sorted(set(table) ^ wanted))
        raise ValueError(f"{file}: issue {table.get('id')!r} lacks, or should not have: {off}")
    columns = table["columns"]
    assert isinstance(columns, list), f"{file}: columns of {table['id']!r} is no list"
    return KnownIssue(**table | {"columns": tuple(columns)})  # type: ignore[arg-type]


def of_columns(columns: Iterable[str]) -> tuple[KnownIssue, ...]:
    """The entries that concern any of these columns, in whatever environment (`column@environment`) it runs.

    >>> [i.id for i in of_columns(["vllm-lens@vllm-0.30"])][0]
    'vllm-lens-pre-hook'
    """
    bases = {c.partition("@")[0] for c in columns}
    return tuple(i for i in known_issues() if bases & set(i.columns))


def check(issue: KnownIssue, shows: bool, installed: str) -> None:
    """Raise where the installed version does not show what the entry says of it.

    >>> check(known_issues()[0], True, "9.9")
    """
    if shows:
        return
    if newer(installed, issue.version):
        raise Fixed(f"{issue.id}: fixed in {issue.library} {installed}: remove the entry from {FILE.name}")
    raise AssertionError(
        f"{issue.id}: {issue.library} {installed} does not show what {FILE.name} says of {issue.version}: {issue.wrong}"
    )


def newer(version: str, than: str) -> bool:
    """Whether a version comes after another, by its numbers.

    >>> newer("1.10.0", "1.9.4"), newer("2.13.0+cpu", "2.13.0"), newer("4.3", "4.3.0")
    (True, False, False)
    """
    a, b = ([int(n) for n in re.findall(r"\d+", v.partition("+")[0])] for v in (version, than))
    longest = max(len(a), len(b))
    return a + [0] * (longest - len(a)) > b + [0] * (longest - len(b))
