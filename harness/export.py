"""A store in other people's formats: store -> text. Raw runs where a format can hold them, verdicts where it cannot."""

from __future__ import annotations

import csv
import io
import json
import platform
from collections.abc import Callable, Iterable
from typing import Any
from xml.etree import ElementTree

from harness.store import Line, Store, clean

# Every run is exported, also one that failed validation: `validated` says so.
RUN_FIELDS = (
    "grid", "row", "column", "round", "process", "run", "sequence", "value_cpu", "value_wall", "unit", "cpu_seconds",
    "wall_seconds", "tokens", "validated", "invalid_reason", "load", "peak_rss_bytes", "started",
)  # fmt: skip


def to_csv(store: Store) -> str:
    """One line a run, nothing rounded."""
    out = io.StringIO()
    table = csv.DictWriter(out, RUN_FIELDS, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    table.writerows({"grid": store.session["grid"]["name"], **run} for run in store.runs)
    return out.getvalue()


def to_benchfmt(store: Store) -> str:
    """The Go benchmark format: `benchstat -col /column` compares columns, `-row .name` lists rows.

    A cell that failed validation is left out with a comment, because benchstat would compare it like any other.
    """
    session = store.session
    lines = [
        f"grid: {session['grid']['name']}",
        f"model: {session['grid']['model']}",
        f"goos: {platform.system().lower()}",
        f"cpu: {session['fingerprint'].get('cpu')}",
        f"commit: {session['fingerprint'].get('git_commit')}",
        "Unit tok/s better=higher",
        "Unit tok/cpu-s better=higher",
        "Unit wall-s better=lower",
        "Unit cpu-s better=lower",
        "",
    ]
    for run in store.runs:
        name = f"Benchmark{_go_name(run['row'])}/column={run['column']}"
        if not run["validated"]:
            lines.append(f"# {name} left out: {str(run['invalid_reason']).splitlines()[0]}")
            continue
        rate = run["unit"] == "tok/s"
        pairs = [("cpu-s", run["cpu_seconds"]), ("wall-s", run["wall_seconds"])]
        pairs += [("tok/s", run["value_wall"]), ("tok/cpu-s", run["value_cpu"])] if rate else []
        lines.append(f"{name} 1 " + " ".join(f"{value!r} {unit}" for unit, value in pairs if value is not None))
    return "\n".join(lines) + "\n"


def _go_name(row: str) -> str:
    """`capture-1-x8` -> `Capture1X8`: a trailing -N would be read as a processor count.

    >>> _go_name("capture-1-x8")
    'Capture1X8'
    """
    return "".join(part[:1].upper() + part[1:] for part in row.split("-"))


def to_pytest_benchmark(store: Store) -> str:
    """The JSON of `--benchmark-json`, raw data included; the seconds are those of the judged metric."""
    session, metric = store.session, store.session["grid"]["metric"]
    facts = session["fingerprint"]
    benchmarks = [_benchmark(row, column, runs, metric) for (row, column), runs in _by_cell(store.runs).items()]
    whole = {
        "machine_info": {"cpu": facts.get("cpu"), "system": facts.get("kernel"), "python_version": facts.get("python")},
        "commit_info": {"id": facts.get("git_commit"), "dirty": facts.get("git_dirty"), "time": session["started"]},
        "benchmarks": benchmarks,
        "datetime": session["started"],
        "version": "5.3.1",
    }
    return json.dumps(clean(whole)[0], indent=1, allow_nan=False) + "\n"


def _benchmark(row: str, column: str, runs: list[Line], metric: str) -> dict[str, Any]:
    import statistics as s

    data = [r[f"{metric}_seconds"] for r in runs]
    ordered = sorted(data)
    q1, median, q3 = s.quantiles(data, n=4, method="inclusive") if len(data) > 1 else [data[0]] * 3
    mean, sd = s.fmean(data), s.stdev(data) if len(data) > 1 else 0.0
    stats = {
        "min": ordered[0], "max": ordered[-1], "mean": mean, "stddev": sd, "rounds": len(data), "median": median,
        "iqr": q3 - q1, "q1": q1, "q3": q3, "iqr_outliers": 0, "stddev_outliers": 0, "outliers": "0;0",
        "ld15iqr": ordered[0], "hd15iqr": ordered[-1], "ops": 1 / mean if mean else None, "total": sum(data),
        "iterations": 1, "data": data,
    }  # fmt: skip
    return {
        "group": row,
        "name": f"{row}[{column}]",
        "fullname": f"grid::{row}::{column}",
        "params": {"column": column},
        "param": column,
        "extra_info": {
            "metric": metric,
            "validated": all(r["validated"] for r in runs),
            "processes": [r["process"] for r in runs],
            "tokens": [r["tokens"] for r in runs],
        },
        "options": {"timer": metric, "warmup": True},
        "stats": stats,
    }


def _by_cell(runs: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    found: dict[tuple[str, str], list[Line]] = {}
    for run in runs:
        found.setdefault((run["row"], run["column"]), []).append(run)
    return found


def to_markdown(store: Store) -> str:
    """The report for a pull request: as `tapgrid report` writes it beside the HTML."""
    import tempfile
    from pathlib import Path

    import reports.markdown
    from harness.finish import judged

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "report.md"
        reports.markdown.write(store, judged(store)[0], path)
        return path.read_text(encoding="utf-8")


def to_baseline(store: Store) -> str:
    """What a later gate needs of this session and no more: small enough to be committed."""
    from harness import baseline

    return json.dumps(clean(baseline.export(store))[0], indent=1, allow_nan=False) + "\n"


def to_junit(store: Store) -> str:
    """JUnit XML: a cell a test case; INVALID and MISSING are failures, UNSUPPORTED is skipped."""
    from harness.finish import judged
    from harness.judge import to_json

    cells, name = judged(store)[0], store.session["grid"]["name"]
    failed = sum(c.verdict in ("INVALID", "MISSING") for c in cells)
    skipped = sum(c.verdict == "UNSUPPORTED" for c in cells)
    suite = ElementTree.Element(
        "testsuite", name=f"grid {name}", tests=str(len(cells)), failures=str(failed), skipped=str(skipped), errors="0",
        timestamp=store.session["started"],
    )  # fmt: skip
    seconds = {cell: sum(r["wall_seconds"] for r in runs) for cell, runs in _by_cell(store.runs).items()}
    for cell in cells:
        time = seconds.get((cell.row, cell.column), 0.0)
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"grid.{name}.{cell.row}", name=cell.column, time=f"{time:.3f}"
        )
        properties = ElementTree.SubElement(case, "properties")
        for key, value in to_json(cell).items():
            if value is not None:
                ElementTree.SubElement(properties, "property", name=key, value=_xml(value))
        if cell.verdict in ("INVALID", "MISSING"):
            ElementTree.SubElement(case, "failure", message=_xml(f"{cell.verdict}: {cell.reason}"))
        elif cell.verdict == "UNSUPPORTED":
            ElementTree.SubElement(case, "skipped", message=_xml(cell.reason))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def _xml(value: Any) -> str:
    """Text that XML 1.0 can hold: engines put terminal colours into their messages."""
    return "".join(c if c in "\t\n\r" or ord(c) >= 32 else "\ufffd" for c in str(value))


FORMATS: dict[str, Callable[[Store], str]] = {
    "benchfmt": to_benchfmt,
    "pytest-benchmark": to_pytest_benchmark,
    "csv": to_csv,
    "markdown": to_markdown,
    "junit": to_junit,
    "baseline": to_baseline,
}
