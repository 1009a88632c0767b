"""What a Llama-shaped model holds at a point, by plain hooks on `transformers` in float32, whole sequence at once.

Small on purpose and independent of `validation/`: it is what the peers' translations are checked against.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters.work import AblateHead, Outcome, Request, Steer, Work


def reference(model: Path, tokens: Sequence[int], work: Work, points: Sequence[str]) -> dict[str, Any]:
    """Point -> [tokens, ...] for `tokens`, with the write of `work` in place."""
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    layers, found = net.model.layers, {}
    heads, size = net.config.num_attention_heads, net.config.head_dim

    def hidden(out: Any) -> Any:
        return out[0] if isinstance(out, tuple) else out

    if isinstance(work, Steer):
        vector = torch.from_numpy(work.vector)
        where = layers[int(work.point.split(".")[1])]
        where.register_forward_hook(
            lambda m, a, out: (out[0] + vector, *out[1:]) if out is not hidden(out) else out + vector
        )
    if isinstance(work, AblateHead):
        columns = slice(work.head * size, (work.head + 1) * size)

        def zero(module: Any, args: Any) -> None:
            args[0][..., columns] = 0

        layers[work.layer].self_attn.o_proj.register_forward_pre_hook(zero)
    for point in points:
        name, _, layer = point.partition(".")
        if name == "resid_post":
            layers[int(layer)].register_forward_hook(
                lambda m, a, out, point=point: found.__setitem__(point, hidden(out)[0].clone())
            )
        elif name == "z":
            layers[int(layer)].self_attn.o_proj.register_forward_pre_hook(
                lambda m, a, point=point: found.__setitem__(point, a[0][0].clone().unflatten(-1, (heads, size)))
            )
    with torch.no_grad():
        found["logits"] = net(torch.tensor([list(tokens)])).logits[0]
        found["unembed"] = lambda h: net.lm_head(net.model.norm(h))
    return found


def sequence(request: Request, outcome: Outcome) -> tuple[int, ...]:
    """The tokens that the engine computed: the prompt and all but the last new one."""
    return (*request.token_ids, *outcome.token_ids[:-1])


def worst(value: Any, expected: Any) -> float:
    """The worst token's error, relative to that token's size."""
    off = (value.float() - expected.float()).flatten(1).norm(dim=1)
    return float((off / expected.float().flatten(1).norm(dim=1).clamp_min(1e-6)).max())
