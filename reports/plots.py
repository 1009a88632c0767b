"""The dots as a picture for a paper or a slide (PNG, PDF, SVG by the file's ending): `pip install matplotlib`.

from reports import plots
plots.write(cells, Path("dots.png"))
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.marks import Mark, marks
from reports.numbers import finite
from reports.svg import axis
from reports.view import Panel, arrange
from reports.words import verdict

if TYPE_CHECKING:
    from harness.judge import Cell

INSTALL = "pip install matplotlib"
COLOURS = {
    "vllm": "#3a3f47", "hf": "#7b6f5d", "tapgrid": "#0067b1", "nnsight": "#c44d00", "interp": "#007a5a",
    "lens": "#9c3f86", "tlens": "#8a6800", "other0": "#5546b5", "other1": "#4a6b1f", "other2": "#a12a5e",
}  # fmt: skip
_SHAPES = {
    "square": "s", "diamond": "D", "circle": "o", "up": "^", "down": "v", "hexagon": "h", "pentagon": "p", "plus": "P",
    "bow": "d", "cross": "X",
}  # fmt: skip


class MissingMatplotlib(ImportError):
    """Pictures need a library that tapgrid does not install by itself; the message is the install line."""


def _pyplot() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")  # no display is needed, or looked for
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as missing:
        raise MissingMatplotlib(f"pictures need matplotlib, which is not installed: {INSTALL}") from missing


def _draw(axes: Any, cell: Cell, own: Mark, y: float) -> None:
    """Whisker from the slowest to the fastest process, the interval, and the mark."""
    colour = COLOURS[own.library.key]
    each = [s for s in map(finite, cell.process_shares) if s is not None]
    low, high, share = finite(cell.low), finite(cell.high), finite(cell.share)
    if each:
        axes.plot([min(each), max(each)], [y, y], color=colour, linewidth=0.8)
    if low is not None and high is not None:
        axes.plot([low, high], [y, y], color=colour, linewidth=4, alpha=0.35, solid_capstyle="butt")
    if share is not None:
        fill = colour if own.compiled else "white"
        axes.plot([share], [y], _SHAPES[own.library.shape], color=colour, markerfacecolor=fill, markersize=6)


def figure(panel: Panel, own: dict[str, Mark], margin: float) -> Any:
    """One grid: rows down, in each its columns, as judged shares on a logarithmic axis."""
    plt = _pyplot()
    lines = [(row, c) for row in panel.rows for c in panel.columns if panel.cells.get((row, c), (0, None))[1]]
    shown = [(row, c) for row, c in lines if finite(panel.cells[row, c][1].share) is not None]
    made, axes = plt.subplots(figsize=(7, 1 + 0.2 * max(1, len(shown))), layout="constrained")
    axes.set_xscale("log")
    axes.axvspan(1 / (1 + margin), 1 + margin, color="#efede4", zorder=0)
    axes.axvline(1, color="#6b7078", linewidth=0.8, zorder=0)
    for i, (row, column) in enumerate(shown):
        _draw(axes, panel.cells[row, column][1], own[column], -i)
    words = [f"{row} · {c}  {verdict(panel.cells[row, c][1].verdict).sign}" for row, c in shown]
    axes.set_yticks([-i for i in range(len(shown))], words, fontsize=7)
    scale = axis([s for place in shown for s in panel.cells[place][1].process_shares])
    axes.set_xlim(scale.low, scale.high)
    axes.set_xticks(scale.ticks(), [f"{100 * t:g} %" for t in scale.ticks()], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_ylim(-len(shown) + 0.3, 0.7)
    axes.set_xlabel("share of the plain engine, log scale", fontsize=8)
    axes.set_title(panel.grid, fontsize=10, loc="left")
    return made


def write(cells: Sequence[Cell], path: Path, margin: float = 0.03) -> None:
    """Draw the first grid among the cells to `path`."""
    panels = arrange(cells)
    if not panels:
        raise ValueError("there are no cells to draw; measure first, with `tapgrid run GRID`")
    made = figure(panels[0], marks(panels[0].columns, {}), margin)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=160)
    _pyplot().close(made)
