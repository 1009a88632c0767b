"""What the page carries as data: every cell exactly, every run compactly, and where the rest lies."""

from __future__ import annotations

import hashlib
from typing import Any

from harness.judge import to_json
from reports.escape import Safe, join, json_block, tag
from reports.numbers import finite
from reports.runs import MOST_RUNS
from reports.view import View
from reports.words import plural

SCHEMA = "1.0"
RUN_FIELDS = ("process", "row", "run", "value_wall", "value_cpu", "validated")


def _six(value: object) -> float | None:
    number = finite(value)
    return None if number is None else float(f"{number:.6g}")


def _runs(view: View) -> dict[str, Any]:
    """Runs as short rows: names once, values to six digits. A larger store keeps its runs to itself."""
    if len(view.store.runs) > MOST_RUNS:
        return {"left_out": f"{len(view.store.runs)} runs: read them in the store"}
    places = {p.get("process"): i for i, p in enumerate(view.store.processes)}
    names = list(dict.fromkeys(str(r.get("row")) for r in view.store.runs))
    rows = {name: i for i, name in enumerate(names)}
    return {
        "digits": 6,
        "processes": [[p.get(k) for k in ("process", "round", "order", "column")] for p in view.store.processes],
        "rows": names,
        "fields": RUN_FIELDS,
        "values": [
            [places.get(r.get("process")), rows[str(r.get("row"))], r.get("run"), _six(r.get("value_wall")),
             _six(r.get("value_cpu")), int(bool(r.get("validated")))]
            for r in view.store.runs
        ],
    }  # fmt: skip


def page_data(view: View) -> dict[str, Any]:
    """The embedded data: cells as one list of fields and one list a cell."""
    cells = [to_json(c) for c in view.cells]
    fields = list(cells[0]) if cells else []
    session = {k: v for k, v in view.session.items() if k not in {"plan", "kind"}}
    return {
        "schema": SCHEMA,
        "name": view.name,
        "session": session,
        "libraries": {c: m.library.name for c, m in view.marks.items()},
        "cells": {"fields": fields, "values": [[c[f] for f in fields] for c in cells]},
        "runs": _runs(view),
    }


def data(view: View) -> Safe:
    """The section with the download buttons, and the data itself."""
    block = json_block(page_data(view))
    digest = hashlib.sha256(block.encode()).hexdigest()
    path = getattr(view.store, "path", None)
    store = "/".join(path.parts[-2:]) if path else None  # the rest of the path is this machine's own business
    runs = (
        "runs are left to the store"
        if len(view.store.runs) > MOST_RUNS
        else f"{plural(len(view.store.runs), 'run')} to six digits"
    )
    said = [
        f"This page carries {plural(len(view.cells), 'cell')} exactly, as ",
        tag("code", "tapgrid show --json"),
        f" prints them; {runs}. Schema {SCHEMA}, SHA-256 ",
        tag("code", digest[:16]),
        ".",
    ]
    return join(
        [
            tag("p", *said),
            tag("p", "Every line as it was measured: ", tag("code", store)) if store else "",
            tag("p", tag("button", "download JSON", type="button", data_do="json"), class_="js-only"),
            tag("script", block, type="application/json", id="embedded"),
        ]
    )
