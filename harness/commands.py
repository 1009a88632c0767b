"""What each subcommand of `tapgrid` does: arguments in, exit code out. Data goes to stdout, all else to stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from harness import grid as grids
from harness import options as words
from harness import plan
from harness.costs import load_costs
from harness.environments import beside
from harness.finish import finish, floors_file, judged, table_of, write_reports
from harness.grid import UsageError
from harness.models import EMBEDDED
from harness.session import Choice, choose, costs_key, folder_of, plan_for, twinned
from harness.store import FILE, StoreError, find, home, read, stores
from harness.workloads import KINDS, PLAIN_COLUMNS

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
        "columns": {n: c.about for n, c in grids.every_column().items()},
        "tiers": {n: f"{t.rounds} rounds, {t.runs} runs" for n, t in sorted(grids.TIERS.items())},
        "models": {n: f"embedded, from {m.package}" for n, m in EMBEDDED.items()}
        | {"synthetic:FAMILY": "a small seeded twin, made on the spot"},
        "stores": {str(p): read(p).session["started"] for p in stores(home())},
    }


def plan_(args: Namespace) -> int:
    return _show_plan(args, choose(words.options(args.grid, vars(args))))


def _show_plan(args: Namespace, choice: Choice) -> int:
    costs = load_costs(folder_of(choice.options), costs_key(choice.grid))
    made = plan_for(choice, costs)
    out(args, made.to_json(), [plan.show(made, choice.grid, costs)])
    return 0


def run_(args: Namespace) -> int:
    choice = choose(words.options(args.grid, vars(args)))
    if args.dry_run:
        return _show_plan(args, choice)
    asked = words.asked(vars(args))
    ending = finish(_execute(choice), args.report, asked, lambda cells: confirm(choice, cells))
    out(args, ending.to_json(), ending.lines())
    return ending.code


def confirm(choice: Choice, cells: Collection[tuple[str, str]]) -> Path:
    """Two fresh rounds of the cells that an alarm is about, and of the plain ones that they are read against."""
    rows = {r for r, _ in cells} | {KINDS[r].plain for r, _ in cells}
    columns = {c for _, c in cells} | {beside(p, c) for p in PLAIN_COLUMNS for _, c in cells}
    again = dataclasses.replace(
        choice,
        rows=tuple(r for r in choice.rows if r.name in rows),
        columns=tuple(c for c in choice.columns if c in columns),
        options=dataclasses.replace(choice.options, rounds=2, budget_minutes=None, fresh=True, store=_folder(choice)),
    )
    return _execute(again)


def _folder(choice: Choice) -> str:
    return str(folder_of(choice.options) / "confirmations")


def _execute(choice: Choice, *, timed: bool = True) -> Path:
    from harness.run import execute, prepare

    return execute(prepare(choice, timed=timed))


def report_(args: Namespace) -> int:
    store, html = read(find(args.store)), Path(args.report)
    cells, floors = judged(store)
    if args.check:
        return _check_report(args, lambda path: write_reports(store, cells, path, floors), html)
    written = [str(p) for p in write_reports(store, cells, html, floors)]
    out(args, written, written)
    return 0


def _check_report(args: Namespace, make: Callable[[Path], list[Path]], html: Path) -> int:
    """Whether the reports on disk are the ones that the store gives, so that published numbers cannot drift."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = make(Path(scratch) / html.name)
        pairs = [(html.with_suffix(f.suffix), f.read_bytes()) for f in fresh]
    stale = [str(p) for p, wanted in pairs if not p.exists() or p.read_bytes() != wanted]
    out(args, stale, [f"{p} is not what the store gives; write it again with `tapgrid report`" for p in stale])
    return 1 if stale else 0


def show_(args: Namespace) -> int:
    from harness.judge import to_json

    store = read(find(args.store))
    session = store.session
    rows = set(grids.pick("row", args.rows, session["rows"]))
    columns = set(grids.pick("column", args.columns, session["columns"]))
    against = args.against or None
    if against is not None and against not in session["columns"]:
        raise UsageError(grids.nearest("column", against, session["columns"]))
    cells = [c for c in judged(store, against)[0] if c.row in rows and c.column in columns]
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
    """Informs and does not fail, unless nothing could be compared."""
    from harness import gate, gating
    from harness.baseline import load

    after = read(find(args.after))
    before = load(gating.find_baseline(args.before, but=after.path))
    result = gate.gate(before, after, gating.rule_of(None, after.session["grid"].get("gate") or {}))
    out(args, gate.to_json(result), gate.to_markdown(result, unchanged=True).rstrip().splitlines())
    compared = result.comparison is not None and any(c.change is not None for c in result.comparison.changes)
    return 0 if compared else 3


def gate_(args: Namespace) -> int:
    from harness import gate, gating

    asked = words.asked(vars(args), baseline=args.before)
    result = gating.ask(asked, read(find(args.after)))
    out(args, gate.to_json(result), gating.lines(result))
    return result.exit_code


def aa_(args: Namespace) -> int:
    from harness import aa

    choice = twinned(choose(words.options(args.grid, vars(args))))
    floors = aa.measure(read(_execute(choice)))
    file = floors_file(folder_of(choice.options), choice.grid.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    aa.write(floors, file)
    lines = [
        f"{f.column}, {f.row}: floor {100 * f.floor:.1f} % over {f.rounds} rounds, "
        f"one round {100 * f.spread:.1f} %; booted first {100 * f.first:+.1f} % (p {f.first_p:.2f})"
        for f in floors.cells
    ]
    alarms = f"{100 * floors.alarm_rate:.0f} % of {floors.relabellings} relabellings raised a false alarm"
    out(args, dataclasses.asdict(floors), [*lines, alarms, f"floors: {file}"])
    return 0


def trend_(args: Namespace) -> int:
    from harness.trend import trend

    given = [Path(s) for s in args.stores] or [home()]
    paths = [p for g in given for p in (stores(g) if g.is_dir() and not (g / FILE).exists() else [find(g)])]
    if not paths:
        raise StoreError(f"no store under {', '.join(map(str, given))}")
    found = trend(read(p) for p in paths)
    lines = []
    for t in found:
        lines.append(f"{t.key} on {t.machine}: {len(t.points)} sessions, now {100 * t.points[-1].share:.1f} %")
        lines += [
            f"  {100 * s.change:+.1f} % at {t.points[s.index].started} (commit {t.points[s.index].commit})"
            for s in t.steps
        ]
    out(args, [dataclasses.asdict(t) for t in found], lines or ["no cell has a share of plain in these stores"])
    return 0 if found else 3


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
    from harness import doctor, readiness

    found = [*doctor.examine(), *readiness.columns()]
    out(args, [dataclasses.asdict(f) for f in found], [doctor.line(f) for f in found])
    return 0 if all(f.good is not False for f in found) else 3


def overhead_(args: Namespace) -> int:
    from harness import overhead

    costs, code = overhead.in_a_process(args.rounds or overhead.ROUNDS)
    out(args, costs, [overhead.line(c) for c in costs])
    return code
