"""Every run against its place in time: drift and interference show as steps that all columns share."""

from __future__ import annotations

from collections.abc import Sequence

from reports.escape import Safe, join, tag
from reports.marks import DOT, SMALL, Mark
from reports.numbers import fixed
from reports.timeline import Point, Timeline, points, probe_changes, speed, timeline
from reports.view import View
from reports.words import plural

WIDTH, HEIGHT, LEFT, TOP = 380, 104, 40, 4
PLOT = HEIGHT - 22
MOST_RUNS = 4000  # above it, one mark a process: the page stays under a megabyte
MOST_SPREAD = 0.5


def _spread(found: Sequence[Point], margin: float) -> float:
    return min(MOST_SPREAD, max([2 * margin, *(abs(p.change) for p in found)]) * 1.08)


def _x(slot: float, line: Timeline) -> float:
    return round(LEFT + slot / line.width * (WIDTH - LEFT - 2), 1)


def _y(change: float, spread: float) -> float:
    return round(TOP + (1 - min(1.0, max(-1.0, change / spread))) / 2 * PLOT, 1)


def _frame(line: Timeline, spread: float, margin: float) -> list[Safe]:
    """Rounds shaded in turn (dropped ones in their own shade), the margin, the median, the ends of the scale."""
    parts: list[Safe] = []
    for i, r in enumerate(line.rounds):
        left, right = _x(r.first, line), _x(r.first + r.slots, line)
        if r.dropped or i % 2 == 0:
            why = tag("title", f"round {r.name} counts for no column: {r.dropped}") if r.dropped else ""
            style = "round dropped" if r.dropped else "round"
            parts.append(tag("rect", why, x=left, y=TOP, width=round(right - left, 1), height=PLOT, class_=style))
        if len(line.rounds) <= 20:
            middle = round((left + right) / 2, 1)
            parts.append(tag("text", r.name, x=middle, y=HEIGHT - 2, text_anchor="middle", class_="label"))
    right = WIDTH - 2
    edges = f"M{LEFT} {_y(margin, spread)}H{right}M{LEFT} {_y(-margin, spread)}H{right}"
    parts += [tag("path", d=edges, class_="rule"), tag("path", d=f"M{LEFT} {_y(0, spread)}H{right}", class_="one")]
    top = fixed(100 * spread, 0 if spread >= 0.1 else 1)
    for y, label in ((TOP + 8, f"+{top} %"), (_y(0, spread) + 3, "0"), (TOP + PLOT, f"−{top} %")):
        parts.append(tag("text", label, x=LEFT - 4, y=y, text_anchor="end", class_="label"))
    return parts


def _strip(view: View, line: Timeline) -> list[Safe]:
    """The host probe under the plot: one block a round, darker where the host was off its median."""
    changes = probe_changes(view.store.probes, view.metric)
    parts = []
    for r in line.rounds:
        if r.key not in changes:
            continue
        change = changes[r.key]
        level = sum(abs(change) > edge for edge in (0.02, 0.05, 0.1, 0.2))
        left, right = _x(r.first, line), _x(r.first + r.slots, line)
        said = tag("title", f"host probe took {fixed(100 * change, 1)} % more than its median")
        box = {"x": left, "y": TOP + PLOT + 2, "width": round(right - left, 1), "height": 4}
        parts.append(tag("rect", said, **box, class_=f"host{level}"))
    return parts


