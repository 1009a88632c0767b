"""`tapgrid adapter check my_module`: an adapter through the conformance suite, in a process of its own.

The child is a worker like those of a grid: the column's interpreter, the variables that every column gets. It sends a
line as each is known, so that a crash shows what came before it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adapters.columns import Column
from adapters.engines.settings import environment
from adapters.work import Settings
from harness import child, environments, fingerprint, models
from harness.child import Died, Hang, Worker
from harness.commands import out
from harness.grid import Limits, every_column
from harness.usage import UsageError, nearest
from harness.visit import plugins

ACTIONS = ("check",)
MODEL = "synthetic:llama"
# What a small model is asked in: float32 against float32 shows what is wrong and not what rounds.
SETTINGS = Settings(dtype="float32", max_model_len=256, max_concurrent=4)
AROUND = ("made, and closed before any boot", "boot", "protocol", "closed")  # not the work itself
LIMITS = Limits(boot=300, validate=300)
Line = dict[str, Any]


def adapter_(args: Namespace) -> int:
    """0: all holds that is not refused; 1: something is wrong; 3: nothing could be judged."""
    if args.action not in ACTIONS:
        raise UsageError(nearest("action", args.action, ACTIONS))
    column = column_of(args.target)
    python = environments.python_of(column.environment)
    if python is None:
        found: list[Line] = [_line("boot", "refused", environments.how_to_build(column.environment))]
    else:
        found = run(column, python, args.new_tokens)
    out(args, found, table(column.name, found))
    return code_of(found)


def column_of(target: str) -> Column:
    """The column called `target`, or the adapter class of a module: "my_module", "package.module:Class"."""
    known = every_column()
    if target in known:
        return known[target]
    module, _, name = target.partition(":")
    here = [os.getcwd(), *sys.path]
    top = module.partition(".")[0]
    if not any((Path(p) / top).is_dir() or (Path(p) / f"{top}.py").is_file() for p in here):
        raise UsageError(f"no module and {nearest('column', target, known)}")
    return Column(target, f"{module}:{name}", "given on the command line")


def code_of(found: Sequence[Line]) -> int:
    """1 where anything is wrong; 3 where it did not come to the work, or all of it was refused.

    >>> code_of([_line("nothing x1", "holds"), _line("steer x1", "wrong", "tokens")]), code_of([_line("x", "refused")])
    (1, 3)
    """
    verdicts = {line["verdict"] for line in found if line["what"] not in AROUND}
    return 1 if any(line["verdict"] == "wrong" for line in found) else 0 if "holds" in verdicts else 3


def _line(what: str, verdict: str, reason: str = "") -> Line:
    return {"what": what, "verdict": verdict, "reason": reason}


def table(name: str, found: Sequence[Line]) -> list[str]:
    """One line a check, then how many of each.

    >>> lines = [_line("nothing x1", "holds"), _line("lens", "refused", "model: no"), _line("boot", "wrong", "x")]
    >>> table("acme", lines)
    ['nothing x1  holds', 'lens        refused  model: no', 'boot        WRONG    x', '', 'acme: 1 hold, 1 refused, \
1 wrong']
    """
    wide = max(len(line["what"]) for line in found)
    lines = [
        f"{line['what']:<{wide}}  {line['verdict'].upper() if line['verdict'] == 'wrong' else line['verdict']:<7}"
        f"  {line['reason']}".rstrip()
        for line in found
    ]
    count = {v: sum(line["verdict"] == v for line in found) for v in ("holds", "refused", "wrong")}
    return [*lines, "", f"{name}: {count['holds']} hold, {count['refused']} refused, {count['wrong']} wrong"]


def run(column: Column, python: str, new: int) -> list[Line]:
    """The suite's lines, from a child; one more where it ended before its time."""
    spec = {
        "target": column.target,
        "model": str(models.resolve(MODEL)),
        "settings": asdict(SETTINGS),
        "new": new,
        "path": [os.getcwd()],
    }
    cuda = fingerprint.collect()["gpu"] is not None
    env = environment(SETTINGS, cuda=cuda, ahead=column.ahead) | plugins(column)
    found: list[Line] = []
    with tempfile.TemporaryDirectory() as scratch:
        worker = Worker(python, spec, env, Path(scratch) / "log", LIMITS, module="harness.adapter_child")
        try:
            for line in worker:
                if line["kind"] == "usage":
                    raise UsageError(line["reason"])
                if line["kind"] == "line":
                    found.append({k: line[k] for k in ("what", "verdict", "reason")})
        except (Died, Hang) as error:
            print(child.tail(worker.log), file=sys.stderr)
            found.append(_line("the process", "wrong", str(error)))
        finally:
            worker.kill()
    return found
