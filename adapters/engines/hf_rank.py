"""One rank of `transformers` with tensor parallelism: the engine beside its part of the model, and the loop that serves
a client in another process (`python -m adapters.engines.hf_rank FD`)."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from adapters.engines.hf import HFEngine, kernel_for
from adapters.engines.hf_sharding import sharding_of
from adapters.engines.wire import Kept
from adapters.ranks import Ranks
from adapters.runtime import Ask, Output
from adapters.sharded import WholeInterleaver

R = TypeVar("R", bound="RankEngine")


class RankEngine(HFEngine):
    """A rank's part of a model, with interventions that see all of it. `run` is called on every rank alike."""

    gradients = False
    il: WholeInterleaver

    def __init__(self, model: Any, tokenizer: Any, ranks: Ranks) -> None:
        super().__init__(model, tokenizer)
        self.ranks, self.sharding = ranks, sharding_of(model, self.points, ranks.size)
        self.il = WholeInterleaver(self, self.sharding, ranks)

    def weight(self, path: str) -> torch.Tensor:
        held = super().weight(path)
        # transformers keeps on every parameter how it is placed.
        full = getattr(held, "full_tensor", None)
        return self.il.parameter(path, held) if full is None else self.il.apart(path, full)

    def unembed(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.il.apart("unembed", super().unembed, x)
        return logits

    def kept(self, asks: Sequence[Ask]) -> list[tuple[Output, Kept]]:
        """Run, and what this rank left of each request, its trail with it."""
        self.il.check_reads = any(a.check_ranks for a in asks)
        self.il.trails.clear()
        return [(out, self._kept(out)) for out in super().run(asks)]

    def _kept(self, out: Output) -> Kept:
        trail = self.il.trails[out.request]
        if trail.reads:
            for name, entries in out.saves.items():
                trail.add(f"what was saved as {name!r}", list(entries))
        saves = out.saves if self.ranks.rank == 0 else {}
        return Kept(saves, out.error, out.stopped, len(out.token_ids), trail.entries())


def load_rank(
    path: Path,
    *,
    dtype: str,
    attention: str | None = None,
    threads: int | None = None,
    rank_timeout: float = 30.0,
    make: type[R] = RankEngine,  # type: ignore[assignment]
) -> R:
    """Load this rank's part, as an engine of class `make`. The ranks' process group is made here where there is none,
    from the variables that `torchrun` sets."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads or 1)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    attention = attention or kernel_for(AutoConfig.from_pretrained(path))
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation=attention, **_by_the_models_own_plan()
    )
    model.requires_grad_(False)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(path) if any(path.glob("tokenizer*")) else None
    return make(model, tokenizer, Ranks(_all_gather, timeout=rank_timeout))


def _by_the_models_own_plan() -> dict[str, Any]:
    """The argument that splits a model; releases differ."""
    import transformers

    config = getattr(transformers, "DistributedConfig", None)
    return {"tp_plan": "auto"} if config is None else {"distributed_config": config(tp_plan="auto")}


def _all_gather(x: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return parts


def serve(connection: Connection) -> None:
    """Load what the client asks for, then run what it sends until it hangs up."""
    path, arguments = pickle.loads(connection.recv_bytes())
    engine = load_rank(path, **arguments)
    hello = (engine.points, engine.sharding, engine.eos_token_id, engine.max_tokens, engine.describe())
    connection.send_bytes(pickle.dumps(hello))
    while True:
        try:
            received = connection.recv_bytes()
        except EOFError:
            return
        if received == b"regroup":
            engine.ranks.regroup()
            connection.send_bytes(b"")
            continue
        asks = [Ask(**{**a, "fns": a["fns"].fns}) for a in _unpacked(received)]
        found = [(out.token_ids, kept.packed()) for out, kept in engine.kept(asks)]
        connection.send_bytes(pickle.dumps((engine.ranks.broken, found)))


def _unpacked(received: bytes) -> list[dict[str, Any]]:
    """The asks; functions that are the same for several of them travelled once, and come out as the same object."""
    asks: list[dict[str, Any]] = pickle.loads(received)
    once: dict[bytes, Any] = {}
    for ask in asks:
        packed = ask["fns"]
        if packed not in once:
            once[packed] = pickle.loads(packed)
        ask["fns"] = once[packed]
    return asks


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
