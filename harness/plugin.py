"""The pytest plugin: `pytest --grid smollm2`. One item a cell, `grid::smollm2::<row>::<column>`.

The items are reported after the whole selection was measured, because the plan interleaves columns by rounds: a
passed item was measured, a failed one is INVALID or MISSING, a skipped one is UNSUPPORTED, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from harness import grid as grids
from harness import options as words
from harness.grid import UsageError
from harness.session import Choice, choose

PREFIX = "--grid-"
NODE = "grid::"
JSON = words.Word(
    "json", "write the judged cells to this file, as `tapgrid show --json` prints them", "PATH", words._text
)
ALL = (*words.PLANNING, *words.RUNNING, words.DRY, JSON)
TAKEN = (
    "tapgrid: another plugin or conftest.py already has an option {name}, so both cannot be loaded; "
    "run with `-p no:tapgrid`, or without that plugin (-p no:NAME)"
)


@dataclass
class State:
    """The grid of this pytest session."""

    choice: Choice
    given: dict[str, Any]
    asked: Any  # harness.gating.Asked
    only: list[str]  # node ids named on the command line; empty: all cells
    cells: dict[tuple[str, str], Any] = field(default_factory=dict)  # (row, column) -> Cell
    ending: Any = None


KEY = pytest.StashKey[State]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tapgrid", "tapgrid: measure and validate a grid")
    try:
        group.addoption("--grid", dest="tapgrid_grid", metavar="GRID", help="measure this grid: a name or a .toml file")
        words.add(group, ALL, PREFIX)
    except (ValueError, argparse.ArgumentError) as error:
        raise pytest.UsageError(TAKEN.format(name=_option_in(str(error)))) from error
    _guard(parser)


def _option_in(message: str) -> str:
    return next((w.strip("{}':,") for w in message.split() if "--grid" in w), "--grid")


def _guard(parser: pytest.Parser) -> None:
    """A plugin that comes after us and wants one of our options gets our sentence instead of argparse's traceback."""

    def guarded(add: Any) -> Any:
        def addoption(*opts: str, **attrs: Any) -> None:
            try:
                add(*opts, **attrs)
            except (ValueError, argparse.ArgumentError) as error:
                if any(o.startswith("--grid") for o in opts):
                    raise pytest.UsageError(TAKEN.format(name=opts[0])) from error
                raise

        return addoption

    getgroup = parser.getgroup

    def getgroup_guarded(*args: Any, **kwargs: Any) -> Any:
        group = getgroup(*args, **kwargs)
        if "addoption" not in vars(group):
            group.addoption = guarded(group.addoption)  # type: ignore[method-assign]
        return group

    parser.addoption = guarded(parser.addoption)  # type: ignore[method-assign]
    parser.getgroup = getgroup_guarded  # type: ignore[method-assign]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "grid(row, column): a cell of the grid that --grid names")
    only = [a for a in config.args if a.startswith(NODE)]
    name = config.getoption("tapgrid_grid", None) or (only[0].split("::")[1] if only else None)
    if not name:
        return
    try:
        _refuse_xdist(config)
        given = vars(config.option)
        choice, asked = choose(words.options(name, given, PREFIX)), words.asked(given, PREFIX)
        config.stash[KEY] = State(choice, words.values(given, ALL, PREFIX), asked, only)
    except UsageError as error:
        pytest.exit(str(error), returncode=2)
    # The grid alone, unless tests were named beside it.
    named = config.args_source == pytest.Config.ArgsSource.ARGS
    config.args = [a for a in config.args if named and not a.startswith(NODE)]
    config.args_source = pytest.Config.ArgsSource.ARGS


def _refuse_xdist(config: pytest.Config) -> None:
    spread = config.getoption("numprocesses", None) or config.getoption("dist", "no") not in ("no", None)
    if spread or hasattr(config, "workerinput"):
        raise UsageError(
            "--grid does not run under xdist: engines that run at the same time falsify each other; "
            "drop -n, or give -n 0"
        )


class GridNode(pytest.Collector):
    """The parent of all cells, as `--co` shows it."""

    def collect(self) -> Sequence[pytest.Item]:
        state = self.config.stash[KEY]
        made = [GridItem.from_parent(self, name=f"{r}::{c}", row=r, column=c) for r, c in state.choice.cells]
        if not state.only:
            return made
        return [i for i in made if any(i.nodeid == o or i.nodeid.startswith(o + "::") for o in state.only)]


