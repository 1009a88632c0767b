"""Mistakes that an adapter can make, each as one edit of the template, and the line of the table that must show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """`right` in the template's source is replaced by `wrong`; `line` must then be wrong and say `says`, and nothing
    may be wrong that does not begin with one of `only`."""

    name: str
    right: str
    wrong: str
    line: str
    says: str
    only: tuple[str, ...]


READS = ("capture", "probe", "steer-watched")
ALL = ("nothing", "capture", "probe", "steer", "unchanged", "protocol")
MISTAKES = (
    Mistake(
        "shifted tokens",
        "append(hidden[0].clone())",
        "append(hidden[0].roll(1, 0))",
        "capture-1 x1",
        "resid_post.1 is off by",
        READS,
    ),
    Mistake("dropped writes", "hidden + vector", "hidden * 1", "steer-watched x1", "", ("steer",)),
    Mistake("half a write", "hidden + vector", "hidden + 0.99 * vector", "steer-watched x1", "is off by", ("steer",)),
    Mistake(
        "wrong count",
        "range(request.new_tokens)",
        "range(request.new_tokens - 1)",
        "nothing x1",
        "3 tokens came back, 4 were asked for",
        ALL,
    ),
    Mistake(
        "ignored argument",
        'getattr(work, "watch", ())',
        "()",
        "steer-watched x1",
        "('resid_post.0', 'resid_post.1', 'resid_post.2') asked, [] came back",
        ("steer-watched",),
    ),
    Mistake(
        "ignored layer", 'int(point.partition(".")[2])', "1", "capture-all x1", "resid_post.0 is off by", READS
    ),
    Mistake(
        "neighbour's rows", "for request in requests]", "for request in requests[::-1]]", "capture-1 x3", "", ALL
    ),
    Mistake(
        "one outcome too few", "for request in requests]", "for request in requests[:1]]", "nothing x3",
        "1 outcomes for 3 requests", ALL,
    ),
    Mistake(
        "left on the engine",
        "    def remove(self) -> None:\n        self._installed = Nothing()",
        "    def remove(self) -> None:\n        pass",
        "unchanged after all",
        "other tokens than before any work was done",
        ("unchanged",),
    ),
    Mistake(
        "values asked for and not kept", "return dict(kept)", "return {}", "capture-1 installed", "asked, [] came back",
        READS,
    ),
    Mistake("a code of its own", '"not-expressible", f"acme has', '"cannot", f"acme has', "lens",
        "refusal code 'cannot' is none of not-expressible,", ("lens", "ablate", "force", "gradient"),
    ),
    Mistake("settings that are no data", '"threads": self._settings.threads', '"model": self._model', "protocol",
        "engine_settings() is not plain data", ("protocol",),
    ),
    Mistake("another dtype than asked", "dtype=settings.dtype)", 'dtype="bfloat16")', "protocol",
        "engine_settings() has dtype 'bfloat16', not float32", ALL,
    ),
)  # fmt: skip
