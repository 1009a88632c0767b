"""What a Llama-shaped model holds at a point, by plain hooks on `transformers` in float32, whole sequence at once.

Small on purpose and independent of the rest of `validation/`: it is what an adapter's translation is checked against.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from adapters.work import AblateHead, Outcome, Request, Steer, Work


@functools.lru_cache(maxsize=2)
def _net(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()


def reference(model: Path, tokens: Sequence[int], work: Work, points: Sequence[str]) -> dict[str, Any]:
    """Point -> [tokens, ...] for `tokens`, with the write of `work` in place; `logits` and `unembed` always."""
    import torch

    net = _net(model)
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for handle in _writes(net, work):
            hooks.callback(handle.remove)
        for handle in _reads(net, points, found):
            hooks.callback(handle.remove)
        found["logits"] = net(torch.tensor([list(tokens)])).logits[0]
    found["unembed"] = lambda h: net.lm_head(net.model.norm(h)).detach()
    return found


def gradient(model: Path, tokens: Sequence[int], point: str) -> Any:
    """The gradient at `resid_post.<layer>` of the summed log-probability of each next token: [tokens, d_model]."""
    import torch

    net, kept = _net(model), []

    def keep(module: Any, args: Any, out: Any) -> None:
        kept.append(out[0] if isinstance(out, tuple) else out)

    handle = net.model.layers[int(point.partition(".")[2])].register_forward_hook(keep)
    try:
        with torch.enable_grad():
            ids = torch.tensor([list(tokens)])
            chances = torch.log_softmax(net(ids).logits[0, :-1], -1)
            (found,) = torch.autograd.grad(chances.gather(1, ids[0, 1:, None]).sum(), kept)
    finally:
        handle.remove()
    return found[0]


def _writes(net: Any, work: Work) -> Iterator[Any]:
    import torch

    layers, size = net.model.layers, net.config.head_dim
    if isinstance(work, Steer):
        vector = torch.from_numpy(work.vector)

        def add(module: Any, args: Any, out: Any) -> Any:
            return (out[0] + vector, *out[1:]) if isinstance(out, tuple) else out + vector

        yield layers[int(work.point.split(".")[1])].register_forward_hook(add)
    if isinstance(work, AblateHead):
        columns = slice(work.head * size, (work.head + 1) * size)

        def zero(module: Any, args: Any) -> None:
            args[0][..., columns] = 0

        yield layers[work.layer].self_attn.o_proj.register_forward_pre_hook(zero)


def _reads(net: Any, points: Sequence[str], found: dict[str, Any]) -> Iterator[Any]:
    layers, heads, size = net.model.layers, net.config.num_attention_heads, net.config.head_dim
    for point in points:
        name, _, layer = point.partition(".")
        if name == "resid_post":

            def keep(module: Any, args: Any, out: Any, point: str = point) -> None:
                found[point] = (out[0] if isinstance(out, tuple) else out)[0].clone()

            yield layers[int(layer)].register_forward_hook(keep)
        elif name == "z":

            def heads_of(module: Any, args: Any, point: str = point) -> None:
                found[point] = args[0][0].clone().unflatten(-1, (heads, size))

            yield layers[int(layer)].self_attn.o_proj.register_forward_pre_hook(heads_of)


def sequence(request: Request, outcome: Outcome) -> tuple[int, ...]:
    """The tokens that the engine computed: the prompt and all but the last new one.

    >>> sequence(Request("a", (5, 6), 2), Outcome((7, 8)))
    (5, 6, 7)
    """
    return (*request.token_ids, *outcome.token_ids[:-1])


def worst(value: Any, expected: Any) -> float:
    """The worst token's error, relative to that token's size."""
    off = (value.float() - expected.float()).flatten(1).norm(dim=1)
    return float((off / expected.float().flatten(1).norm(dim=1).clamp_min(1e-6)).max())
