"""How to read the page: one line of dots taken apart, the marks, and what each verdict claims."""

from __future__ import annotations

from reports.escape import Safe, tag
from reports.numbers import NARROW
from reports.svg import mark
from reports.view import View
from reports.words import VERDICTS

# (x of the thing, x and y of its label, how the label is anchored, the label), in a picture of 460 x 104.
_LABELS = (
    (92, 52, 14, "start", "slowest process"),
    (160, 172, 14, "start", "95 % interval"),
    (214, 204, 98, "middle", "estimate"),
    (128, 118, 98, "middle", "one tick a process"),
    (330, 330, 14, "middle", "100 %: plain engine"),
    (345, 352, 98, "start", "margin"),
)


def _anatomy(view: View) -> Safe:
    """One line of the plot, larger, with its parts named."""
    y = 54
    own = view.marks.get("tapgrid-eager") or next(iter(view.marks.values()), None)
    hue = own.hue if own else "hue-tapgrid"
    lines = "".join(
        f"M{x} {y - 22 if ly < y else y + 14}V{ly + 5 if ly < y else ly - 11}" for x, _, ly, _, _ in _LABELS
    )
    parts = [
        tag("rect", x=312, y=y - 24, width=36, height=48, class_="round"),
        tag("path", d=f"M330 {y - 24}v48", class_="one"),
        tag("path", d=f"M92 {y}H300", class_=f"whisker {hue}"),
        tag("path", d=f"M150 {y}H272", class_=f"ci {hue}"),
        tag("path", d="".join(f"M{x} {y - 6}v12" for x in (92, 128, 190, 221, 262, 300)), class_=f"tick {hue}"),
        mark(own, "210", str(y)) if own else "",
        tag("path", d=lines, class_="lead-line"),
        *(tag("text", label, x=x, y=ly, text_anchor=anchor, class_="label") for _, x, ly, anchor, label in _LABELS),
    ]
    return tag("svg", *parts, viewBox="0 0 460 104", width="460", height="104", aria_hidden="true", class_="anatomy")


def reading(view: View) -> Safe:
    """The section, open; it folds away."""
    words = [
        tag(
            "div",
            tag("dt", tag("span", v.sign, class_="sign"), " ", v.name, class_="v-" + v.style),
            tag("dd", v.meaning),
        )
        for v in VERDICTS
    ]
    share = (
        "A share compares a column with its own plain engine inside one round, on the same row: vLLM columns with "
        "vanilla, those on transformers with hf. Right is always faster, also for rows measured in seconds. The "
        f"evidence is the process, not the run. The margin is ±{100 * view.margin:g}{NARROW}%. Numbers show as many "
        "digits as their interval supports; the page carries all of them."
    )
    marks = (
        "Hue and shape say the library. A filled mark is a compiled engine, a hollow one eager; a dot in its centre "
        "means that the engine is transformers. Bold is faster, italic the same, ~ unclear. What is struck through "
        "failed validation."
    )
    return tag(
        "details",
        tag("summary", "How to read this"),
        tag(
            "div",
            tag("div", _anatomy(view), tag("p", share), tag("p", marks)),
            tag("dl", *words, class_="words"),
            class_="two",
        ),
        class_="reading",
        open=True,
    )
