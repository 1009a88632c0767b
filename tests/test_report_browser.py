"""The report in a real browser, from file://, in light and in dark: it asks for nothing, complains about nothing, shows
the store's cells, and can be sorted, filtered, copied and walked through with the keyboard alone."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.judge import Cell
from reports import facts, html
from tests.test_report_bad_input import IMAGE, hostile
from tests.test_report_sample import page as rendered
from tests.test_report_sample import rich

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

INSTALL = "install one: apt-get install chromium (and pip install playwright)"
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
KEYS: dict[str, Callable[[Cell], Any]] = {
    "share_vanilla": lambda c: c.share_vanilla,
    "p": lambda c: c.p,
    "row": lambda c: c.row,
}


def chromium() -> str:
    """The browser of this machine. Without one the test fails in CI, where it must run, and skips elsewhere."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no Chromium on this machine; {INSTALL}")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    api = (
        importlib.import_module("playwright.sync_api")
        if os.environ.get("CI")
        else pytest.importorskip("playwright.sync_api")
    )
    with api.sync_playwright() as started:
        made = started.chromium.launch(executable_path=path, args=list(QUIET))
        yield made
        made.close()


@dataclasses.dataclass
class Opened:
    """A page, every address that it asked for, and everything that it complained about."""

    page: Page
    asked: list[str]
    complaints: list[str]


def open_report(browser: Browser, content: str, folder: Path, **context: Any) -> Opened:
    path = folder / "report.html"
    path.write_text(content, encoding="utf-8")
    page = browser.new_context(**context).new_page()
    opened = Opened(page, [], [])
    page.on("request", lambda request: opened.asked.append(request.url))
    page.on("console", lambda message: opened.complaints.append(message.text))
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    page.goto(path.as_uri())
    return opened


@pytest.fixture(params=["light", "dark"])
def opened(browser: Browser, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    found = open_report(browser, rendered(), tmp_path, color_scheme=request.param)
    yield found
    assert found.asked == [(tmp_path / "report.html").as_uri()]
    assert found.complaints == []
    found.page.context.close()


ROWS = "[...document.querySelectorAll('#cells tbody tr')]"


def table(page: Page, visible: bool = False) -> list[list[str]]:
    """What the table shows: the text of its cells, line by line."""
    keep = ".filter(r => r.offsetParent !== null)" if visible else ""
    found: list[list[str]] = page.evaluate(f"{ROWS}{keep}.map(r => [...r.cells].map(c => c.innerText.trim()))")
    return found


def order(page: Page) -> list[int]:
    found: list[int] = page.evaluate(f"{ROWS}.map(r => Number(r.id.slice(1)))")
    return found


def contrast(page: Page) -> float:
    """WCAG contrast of the body's text to its background."""
    script = """() => {
        const light = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
            .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
        const style = getComputedStyle(document.body), a = light(style.color), b = light(style.backgroundColor);
        return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    }"""
    found: float = page.evaluate(script)
    return found


def test_the_table_shows_the_stores_cells(opened: Opened) -> None:
    shown = table(opened.page)
    assert len(shown) == len(rich().cells)
    for line, cell in zip(shown, rich().cells, strict=True):
        assert line[:2] == [cell.row, cell.column]
        assert line[2].endswith(cell.verdict)
        assert line[3] == facts.side(cell, "vanilla")
        assert facts.bounds(cell, "") in line
        assert facts.remarks(cell) == line[-1]
    assert contrast(opened.page) > 10


def test_sorting_follows_the_exact_values_with_blanks_last_both_ways(opened: Opened) -> None:
    for key, value in KEYS.items():
        button = opened.page.locator(f"#cells th button[data-key={key}]")
        for descending in (False, True):
            button.click()
            values = [value(rich().cells[i]) for i in order(opened.page)]
            known = [v for v in values if v is not None]
            assert known == sorted(known, reverse=descending)
            assert values[len(known) :] == [None] * (len(values) - len(known))
            head = opened.page.locator(f"#cells th:has(button[data-key={key}])")
            assert head.get_attribute("aria-sort") == ("descending" if descending else "ascending")
    assert sorted(order(opened.page)) == list(range(len(rich().cells)))


def test_filters_narrow_the_table_and_say_how_much_is_left(opened: Opened) -> None:
    page, total = opened.page, len(rich().cells)
    page.fill("#find", "capture nnsight")
    wanted = [c for c in rich().cells if "capture" in c.row and "nnsight" in c.column]
    assert [line[:2] for line in table(page, visible=True)] == [[c.row, c.column] for c in wanted]
    assert page.inner_text("#shown") == f"{len(wanted)} of {total}"
    page.fill("#find", "")
    page.uncheck("input[name=verdict][value=UNSUPPORTED]")
    assert page.inner_text("#shown") == f"{sum(c.verdict != 'UNSUPPORTED' for c in rich().cells)} of {total}"
    page.select_option("#library", label="nnsight")
    assert {line[1] for line in table(page, visible=True)} == {"nnsight-eager"}
    page.select_option("#library", value="")
    page.check("input[name=verdict][value=UNSUPPORTED]")
    assert len(table(page, visible=True)) == total


def test_the_keyboard_alone_reaches_every_part(opened: Opened) -> None:
    page = opened.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    seen = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate("""() => {
            const e = document.activeElement;
            return e.closest('nav') ? 'nav' : e.closest('.matrix') ? 'matrix' : e.closest('.dots') ? 'dots'
                : e.closest('.cells thead') ? 'heads' : e.closest('.controls') ? 'controls' : e.dataset.do || e.tagName;
        }""")
        )
        if "json" in seen:
            break
    assert {"nav", "matrix", "dots", "heads", "controls", "json", "SUMMARY"} <= seen


