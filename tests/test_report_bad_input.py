"""Reports of stores that nobody hopes for: hostile names, half of it failed, nothing in it, no number in it, huge."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from harness import aa
from harness.judge import Cell, judge
from harness.store import Store
from reports import html, markdown, terminal, words
from tests.test_report_dom import Node, parse
from tests.test_report_sample import COLUMNS, ROWS, Sample, Spec, lines, rich, store_of

IMAGE, SCRIPT = "<img src=x onerror=1>", "</script><script>document.title='owned'</script>"
ALLOWED = """
    html head body meta title link style script nav main header section details summary a p h1 h2 h3 div span b i s sup
    mark strong code ul ol li dl dt dd table thead tbody tr th td figure figcaption svg defs g path rect circle use text
    input label select option output button
"""
NUMBERS = (
    "value", "value_other", "share_vanilla", "share_eager", "share_hf", "low", "high", "p", "p_adjusted", "p_exact",
    "p_unpaired", "smallest_detectable",
)  # fmt: skip


def hostile_lines() -> list[dict[str, Any]]:
    """A session in which every string that a user or a library chooses is hostile."""
    columns = ("vanilla", IMAGE, f"tapgrid{SCRIPT}")
    made = lines(Spec(rounds=2, columns=columns, rows=("generate", SCRIPT), grid=f"{IMAGE}{SCRIPT}", layers=3))
    for line in made:
        for key in ("reason", "text", "prompt", "stderr", "invalid_reason", "point"):
            if line.get(key):
                line[key] = f"{SCRIPT}{IMAGE} {line[key]}"
        for key in ("settings", "env", "packages", "fingerprint"):
            if key in line:
                line[key] = {f"{IMAGE}{k}": f"{SCRIPT}{v}" for k, v in line[key].items()}
    made.append({"kind": "failed", "session": "s1", "process": None, "round": 0, "column": IMAGE, "row": SCRIPT,
                 "reason": SCRIPT, "stderr": IMAGE})  # fmt: skip
    return made


def hostile(folder: Path) -> Sample:
    store = store_of(hostile_lines(), folder)
    cells = [dataclasses.replace(c, reason=c.reason + IMAGE, code=SCRIPT, warnings=(IMAGE,)) for c in judge(store)]
    return Sample(store, cells)


def test_hostile_strings_are_shown_as_they_are_and_never_become_markup(tmp_path: Path) -> None:
    bad = hostile(tmp_path)
    floor = aa.Floor(SCRIPT, IMAGE, 3, 0.05, 0.08, (0.9, 1.0, 1.1), 0.01, 0.25)
    floors = aa.Floors(IMAGE, SCRIPT, "cpu", "m", (floor,), relabellings=4, alarm_rate=0.0, alarms=0.0)
    root = parse(html.render(bad.store, bad.cells, floors))
    assert {n.name for n in root.walk()} - {""} <= set(ALLOWED.split())
    assert len(root.all("script")) == 2
    assert not any(a.startswith("on") for n in root.walk() for a in n.attributes)
    table = root.one("table", id="cells")
    assert IMAGE in table.text
    assert SCRIPT in table.text
    assert f"{IMAGE}{SCRIPT}" in root.one("h1").text
    assert IMAGE in root.one("table", class_="matrix").text  # head of a column
    assert any(IMAGE in n.text for n in root.all("title"))  # chart labels
    assert any(SCRIPT in n.attributes.get("aria-label", "") for n in root.all("a"))
    held = json.loads(root.one("script", id="embedded").text)["cells"]
    assert {value[held["fields"].index("row")] for value in held["values"]} == {"generate", SCRIPT}
    for part in ("environment", "failures", "texts", "validation", "floors"):
        assert "<" in root.one("section", id=part).text, part


def test_hostile_strings_stay_in_their_cell_in_markdown_and_on_one_line_in_a_terminal(tmp_path: Path) -> None:
    bad = hostile(tmp_path)
    text = markdown.render(bad.store, bad.cells)
    assert "<img" not in text.replace("\\<img", "").replace("`<img", "")
    for line in (line for line in text.splitlines() if line.startswith("| ")):
        assert line.endswith(" |")
    shown = terminal.render([dataclasses.replace(c, column=f"{c.column}\x1b[2J") for c in bad.cells])
    assert "\x1b" not in shown


def failed_cells() -> list[Cell]:
    """The rich cells with every second one gone, each in another way."""
    ways: list[dict[str, Any]] = [
        {"verdict": "MISSING", "reason": "the worker died"},
        {"verdict": "UNSUPPORTED", "reason": "no way to say it", "code": "not-expressible"},
        {"verdict": "INVALID", "reason": "a layer off"},
        {"verdict": "MISSING", "reason": ""},
    ]
    empty: dict[str, Any] = dict.fromkeys(NUMBERS) | {"process_values": (), "process_shares": ()}
    empty |= {"rounds": 0, "runs": 0, "code": None}
    return [dataclasses.replace(c, **(empty | ways[i // 2 % 4])) if i % 2 else c for i, c in enumerate(rich().cells)]


def test_half_of_the_cells_failed() -> None:
    cells = failed_cells()
    root = parse(html.render(rich().store, cells))
    rows = root.one("table", id="cells").one("tbody").all("tr")
    assert len(rows) == len(cells)
    for row, cell in zip(rows, cells, strict=True):
        assert cell.verdict in row.words
        assert (cell.reason or "no reason was given") in row.words
    assert sum(int(li.words.split()[0]) for li in root.one("ul", class_="tally").all("li")) == len(cells)
    assert words.sentence(cells).startswith(f"{len(cells)} cells: ")
    assert "no reason was given" in markdown.render(rich().store, cells)
    assert "no reason was given" in terminal.render(cells)


def test_no_cells_and_an_empty_store(tmp_path: Path) -> None:
    head = {**lines(Spec(rounds=1))[0], "columns": [], "rows": []}
    store = store_of([head], tmp_path)
    assert judge(store) == []
    root = parse(html.render(store, []))
    assert root.one("p", id="sentence").words == "Nothing was measured: there are no cells."
    assert root.one("table", id="cells").one("tbody").all("tr") == []
    assert "No worker crashed" in root.words
    assert "Nothing was measured" in markdown.render(store, [])
    assert "Nothing was measured" in terminal.render([])


def test_numbers_that_are_none_are_blank_and_the_data_stays_strict() -> None:
    broken: dict[str, Any] = dict.fromkeys(NUMBERS, math.nan) | {"process_values": (math.nan, math.inf)}
    cells = [dataclasses.replace(c, **broken) for c in rich().cells]
    page = html.render(rich().store, cells)
    root = parse(page)
    numbers = root.one("table", id="cells").one("tbody").all("td", class_="n") + root.one("table", class_="matrix").all(
        "td"
    )
    assert not [n.words for n in numbers if "nan" in n.words.lower() or "inf" in n.words.lower()]
    assert not any("nan" in n.attributes.get(k, "") for n in root.walk() for k in ("d", "x", "y", "width"))
    data = json.loads(root.one("script", id="embedded").text, parse_constant=lambda name: pytest.fail(name))
    assert data["cells"]["values"][0][data["cells"]["fields"].index("value")] is None
    assert "nan" not in markdown.render(rich().store, cells).lower()
    assert "nan" not in terminal.render(cells).lower()


def test_one_round_gives_dots_without_intervals_and_says_why(tmp_path: Path) -> None:
    store = store_of(lines(Spec(rounds=1, runs=1)), tmp_path)
    cells = judge(store)
    assert {c.verdict for c in cells} & {"FASTER", "SLOWER", "SAME"} == set()
    root = parse(html.render(store, cells))
    dots = root.one("table", class_="dots")
    assert dots.all("path", class_="ci") == []
    assert len(dots.all("path", class_="tick")) > 10
    alarms = root.one("ul", class_="alarms").words
    assert "No difference is claimed anywhere" in alarms
    assert "1 round cannot give p < 0.05" in alarms
    blank = [td for td in root.all("td", class_="ci-text") if not td.words]
    assert blank
    assert all(td.attributes["title"] for td in blank)


def test_a_verdict_of_a_later_version_is_shown_and_counted() -> None:
    cells = [dataclasses.replace(rich().cells[2], verdict="CONTESTED"), *rich().cells[3:9]]
    root = parse(html.render(rich().store, cells))
    assert "1 ? contested" in root.one("ul", class_="tally").words
    assert "CONTESTED" in root.one("table", id="cells").words
    assert "1 contested" in words.sentence(cells)


def test_a_grid_without_vanilla_and_a_row_without_a_plain_engine(tmp_path: Path) -> None:
    spec = Spec(rounds=2, columns=("vanilla-eager", "tapgrid-eager"), rows=("generate", "gradient"))
    store = store_of(lines(spec), tmp_path)
    cells = judge(store)
    assert any(c.row == "gradient" and c.value is not None and c.share is None for c in cells)
    root = parse(html.render(store, cells))
    gradient = next(n for n in root.one("table", class_="dots").all("tbody") if n.words.startswith("gradient"))
    assert "no plain engine runs this row" in gradient.words
    assert "% of vanilla-eager" in root.one("table", class_="matrix").words
    heads = root.one("table", class_="dots").one("thead").words
    assert "of vanilla-eager, log scale" in heads
    assert "of vanilla," not in heads


def test_hf_is_not_drawn_at_the_place_of_vanilla_where_vanilla_is_missing(tmp_path: Path) -> None:
    made = lines(Spec(rounds=2, columns=("vanilla", "hf", "tapgrid-hf"), rows=("generate", "forward")))
    gone = [x for x in made if not (x["kind"] == "run" and x["column"] == "vanilla" and x["row"] == "forward")]
    store = store_of(gone, tmp_path)
    root = parse(html.render(store, judge(store)))
    forward = next(n for n in root.one("table", class_="dots").all("tbody") if n.words.startswith("forward"))
    row = next(r for r in forward.all("tr") if "hf" in [a.words for a in r.all("a")])
    marks = [[u for u in td.all("use") if u.attributes["href"].startswith("#k")] for td in row.all("td", class_="p")]
    assert [len(m) for m in marks] == [0, 1]


def large(columns: int, rows: int, folder: Path) -> Sample:
    """A grid of that size, with the rich cells' numbers, and every line of its store."""
    names = [*COLUMNS, *(f"acme-{i}" for i in range(columns - len(COLUMNS)))]
    work = [*ROWS, *(f"extra-{i}" for i in range(rows - len(ROWS)))]
    store = store_of(lines(Spec(rounds=10, columns=tuple(names), rows=tuple(work))), folder)
    measured = [c for c in rich().cells if c.share is not None]
    cells = [
        dataclasses.replace(measured[i % len(measured)], row=row, column=column)
        for i, (row, column) in enumerate((r, c) for r in work for c in names)
    ]
    return Sample(store, cells)


