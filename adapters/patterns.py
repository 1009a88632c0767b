"""Attention probabilities, for engines that do not keep them.

`pattern[l]` is [heads, tokens of this pass, positions 0 to the last]: what each head gives to each position, after
scale, soft cap, mask and window, before the values are mixed; rows sum to 1. It is computed from the queries and keys
that attention is given, beside the engine's own kernel, whose result stands unless the pattern is edited: then the
edited rows are the edited pattern times the values.

The `attention` side of a module is reached through a seam of its own, which is there only while somebody waits:
`transformers` looks its attention function up by name at every call; vLLM's attention layer is a module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from adapters.errors import PointRefusedError, WriteError, at_user_line
from adapters.rows import Rows

Visit = Callable[[Any], Any]
Waits = Callable[[], bool]
PREFIX = "tapgrid_"


class Attended(Protocol):
    """What a pattern is read from and written to: one attention layer in one pass, its keys, values and result."""

    def read(self, rows: Rows, index: int, first: int, tokens: int) -> torch.Tensor:
        """Request `index`'s probabilities [heads, tokens, first + tokens]."""

    def write(self, rows: Rows, index: int, first: int, tokens: int, pattern: torch.Tensor) -> None:
        """Mix the values by `pattern` instead, for this request's rows."""


def probabilities(
    q: torch.Tensor, k: torch.Tensor, first: int, *, scale: float, window: int | None = None, cap: float | None = None
) -> torch.Tensor:
    """Causal attention probabilities [heads, tokens, keys] of queries [tokens, heads, d] at positions `first` and on
    over keys [keys, kv_heads, d] at positions 0 and on. `window` is how many positions a query sees, itself included.

    >>> probabilities(torch.zeros(2, 1, 4), torch.zeros(3, 1, 4), 1, scale=1.0)[0].tolist()
    [[0.5, 0.5, 0.0], [0.3333333432674408, 0.3333333432674408, 0.3333333432674408]]
    >>> probabilities(torch.zeros(1, 1, 4), torch.zeros(3, 1, 4), 2, scale=1.0, window=2)[0].tolist()
    [[0.0, 0.5, 0.5]]
    """
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,khd->htk", q.float(), k.float().repeat_interleave(group, 1)) * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    ago = torch.arange(first, first + q.shape[0], device=q.device)[:, None] - torch.arange(k.shape[0], device=q.device)
    hidden = ago < 0 if window is None else (ago < 0) | (ago >= window)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1).to(q.dtype)


