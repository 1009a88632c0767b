"""The boot self-tests, of a compiled engine and of one that is split over ranks.

In a compiled one, every declared tap is counted in one real prefill and one real decode step.
A dead tap is silent: the model still speaks, the captures are just somebody else's or none. A stale compile cache, code
shared with an untapped instance, a hook that came after compilation, a full graph replayed over the tap, a pass that
undid the split: each shows here as a count that is not two, or as a write that changed nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from adapters.declared import Add, Capture, Stated
from adapters.errors import InterventionError, LoadError
from adapters.points import PER_LAYER, Location, Points

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adapters.intervention import Pass
    from adapters.runtime import Output, Runtime

PROMPT = (5, 7, 11, 13, 17)
_WHY = (
    "the usual reasons are a compile cache from an engine with other taps, hooks added after the first compiled call, "
    "another instance of the model class compiled before in this process, or a full graph that replays over the tap"
)


def check_taps(runtime: Runtime) -> None:
    """Refuse to serve (LoadError) unless every declared tap fires in prefill and in decode, for reads and writes."""
    locations = runtime.engine.declared()
    try:
        counts = _counts(runtime, locations)
        dead = [f"{loc} ({got} of 2 passes)" for loc, got in zip(locations, counts, strict=True) if got != 2]
        if dead:
            raise LoadError(f"taps that did not fire: {', '.join(dead)}; {_WHY}")
        deaf = _deaf(runtime, locations)
        if deaf:
            raise LoadError(f"taps whose writes change nothing: {', '.join(map(str, deaf))}; {_WHY}")
    except BaseException:
        runtime.close()
        raise


def _counts(runtime: Runtime, locations: list[Location]) -> list[int]:
    """How many of two passes each tap was visited in. A tap that is not visited ends the pass, and taps after it count
    too few as well: each gets a chance of its own in a second look."""

    def total(only: list[int]) -> list[int]:
        def one(m: Pass) -> None:
            for i in only:
                m._read(locations[i])
                m.save("seen", i)

        out = runtime.run([PROMPT], one, max_new_tokens=2, ignore_eos=True, on_error="return")[0]
        seen = out.saves.get("seen", [])
        return [seen.count(i) for i in only]

    first = total(list(range(len(locations))))
    return [got if got == 2 else total([i])[0] for i, got in enumerate(first)]


def _deaf(runtime: Runtime, locations: list[Location]) -> list[Location]:
    """Taps whose write leaves the logits of that very pass as they were, in prefill or in decode.

    A pass at a time: what was written into the prompt shows in the logits of decode, whatever is lost there.
    """

    def logits(write: Location | None, step: int) -> list[torch.Tensor]:
        def poke(m: Pass) -> None:
            if write is not None and m.step == step:
                m._read(write).mul_(-3.0).add_(1.0)
            m.save("logits", m.logits)
            m.sampled[:] = PROMPT[0]

        out: Any = runtime.run([PROMPT], poke, max_new_tokens=1 + step, ignore_eos=True, on_error="return")[0]
        if isinstance(out.error, InterventionError):
            raise LoadError(f"self-test: {out.error}") from out.error
        return list(out.saves["logits"])

    plain = logits(None, 1)
    return [
        loc
        for loc in _one_of_each(locations)
        if any(torch.equal(plain[step], logits(loc, step)[step]) for step in (0, 1))
    ]


def check_buffers(runtime: Runtime) -> None:
    """Refuse to serve (LoadError) unless every buffered point is filled in prefill and in decode, and adds."""
    locations: list[Location] = runtime.engine.buffered()  # type: ignore[attr-defined]
    names = [loc.text for loc in locations]

    capture = Capture(*names, "logits")

    def run(stated: Stated) -> Output:
        return runtime.run([PROMPT], stated, max_new_tokens=2, ignore_eos=True, on_error="return")[0]

    try:
        plain = run(capture)
        dead = [n for n in names if not _filled(plain.saves.get(n, ()))]
        if dead:
            raise LoadError(f"buffers that the graph does not fill: {', '.join(dead)}; {_WHY}")
        for loc in _one_of_each(locations):
            row = plain.saves[loc.text][0][0]
            moved = run(Add(loc.text, torch.ones_like(row), 1024.0).then(capture))
            pairs = list(zip(moved.saves.get(loc.text, ()), plain.saves[loc.text], strict=False))
            # What is handed out, and what the model goes on with.
            added = len(pairs) == 2 and all((a > b).all() for a, b in pairs)
            if not added or torch.equal(moved.saves["logits"][0], plain.saves["logits"][0]):
                raise LoadError(f"buffers that add nothing: {loc.text}; {_WHY}")
    except BaseException:
        runtime.close()
        raise


def _filled(rows: Sequence[torch.Tensor]) -> bool:
    """Whether prefill and decode left rows, and decode not those of the prefill again."""
    return len(rows) == 2 and all(bool(r.any()) for r in rows) and not torch.equal(rows[0][:1], rows[1])


def _one_of_each(locations: list[Location]) -> list[Location]:
    """The last declared tap of every point: writes share the operator, so one of each name shows that it is right."""
    return list({loc.name: loc for loc in locations}.values())


def check_ranks(runtime: Runtime) -> None:
    """Read every point of a model that is split over ranks once: LoadError for one that cannot be made whole.

    Where all ranks should hold the same, that is compared in this pass; later reads there cost no communication.
    """
    engine = runtime.engine
    locations = sorted(engine.declared() or _everywhere(engine.points), key=lambda loc: loc.rank)

    def read(m: Pass) -> None:
        for loc in locations:
            m._read(loc)

    try:
        out = runtime.run([PROMPT], read, max_new_tokens=1, ignore_eos=True, on_error="return")[0]
        if out.error is not None:
            raise LoadError(f"self-test of the split model: {out.error}") from out.error
    except BaseException:
        runtime.close()
        raise


def _everywhere(points: Points) -> list[Location]:
    """One location a place, for all that is held as a tensor."""
    names = [n for n in points.names() if n not in ("pattern", "logits", "sampled")]
    found = [points.at(n, layer) for n in names for layer in (points.layers(n) if n in PER_LAYER else (None,))]
    return list({loc.key: loc for loc in found}.values())
