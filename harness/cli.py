"""`tapgrid`: the same words as pytest's --grid options, without the prefix.

Exit codes: 0 fine, 1 regression or validation failure, 2 usage, 3 cannot judge, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness import commands as do
from harness import options as words
from harness.adapter_check import adapter_
from harness.building import BuildError
from harness.env_commands import env_
from harness.grid import UsageError
from harness.options import Word
from harness.store import StoreError

ABOUT = """\
Measure and validate LLM interpretability engines: rows (workloads) x columns (engines) on one model.

  tapgrid list                                    what there is: grids, rows, columns, tiers, stores
  tapgrid plan smollm2 --tier quick               what would run, in which order, how long
  tapgrid run smollm2 --columns vanilla,tapgrid-eager
  tapgrid show --json                             the verdicts of the newest store
  tapgrid gate before.jsonl after.jsonl           fail a build (exit code 1) on a cell that got slower

`pytest --grid smollm2` does what `run` does, with every cell a pytest item.
"""

STORE = "a store file or its folder (default: the newest under .tapgrid)"
FORMATS = ("benchfmt", "pytest-benchmark", "csv", "markdown", "junit", "baseline")
AXES = (
    Word("rows", "only these rows", "ROWS", words._text),
    Word("columns", "only these columns", "COLUMNS", words._text),
)
GATING = tuple(w for w in words.RUNNING if w.name in ("gate", "strict", "allow"))


@dataclass(frozen=True)
class Command:
    """One subcommand: what it takes, and the function of `harness.commands` that does it."""

    run: Callable[[argparse.Namespace], int]
    help: str
    example: str
    positional: tuple[tuple[str, str, str], ...] = ()  # name, nargs ("" for one), help
    words: tuple[Word, ...] = ()


GRID = ("grid", "", "a grid's name, or the path of a .toml file")
COMMANDS: dict[str, Command] = {
    "list": Command(
        do.list_,
        "what there is",
        "tapgrid list rows",
        (("what", "?", "grids, rows, columns, tiers, models or stores (default: all but stores)"),),
    ),
    "plan": Command(
        do.plan_,
        "what a run would do, and how long it would take",
        "tapgrid plan smollm2 --budget 40m",
        (GRID,),
        words.PLANNING,
    ),
    "run": Command(
        do.run_,
        "measure a grid, or go on with an interrupted session",
        "tapgrid run smollm2 --tier standard",
        (GRID,),
        (*words.PLANNING, *words.RUNNING, words.DRY),
    ),
    "report": Command(
        do.report_,
        "write report.html and report.md of a store",
        "tapgrid report --report out/report.html",
        (("store", "?", STORE),),
        (
            words.RUNNING[0],
            Word("check", "write nothing; exit code 1 if the reports on disk are not what the store gives"),
        ),
    ),
    "show": Command(
        do.show_,
        "the verdicts of a store",
        "tapgrid show --rows 'capture-*' --against nnsight-eager",
        (("store", "?", STORE),),
        (
            *AXES,
            Word("against", "judge every column against this one, not against its plain engine", "COLUMN", words._text),
        ),
    ),
    "export": Command(
        do.export_,
        "a store in another format",
        "tapgrid export --format benchfmt | benchstat -col /column -",
        (("store", "?", STORE),),
        (
            Word("format", f"one of {', '.join(FORMATS)}", "FORMAT", words._text, "csv"),
            Word("output", "a file (default: stdout)", "PATH", words._text),
        ),
    ),
    "import": Command(
        do.import_,
        "a store out of a pytest-benchmark JSON file, or of published cells (.jsonl)",
        "tapgrid import .benchmarks/0001.json",
        (("file", "", "what to import"),),
        (Word("output", "the folder that gets the store(s) (default .tapgrid)", "PATH", words._text),),
    ),
    "compare": Command(
        do.compare_,
        "two stores, cell by cell, by their shares of vanilla",
        "tapgrid compare before.jsonl after.jsonl",
        (("before", "", "a store"), ("after", "?", STORE)),
    ),
    "gate": Command(
        do.gate_,
        "compare, and fail on what got slower",
        'tapgrid gate before.jsonl after.jsonl --gate "slower:3%"',
        (("before", "", "the baseline store"), ("after", "?", STORE)),
        GATING,
    ),
    "aa": Command(
        do.aa_,
        "a column against itself: what this machine calls a difference where there is none",
        "tapgrid aa smollm2 --columns vanilla-eager --tier standard",
        (GRID,),
        words.PLANNING,
    ),
    "trend": Command(
        do.trend_,
        "steps in the history of every cell",
        "tapgrid trend .tapgrid",
        (("stores", "*", "stores or folders of them (default .tapgrid)"),),
    ),
    "validate": Command(
        do.validate_,
        "check a grid's activations and time nothing; or what a store found",
        "tapgrid validate smollm2 --columns tapgrid-eager",
        (("what", "?", "a grid, or a store (default: the newest store)"),),
        (*words.SELECT, words.PLANNING[-1]),
    ),
    "overhead": Command(
        do.overhead_,
        "what the runtime itself costs, in microseconds, beside nnsight's",
        "tapgrid overhead --json",
        (),
        tuple(w for w in words.PLANNING if w.name == "rounds"),
    ),
    "doctor": Command(
        do.doctor_,
        "is this machine fit to measure on, which columns run here, and what to do if not",
        "tapgrid doctor",
    ),
    "adapter": Command(
        adapter_,
        "put an adapter through the conformance suite on a tiny model: what holds, what is refused, what is wrong",
        "tapgrid adapter check my_module",
        (("action", "", "check"), ("target", "", "a module, module:Class, or a column's name")),
        (Word("new-tokens", "this many new tokens of each request", "N", words._whole, 6),),
    ),
    "env": Command(
        env_,
        "build, list, lock or remove the environments of columns that pin other engines",
        "tapgrid env build vllm-0.32",
        (("action", "", "build, list, lock or rm"), ("names", "*", "environments (all: every one but the default)")),
    ),
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="tapgrid",
        description=ABOUT,
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subs = top.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        sub = subs.add_parser(
            name,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
            epilog=f"example:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for positional, nargs, text in command.positional:
            sub.add_argument(positional, help=text, **({"nargs": nargs} if nargs else {}))  # type: ignore[arg-type]
        words.add(sub, command.words)
        sub.add_argument("--json", action="store_true", help="machine-readable output, and nothing else, on stdout")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code.

    >>> main(["list", "tiers"])
    publish: 10 rounds, 3 runs
    quick: 3 rounds, 3 runs
    standard: 6 rounds, 3 runs
    0
    """
    given = parser()
    try:
        args = given.parse_args(argv)
    except SystemExit as stop:  # argparse has said its sentence
        return int(stop.code or 0)
    if args.command is None:
        given.print_help()
        return 2
    command = COMMANDS[args.command]
    try:
        for name, value in words.values(vars(args), command.words).items():
            setattr(args, name.replace("-", "_"), value)
        return command.run(args)
    except UsageError as error:
        return _say(error, 2)
    except (StoreError, BuildError) as error:
        return _say(error, 3)
    except KeyboardInterrupt as stop:
        return _say(stop if str(stop) else "interrupted", 130)
    except BrokenPipeError:  # `tapgrid list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _say(what: Any, code: int) -> int:
    print(f"tapgrid: {what}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
