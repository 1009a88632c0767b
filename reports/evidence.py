"""The smaller sections: what the models wrote, and what failed and where its log is."""

from __future__ import annotations

from reports.escape import Safe, join, tag
from reports.numbers import finite
from reports.svg import mark_svg
from reports.view import View
from reports.words import plural


def texts(view: View) -> Safe:
    """The continuation of every column; a column whose processes disagree shows each text with its count."""
    if not view.store.texts:
        return tag("p", "No column wrote a text.", class_="note")
    found: dict[str, dict[str, dict[str, int]]] = {}  # prompt -> column -> text -> processes
    for line in view.store.texts:
        own = found.setdefault(str(line.get("prompt")), {}).setdefault(str(line.get("column")), {})
        said = str(line.get("text"))
        own[said] = own.get(said, 0) + 1
    parts: list[Safe] = []
    for prompt, columns in found.items():
        reference = next(iter(next(iter(columns.values()))))
        rows = [
            tag(
                "tr",
                tag("th", mark_svg(view.marks[c]) if c in view.marks else "", c, scope="row"),
                tag(
                    "td",
                    tag("span", prompt, class_="prompt"),
                    tag("mark" if said == reference else "strong", said),
                    class_="said",
                ),
                tag("td", plural(n, "process"), class_="n"),
                tag("td", "" if said == reference else f"differs from {next(iter(columns))}", class_="note"),
            )
            for c, own in columns.items()
            for said, n in own.items()
        ]
        parts.append(tag("div", tag("table", tag("tbody", *rows), class_="plain texts"), class_="scroll"))
    silent = [c for c in view.columns if not any(c in columns for columns in found.values())]
    return join([*parts, tag("p", f"No text from: {', '.join(silent)}.", class_="note") if silent else ""])


def failures(view: View) -> Safe:
    """What was lost, why, and the file that holds the worker's last words."""
    if not view.failures:
        return tag("p", "No worker crashed or hung.", class_="note")
    head = tag("tr", *(tag("th", h, scope="col") for h in ("round", "column", "row", "reason", "log")))
    rows = [
        tag(
            "tr",
            tag("td", str(int(f["round"]) + 1) if finite(f.get("round")) is not None else "", class_="n"),
            tag("th", f.get("column"), scope="row"),
            tag("td", f.get("row") or "the whole process"),
            tag("td", f.get("reason"), class_="reason"),
            tag("td", tag("code", f.get("stderr")) if f.get("stderr") else "none was kept"),
        )
        for f in view.failures
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="plain"), class_="scroll")
