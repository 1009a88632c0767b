"""`tapgrid env build|list|lock|rm`: the environments of columns that do not run on this interpreter."""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from collections.abc import Sequence

from harness import building, environments
from harness.building import Built
from harness.commands import out
from harness.environments import DEFAULT, Environment
from harness.usage import UsageError, nearest

ACTIONS = ("build", "list", "lock", "rm")


def env_(args: Namespace) -> int:
    if args.action not in ACTIONS:
        raise UsageError(nearest("action", args.action, ACTIONS))
    return {"build": _build, "list": _list, "lock": _lock, "rm": _rm}[args.action](args)


def _chosen(names: Sequence[str]) -> list[Environment]:
    """The environments named, each checked before anything is done; `all` is all but the default one."""
    known = environments.environments()
    if not names:
        raise UsageError(f"name an environment, or all: {', '.join(n for n in known if n != DEFAULT)}")
    if list(names) == ["all"]:
        return [e for n, e in known.items() if n != DEFAULT]
    return [environments.named(n) for n in dict.fromkeys(names)]


def _build(args: Namespace) -> int:
    made = []
    for environment in _chosen(args.names):
        stamp = building.build(environment, lambda said: print(said, file=sys.stderr, flush=True))
        made.append({"folder": str(environment.folder), **stamp})
    lines = [f"{m['name']}: {m['folder']}, {m['bytes'] / 1e9:.1f} GB, in {m['seconds']:.0f} s" for m in made]
    out(args, made, lines)
    return 0


def _list(args: Namespace) -> int:
    known = environments.environments().values() if not args.names else _chosen(args.names)
    found = [building.state_of(e) for e in known]
    out(args, [dataclasses.asdict(b) for b in found], [line for b in found for line in _lines(b)])
    return 0


def _lines(built: Built) -> list[str]:
    size = f"{built.gigabytes:g} GB" if built.state == "built" else f"about {built.gigabytes:g} GB"
    place = built.folder or built.python
    where = f", {place}" if place else f": `tapgrid env build {built.name}` ({size})"
    columns = f"  columns: {', '.join(built.columns)}" if built.columns else "  columns: those without an @"
    return [f"{built.name}: {built.about}", f"  {built.state}{where}", columns, f"  pins: {' '.join(built.pins)}"]


def _lock(args: Namespace) -> int:
    written = [str(building.write_lock(e)) for e in _chosen(args.names)]
    out(args, written, written)
    return 0


def _rm(args: Namespace) -> int:
    removed = {e.name: [str(f) for f in building.remove(e.name)] for e in _chosen(args.names)}
    gone = [f"{name}: removed {folder}" for name, folders in removed.items() for folder in folders]
    out(args, removed, gone or ["nothing was built under these names"])
    return 0
