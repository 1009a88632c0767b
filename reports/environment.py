"""Where the numbers come from: machine, packages, variables, engine settings; and what differs between columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from reports.escape import Safe, join, tag
from reports.svg import mark_svg
from reports.view import Line, View

Table = dict[str, dict[str, str]]  # key -> column -> value


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested data as dotted keys and printed values.

    >>> flat({"a": {"b": 1}, "c": [1, 2], "d": None})
    {'a.b': '1', 'c': '[1, 2]', 'd': 'none'}
    """
    found: dict[str, str] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, name + ".")
        elif key.endswith("_bytes") and isinstance(value, int):
            found[name.removesuffix("_bytes")] = f"{value / 2**30:.1f} GiB"
        else:
            found[name] = shown(value)
    return found


def shown(value: Any) -> str:
    """A value of a setting, as text: what JSON writes, without quotes around strings."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def by_key(lines: Sequence[Line], kind: str) -> Table:
    """One part of the processes ("settings", "env", "packages"), turned: key -> column -> value.

    A column whose processes disagree among themselves shows all of its values.
    """
    found: dict[str, dict[str, dict[str, None]]] = {}
    for line in lines:
        part = line.get(kind)
        for key, value in flat(part if isinstance(part, Mapping) else {}).items():
            found.setdefault(key, {}).setdefault(str(line.get("column")), {})[value] = None
    return {key: {c: " / ".join(values) for c, values in columns.items()} for key, columns in found.items()}


def split(table: Table, columns: list[str]) -> tuple[dict[str, str], Table]:
    """What all columns share, and what they do not."""
    common: dict[str, str] = {}
    differ: Table = {}
    for key, values in table.items():
        distinct = {values.get(c) for c in columns}
        if len(distinct) == 1 and None not in distinct and not any(" / " in v for v in values.values()):
            common[key] = next(iter(values.values()))
        else:
            differ[key] = values
    return common, differ


def _pairs(data: Mapping[str, str]) -> Safe:
    rows = [tag("tr", tag("th", k, scope="row"), tag("td", v)) for k, v in data.items()]
    return tag("table", tag("tbody", *rows), class_="pairs")


def _difference(differ: Table, columns: list[str], view: View) -> Safe:
    """Keys down, columns across; the value that most columns have is muted, the others stand out."""
    head = tag("tr", tag("th", ""), *(tag("th", mark_svg(view.marks[c]), c, scope="col") for c in columns))
    rows = []
    for key, values in differ.items():
        each = [values.get(c, "") for c in columns]
        usual = max(dict.fromkeys(each), key=each.count)
        cells = [tag("td", v or "·", class_="usual" if v == usual and each.count(v) > 1 else "odd") for v in each]
        rows.append(tag("tr", tag("th", key, scope="row"), *cells))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="plain diff"), class_="scroll")


def _part(title: str, kind: str, view: View, nothing: str) -> Safe:
    columns = [c for c in view.columns if any(p.get("column") == c for p in view.store.processes)]
    table = by_key(view.store.processes, kind)
    if not table:
        return join([tag("h3", title), tag("p", nothing, class_="note")])
    common, differ = split(table, columns)
    parts = [tag("h3", title)]
    if differ and len(columns) > 1:
        parts.append(_difference(differ, columns, view))
    elif differ:
        common |= {k: v.get(columns[0], "") for k, v in differ.items()}
    else:
        parts.append(tag("p", "The same in every column.", class_="note"))
    if common:
        folded = tag("details", tag("summary", f"{len(common)} shared by all columns"), _pairs(common))
        parts.append(folded if differ and len(columns) > 1 else _pairs(common))
    return tag("div", *parts, class_="part")


def _fingerprint(view: View) -> Safe:
    machines: list[dict[str, str]] = []
    for session in view.sessions:
        found = session.get("fingerprint")
        machine = flat({k: v for k, v in found.items() if k != "packages"} if isinstance(found, Mapping) else {})
        if machine not in machines:
            machines.append(machine)
    if not any(machines):
        return tag("p", "This store holds no fingerprint of its machine.", class_="warn")
    warn = tag(
        "p", "The sessions of this store differ in machine or state: compare across them with care.", class_="warn"
    )
    return join([warn if len(machines) > 1 else "", *(_pairs(m) for m in machines)])


def environment(view: View) -> Safe:
    """Machine, then what differs between the columns' engines, variables and packages, then what they share."""
    asked = {k: v for k, v in flat(view.grid).items() if not k.startswith(("tiers.", "path"))}
    return join(
        [
            tag("div", tag("h3", "Machine"), _fingerprint(view), class_="part"),
            _part("Engine settings", "settings", view, "No process reported its engine's settings."),
            _part("Environment variables", "env", view, "No process reported its variables."),
            _part("Packages", "packages", view, "No process reported its packages."),
            tag("details", tag("summary", "The grid as it was resolved"), _pairs(asked)) if asked else "",
        ]
    )
