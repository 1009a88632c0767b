"""`load`: from a model's folder or name to a runtime that is ready for interventions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from adapters.errors import LoadError
from adapters.runtime import Engine, Runtime
from adapters.selftest import check_buffers, check_ranks, check_taps

EngineName = Literal["hf", "vllm"]
BackendName = Literal["eager", "taps", "sharded"]


def load(
    model: str | Path,
    *,
    engine: EngineName = "hf",
    backend: BackendName = "eager",
    taps: Sequence[str] | None = None,
    tp: int | None = None,
    buffers: Sequence[str] = (),
    dtype: str = "bfloat16",
    resolve: Callable[[str], Path] | None = None,
    **arguments: Any,
) -> Runtime:
    """Load a model on an engine, ready for interventions.

    Args:
        model: a local folder in `transformers` format, or a name that `resolve` turns into one.
        engine: "hf" for `transformers`, "vllm" for vLLM.
        backend: "eager" reaches every location, through hooks on the touched modules only. "taps" compiles the model
            and keeps the declared points live inside it. "sharded" splits it over `tp` ranks, and what interventions
            see is whole all the same.
        taps: the points that stay live in a compiled model: "resid_post.*" (every layer), "z.10", "embed".
            `logits` and `sampled` are always reachable. With backend="sharded" the model is compiled if there are any.
        tp: how many ranks backend="sharded" splits the model over.
        buffers: the points at which `Capture` and `Add` run inside the graph of a compiled vLLM, as part of it and with
            no Python: `buffers=["resid_post.*"]`, beside or instead of taps.
        arguments: passed to the engine, on top of what every tapgrid engine boots with.

    Raises LoadError for a combination that cannot work, with what to change.

    >>> from harness.models import resolve
    >>> with load("synthetic:llama", dtype="float32", resolve=resolve) as rt:
    ...     rt.points()[:4]
    ('embed', 'resid_pre', 'attn_in', 'q')
    >>> load("synthetic:llama", taps=["resid_post.*"])
    Traceback (most recent call last):
        ...
    adapters.errors.LoadError: taps=['resid_post.*'] needs backend='taps'; backend='eager' reaches every...
    """
    if backend == "taps" and taps is None:
        raise LoadError(
            "backend='taps' needs taps=[...], the points that stay live in the compiled model: taps=['resid_post.*']"
        )
    if backend == "eager" and taps is not None:
        raise LoadError(f"taps={list(taps)} needs backend='taps'; backend='eager' reaches every point undeclared")
    if (backend == "sharded") != (tp is not None) or (tp is not None and tp < 2):
        raise LoadError(
            f"tp={tp} with backend={backend!r}: backend='sharded' and tp=2 or more go together, and nothing else does"
        )
    for name, given in (("taps", taps), ("buffers", buffers)):
        if isinstance(given, str):
            raise LoadError(f"{name} is a list of points: {name}=[{given!r}]")
    if buffers and (engine, backend) != ("vllm", "taps"):
        raise LoadError(
            f"buffers={list(buffers)} needs engine='vllm' with backend='taps'; elsewhere Capture and Add need no "
            "declaring and run as Python"
        )
    booted = _ENGINES_OF.get((engine, backend))
    if booted is None:
        known = ", ".join(f"engine={e!r} backend={b!r}" for e, b in _ENGINES_OF)
        raise LoadError(f"there is no engine={engine!r} with backend={backend!r}; there are {known}")
    path = Path(model)
    if not path.is_dir():
        if resolve is None:
            raise LoadError(
                f"{str(model)!r} is not a folder; tapgrid.load also takes names of embedded models and hub ids"
            )
        path = resolve(str(model))
    more = {**arguments, **({"tp": tp} if tp is not None else {}), **({"buffers": list(buffers)} if buffers else {})}
    runtime = Runtime(booted(path, dtype, list(taps or ()), more))
    if tp is not None:
        check_ranks(runtime)
    if taps is not None:
        check_taps(runtime)
    if buffers:
        check_buffers(runtime)
    return runtime


def _hf_eager(path: Path, dtype: str, taps: list[str], arguments: dict[str, Any]) -> Engine:
    from adapters.engines.hf import load_hf

    return load_hf(path, dtype=dtype, **arguments)


def _vllm_eager(path: Path, dtype: str, taps: list[str], arguments: dict[str, Any]) -> Engine:
    from adapters.engines.vllm import load_vllm

    return load_vllm(path, dtype=dtype, **arguments)


def _hf_taps(path: Path, dtype: str, taps: list[str], arguments: dict[str, Any]) -> Engine:
    from adapters.engines.hf_taps import load_hf_taps

    return load_hf_taps(path, dtype=dtype, taps=taps, **arguments)


def _vllm_taps(path: Path, dtype: str, taps: list[str], arguments: dict[str, Any]) -> Engine:
    from adapters.engines.vllm import load_vllm

    return load_vllm(path, dtype=dtype, taps=taps, **arguments)


def _vllm_sharded(path: Path, dtype: str, taps: list[str], arguments: dict[str, Any]) -> Engine:
    from adapters.engines.vllm_sharded import load_vllm_sharded

    return load_vllm_sharded(path, dtype=dtype, taps=taps or None, **arguments)


def _hf_sharded(path: Path, dtype: str, taps: list[str], arguments: dict[str, Any]) -> Engine:
    from adapters.engines.hf_sharded import load_hf_sharded

    if taps:
        raise LoadError("taps=[...] with backend='sharded' needs engine='vllm'")
    return load_hf_sharded(path, dtype=dtype, **arguments)


_ENGINES_OF: dict[tuple[str, str], Callable[[Path, str, list[str], dict[str, Any]], Engine]] = {
    ("hf", "eager"): _hf_eager,
    ("vllm", "eager"): _vllm_eager,
    ("hf", "taps"): _hf_taps,
    ("vllm", "taps"): _vllm_taps,
    ("vllm", "sharded"): _vllm_sharded,
    ("hf", "sharded"): _hf_sharded,
}