def test_arrows_walk_the_grid_and_the_card_says_what_the_table_says(opened: Opened) -> None:
    page, columns = opened.page, len({c.column for c in rich().cells})
    page.locator(".matrix a").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    at = int(page.evaluate("document.activeElement.dataset.i"))
    assert at == columns + 2
    cell = rich().cells[at]
    card = page.inner_text("#card")
    assert f"{cell.row} · {cell.column}" in card
    for said in (facts.side(cell, "vanilla"), facts.bounds(cell, ""), facts.remarks(cell), cell.verdict):
        assert said in card
    page.keyboard.press("Escape")
    assert page.is_hidden("#card")
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == f"#c{at}"
    assert page.locator(f"#c{at}").is_visible()
    stops = page.locator(".matrix a[tabindex='0']")
    assert stops.count() == 1


def test_hovering_a_line_of_dots_shows_its_card_inside_the_window(opened: Opened) -> None:
    page = opened.page
    line = page.locator(".dots tr[data-i]").nth(3)
    line.hover()
    box = page.locator("#card").bounding_box()
    assert box is not None
    size = page.viewport_size or {"width": 0, "height": 0}
    assert 0 <= box["x"] <= size["width"] - box["width"]
    assert 0 <= box["y"] <= size["height"] - box["height"]


def test_the_data_can_be_taken_away(opened: Opened, tmp_path: Path) -> None:
    page = opened.page
    with page.expect_download() as download:
        page.click("[data-do=json]")
    download.value.save_as(tmp_path / "data.json")
    found = json.loads((tmp_path / "data.json").read_text())
    assert [c["share_vanilla"] for c in found["cells"]] == [c.share_vanilla for c in rich().cells]


def test_copies_hold_what_is_visible(browser: Browser, tmp_path: Path) -> None:
    found = open_report(browser, rendered(), tmp_path, permissions=["clipboard-read", "clipboard-write"])
    page = found.page
    page.fill("#find", "steer")
    page.click("[data-do=markdown]")
    text = page.evaluate("navigator.clipboard.readText()")
    assert len(text.splitlines()) == 2 + sum(c.row == "steer" for c in rich().cells)
    assert "tapgrid-eager" in text
    page.click("[data-do=csv]")
    lines = list(csv.DictReader(io.StringIO(page.evaluate("navigator.clipboard.readText()"))))
    exact = {c.column: c.share_vanilla for c in rich().cells if c.row == "steer"}
    assert {line["column"]: float(line["share_vanilla"]) if line["share_vanilla"] else None for line in lines} == exact
    page.context.close()


def test_nothing_overflows_a_narrow_window(browser: Browser, tmp_path: Path) -> None:
    found = open_report(browser, rendered(), tmp_path, viewport={"width": 390, "height": 800})
    assert found.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert found.complaints == []
    found.page.context.close()


def test_without_a_script_everything_is_still_there(browser: Browser, tmp_path: Path) -> None:
    found = open_report(browser, rendered(), tmp_path, java_script_enabled=False)
    page = found.page
    assert page.locator("#cells tbody tr").count() == len(rich().cells)
    assert page.locator(".controls").is_hidden()
    assert page.locator(".matrix a").first.is_visible()
    page.context.close()


def test_labels_do_not_lie_on_each_other(opened: Opened) -> None:
    """Neighbours in the heads and cells of the tables, and the labels of an axis, must not overlap."""
    script = """selector => {
        const boxes = [...document.querySelectorAll(selector)].map(e => e.getBoundingClientRect()).filter(b => b.width);
        let bad = 0;
        boxes.forEach((a, i) => boxes.slice(i + 1).forEach(b => {
            if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1) bad++;
        }));
        return [boxes.length, bad];
    }"""
    for selector in (".dots thead text", ".matrix thead th", ".anatomy text", ".dots tbody tr:nth-child(-n+3) > *"):
        count, bad = opened.page.evaluate(script, selector)
        assert count > 3, selector
        assert bad == 0, selector


def test_hostile_names_do_nothing_but_stand_there(browser: Browser, tmp_path: Path) -> None:
    bad = hostile(tmp_path)
    found = open_report(browser, html.render(bad.store, bad.cells), tmp_path)
    assert found.page.title() != "owned"
    assert found.page.locator("img").count() == 0
    assert IMAGE in found.page.inner_text("#cells")
    found.page.locator(".matrix a").nth(1).focus()
    assert IMAGE in found.page.inner_text("#card")
    found.page.locator("#cells th button[data-key=column]").click()
    assert [url for url in found.asked if not url.startswith("file:")] == []
    assert found.complaints == []
    found.page.context.close()
