"""Which vLLM releases the runtime is tested on, what is refused by name, and what differs between releases."""

from __future__ import annotations

import gc
import re
from typing import Any

from adapters.errors import LoadError

# Shown at more than the ends: `tapgrid adapter check tapgrid-eager@vllm-0.30`, and the others of `tapgrid env list`.
OLDEST, NEWEST = (0, 27, 1), (0, 32, 0)

# What the runtime hangs on in vLLM's model runner, with what goes through it.
SEAMS = {
    "_model_forward": "every forward pass",
    "_sample": "every token drawn",
    "query_start_loc": "where each request's rows begin",
    "discard_request_mask": "which requests draw no token in a pass",
    "input_batch": "which request is where",
}

# Engine argument -> whether its value is refused, and why.
_REFUSED: dict[str, tuple[Any, str]] = {
    "pipeline_parallel_size": (lambda v: v not in (None, 1), "a stage holds only some of the layers"),
    "speculative_config": (lambda v: v is not None, "rows of rejected tokens would reach the intervention"),
    "enable_dbo": (bool, "a pass is cut into micro-batches, so its rows are apart"),
    "decode_context_parallel_size": (lambda v: v not in (None, 1), "the tokens of a request lie on several ranks"),
}


def parse(version: str) -> tuple[int, int, int]:
    """The release that a version string names, without suffixes.

    >>> parse("0.27.1+cpu"), parse("0.30.0rc1")
    ((0, 27, 1), (0, 30, 0))
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)


def check_version(version: str) -> None:
    """Refuse a vLLM outside of the tested range.

    >>> check_version("0.28.0")
    >>> check_version("0.26.0")
    Traceback (most recent call last):
        ...
    adapters.errors.LoadError: vLLM 0.26.0 is outside of the tested releases, 0.27.1 to 0.32.0: install one of those
    """
    if not OLDEST <= parse(version) <= NEWEST:
        oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
        raise LoadError(f"vLLM {version} is outside of the tested releases, {oldest} to {newest}: install one of those")


def check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse engine arguments that interventions cannot be right with.

    >>> check_arguments({"enable_dbo": True})
    Traceback (most recent call last):
        ...
    adapters.errors.LoadError: enable_dbo=True is not supported: a pass is cut into micro-batches, so its rows are apart
    """
    for name, (is_refused, why) in _REFUSED.items():
        if is_refused(arguments.get(name)):
            raise LoadError(f"{name}={arguments[name]!r} is not supported: {why}")


def shut_down(client: Any) -> None:
    """Shut an engine down. vLLM's own way tears the distributed state of the whole process down with it, and so every
    other engine in this process: while there is one, only this engine's own parts are shut down."""
    core = getattr(client, "engine_core", None)
    if core is None or not _others(core):
        client.shutdown()
        return
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()


def _others(core: Any) -> bool:
    """Whether another engine lives in this process, ours or anybody's."""
    gc.unfreeze()  # vLLM hides what was there at its boot from the collector; shutting down undoes that in any case
    gc.collect()
    kind = next(k for k in type(core).__mro__ if k.__name__ == "EngineCore")
    return any(issubclass(type(o), kind) and o is not core for o in gc.get_objects())


def check_runner(runner: Any, version: str) -> None:
    """Refuse a model runner that lacks a seam: what is missing would be captured as nothing and steered as nothing."""
    missing = [f"{name} ({what})" for name, what in SEAMS.items() if not hasattr(runner, name)]
    if missing:
        raise LoadError(f"vLLM {version}: {type(runner).__name__} has no {', no '.join(missing)}; see versions.py")