def _picture(title: str, parts: Sequence[Safe]) -> Safe:
    return tag("svg", tag("title", title), *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", class_="scatter")


def _marks(column: str, found: Sequence[Point], spread: float, line: Timeline, own: Mark, whole: bool) -> list[Safe]:
    """One path for a column's valid points and one for its invalid ones. Means of a large store are plain dots:
    there are too many of them for shapes to be told apart."""
    drawn = []
    for valid, shape in ((True, DOT if whole else SMALL[own.library.shape]), (False, SMALL["cross"])):
        d = "".join(f"M{_x(p.slot, line):g} {_y(p.change, spread):g}{shape}" for p in found if p.valid is valid)
        style = "dot" if shape == DOT else "full" if own.compiled and valid else "hollow"
        if d:
            drawn.append(tag("path", tag("title", column), d=d, class_=f"run {style} {own.hue}"))
    return drawn


def _facet(row: str, grid: str, view: View, line: Timeline, whole: bool) -> Safe:
    """One row: all columns, each around its own median."""
    columns = dict.fromkeys(c.column for c in view.cells if c.row == row and c.grid == grid)
    runs_of = [r for r in view.store.runs if r.get("row") == row]
    found = {c: points([r for r in runs_of if r.get("column") == c], view.metric, line, whole) for c in columns}
    everything = [p for own in found.values() for p in own]
    if not everything:
        return Safe("")
    spread = _spread(everything, view.margin)
    parts = _frame(line, spread, view.margin) + _strip(view, line)
    for column, own in found.items():
        parts += _marks(column, own, spread, line, view.marks[column], whole)
    noun = "process" if whole else "run"
    title = f"{row}: {plural(len(everything), noun)}, change from each column's own median"
    return tag("figure", tag("figcaption", tag("b", row)), _picture(title, parts))


def _probe_facet(view: View, line: Timeline) -> Safe:
    """The host probe on its own, by both times: what the machine did while nothing of ours ran."""
    drawn: list[tuple[str, str, list[Point]]] = []
    for metric, shape in (("cpu", SMALL["circle"]), ("wall", SMALL["cross"])):
        changes = probe_changes(view.store.probes, metric)
        held = [
            Point(r.first + r.slots / 2, 1 / (1 + changes[r.key]) - 1, True) for r in line.rounds if r.key in changes
        ]
        drawn.append((metric, shape, held))
    everything = [p for _, _, held in drawn for p in held]
    if not everything:
        return Safe("")
    spread = _spread(everything, view.margin)
    parts = _frame(line, spread, view.margin)
    for metric, shape, held in drawn:
        d = "".join(f"M{_x(p.slot, line):g} {_y(p.change, spread):g}{shape}" for p in held)
        parts.append(tag("path", tag("title", f"{metric} time of the probe"), d=d, class_="run hollow hue-vllm"))
    head = tag("figcaption", tag("b", "host probe"), " ", tag("span", "○ CPU time, × wall time", class_="unit"))
    return tag("figure", head, _picture("host probe, one a round", parts))


def _note(view: View, line: Timeline, whole: bool) -> Safe:
    """What the pictures show, and what of the store they do not."""
    lost = sum(speed(r, view.metric) is None for r in view.store.runs)
    gone = [r.name for r in line.rounds if r.dropped]
    said = [
        f"Each mark is {'the mean of a process' if whole else 'one run'} against the median of its own cell; up is",
        "faster. Shaded bands are rounds, dashed lines the margin; the strip below is the host probe, darker where it",
        "was off its median.",
        "A cross is a run that failed validation." if any(not r.get("validated") for r in view.store.runs) else "",
        f"Dropped for all columns: {plural(len(gone), 'round')} ({', '.join(gone)})." if gone else "",
        f"{plural(lost, 'run')} without a value not drawn." if lost else "",
        "" if view.store.probes else "There was no host probe.",
    ]
    return tag("p", " ".join(s for s in said if s), class_="note")


def runs(view: View) -> Safe:
    """One small plot a row, in the order in which things ran, and one of the host."""
    line = timeline(view)
    whole = len(view.store.runs) > MOST_RUNS
    facets = [_facet(row, p.grid, view, line, whole) for p in view.panels for row in p.rows]
    if not any(facets):
        return tag("p", "No run in this store has a value.", class_="warn")
    return join([_note(view, line, whole), tag("div", *facets, _probe_facet(view, line), class_="facets")])
