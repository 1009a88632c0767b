"""The part that runs inside the vLLM worker of one rank: the same as elsewhere, with whole tensors."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.platforms import current_platform

from adapters.engines.vllm_sharded import PATIENCE
from adapters.engines.vllm_sharding import planned
from adapters.engines.vllm_worker import Worker, WorkerHost
from adapters.engines.wire import Carried, Kept
from adapters.errors import LoadError
from adapters.live import Live
from adapters.ranks import Ranks
from adapters.sharded import Sharding, WholeInterleaver


def _all_gather(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """vLLM's own collective, which knows the fast way between these ranks."""
    group = get_tp_group()
    found: torch.Tensor = group.all_gather(x if x.dim() else x[None], 0)
    return [part.view(x.shape) for part in found.chunk(group.world_size)]


class RankHost(WorkerHost):
    """Interventions beside the model runner of one rank."""

    il: WholeInterleaver

    def __init__(self, runner: Any, taps: Sequence[str] | None, sharding: Sharding, patience: float) -> None:
        super().__init__(runner, taps)
        self.ranks = Ranks(_all_gather, timeout=patience)
        self.il = WholeInterleaver(self, sharding, self.ranks)

    def weight(self, path: str) -> torch.Tensor:
        return self.il.parameter(path, super().weight(path))

    def unembed(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.il.apart("unembed", super().unembed, x)
        return logits

    def admitted(self, live: Live, carried: Carried) -> None:
        assert live.trail is not None
        live.trail.reads = carried.check_ranks

    def kept(self, live: Live) -> Kept:
        kept, trail = super().kept(live), self.il.trails.pop(live.id)
        if trail.reads:
            for name, entries in live.saves.items():
                trail.add(f"what was saved as {name!r}", entries)
        return Kept(kept.saves if self.ranks.rank == 0 else {}, kept.error, kept.stopped, kept.tokens, trail.entries())


class RankWorker(Worker):
    """The platform's worker of one rank."""

    tapgrid: RankHost | None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if not current_platform.use_all_gather():
            raise LoadError(
                f"on {current_platform.device_name} vLLM gathers logits on one rank only, so not every rank's "
                "intervention would see them"
            )
        with planned(self.parallel_config.tensor_parallel_size) as self.tapgrid_plan:
            super().load_model(*args, **kwargs)
        # Of vLLM's two Ray executors the older one goes past the worker, straight to its runner.
        runner, host = self.model_runner, self.tapgrid
        assert host is not None
        plain = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            host.scheduled(scheduler_output)
            return plain(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model

    def execute_model(self, scheduler_output: Any) -> Any:
        return super(Worker, self).execute_model(scheduler_output)

    def tapgrid_host(self, taps: Sequence[str] | None) -> RankHost:
        if not self.tapgrid_plan:
            raise LoadError(
                "vLLM loaded the weights in a way that showed no plan (load_format): use load_format='auto', so that "
                "it can be read how the model is split"
            )
        patience = float(self.vllm_config.additional_config[PATIENCE])
        return RankHost(self.model_runner, taps, self.tapgrid_plan[0], patience)

    def tapgrid_sharding(self) -> bytes:
        """collective_rpc: the plan of this engine."""
        assert self.tapgrid is not None
        return pickle.dumps(self.tapgrid.il.sharding)

    def tapgrid_collect(self, ids: list[str], packed: bool = True) -> Any:
        """collective_rpc: what `ids` left on this rank, and whether the ranks have to regroup."""
        assert self.tapgrid is not None
        found = self.tapgrid.collect(ids, packed=False)
        return pickle.dumps((self.tapgrid.ranks.broken, [kept and kept.packed() for kept in found]))

    def tapgrid_regroup(self) -> None:
        """collective_rpc: agree anew, after the ranks have parted."""
        assert self.tapgrid is not None
        self.tapgrid.ranks.regroup()
