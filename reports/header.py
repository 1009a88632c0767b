"""The top of the page: the verdict in one sentence, what it rests on, what to beware of, and who the columns are."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from reports import findings
from reports.escape import Safe, join, tag
from reports.marks import Mark
from reports.numbers import NARROW, finite, percent
from reports.peers import unexplained, unlike
from reports.svg import mark_svg
from reports.view import View, column_lines
from reports.words import VERDICTS, counts, plural, sentence, verdict

if TYPE_CHECKING:
    from harness.judge import Cell


def facts_line(view: View) -> list[tuple[str, str]]:
    """What the numbers rest on, as (name, value); blanks are left out."""
    session, grid = view.session, view.grid
    machine = session.get("fingerprint") or {}
    rounds = max((c.rounds for c in view.cells), default=0)
    runs = session.get("runs")
    moments = [str(x["started"]) for x in (*view.sessions, *view.store.runs) if x.get("started")]
    commit = machine.get("git commit") or machine.get("git_commit") or machine.get("commit")
    dirty = machine.get("git dirty") or machine.get("git_dirty") or machine.get("dirty")
    found = [
        ("model", grid.get("model")),
        ("tier", session.get("tier")),
        (
            "evidence",
            plural(rounds, "round") + (f" × {plural(runs, 'run')}" if isinstance(runs, int) else "")
            if rounds
            else None,
        ),
        ("judged by", {"cpu": "process CPU time", "wall": "wall time"}.get(view.metric, view.metric)),
        ("margin", f"±{100 * view.margin:g}{NARROW}%"),
        ("α", f"{grid.get('alpha', 0.05)}, Benjamini-Hochberg over the report"),
        ("measured", _span(moments)),
        ("machine", ", ".join(str(machine[k]) for k in ("cpu", "gpu") if machine.get(k))),
        ("commit", f"{str(commit)[:12]}{' with uncommitted changes' if dirty else ''}" if commit else None),
    ]
    return [(name, str(value)) for name, value in found if value]


def _span(moments: list[str]) -> str:
    """Two ISO moments as one short span."""
    if not moments:
        return ""
    first, last = min(moments)[:16].replace("T", " "), max(moments)[:16].replace("T", " ")
    if first == last:
        return first
    return f"{first} – {last[11:] if first[:10] == last[:10] else last}"


def warnings(view: View) -> list[str]:
    """What a reader must know before believing a number."""
    tally = counts(view.cells)
    found = []
    if tally["INVALID"]:
        found.append(
            f"{plural(tally['INVALID'], 'cell')} INVALID: what was computed there is wrong, so its speed is no result."
        )
    if tally["MISSING"]:
        found.append(f"{plural(tally['MISSING'], 'cell')} MISSING: see what failed.")
    judged = [c for c in view.cells if verdict(c.verdict).judged]
    if judged and all(c.verdict == "UNCLEAR" for c in judged):
        reason, _ = Counter(c.reason or "no difference or sameness could be shown" for c in judged).most_common(1)[0]
        found.append(f"No difference is claimed anywhere: {reason}.".replace("..", "."))
    if not view.store.validations and view.cells:
        found.append("Nothing was validated, so no speed here is eligible.")
    lost = len(getattr(view.store, "lost", ()))
    if lost:
        found.append(f"{plural(lost, 'run')} of cells that broke off are kept in the store and not counted.")
    if view.store.processes and getattr(view.store, "finished", True) is False:
        found.append("The plan was not carried out to its end: the same command resumes it.")
    found += [f"Not alike: {d}." for d in unexplained(view)]
    found += _noted(view)
    return found + [str(w) for w in getattr(view.store, "warnings", ())]


def _noted(view: View) -> list[str]:
    """The cells' own warnings: one that most cells share is said once, the others are counted."""
    tally = Counter(w for c in view.cells for w in c.warnings)
    shared = [w for w, n in tally.items() if 2 * n > len(view.cells)]
    others = sum(any(w not in shared for w in c.warnings) for c in view.cells)
    return shared + (
        [f"{plural(others, 'cell')} with a note of caution: see the reasons in the table."] if others else []
    )