def mixed(pattern: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values [keys, kv_heads, d] mixed by a pattern [heads, tokens, keys] -> [tokens, heads, d]."""
    group = pattern.shape[0] // values.shape[1]
    return torch.einsum("htk,khd->thd", pattern, values.repeat_interleave(group, 1))


def attach(model: torch.nn.Module, path: str, waits: Waits, visit: Visit) -> Seam:
    """Call `visit(Attended)` when the attention layer at `path` has run and somebody `waits`.

    AttributeError when the model has no such module.
    """
    core = _module(model, path)
    return VLLMSeam(core, waits, visit) if hasattr(core, "impl") else TransformersSeam(core, waits, visit)


def _module(model: torch.nn.Module, path: str) -> Any:
    name, _, layer = path.partition(".")
    instances = getattr(model, "attention_instances", None)
    if name == "attention_instances" and instances is not None:
        # vLLM's class around the code of transformers keeps its attention layers outside the module tree.
        return instances[int(layer)]
    return model.get_submodule(path)


class Seam(Protocol):
    def remove(self) -> None: ...


# ---- transformers

# What is to be called for a module's attention, while somebody may wait for it.
_TAPPED: dict[torch.nn.Module, tuple[Waits, Visit]] = {}


class TransformersSeam:
    """Points the model's config at our attention function, which calls the one that was there."""

    def __init__(self, module: Any, waits: Waits, visit: Visit) -> None:
        self.module, self.config = module, module.config
        self.before: str = self.config._attn_implementation
        if not self.before.startswith(PREFIX):
            self.config._attn_implementation_internal = _registered(self.before)
        _TAPPED[module] = (waits, visit)

    def remove(self) -> None:
        _TAPPED.pop(self.module, None)
        self.config._attn_implementation_internal = self.before.removeprefix(PREFIX)


def _registered(base: str) -> str:
    """The name under which transformers finds our function around its `base` one: the same mask, the same kernel."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = PREFIX + base
    if name not in ALL_ATTENTION_FUNCTIONS:

        def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
            run = ALL_ATTENTION_FUNCTIONS.get_interface(base, _eager_of(module))
            return _attend(run, module, query, key, value, mask, kwargs)

        ALL_ATTENTION_FUNCTIONS.register(name, attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def _eager_of(module: Any) -> Callable[..., Any]:
    """The family's own attention code, which is what knows its soft caps and scales."""
    found: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return found


def _attend(run: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, kwargs: dict[str, Any]) -> Any:
    output, weights = run(module, query, key, value, mask, **kwargs)
    waits, visit = _TAPPED.get(module, (None, None))
    if waits is None or visit is None or not waits():
        return output, weights
    _, computed = _eager_of(module)(module, query, key, value, _additive(mask, query, key), **kwargs)
    seen = TransformersAttended(computed, value, output)
    visit(seen)
    return (seen.in_graph() if torch.is_grad_enabled() else output), weights


def _additive(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as the eager code adds it. None, which a kernel may be given, means causal with the queries last."""
    q, k, lowest = query.shape[2], key.shape[2], torch.finfo(query.dtype).min
    if mask is None:
        mask = torch.ones(q, k, dtype=torch.bool, device=query.device).tril(k - q)[None, None]
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, lowest)
    return mask


class _Edits:
    """Patterns that were written in this pass: a read after the write sees it."""

    def __init__(self) -> None:
        self._written: dict[tuple[int, int, int], torch.Tensor] = {}

    def get(self, index: int, first: int, tokens: int) -> torch.Tensor | None:
        return self._written.get((index, first, tokens))

    def put(self, index: int, first: int, tokens: int, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Remember `new`. Returns which rows of it [heads, tokens] differ: the others' result stands."""
        self._written[index, first, tokens] = new
        return (old != new).any(-1)


class TransformersAttended:
    """Weights [batch, heads, queries, keys], values [batch, kv_heads, keys, d], result [batch, queries, heads, d]."""

    def __init__(self, weights: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
        self.weights, self.value, self.output = weights, value, output
        self._edits = _Edits()

    def read(self, rows: Rows, index: int, first: int, tokens: int) -> torch.Tensor:
        edited = self._edits.get(index, first, tokens)
        if edited is not None:
            return edited.clone()
        return _widened(rows.of(self.weights.transpose(1, 2), index).transpose(0, 1), first + tokens).clone()

    def write(self, rows: Rows, index: int, first: int, tokens: int, pattern: torch.Tensor) -> None:
        keys = self.weights.shape[-1]
        gone = pattern[..., : max(0, pattern.shape[-1] - keys)]
        if gone.any():
            raise WriteError(
                at_user_line(
                    f"pattern: positions 0 to {gone.shape[-1] - 1} are outside this layer's window and no longer in "
                    "the cache, so nothing but zero can be written for them"
                )
            )
        changed = self._edits.put(index, first, tokens, self.read(rows, index, first, tokens), pattern)
        pattern = _widened(pattern, keys)
        if torch.is_grad_enabled():
            self.weights = self.weights.clone()
            rows.of(self.weights.transpose(1, 2), index).transpose(0, 1).copy_(pattern)
            return
        mine = rows.of(self.output, index)
        put(mine, torch.where(changed.T[..., None], mixed(pattern, self.value[index].transpose(0, 1)), mine))

    def in_graph(self) -> torch.Tensor:
        """The result by these weights, for everybody: a pattern has a gradient only if the model computes with it."""
        group = self.weights.shape[1] // self.value.shape[1]
        return torch.matmul(self.weights, self.value.repeat_interleave(group, 1)).transpose(1, 2)


def _widened(pattern: torch.Tensor, keys: int) -> torch.Tensor:
    """The last `keys` columns; zeros stand for positions that are not there."""
    missing = keys - pattern.shape[-1]
    return torch.nn.functional.pad(pattern, (missing, 0)) if missing > 0 else pattern[..., -keys:]


def put(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy into a tensor of the model's, which may be an inference tensor."""
    with torch.inference_mode(target.is_inference()):
        target.copy_(value)


# ---- vLLM


class VLLMSeam:
    """Shadows the attention layer's `forward` with one that calls it and then us."""

    def __init__(self, core: Any, waits: Waits, visit: Visit) -> None:
        from adapters.engines.vllm_cache import why_not

        if (why := why_not(core)) is not None:
            raise PointRefusedError(at_user_line(f"pattern: {why}; the nearest points are q, k and z"))
        self.core, plain = core, core.forward

        def forward(query: torch.Tensor, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            output: torch.Tensor = plain(query, key, value, *args, **kwargs)
            if waits():
                visit(VLLMAttended(core, query, output))
            return output

        core.forward = forward

    def remove(self) -> None:
        self.core.__dict__.pop("forward", None)


class VLLMAttended:
    """An attention layer that has run: the packed queries, the paged cache with this pass's keys in it, the result."""

    def __init__(self, core: Any, query: torch.Tensor, output: torch.Tensor) -> None:
        self.core, self.query, self.output = core, query, output
        self._edits = _Edits()

    def read(self, rows: Rows, index: int, first: int, tokens: int) -> torch.Tensor:
        from adapters.engines.vllm_cache import cached

        edited = self._edits.get(index, first, tokens)
        if edited is not None:
            return edited.clone()
        core, q = self.core, rows.of(self.query, index)
        k, _ = cached(core, index, first + tokens)
        return probabilities(
            q.reshape(tokens, core.num_heads, core.head_size),
            k,
            first,
            scale=core.impl.scale,
            window=core.sliding_window,
            cap=getattr(core.impl, "logits_soft_cap", None),
        )

    def write(self, rows: Rows, index: int, first: int, tokens: int, pattern: torch.Tensor) -> None:
        from adapters.engines.vllm_cache import cached

        changed = self._edits.put(index, first, tokens, self.read(rows, index, first, tokens), pattern)
        _, v = cached(self.core, index, first + tokens)
        if self.core.sliding_window is not None:
            # Blocks behind the window are given away: what lies in them now is not this request's.
            v[: max(0, first + 1 - self.core.sliding_window)] = 0
        mine = rows.of(self.output, index)
        heads = mine.view(tokens, pattern.shape[0], -1)
        put(heads, torch.where(changed.T[..., None], mixed(pattern, v), heads))
