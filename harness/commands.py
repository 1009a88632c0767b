"""What each subcommand of `tapgrid` does: arguments in, exit code out. Data goes to stdout, all else to stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from adapters.columns import all_columns
from harness import grid as grids
from harness import options as words
from harness import plan
from harness.finish import finish, table_of, write_reports
from harness.grid import UsageError
from harness.models import EMBEDDED
from harness.session import Choice, choose, costs_key, folder_of, plan_for, twinned
from harness.store import find, home, read, stores
from harness.workloads import KINDS

LISTED = ("grids", "rows", "columns", "tiers", "models", "stores")


def out(args: Namespace, data: Any, lines: Iterable[str]) -> None:
    """The one place that prints: JSON alone, or lines."""
    print(json.dumps(data, indent=1, allow_nan=False) if args.json else "\n".join(lines))


def list_(args: Namespace) -> int:
    if args.what is not None and args.what not in LISTED:
        raise UsageError(grids.nearest("list", args.what, LISTED))
    found = _listing()
    chosen = {args.what: found[args.what]} if args.what else {k: v for k, v in found.items() if k != "stores"}
    lines: list[str] = []
    for what, entries in chosen.items():
        lines += [*(["", what] if lines else [what])] if len(chosen) > 1 else []
        lines += [f"{'  ' if len(chosen) > 1 else ''}{name}: {about}" for name, about in entries.items()]
    out(args, chosen if len(chosen) > 1 else chosen[args.what], lines)
    return 0


def _listing() -> dict[str, dict[str, str]]:
    return {
        "grids": {n: g.about for n in grids.names() for g in [grids.load(n)]},
        "rows": {n: f"{k.about} [{k.unit}]" for n, k in KINDS.items()},
        "columns": {n: c.about for n, c in all_columns().items()},
        "tiers": {n: f"{t.rounds} rounds, {t.runs} runs" for n, t in sorted(grids.TIERS.items())},
        "models": {n: f"embedded, from {m.package}" for n, m in EMBEDDED.items()}
        | {"synthetic:FAMILY": "a small seeded twin, made on the spot"},
        "stores": {str(p): read(p).session["started"] for p in stores(home())},
    }


def plan_(args: Namespace) -> int:
    return _show_plan(args, choose(words.options(args.grid, vars(args))))


def _show_plan(args: Namespace, choice: Choice) -> int:
    costs = plan.load_costs(folder_of(choice.options), costs_key(choice.grid))
    made = plan_for(choice, costs)
    out(args, made.to_json(), [plan.show(made, choice.grid, costs)])
    return 0


def run_(args: Namespace) -> int:
    choice = choose(words.options(args.grid, vars(args)))
    if args.dry_run:
        return _show_plan(args, choice)
    path = _execute(choice)
    ending = finish(path, report=args.report, baseline=args.baseline, gate=args.gate, strict=args.strict)
    out(args, ending.to_json(), ending.lines())
    return ending.code


def _execute(choice: Choice, *, timed: bool = True) -> Path:
    from harness.run import execute, prepare

    return execute(prepare(choice, timed=timed))


def report_(args: Namespace) -> int:
    from harness.judge import judge

    store = read(find(args.store))
    html = Path(args.report)
    if args.check:
        return _check_report(args, store, html)
    written = [str(p) for p in write_reports(store, judge(store), html)]
    out(args, written, written)
    return 0


def _check_report(args: Namespace, store: Any, html: Path) -> int:
    """Whether the reports on disk are the ones that the store gives, so that published numbers cannot drift."""
    import tempfile

    from harness.judge import judge

    stale = []
    with tempfile.TemporaryDirectory() as scratch:
        for fresh in write_reports(store, judge(store), Path(scratch) / html.name):
            on_disk = html.with_suffix(fresh.suffix)
            if not on_disk.exists() or on_disk.read_bytes() != fresh.read_bytes():
                stale.append(str(on_disk))
    out(args, stale, [f"{p} is not what {store.path} gives; write it again with `tapgrid report`" for p in stale])
    return 1 if stale else 0


def show_(args: Namespace) -> int:
    from harness.judge import judge, to_json

    store = read(find(args.store))
    session = store.session
    rows = set(grids.pick("row", args.rows, session["rows"]))
    columns = set(grids.pick("column", args.columns, session["columns"]))
    cells = [c for c in judge(store) if c.row in rows and c.column in columns]
    about = f"{session['grid']['name']} on {session['grid']['model']}, tier {session['tier']}, {session['started']}"
    out(args, [to_json(c) for c in cells], [f"{store.path}: {about}", "", *table_of(cells)])
    return 0


def export_(args: Namespace) -> int:
    from harness import export

    if args.format not in export.FORMATS:
        raise UsageError(grids.nearest("format", args.format, export.FORMATS))
    text = export.FORMATS[args.format](read(find(args.store)))
    if args.output:
        Path(args.output).write_text(text)
        text = ""
    if args.json:
        text = json.dumps({"format": args.format, "output": args.output, "text": text or None}) + "\n"
    sys.stdout.write(text)
    return 0


def import_(args: Namespace) -> int:
    from harness import importing

    made = [str(p) for p in importing.import_file(Path(args.file), Path(args.output) if args.output else home())]
    out(args, made, made)
    return 0


def compare_(args: Namespace) -> int:
    from harness import gate

    found = gate.compare(read(find(args.before)), read(find(args.after)))
    out(args, gate.to_json(found), [gate.markdown(found)])
    return 0


def gate_(args: Namespace) -> int:
    from harness.finish import ask_gate

    code, said = ask_gate(args.before, find(args.after), args.gate, args.strict)
    out(args, {"code": code, "notes": said}, said)
    return code


def aa_(args: Namespace) -> int:
    from harness import aa

    path = _execute(twinned(choose(words.options(args.grid, vars(args)))))
    return aa.report(path, args)


def trend_(args: Namespace) -> int:
    from harness import trend

    return trend.report(args)


def validate_(args: Namespace) -> int:
    what = args.what
    if what is None or Path(what).suffix == ".jsonl" or (Path(what).is_dir() and what not in grids.names()):
        path = find(what)
    else:
        options = words.options(what, vars(args) | {"runs": "1", "rounds": "1"})
        path = _execute(choose(options), timed=False)
    store = read(path)
    keys = (
        "column",
        "row",
        "round",
        "point",
        "layer",
        "error",
        "yardstick",
        "ratio",
        "slope",
        "nearest_layer",
        "verdict",
        "reason",
    )
    found = [{"kind": v["what"]} | {k: v.get(k) for k in keys} for v in store.validations]
    bad = [v for v in found if v["verdict"] != "PASS"]
    lines = [f"{v['column']} {v['kind']} {v['point']}: {v['verdict']}: {v['reason']}" for v in bad]
    lines += [
        f"{r['column']}: {r['reason']}"
        for r in {(r["column"], r["reason"]): r for r in store.refusals if not found}.values()
    ]
    lines += [f"lost: {f['column']}: {f['reason']} (its output: {f['stderr']})" for f in store.failed]
    passed = len(found) - len(bad)
    lines.append(f"{passed} of {len(found)} checks passed ({path})" if found else f"nothing was validated ({path})")
    out(args, found, lines)
    if any(v["verdict"] == "FAIL" for v in found):
        return 1
    return 3 if not found or store.failed else 0


def doctor_(args: Namespace) -> int:
    from harness import doctor

    found = doctor.examine()
    out(args, [dataclasses.asdict(f) for f in found], [doctor.line(f) for f in found])
    return 0 if all(f.good is not False for f in found) else 3