def bar(view: View) -> Safe:
    """All cells as one bar, split by verdict; the numbers add up to its length."""
    tally = {name: n for name, n in counts(view.cells).items() if n}
    total = sum(tally.values())
    if not total:
        return Safe("")
    parts, at = [], 0.0
    for name, n in tally.items():
        width = 100 * n / total
        parts.append(
            tag("rect", x=f"{at:.3f}%", y="0", width=f"{width:.3f}%", height="10", class_="b-" + verdict(name).style)
        )
        at += width
    labels = [
        tag(
            "li",
            tag("b", str(n)),
            " ",
            tag("span", verdict(name).sign, class_="sign"),
            " ",
            verdict(name).short,
            class_="v-" + verdict(name).style,
        )
        for name, n in tally.items()
    ]
    return join(
        [
            tag("svg", *parts, width="100%", height="10", aria_hidden="true", class_="bar"),
            tag("ul", *labels, class_="tally"),
        ]
    )


def header(view: View) -> Safe:
    """Title, sentence, bar, facts and warnings."""
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts_line(view)]
    alarms = [tag("li", w) for w in warnings(view)]
    forced = [tag("li", f"{d}.") for d in unlike(view)]
    return tag(
        "header",
        tag("p", "tapgrid", class_="brand"),
        tag("h1", view.name),
        tag("p", view.grid["about"], class_="about") if view.grid.get("about") else "",
        tag("p", sentence(view.cells), class_="lead", id="sentence"),
        bar(view),
        tag("ul", *alarms, class_="alarms") if alarms else "",
        tag("dl", *facts, class_="facts"),
        tag("p", "Forced by a library, and so not alike in every column:", class_="note") if forced else "",
        tag("ul", *forced, class_="note", id="unlike") if forced else "",
    )


def _version(mark: Mark, packages: object) -> str:
    """Versions of the library and of the engine below it."""
    known = packages if isinstance(packages, dict) else {}
    names = dict.fromkeys([mark.library.name.removeprefix("plain ").lower(), mark.engine.lower()])
    return ", ".join(f"{n} {known[n]}" for n in names if n in known)


def _range(cells: list[Cell]) -> str:
    shares = [s for c in cells if verdict(c.verdict).judged and (s := finite(c.share)) is not None]
    if not shares:
        return ""
    low, high = percent(min(shares), unit=""), percent(max(shares), unit="")
    return low if low == high else f"{low}–{high}"


def _activations(found: list[findings.Spot], mark: Mark) -> tuple[str, bool]:
    """What validation said about a column, and whether that is nothing to worry about."""
    tally = findings.tally(found)
    if not found:
        plain = mark.library.name.startswith("plain ")
        return "nothing attached" if plain else "not checked", plain
    if tally["FAIL"] or tally["WARN"]:
        return ", ".join(f"{n} {name}" for name, n in tally.items() if n), not tally["FAIL"]
    return f"{len(found)} PASS", True


def _column(column: str, view: View, found: list[findings.Spot]) -> Safe:
    mark = view.marks[column]
    own = [c for c in view.cells if c.column == column]
    tally = counts(own)
    booted = column_lines(view.store.processes, column)
    boots = sorted(b for p in booted if (b := finite(p.get("boot_wall_seconds"))) is not None)
    said, good = _activations(found, mark)
    return tag(
        "tr",
        tag("th", mark_svg(mark), column, scope="row"),
        tag("td", f"{mark.mode}, {mark.engine}"),
        tag("td", _version(mark, booted[0].get("packages") if booted else None), class_="note"),
        *(
            tag(
                "td",
                str(tally[v.name]) if tally[v.name] else "·",
                class_="n" + (f" v-{v.style}" if tally[v.name] else " zero"),
            )
            for v in VERDICTS
        ),
        tag("td", str(len(own)), class_="n"),
        tag("td", _range(own), class_="n"),
        tag("td", said, class_="ok" if good else "bad"),
        tag("td", f"{boots[len(boots) // 2]:.0f} s" if boots else "", class_="n"),
    )


def columns(view: View) -> Safe:
    """Legend and summary in one: a line for every column."""
    found = findings.spots(view.store.validations)
    signs = [
        tag("th", v.sign, title=v.name.lower(), scope="col", class_="n", aria_label=v.name.lower()) for v in VERDICTS
    ]
    left = [tag("th", h, scope="col") for h in ("column", "engine", "versions")]
    numbers = (("cells", "n"), ("% of plain", "n"), ("activations", None), ("boot", "n"))
    right = [tag("th", h, scope="col", class_=style) for h, style in numbers]
    head = tag("tr", *left, *signs, *right)
    body = [_column(c, view, [s for s in found if s.column == c]) for c in view.columns]
    return tag(
        "div", tag("table", tag("thead", head), tag("tbody", *body), class_="plain legend-table"), class_="scroll"
    )
