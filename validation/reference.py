"""The reference: what `transformers` computes for a token sequence, in float32 and in the engine's dtype.

    with References(model, cache, threads=1) as refs:
        exact, own = refs.get([Query(ids, "float32", ("resid_post.15",)), Query(ids, "bfloat16", ("resid_post.15",))])
    exact["resid_post.15"]                  # [tokens, d_model] float32

The computing is done elsewhere. A server process, which has imported torch and holds no model, forks a child
for each batch of misses; the child loads the checkpoint, answers and exits. So a timed engine shares neither
process nor memory with a second model, and only the first batch pays for the imports. Answers are kept in
`cache` under everything that decides them. Importing this file imports neither torch nor transformers.

By hand, `python -m validation.reference REQUEST.json` answers one request file and exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TextIO

import numpy as np
import numpy.typing as npt

from validation.query import Query, Write, folder_hash, key

__all__ = ["Query", "ReferenceFailed", "References", "Server", "Write", "prune"]

Array = npt.NDArray[Any]
ROOT = Path(__file__).resolve().parent.parent
CACHE_BYTES = 4 * 2**30


class ReferenceFailed(RuntimeError):
    """The reference process could not answer; the message holds what it said."""


class Server:
    """The process that computes: started at the first request, ended by `close` or with this process."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: Path) -> None:
        """Have a request file answered; returns when its answers are on disk."""
        stdin, stdout = self._pipes()
        with contextlib.suppress(BrokenPipeError):  # a dead server says so by an empty answer
            stdin.write(f"{request}\n")
            stdin.flush()
        line = stdout.readline()
        if not line:
            raise ReferenceFailed(f"the reference process died (exit code {self.close()}); its stderr says why")
        if error := json.loads(line)["error"]:
            raise ReferenceFailed(error)

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        if self._process is None or self._process.poll() is not None:
            env = {
                **os.environ,
                "OMP_NUM_THREADS": str(self.threads),
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            }
            env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
            command = [sys.executable, "-m", "validation.reference", "--serve"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def close(self) -> int | None:
        """End the process and return its exit code; a later `ask` starts another."""
        process, self._process = self._process, None
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return process.wait(timeout=60)


class References:
    """Answers queries about one model from the cache, and has the rest computed. A context manager."""

    def __init__(
        self, model: Path, cache: Path, *, threads: int = 1, device: str = "auto", server: Server | None = None
    ) -> None:
        self.model, self.cache, self.threads = Path(model), Path(cache), threads
        self.device = device if device != "auto" or shutil.which("nvidia-smi") else "cpu"
        self.hash = folder_hash(self.model)
        self.server = server or Server(threads)
        self.computed = 0

    def get(self, queries: Sequence[Query]) -> list[dict[str, Array]]:
        """One dict of arrays a query, in order."""
        paths = [self.cache / f"{key(self.hash, q, self.device)}.npz" for q in queries]
        missing = {p: q for p, q in zip(paths, queries, strict=True) if not p.exists()}
        if missing:
            self._compute(missing)
        return [_load(p) for p in paths]

    def _compute(self, missing: dict[Path, Query]) -> None:
        self.cache.mkdir(parents=True, exist_ok=True)
        prune(self.cache, CACHE_BYTES)
        request = {
            "model": str(self.model.resolve()), "threads": self.threads, "device": self.device,
            "queries": [q.to_json() for q in missing.values()], "paths": [str(p.resolve()) for p in missing],
        }  # fmt: skip
        with tempfile.NamedTemporaryFile("w", suffix=".json", dir=self.cache) as f:
            json.dump(request, f)
            f.flush()
            try:
                self.server.ask(Path(f.name).resolve())
            except ReferenceFailed as failed:
                raise ReferenceFailed(f"reference for {self.model}: {failed}") from failed
        self.computed += len(missing)

    def close(self) -> None:
        """End the computing process."""
        self.server.close()

    def __enter__(self) -> References:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _load(path: Path) -> dict[str, Array]:
    with np.load(path) as data:
        os.utime(path)  # pruning drops what was used longest ago
        return {name: data[name] for name in data.files}


def prune(cache: Path, limit: int) -> None:
    """Drop the answers used longest ago until `cache` holds at most `limit` bytes."""
    kept = 0
    stats = {}
    for path in cache.glob("*.npz"):
        with contextlib.suppress(FileNotFoundError):  # another worker pruned it
            stats[path] = path.stat()
    for path, stat in sorted(stats.items(), key=lambda item: item[1].st_mtime, reverse=True):
        kept += stat.st_size
        if kept > limit:
            path.unlink(missing_ok=True)


def answer_file(request: Path) -> None:
    """Compute one request file in this process."""
    from validation import compute

    data = json.loads(request.read_text())
    queries = [Query.from_json(q) for q in data["queries"]]
    compute.run(Path(data["model"]), queries, [Path(p) for p in data["paths"]], data["threads"], data["device"])


def serve(requests: TextIO) -> None:
    """Answer request files named on `requests`, a line each, one forked child for each; ends with its input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's to handle; we end when it does
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr, not into the protocol
    from validation import compute

    compute.warm()
    for line in iter(requests.readline, ""):
        print(json.dumps({"error": _forked(Path(line.strip()))}), file=reply, flush=True)


def _forked(request: Path) -> str | None:
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        code = 1
        try:
            answer_file(request)
            code = 0
        except BaseException as error:
            traceback.print_exc()
            os.write(send, f"{type(error).__name__}: {error}".encode()[:60_000])
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    if status == 0:
        return None
    return said or f"the child ended with status {os.waitstatus_to_exitcode(status)} (-9 is mostly: out of memory)"


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve(sys.stdin)
    elif len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
        answer_file(Path(sys.argv[1]))
    else:
        print("usage: python -m validation.reference REQUEST.json | --serve", file=sys.stderr)
        sys.exit(2)
