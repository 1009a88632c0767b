"""vLLM with tensor parallelism: the worker of one rank, and the client that hears all of them.

Every rank gets the interventions and runs them; the first one's saves come home, the others' trails are compared with
its own.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapters.engines.vllm import VLLMEngine, load_vllm
from adapters.engines.wire import Kept
from adapters.errors import LoadError, RanksDivergedError
from adapters.points import dimensions
from adapters.ranks import parted
from adapters.sharded import Sharding
from adapters.work import Settings

WORKER = "adapters.engines.vllm_rank.RankWorker"
# The key in `additional_config` of how many seconds a rank waits for the others.
PATIENCE = "tapgrid_rank_timeout"


class ShardedEngine(VLLMEngine):
    """vLLM split over several ranks; interventions run on each of them, on whole tensors."""

    sharded = True

    def __init__(self, llm: Any, arguments: dict[str, Any], host: Any) -> None:
        super().__init__(llm, arguments, host)
        self.sharding: Sharding = pickle.loads(llm.collective_rpc("tapgrid_sharding")[0])

    def _fetch(self, carried: list[str]) -> list[Kept | None]:
        answers = [pickle.loads(a) for a in self.llm.collective_rpc("tapgrid_collect", args=(carried,))]
        if any(broken for broken, _ in answers):
            self.llm.collective_rpc("tapgrid_regroup")
        return [merged(kept) for kept in zip(*(found for _, found in answers), strict=True)]


def merged(ranks: Sequence[Kept | None]) -> Kept | None:
    """What all ranks left of one request: the first one's saves, and an error where any rank has one or where their
    trails part."""
    kept = [k.unpacked() for k in ranks if k is not None]
    if not kept:
        return None
    errors = {i: k.error for i, k in enumerate(kept) if k.error is not None}
    # What a user's function raised says more than that other ranks missed it afterwards.
    error = next(
        (e for e in errors.values() if not isinstance(e, RanksDivergedError)), next(iter(errors.values()), None)
    )
    if error is not None and len(errors) < len(kept):
        error.add_note(f"on rank {', '.join(map(str, errors))} of {len(kept)} only")
    if error is None:
        where = parted([k.trail for k in kept])
        if where is None and len({(k.stopped, k.tokens) for k in kept}) > 1:
            where = "when it stopped"
        if where is not None:
            error = RanksDivergedError(
                f"{where}: the ranks hold different values, so the intervention did not do the same on all of them: "
                "does it draw random numbers of its own, or look at a clock?"
            )
    return replace(kept[0], error=error, stopped=any(k.stopped for k in kept), tokens=min(k.tokens for k in kept))


def load_vllm_sharded(
    path: Path,
    *,
    dtype: str,
    tp: int,
    settings: Settings | None = None,
    taps: Sequence[str] | None = None,
    rank_timeout: float = 30.0,
    **overrides: Any,
) -> ShardedEngine:
    """Boot vLLM over `tp` ranks; `rank_timeout` is how many seconds a rank waits for the others in a collective."""
    check_divides(path, tp)
    if (replicas := overrides.get("data_parallel_size") or 1) > 1:
        raise LoadError(f"data_parallel_size={replicas} is not supported: run one engine for each replica")
    settings = replace(settings or Settings(dtype=dtype), tensor_parallel=tp)
    more = {"tensor_parallel_size": tp, "worker_cls": WORKER, **overrides}
    more["additional_config"] = {**(overrides.get("additional_config") or {}), PATIENCE: rank_timeout}
    engine = load_vllm(path, dtype=dtype, settings=settings, taps=taps, make=ShardedEngine, **more)
    assert isinstance(engine, ShardedEngine)
    if not any(layer.split for layer in engine.sharding.modules.values()):
        engine.close()
        raise LoadError(
            f"tp={tp}, and no module of {path.name} was recognised as split: vLLM's plan for it is not one that can be "
            "read here, so no tensor of it could be made whole; use backend='eager' on one rank"
        )
    return engine


def check_divides(path: Path, tp: int, *, copies: bool = True) -> None:
    """Refuse a model that tensor parallelism cannot divide, with the number that does not. `copies` is whether the
    engine can hold a key-value head on several ranks."""
    config = json.loads((path / "config.json").read_text())
    d = dimensions(config)
    named = {"attention heads": d.heads, "MLP neurons": d.d_mlp}
    for what, count in named.items():
        if count % tp:
            raise LoadError(
                f"{path.name} has {count} {what}, which do not divide by tp={tp}: choose a tp that divides them"
            )
    if d.kv_heads % tp and not copies:
        raise LoadError(
            f"{path.name} has {d.kv_heads} key-value heads, which do not divide by tp={tp}, and transformers does not "
            "hold one on several ranks: engine='vllm' does"
        )
    if d.kv_heads % tp and tp % d.kv_heads:
        raise LoadError(
            f"{path.name} has {d.kv_heads} key-value heads, and neither do they divide by tp={tp} nor tp by them: "
            "choose another tp"
        )
