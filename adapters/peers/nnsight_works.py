"""The works in nnsight's own words, for its vLLM engine: each is called once a pass, in vLLM's worker; the blocks
around them are at the end.

The fast path of its own documentation: modules are bound outside the block (inside, every request would pickle the
model: 49 kB against 3), what a request saves goes home as one stacked tensor (158 us a tensor otherwise), several
requests are several invokes of one trace, and work that stays is an `edit()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Site:
    """A point: `envoy` is nnsight's handle of the module (or of the model), `kind` how its value is read there,
    `rank` its place in the model's order, in which a block must read."""

    envoy: Any
    kind: str  # "pair": (hidden, residual), whose sum is the stream; "output"; "input"; "logits"
    rank: float


# --- the works, one pass each ------------------------------------------------------------------------------------


def read(site: Site) -> Any:
    """The point's value in this pass, safe to keep: the engine reuses the buffers that a bare read hands out."""
    if site.kind == "pair":
        hidden, residual = site.envoy.output
        return hidden + residual
    if site.kind == "input":
        return site.envoy.input.clone()
    return (site.envoy.logits if site.kind == "logits" else site.envoy.output).clone()


def capture(sites: Sequence[Site]) -> list[Any]:
    return [read(s) for s in sites]


def steer(site: Site, vector: Any, before: Sequence[Site], after: Sequence[Site]) -> list[Any]:
    kept = capture(before)
    stream = site.envoy.output[0] if site.kind == "pair" else site.envoy.output
    stream[:] += vector
    return kept + capture(after)


def ablate(out: Any, columns: slice, before: Sequence[Site], after: Sequence[Site]) -> list[Any]:
    kept = capture(before)
    out.input[:, columns] = 0
    return kept + capture(after)


def lens(site: Site, logits_processor: Any, head: Any, norm: Any) -> list[Any]:
    return [logits_processor(head, norm(read(site)[-1:])).max(-1).indices]


def probe(site: Site, direction: Any) -> list[Any]:
    return [read(site).float() @ direction]


def force(model: Any, token: int) -> list[Any]:
    import torch

    model.samples = torch.full_like(model.samples, token)
    return []


def joined(passes: Sequence[Sequence[Any]]) -> Any:
    """The rows of all passes at every site: one tensor [sites, rows, ...] where they have one shape, else a list."""
    import torch

    rows = [torch.cat(parts) for parts in zip(*passes, strict=True)]
    return torch.stack(rows) if len({r.shape for r in rows}) == 1 else rows


def forget_saved_ids() -> None:
    """nnsight keeps what is saved as object ids, to be cleared as the outermost trace ends. A worker in this process
    holds that depth open, so the ids outlive their objects, and whatever comes to lie at one of those addresses is
    taken for saved and shipped: now and then a module, which cannot be pickled (0.8.1)."""
    from nnsight.tracing.tracer import _saves

    _saves().clear()


# --- the blocks. nnsight reads their source: what they name is all that travels -----------------------------------


def trace_one(model: Any, body: Any, args: Any, invokes: Any) -> tuple[list[Any], list[Any]]:
    ((prompt, settings, new),) = invokes
    with model.trace(prompt, **settings) as tr:
        passes = []
        for _ in tr.iter[:new]:
            passes.append(body(*args))
        saved = save(joined(passes))
        result = tr.result.save()
    return [result], [saved]


def trace_many(model: Any, body: Any, args: Any, invokes: Any) -> tuple[list[Any], list[Any]]:
    with model.trace() as tr:
        for prompt, settings, new in invokes:
            with tr.invoke(prompt, **settings):
                passes = []
                for _ in tr.iter[:new]:
                    passes.append(body(*args))
                saved = save(joined(passes))
                result = tr.result.save()
    return result, saved


def edit(model: Any, body: Any, args: Any) -> Any:
    with model.edit() as (tr, installed):
        passes = save([])
        for _ in tr.all():
            passes.append(body(*args))
    return installed


def save(value: Any) -> Any:
    import nnsight

    return nnsight.save(value)
