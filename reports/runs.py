"""Every run against its place in time: drift and interference show as steps that all columns share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from reports.escape import Safe, join, tag
from reports.marks import DOT, SMALL, Mark
from reports.numbers import finite, fixed
from reports.view import Line, View
from reports.words import plural

WIDTH, HEIGHT, LEFT, TOP = 380, 104, 40, 4
PLOT = HEIGHT - 22
MOST_RUNS = 4000  # above it, one mark a process: the page stays under a megabyte
MOST_SPREAD = 0.5


@dataclass(frozen=True)
class Point:
    """A run, or the mean of a process: its slot in time, and its speed relative to its own cell's median."""

    slot: float
    change: float
    valid: bool


@dataclass(frozen=True)
class Timeline:
    """Processes in the order in which they ran, each with a slot of width one; `rounds` are ranges of slots."""

    slots: Mapping[object, int]
    rounds: tuple[tuple[int, int, str], ...]  # first slot, slots, name

    @property
    def width(self) -> int:
        return max(1, sum(n for _, n, _ in self.rounds))


def timeline(processes: Sequence[Line], sessions: Sequence[Line]) -> Timeline:
    """Slots in the order sessions started, then rounds, then the order inside a round."""
    place = {s.get("session"): i for i, s in enumerate(sessions)}
    ordered = sorted(
        processes, key=lambda p: (place.get(p.get("session"), 0), p.get("round") or 0, p.get("order") or 0)
    )
    slots = {p.get("process"): i for i, p in enumerate(ordered)}
    rounds: list[tuple[int, int, str]] = []
    for i, p in enumerate(ordered):
        name = str((p.get("round") or 0) + 1)
        if rounds and rounds[-1][2] == name and ordered[i - 1].get("session") == p.get("session"):
            first, n, _ = rounds[-1]
            rounds[-1] = (first, n + 1, name)
        else:
            rounds.append((i, 1, name))
    return Timeline(slots, tuple(rounds))


def speed(run: Line, metric: str) -> float | None:
    """A run's value oriented so that more is faster, None when it has none."""
    value = finite(run.get(f"value_{metric}"))
    if value is None or value <= 0:
        return None
    return 1 / value if run.get("unit") == "s" else value


def _points(runs: Sequence[Line], metric: str, line: Timeline, whole: bool) -> list[Point]:
    """Runs of one cell; `whole` gives one point a process instead."""
    known = [(r, s) for r in runs if (s := speed(r, metric)) is not None and r.get("process") in line.slots]
    if not known:
        return []
    middle = median(s for _, s in known)
    by_process: dict[object, list[tuple[Line, float]]] = {}
    for r, s in known:
        by_process.setdefault(r.get("process"), []).append((r, s))
    points: list[Point] = []
    for process, own in by_process.items():
        start = line.slots[process]
        if whole:
            mean = math.exp(sum(math.log(s) for _, s in own) / len(own))
            points.append(Point(start + 0.5, mean / middle - 1, all(r.get("validated") for r, _ in own)))
            continue
        points += [
            Point(start + (i + 1) / (len(own) + 1), s / middle - 1, bool(r.get("validated")))
            for i, (r, s) in enumerate(own)
        ]
    return points


def _spread(points: Sequence[Point], margin: float) -> float:
    return min(MOST_SPREAD, max([2 * margin, *(abs(p.change) for p in points)]) * 1.08)


def _x(slot: float, line: Timeline) -> float:
    return round(LEFT + slot / line.width * (WIDTH - LEFT - 2), 1)


def _y(change: float, spread: float) -> float:
    return round(TOP + (1 - min(1.0, max(-1.0, change / spread))) / 2 * PLOT, 1)


def _frame(line: Timeline, spread: float, margin: float) -> list[Safe]:
    """Rounds shaded in turn, the cell's own median, the margin, and the ends of the scale."""
    edges = [(_x(first, line), _x(first + n, line)) for first, n, _ in line.rounds]
    parts = [tag("rect", x=a, y=TOP, width=round(b - a, 1), height=PLOT, class_="round") for a, b in edges[::2]]
    parts += [
        tag("text", name, x=_x(first + n / 2, line), y=HEIGHT - 2, text_anchor="middle", class_="label")
        for first, n, name in line.rounds
        if len(line.rounds) <= 20
    ]
    right = WIDTH - 2
    parts.append(
        tag("path", d=f"M{LEFT} {_y(margin, spread)}H{right}M{LEFT} {_y(-margin, spread)}H{right}", class_="rule")
    )
    parts.append(tag("path", d=f"M{LEFT} {_y(0, spread)}H{right}", class_="one"))
    top = fixed(100 * spread, 0 if spread >= 0.1 else 1)
    for y, label in ((TOP + 8, f"+{top} %"), (_y(0, spread) + 3, "0"), (TOP + PLOT, f"−{top} %")):
        parts.append(tag("text", label, x=LEFT - 4, y=y, text_anchor="end", class_="label"))
    return parts


