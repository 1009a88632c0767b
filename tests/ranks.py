"""Two processes that hold one small model in slices, for tests of the sharded backend without an engine.

`Net` has every kind of cut: fused q|k|v with one key-value head for both ranks, a row-parallel projection, fused
gate|up, a row-parallel one whose sum is not taken, and modules that no plan knows. `whole()` is the same model in one
process. Each function of `CASES` runs on both ranks; what rank r returned is `outcomes()[name][r]`.
"""

from __future__ import annotations

import functools
import pickle
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from adapters.engines.module import WrappedModule
from adapters.ranks import Ranks, Trail
from adapters.sharded import Layer, Sharding, WholeInterleaver
from adapters.splits import Piece, Split, even, own

RANKS = 2
D, HEADS, DIM, MLP = 8, 4, 2, 12
QKV = Split("q|k|v", (Piece(HEADS // RANKS * DIM), Piece(DIM, 2), Piece(DIM, 2)))
GATE_UP = Split("gate|up", (Piece(MLP // RANKS), Piece(MLP // RANKS)))
PLAN = Sharding(
    RANKS,
    {
        "qkv": Layer("qkv", output=QKV, parameters={"weight": Split("q|k|v", QKV.pieces, 0)}),
        "o": Layer(
            "row", even("row", HEADS * DIM // RANKS), parameters={"weight": even("row", HEADS * DIM // RANKS, 1)}
        ),
        "gate_up": Layer("merged", output=GATE_UP, parameters={"weight": Split("gate|up", GATE_UP.pieces, 0)}),
        "down": Layer("row", even("row", MLP // RANKS), Split("sum")),
        "out": Layer("replicated"),
    },
)


class Sum(torch.nn.Linear):
    """Row-parallel: every rank's product is a summand."""

    reduce = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.reduce and dist.is_initialized():
            dist.all_reduce(y)
        return y


class Both(torch.nn.Module):
    """Hands on what all ranks hold alike, and beside it what each holds for itself: attention with its weights."""

    def forward(self, x: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, own


class Net(torch.nn.Module):
    """One block of attention without softmax (heads are summed with their key-value head) and a gated MLP."""

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        ranks = 1 if rank is None else RANKS
        self.heads = HEADS // ranks
        self.qkv = torch.nn.Linear(D, (self.heads + 2) * DIM, bias=False)
        self.o = Sum(self.heads * DIM, D, bias=False)
        self.both = Both()
        self.gate_up = torch.nn.Linear(D, 2 * MLP // ranks, bias=False)
        self.act = torch.nn.SiLU()
        self.down = Sum(MLP // ranks, D, bias=False)
        self.down.reduce = False
        self.norm = torch.nn.LayerNorm(D)
        self.out = torch.nn.Linear(D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split([self.heads * DIM, DIM, DIM], -1)
        z = q.unflatten(-1, (self.heads, DIM)) * k[:, None] + v[:, None]
        x = x + self.both(self.o(z.flatten(1)), z)[0]
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        y = self.down(self.act(gate) * up)
        if dist.is_initialized():
            dist.all_reduce(y)
        out: torch.Tensor = self.out(x + y)
        return out


def whole() -> Net:
    torch.manual_seed(0)
    return Net().requires_grad_(False)


def part(rank: int) -> Net:
    """What a rank holds of `whole()`."""
    mine, cuts = (
        Net(rank).requires_grad_(False),
        {
            "qkv.weight": PLAN.parameter("qkv.weight"),
            "o.weight": PLAN.parameter("o.weight"),
            "gate_up.weight": PLAN.parameter("gate_up.weight"),
            "down.weight": even("row", MLP // RANKS, 1),
        },
    )
    for name, p in whole().named_parameters():
        cut = cuts.get(name)
        mine.get_parameter(name).copy_(p if cut is None else own(p, cut, rank, RANKS))
    return mine


class Rank(WrappedModule):
    """One rank's engine."""

    def __init__(self, model: torch.nn.Module, ranks: Ranks) -> None:
        super().__init__(model)
        self.ranks = ranks
        self.il = WholeInterleaver(self, PLAN, ranks)  # type: ignore[arg-type]

    def weight(self, path: str) -> torch.Tensor:
        return self.il.parameter(path, super().weight(path))


INPUTS = [torch.randn(n, D, generator=torch.Generator().manual_seed(n)) for n in (3, 1, 2)]
Case = Callable[[Any, int], Any]
CASES: dict[str, Case] = {}


def case(fn: Case) -> Case:
    CASES[fn.__name__] = fn
    return fn


def read_and(place: str = "", edit: Any = None) -> Any:
    """Save what is cut and what is whole, in order; at `place` ("qkv", "o.in") `edit` first."""

    def fn(m: Any) -> None:
        for path in ("qkv", "o.in", "o", "norm", "gate_up", "down.in", "down", "out"):
            module, _, side = path.partition(".")
            x = m.at(module).input if side else m.at(module).output
            if path == place:
                edit(x)
            m.save(path, x)

    return fn


# Edits in place by where: over the edge between the ranks, of shared heads, of one half of a fused projection.
EDITS: dict[str, Any] = {
    "qkv": lambda x: x[:, 3:9].mul_(-2.0),
    "o.in": lambda x: x[:, 3:5].fill_(7.0),
    "gate_up": lambda x: x[:, MLP:].fill_(0.0),
    "down": lambda x: x.fill_(3.0),
    "norm": lambda x: x.add_(1.0),
}


def everything(engine: Any, fns: Any) -> list[Any]:
    """Outputs, saves and errors of a run on `INPUTS`; one function, or one for each."""
    from adapters.engines.module import Input

    fns = fns if isinstance(fns, list) else [fns] * len(INPUTS)
    results = engine.run([Input(str(i), x, (f,)) for i, (x, f) in enumerate(zip(INPUTS, fns, strict=True))])
    return [(r.output, r.saves, None if r.error is None else f"{type(r.error).__name__}: {r.error}") for r in results]


@case
def reads(engine: Any, rank: int) -> Any:
    return everything(engine, read_and())


@case
def writes(engine: Any, rank: int) -> Any:
    return {place: everything(engine, [nothing, read_and(place, edit), nothing]) for place, edit in EDITS.items()}


def nothing(m: Any) -> None:
    """Nothing."""


@case
def two_functions(engine: Any, rank: int) -> Any:
    from adapters.engines.module import Input

    def first(m: Any) -> None:
        m.at("qkv").output[:] += 1.0

    def second(m: Any) -> None:
        m.save("seen", m.at("qkv").output)

    (result,) = engine.run([Input("0", INPUTS[0], (first, second))])
    return result.output, result.saves


@case
def weights(engine: Any, rank: int) -> Any:
    def fn(m: Any) -> None:
        for path in ("qkv.weight", "o.weight", "gate_up.weight", "out.weight", "norm.weight"):
            m.save(path, m.weight(path))

    return everything(engine, fn)[0][1:]


@case
def an_unplanned_slice(engine: Any, rank: int) -> Any:
    def fn(m: Any) -> None:
        m.save("act", m.at("act").output)

    return [error for _, _, error in everything(engine, fn)]


@case
def what_lies_beside(engine: Any, rank: int) -> Any:
    """A tuple of a point and a slice: refused as a module, and without the slice as that point."""

    def fn(m: Any) -> None:
        x = m.at("both").output
        m.save("x", x)
        x[:] = 1.0
        m.save("norm", m.at("norm").output)

    refused = [error for _, _, error in everything(engine, fn)]
    key = ("both", "out")
    engine.points.there = lambda at: ["attn_out[0]"] if at == key else []
    return refused, everything(engine, fn)


@case
def gathers(engine: Any, rank: int) -> Any:
    """How many gathers a run costs: for three requests at one place, and at places that are whole."""
    counted = {}
    for path in ("qkv", "norm", "out"):
        everything(engine, lambda m, path=path: m.at(path).output)
        before = engine.ranks.visits, engine.ranks._count
        everything(engine, lambda m, path=path: m.save("x", m.at(path).output))
        counted[path] = (engine.ranks.visits - before[0], engine.ranks._count - before[1])
    return counted


@case
def an_error_in_one(engine: Any, rank: int) -> Any:
    def bad(m: Any) -> None:
        m.at("qkv").output[:] = 0.0
        raise KeyError("mine")

    return everything(engine, [read_and(), bad, read_and()])


@case
def another_place_on_each_rank(engine: Any, rank: int) -> Any:
    def fn(m: Any) -> None:
        m.save("x", m.at("qkv" if rank == 0 else "gate_up").output)

    found = everything(engine, fn)
    broken = engine.ranks.broken
    engine.ranks.regroup()
    return [error for _, _, error in found], broken, everything(engine, read_and())


@case
def only_on_one_rank(engine: Any, rank: int) -> Any:
    def fn(m: Any) -> None:
        if rank == 1:
            m.save("x", m.at("qkv").output)

    found = everything(engine, fn)
    broken = engine.ranks.broken
    engine.ranks.regroup()
    return [error for _, _, error in found], broken, everything(engine, read_and())


@case
def trails(engine: Any, rank: int) -> Any:
    """Digests of what was read and written, alike on both ranks unless a function draws numbers of its own."""
    from adapters.live import Job
    from adapters.rows import Slab

    def run(fn: Any, reads: bool) -> list[Any]:
        live = engine.il.live("t", (fn,))
        live.trail = Trail(reads)
        with torch.no_grad():
            engine.il.begin(Slab([0, 3]), [Job(live, 0, 0, 3, True, draws=False)])
            engine.model(INPUTS[0])
            engine.il.end()
        engine.hooks.clear()
        assert live.error is None, live.error
        return list(live.trail.entries())

    def alike(m: Any) -> None:
        m.at("qkv").output[:] += 1.0
        m.at("norm").output[:] += 1.0

    def own_noise(m: Any) -> None:
        m.save("qkv", m.at("qkv").output)
        m.at("norm").output[:] += random.SystemRandom().random()

    return run(alike, False), run(alike, True), run(own_noise, False), run(own_noise, True)


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)

    def all_gather(x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(parts, x)
        return parts

    ranks = Ranks(all_gather, timeout=5.0)
    found = {name: fn(Rank(part(rank), ranks), rank) for name, fn in CASES.items()}
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@functools.cache
def outcomes() -> Mapping[str, list[Any]]:
    """What every case returned, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder,), nprocs=RANKS)  # type: ignore[no-untyped-call]
        each = [pickle.loads(Path(folder, f"{r}.pickle").read_bytes()) for r in range(RANKS)]
    return {name: [found[name] for found in each] for name in CASES}
