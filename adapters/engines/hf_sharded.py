"""`transformers` with its own tensor parallelism: the client that starts the ranks, or a rank that `torchrun` started.

Without `torchrun`, `load` starts one process a rank and speaks to each over a socket. Under `torchrun` every rank's own
script calls `load` and `run` alike, and every one of them gets every output, whole.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from adapters.engines.hf_rank import RankEngine, load_rank
from adapters.engines.vllm_sharded import check_divides, merged
from adapters.engines.wire import Carried, Kept
from adapters.errors import LoadError
from adapters.points import Location
from adapters.runtime import Ask, Output

_ROOT = Path(__file__).resolve().parents[2]


class JoinedEngine(RankEngine):
    """A rank of a `torchrun`: every rank runs the same script, and gets the same outputs."""

    def run(self, asks: Sequence[Ask]) -> list[Output]:
        mine = self.kept(asks)
        heard: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(heard, (self.ranks.broken, [kept.packed() for _, kept in mine]))
        if any(broken for broken, _ in heard):
            self.ranks.regroup()
        together = zip(*(found for _, found in heard), strict=True)
        return [
            _output(ask, out.token_ids, merged(k), self.tokenizer)
            for ask, (out, _), k in zip(asks, mine, together, strict=True)
        ]


class LaunchedEngine:
    """The client of ranks in processes of their own."""

    in_process = False
    taps: Sequence[str] | None = None
    buffers: Sequence[str] = ()
    gradients = False

    def __init__(self, path: Path, tp: int, arguments: dict[str, Any]) -> None:
        from transformers import AutoTokenizer

        self._ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []
        try:
            port = _free_port()
            for rank in range(tp):
                self._ranks.append(_launch(rank, tp, port))
            hellos = self._ask_all(pickle.dumps((path, arguments)))
        except BaseException:
            self.close()
            raise
        self.points, self.sharding, self.eos_token_id, self.max_tokens, self._described = pickle.loads(hellos[0])
        self.tokenizer = AutoTokenizer.from_pretrained(path) if any(path.glob("tokenizer*")) else None
        self.tp, self.running = tp, False

    def run(self, asks: Sequence[Ask]) -> list[Output]:
        packed: dict[Any, bytes] = {}
        for a in asks:
            if tuple(map(id, a.fns)) not in packed:
                packed[tuple(map(id, a.fns))] = Carried(a.fns).packed()
        sent = [{**vars(a), "fns": packed[tuple(map(id, a.fns))]} for a in asks]
        answers = [pickle.loads(b) for b in self._ask_all(pickle.dumps(sent))]
        if any(broken for broken, _ in answers):
            self._ask_all(b"regroup")
        together = zip(*(found for _, found in answers), strict=True)
        return [
            _output(ask, each[0][0], merged([kept for _, kept in each]), self.tokenizer)
            for ask, each in zip(asks, together, strict=True)
        ]

    def _ask_all(self, message: bytes) -> list[bytes]:
        """Send to every rank, then hear every rank."""
        for i, (process, connection) in enumerate(self._ranks):
            try:
                connection.send_bytes(message)
            except OSError:
                raise _died(i, process) from None
        answers = []
        for i, (process, connection) in enumerate(self._ranks):
            try:
                answers.append(connection.recv_bytes())
            except (EOFError, OSError):
                raise _died(i, process) from None
        return answers

    def declared(self) -> list[Location]:
        return []

    def describe(self) -> dict[str, Any]:
        """The settings that the ranks run with, as plain data."""
        return {**self._described, "tp": self.tp}

    def close(self) -> None:
        for _, connection in self._ranks:
            connection.close()
        for process, _ in self._ranks:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._ranks.clear()


def _launch(rank: int, tp: int, port: int) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": tp, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    process = subprocess.Popen(
        [sys.executable, "-m", "adapters.engines.hf_rank", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={
            **os.environ,
            **{name: str(value) for name, value in variables.items()},
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path]),
        },
    )
    theirs.close()
    return process, Connection(ours.detach())


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _died(rank: int, process: subprocess.Popen[bytes]) -> LoadError:
    try:
        code = process.wait(5)
    except subprocess.TimeoutExpired:
        code = None
    return LoadError(f"rank {rank} has gone (exit code {code}); what it said is above. load() again")


def _output(ask: Ask, tokens: Sequence[int], kept: Kept | None, tokenizer: Any) -> Output:
    assert kept is not None
    own = tuple(tokens[: kept.tokens])
    return Output(ask.id, ask.prompt, own, kept.saves, kept.error, kept.stopped, tokenizer)


def load_hf_sharded(path: Path, *, dtype: str, tp: int, **arguments: Any) -> LaunchedEngine | JoinedEngine:
    """Load a local folder with `transformers` over `tp` ranks: those of a `torchrun`, or new ones.

    `arguments` are `attention` (a kernel's name), `threads` (of one rank) and `rank_timeout` (seconds that a rank waits
    for the others in a collective).
    """
    check_divides(path, tp, copies=False)
    if dist.is_torchelastic_launched():
        ranks = int(os.environ["WORLD_SIZE"])
        if ranks != tp:
            raise LoadError(f"tp={tp}, and torchrun started {ranks} ranks: say --nproc-per-node {tp}")
        engine: LaunchedEngine | JoinedEngine = load_rank(path, dtype=dtype, make=JoinedEngine, **arguments)
    else:
        engine = LaunchedEngine(path, tp, {"dtype": dtype, **arguments})
    if not any(layer.split for layer in engine.sharding.modules.values()):
        engine.close()
        raise LoadError(
            f"tp={tp}, and transformers has no plan that splits any module of {path.name}, so every rank would "
            "hold all of it: use backend='eager' on one rank, or engine='vllm'"
        )
    return engine