def _strip(view: View, line: Timeline, changes: Mapping[tuple[object, object], float]) -> list[Safe]:
    """The host probe under the plot: one block a round, darker where the host was slower."""
    parts = []
    ranks = {(p.get("session"), p.get("round")): line.slots[p.get("process")] for p in reversed(view.store.processes)}
    sizes = {first: n for first, n, _ in line.rounds}
    for key, change in changes.items():
        first = min((s for k, s in ranks.items() if k == key), default=None)
        if first is None:
            continue
        first = max((f for f in sizes if f <= first), default=0)
        level = sum(abs(change) > edge for edge in (0.02, 0.05, 0.1, 0.2))
        x = _x(first, line)
        parts.append(
            tag("rect", tag("title", f"host probe {fixed(100 * change, 1)} % from its median"), x=x, y=TOP + PLOT + 2,
                width=round(_x(first + sizes[first], line) - x, 1), height=4, class_=f"host{level}")
        )  # fmt: skip
    return parts


def probe_changes(probes: Sequence[Line], metric: str) -> dict[tuple[object, object], float]:
    """How far the probe of each round took longer than the median of all of them."""
    times = {(p.get("session"), p.get("round")): t for p in probes if (t := finite(p.get(f"{metric}_seconds")))}
    middle = median(times.values()) if times else 1.0
    return {key: t / middle - 1 for key, t in times.items()}


def _marks(column: str, points: Sequence[Point], spread: float, line: Timeline, own: Mark, whole: bool) -> list[Safe]:
    """One path for a column's valid points and one for its invalid ones. Means of a large store are plain dots:
    there are too many of them for shapes to be told apart."""
    found = []
    for valid, shape in ((True, DOT if whole else SMALL[own.library.shape]), (False, SMALL["cross"])):
        d = "".join(f"M{_x(p.slot, line):g} {_y(p.change, spread):g}{shape}" for p in points if p.valid is valid)
        style = "dot" if shape == DOT else "full" if own.compiled and valid else "hollow"
        if d:
            found.append(tag("path", tag("title", column), d=d, class_=f"run {style} {own.hue}"))
    return found


def _facet(row: str, grid: str, view: View, line: Timeline, whole: bool) -> Safe:
    columns = [c for c in view.columns if any(x.column == c and x.row == row and x.grid == grid for x in view.cells)]
    drawn: list[tuple[str, list[Point]]] = []
    for column in columns:
        own = [r for r in view.store.runs if r.get("row") == row and r.get("column") == column]
        drawn.append((column, _points(own, view.metric, line, whole)))
    everything = [p for _, points in drawn for p in points]
    if not everything:
        return Safe("")
    spread = _spread(everything, view.margin)
    parts = _frame(line, spread, view.margin) + _strip(view, line, probe_changes(view.store.probes, view.metric))
    for column, points in drawn:
        parts += _marks(column, points, spread, line, view.marks[column], whole)
    title = f"{row}: {plural(len(everything), 'process' if whole else 'run')}, change from each column's own median"
    picture = tag("svg", tag("title", title), *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", class_="scatter")
    return tag("figure", tag("figcaption", tag("b", row)), picture)


def _probe_facet(view: View, line: Timeline) -> Safe:
    """The host probe on its own, by both times: what the machine did while nothing of ours ran."""
    starts = {i: first for i, (first, _, _) in enumerate(line.rounds)}
    drawn: list[tuple[str, str, list[Point]]] = []
    for metric, shape in (("cpu", SMALL["circle"]), ("wall", SMALL["cross"])):
        changes = list(probe_changes(view.store.probes, metric).values())
        points = [Point(starts[i] + 0.5, 1 / (1 + c) - 1, True) for i, c in enumerate(changes) if i in starts]
        drawn.append((metric, shape, points))
    everything = [p for _, _, points in drawn for p in points]
    if not everything:
        return Safe("")
    spread = _spread(everything, view.margin)
    parts = _frame(line, spread, view.margin)
    for metric, shape, points in drawn:
        d = "".join(f"M{_x(p.slot, line):g} {_y(p.change, spread):g}{shape}" for p in points)
        parts.append(tag("path", tag("title", f"{metric} time of the probe"), d=d, class_="run hollow hue-vllm"))
    picture = tag(
        "svg",
        tag("title", "host probe, one a round"),
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        class_="scatter",
    )
    head = tag("figcaption", tag("b", "host probe"), " ", tag("span", "○ CPU time, × wall time", class_="unit"))
    return tag("figure", head, picture)


def runs(view: View) -> Safe:
    """One small plot a row: all columns, each around its own median, in the order in which they ran."""
    line = timeline(view.store.processes, view.sessions)
    whole = len(view.store.runs) > MOST_RUNS
    facets = [_facet(row, p.grid, view, line, whole) for p in view.panels for row in p.rows]
    if not any(facets):
        return tag("p", "No run in this store has a value.", class_="warn")
    lost = sum(speed(r, view.metric) is None for r in view.store.runs)
    note = [
        f"Each mark is {'the mean of a process' if whole else 'one run'} against the median of its own cell; up is ",
        "faster. Shaded bands are rounds, dashed lines the margin; the strip below is the host probe, darker where it ",
        "was off its median. ",
        "A cross is a run that failed validation. " if any(not r.get("validated") for r in view.store.runs) else "",
        f"{plural(lost, 'run')} without a value not drawn. " if lost else "",
        "" if view.store.probes else "There was no host probe. ",
    ]
    return join([tag("p", *note, class_="note"), tag("div", *facets, _probe_facet(view, line), class_="facets")])