class GridItem(pytest.Item):
    """One cell."""

    def __init__(self, *, row: str, column: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.row, self.column = row, column
        self.add_marker(pytest.mark.grid(row=row, column=column))

    def runtest(self) -> None:
        cell = self.config.stash[KEY].cells[self.row, self.column]
        for name in ("verdict", "value", "unit", "metric", "share_vanilla", "low", "high", "rounds"):
            if getattr(cell, name) is not None:
                self.user_properties.append((name, getattr(cell, name)))
        if cell.verdict in ("INVALID", "MISSING"):
            raise CellFailed(f"{cell.verdict}: {cell.reason}")
        if cell.verdict == "UNSUPPORTED":
            pytest.skip(cell.reason)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, CellFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.config.rootpath / "grid", 0, self.nodeid


class CellFailed(Exception):
    """A cell that is INVALID or MISSING; the message is its reason."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """The grid stands beside whatever else the session collects, so -k, -m and --co treat its cells like any test."""
    report = yield
    state = collector.config.stash.get(KEY, None)
    if state and isinstance(collector, pytest.Session) and report.passed:
        name = state.choice.grid.name
        node = GridNode.from_parent(collector, name=name, nodeid=NODE + name)
        if not node.collect():
            known = [f"{node.nodeid}::{r}::{c}" for r, c in state.choice.cells]
            pytest.exit(grids.nearest("cell", state.only[0], known), returncode=2)
        report.result = [node, *report.result]
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, Any, Any]:
    """Measure the selected cells, before any of them reports."""
    state = session.config.stash.get(KEY, None)
    if state and not session.config.option.collectonly:
        selected = [(i.row, i.column) for i in session.items if isinstance(i, GridItem)]
        if state.given["dry-run"]:
            session.items[:] = []
            with _open_output(session.config):
                print("\n" + _plan(_narrowed(state.choice, selected)))
        elif selected and not session.testsfailed:
            with _open_output(session.config):
                _measure(state, selected)
    return (yield)


@contextlib.contextmanager
def _open_output(config: pytest.Config) -> Iterator[None]:
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        yield


def _narrowed(choice: Choice, selected: Sequence[tuple[str, str]]) -> Choice:
    """Only the rows and columns that -k, -m and node ids left something of."""
    rows, columns = {r for r, _ in selected}, {c for _, c in selected}
    return replace(
        choice,
        rows=tuple(r for r in choice.rows if r.name in rows),
        columns=tuple(c for c in choice.columns if c in columns),
    )


def _plan(choice: Choice) -> str:
    from harness import plan
    from harness.costs import load_costs
    from harness.session import costs_key, folder_of, plan_for

    if not choice.rows:
        return "no cell is selected, so there is nothing to plan"
    costs = load_costs(folder_of(choice.options), costs_key(choice.grid))
    return plan.show(plan_for(choice, costs), choice.grid, costs)


def _measure(state: State, selected: Sequence[tuple[str, str]]) -> None:
    from harness.commands import confirm
    from harness.finish import finish
    from harness.run import execute, prepare
    from harness.store import StoreError

    try:
        choice = _narrowed(state.choice, selected)
        path = execute(prepare(choice, selected))
        state.ending = finish(path, state.given["report"], state.asked, lambda cells: confirm(choice, cells))
    except UsageError as error:
        pytest.exit(str(error), returncode=2)
    except StoreError as error:
        pytest.exit(str(error), returncode=3)
    state.cells = {(c.row, c.column): c for c in state.ending.cells}
    if state.given["json"]:
        Path(state.given["json"]).write_text(json.dumps(state.ending.to_json(), indent=1) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    report = yield
    if isinstance(item, GridItem) and report.skipped and isinstance(report.longrepr, tuple):
        report.longrepr = (str(item.config.rootpath / "grid"), 1, report.longrepr[2])  # ours, not a line of this file
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Never 0 with nothing measured; a lost cell is "cannot judge" (3), a wrong or slower one a failure (1)."""
    state = session.config.stash.get(KEY, None)
    if not state or session.config.option.collectonly or state.given["dry-run"] or exitstatus not in (0, 1, 5):
        return
    code = state.ending.code if state.ending else 3
    grid_failures = sum(c.verdict in ("INVALID", "MISSING") for c in state.cells.values())
    session.exitstatus = 1 if session.testsfailed > grid_failures else code


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    state = config.stash.get(KEY, None)
    if state and state.ending:
        terminalreporter.section(f"grid {state.choice.grid.name}")
        for line in state.ending.lines(quiet=config.option.verbose < 0):
            terminalreporter.write_line(line)
