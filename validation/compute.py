"""The reference's child side: load the checkpoint in one dtype, run each sequence whole, write what was asked.

Eager attention, batch of one, no cache, no padding: nothing that two right answers could differ in. Imports
torch at the top; only the child process imports this file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from validation import hooks
from validation.query import Query

Array = npt.NDArray[Any]
# Vocabulary entries at which the size of a logit error is sampled, where whole logits would be too many to keep.
_SAMPLE = 256


def warm() -> None:
    """Import what every child needs, so that it forks with the imports done. Runs no torch operation:
    a child forked after a thread pool has started would hang in it."""
    import transformers.models.auto.modeling_auto  # noqa: F401


def load(model: Path, dtype: str, device: str = "cpu") -> Any:
    """The checkpoint under `transformers`, in `dtype`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    found = AutoModelForCausalLM.from_pretrained(str(model), dtype=getattr(torch, dtype), attn_implementation="eager")
    return found.to(device).eval().requires_grad_(False)


def attend(model: Any, attention: str) -> None:
    """Compute attention that way from now on; a family without that kernel keeps eager, the one that all have."""
    try:
        model.set_attn_implementation(attention)
    except (ValueError, NotImplementedError):
        model.set_attn_implementation("eager")


def answer(model: Any, query: Query) -> dict[str, Array]:
    """Every array that `query` asks for."""
    ids = torch.tensor([query.token_ids], device=model.device)
    if query.gradient:
        return {f"gradient.{query.gradient}": _gradient(model, ids, query.gradient)}
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad(), ExitStack() as stack:
        _write(model, query, stack)
        for point in _hooked(query):
            hooks.read(model, point, found, stack)
        logits = model(input_ids=ids, use_cache=False).logits[0, query.start :]
    with torch.no_grad():  # the lens runs the model's own modules again: outside the hooks
        return {**_values(model, query, found, logits), **_tokens(query, logits)}


def _hooked(query: Query) -> list[str]:
    points = [p for p in query.points if p != "logits"]
    return list(dict.fromkeys(points + [p for p in (query.lens, query.probe) if p]))


def _values(model: Any, query: Query, found: dict[str, torch.Tensor], logits: torch.Tensor) -> dict[str, Array]:
    values = {p: _numpy(logits if p == "logits" else found[p]) for p in query.points}
    if query.lens:
        values["lens"] = _numpy(_unembed(model, found[query.lens][query.start :]))
    if query.probe:
        direction = torch.tensor(query.direction, device=logits.device).to(logits.dtype)
        values["probe"] = _numpy(found[query.probe] @ direction)
        # A projection is as wrong as its operands are long, however small it comes out.
        values["probe.size"] = _numpy(found[query.probe].float().norm(dim=-1) * direction.float().norm())
    return values


def _tokens(query: Query, logits: torch.Tensor) -> dict[str, Array]:
    """How far below the top each target lies, and a sample of the logits, from which their error is measured."""
    if not query.targets:
        return {}
    z = logits[: len(query.targets)].float()
    z = z - z.logsumexp(dim=-1, keepdim=True)
    chosen = z.gather(1, torch.tensor(query.targets, device=z.device)[:, None])[:, 0]
    step = max(1, z.shape[1] // _SAMPLE)
    return {
        "tokens.gap": _numpy(z.amax(dim=-1) - chosen),
        "tokens.top": _numpy(z.argmax(dim=-1)),
        "tokens.sample": _numpy(z[:, ::step]),
    }


def _gradient(model: Any, ids: torch.Tensor, point: str) -> Array:
    """Gradient at `point` of the summed log-probability of the sequence's own next tokens."""
    found: dict[str, torch.Tensor] = {}
    with torch.enable_grad(), ExitStack() as stack:
        hooks.read(model, point, found, stack, grad=True)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        logits.log_softmax(dim=-1).gather(1, ids[0, 1:, None]).sum().backward()
    gradient = found[point].grad
    if gradient is None:
        raise RuntimeError(f"no gradient arrived at {point}")
    return _numpy(gradient[0])


def _unembed(model: Any, residual: torch.Tensor) -> torch.Tensor:
    norm = model.get_submodule(hooks.layout(model).final_norm)
    logits: torch.Tensor = model.get_output_embeddings()(norm(residual))
    return logits


def _write(model: Any, query: Query, stack: ExitStack) -> None:
    w = query.write
    if w is None:
        return
    if w.kind == "steer":
        hooks.add(model, w.point, torch.tensor(w.vector, device=model.device), stack)
    else:
        hooks.zero_head(model, w.layer, w.head, stack)


def _numpy(x: torch.Tensor) -> Array:
    x = x.detach().cpu()
    return (x.float() if x.is_floating_point() else x).numpy().copy()


def run(model: Path, queries: Sequence[Query], paths: Sequence[Path], threads: int, device: str) -> None:
    """Answer all queries, one load for each dtype, each answer written whole or not at all."""
    torch.set_num_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in dict.fromkeys(q.dtype for q in queries):
        loaded = load(model, dtype, device)
        for query, path in zip(queries, paths, strict=True):
            if query.dtype == dtype:
                attend(loaded, query.attention)
                save(path, answer(loaded, query))
        del loaded


def save(path: Path, arrays: dict[str, Array]) -> None:
    """Write an .npz so that a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two workers may answer the same query at once: each writes its own file, the last rename wins, both are right.
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as f:
        np.savez(f, **arrays)  # type: ignore[arg-type]
    os.replace(partial, path)