def test_fifteen_rows_by_twenty_columns_stay_under_a_megabyte(tmp_path: Path) -> None:
    big = large(20, 15, tmp_path)
    assert len(big.cells) == 300
    page = html.render(big.store, big.cells)
    assert len(page.encode()) < 1_000_000
    root = parse(page)
    assert len(root.one("table", id="cells").one("tbody").all("tr")) == 300
    # What was left out for size is said, and nothing else was.
    assert "runs are left to the store" in root.one("section", id="data").words
    assert "the mean of a process" in root.one("section", id="runs").words


@dataclasses.dataclass(frozen=True)
class Merged:
    """A store of several sessions, as a reader of many files would hand it over."""

    store: Store

    def __getattr__(self, name: str) -> Any:
        if name == "sessions":
            first = dict(self.store.session)
            return (first, {**first, "session": "s2", "fingerprint": {"cpu": "another"}})
        if name in ("session", "failed"):
            raise AttributeError(name)
        return getattr(self.store, "failed" if name == "failures" else name)


def test_sessions_of_different_machines_are_flagged() -> None:
    merged: Any = Merged(rich().store)
    root: Node = parse(html.render(merged, rich().cells))
    assert "differ in machine" in root.one("section", id="environment").words
    assert "another" in root.one("section", id="environment").words
    assert len(root.one("section", id="failures").one("tbody").all("tr")) == 6
