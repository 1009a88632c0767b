"""What a reader must know of the peers: where one could not be given what the others were, and what is known to be
wrong in the libraries measured."""

from __future__ import annotations

from harness.fairness import differences, sentences
from reports.escape import Safe, tag
from reports.view import View, column_lines
from validation.known_issues import KnownIssue, of_columns

UNKNOWN = "no process of it booted"
HEADS = ("library", "where", "what is wrong", "measured", "here")


def unlike(view: View) -> list[str]:
    """Differences that a peer forces, as sentences."""
    return sentences([d for d in differences(view.store, view.session) if d.forced])


def unexplained(view: View) -> list[str]:
    """Differences that nobody can explain: these are warnings."""
    return sentences([d for d in differences(view.store, view.session) if not d.forced])


def issues(view: View) -> tuple[KnownIssue, ...]:
    """The known issues of the page's columns."""
    return of_columns(view.columns)


def version_in(view: View, issue: KnownIssue) -> str:
    """The version of the issue's library that was measured here."""
    for column in view.columns:
        if column.partition("@")[0] in issue.columns:
            for line in column_lines(view.store.processes, column):
                packages = line.get("packages") or {}
                for name in (issue.library, f"{issue.library}-cpu"):
                    if name in packages:
                        return str(packages[name])
    return UNKNOWN


def told(view: View, issue: KnownIssue) -> tuple[str, str, str, str, str]:
    """An issue as the five texts of its line."""
    here = version_in(view, issue)
    seen = f"{issue.library} {issue.version}"
    return (
        seen if here == issue.version else f"{seen} (here: {here})",
        issue.where,
        issue.wrong,
        f"{issue.measured} ({issue.date.isoformat()}, {issue.input})",
        issue.here,
    )


def known(view: View) -> Safe:
    """The section: a table, or nothing where no column has an entry."""
    found = issues(view)
    if not found:
        return Safe("")
    head = tag("tr", *(tag("th", h, scope="col") for h in HEADS))
    body = []
    for issue in found:
        first, *others = told(view, issue)
        body.append(tag("tr", tag("th", first, scope="row"), *(tag("td", t, class_="note") for t in others)))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_="plain"), class_="scroll")
