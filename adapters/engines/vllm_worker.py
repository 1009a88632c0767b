"""The part that runs inside vLLM's worker: registers requests that carry interventions, and calls the interleaver
around each forward pass.

Nothing of the model runner is replaced while no such request is alive: the seams are instance attributes, set when the
first one arrives and deleted with the last.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch
from vllm.platforms import current_platform

from adapters.eager import Hooks
from adapters.engines.vllm import TAPS
from adapters.errors import LoadError
from adapters.interleave import Interleaver, Job, Key, Live
from adapters.points import LOGITS_KEY, SAMPLED_KEY, Points, dimensions, family_of
from adapters.rows import Slab
from adapters.taps import Taps

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

# The key under which a request carries its interventions in `SamplingParams.extra_args`.
EXTRA = "tapgrid"
# Bodies of `trace` and `steps` by request id; only an engine in this process has any.
BODIES: dict[str, Any] = {}
# Workers of engines in this process, newest last: how a client there reaches its own without a remote call.
WORKERS: list[Worker] = []


class WorkerHost:
    """Interventions beside one model runner (interleave.Host)."""

    def __init__(self, runner: Any, tokenizer: Any, taps: Sequence[str] | None) -> None:
        self.runner, self.model, self.tokenizer = runner, runner.model, tokenizer
        config = runner.model_config.hf_text_config
        self.points = Points(family_of(config.model_type), "vllm", dimensions(config))
        self.copies = taps is not None
        self.hooks: Hooks | Taps = Hooks(self.model) if taps is None else Taps(self.model, taps, self.points)
        self.il = Interleaver(self)
        self.live: dict[str, Live] = {}
        self.ended: set[str] = set()
        self._functions: dict[bytes, tuple[Any, ...]] = {}
        self._open: list[Job] = []
        self._seams = False

    # ---- what interventions borrow

    def attach(self, key: Key) -> None:
        self.hooks.attach(key, self.il)

    def weight(self, path: str) -> torch.Tensor:
        parameter: torch.Tensor = self.model.get_parameter(path).detach()
        return parameter

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        # Some families' norms always hand a residual back as well.
        normed = self.model.get_submodule(self.points.at("final_norm").key[0])(x)
        return normed if isinstance(normed, torch.Tensor) else normed[0]

    def unembed(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = type(self.model).compute_logits(self.model, self.norm(x))
        return logits

    # ---- requests

    def admit(self, id: str, sampling_params: Any) -> None:
        """Register a new request, if it carries interventions."""
        payload = (sampling_params.extra_args or {}).get(EXTRA) if sampling_params is not None else None
        if payload is None:
            return
        fns = self._functions.get(payload)
        if fns is None:
            # Requests of one call share the same bytes: unpickled once, kept while anything is alive.
            fns = self._functions[payload] = cloudpickle.loads(payload)
        self.live[id] = self.il.live(id, fns, BODIES.pop(id.rsplit("-", 1)[0], None))
        self._attach_seams()

    def collect(self, ids: list[str], *, packed: bool) -> Any:
        """Take finished requests off and hand back what they saved: [(saves, error, stopped)] in the order of `ids`."""
        found = []
        for id in ids:
            live = self.live.pop(id, None)
            self.ended.discard(id)
            found.append((live.saves, live.error, live.stopped) if live is not None else None)
        if not self.live:
            self._detach_seams()
            self.hooks.clear()
            self._functions.clear()
        return pickle.dumps([f and (_joined(f[0]), _portable(f[1]), f[2]) for f in found]) if packed else found

    # ---- seams

    def _attach_seams(self) -> None:
        if self._seams:
            return
        self._seams = True
        runner, model = self.runner, self.model
        self._plain = (runner._model_forward, model.compute_logits, runner._sample)
        runner._model_forward, model.compute_logits, runner._sample = self._forward, self._compute_logits, self._sample

    def _detach_seams(self) -> None:
        if self._seams:
            self._seams = False
            del self.runner._model_forward, self.model.compute_logits, self.runner._sample

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        batch, n = self.runner.input_batch, self.runner.input_batch.num_reqs
        starts = self.runner.query_start_loc.np[: n + 1].tolist()
        discarded = self.runner.discard_request_mask.np
        computed, prompts = batch.num_computed_tokens_cpu, batch.num_prompt_tokens
        jobs = []
        for i, id in enumerate(batch.req_ids[:n]):
            live = self.live.get(id)
            if live is not None and not live.ended:
                first = int(computed[i])
                jobs.append(Job(live, i, first, starts[i + 1] - starts[i], first < prompts[i], not discarded[i]))
        self._open = jobs
        self.il.begin(Slab(starts), jobs)
        try:
            return self._plain[0](*args, **kwargs)
        except BaseException:
            self.il.abandon()
            raise

    def _compute_logits(self, hidden: torch.Tensor) -> Any:
        logits = self._plain[1](hidden)
        if self._open:
            self.il.visit(LOGITS_KEY, logits)
        return logits

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        drawn = self._plain[2](*args, **kwargs)
        if self._open:
            self.il.visit(SAMPLED_KEY, drawn.sampled_token_ids)
            self.il.end()
            for job in self._open:
                if job.live.ended:
                    self.ended.add(job.live.id)
            self._open = []
        return drawn


def _joined(saves: dict[str, list[Any]]) -> dict[str, Any]:
    """Saves ready for the wire: a name whose entries are rows of one kind becomes one tensor and its lengths."""
    return {name: _join(entries) for name, entries in saves.items()}


def _join(entries: list[Any]) -> tuple[str, Any, list[int]]:
    alike = all(
        isinstance(e, torch.Tensor) and e.dim() and e.dtype == entries[0].dtype and e.shape[1:] == entries[0].shape[1:]
        for e in entries
    )
    if alike:
        return "rows", torch.cat(entries).cpu(), [e.shape[0] for e in entries]
    return "list", [e.cpu() if isinstance(e, torch.Tensor) else e for e in entries], []


def split(saves: dict[str, tuple[str, Any, list[int]]]) -> dict[str, list[Any]]:
    """The client's side of `_joined`: entries as they were saved."""
    return {name: list(kept.split(lengths)) if how == "rows" else kept for name, (how, kept, lengths) in saves.items()}


def _portable(error: BaseException | None) -> bytes | None:
    """An exception as bytes, with its traceback as a note, since frames do not travel."""
    if error is None:
        return None
    import traceback

    error.add_note("in the worker:\n" + "".join(traceback.format_exception(error)))
    try:
        return bytes(cloudpickle.dumps(error))
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.__notes__ = error.__notes__
        return bytes(cloudpickle.dumps(plain))


class Worker(PlatformWorker):  # type: ignore[misc]
    """The platform's worker, with room for interventions."""

    tapgrid: WorkerHost | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if not hasattr(self.model_runner, "_model_forward") or not hasattr(self.model_runner, "query_start_loc"):
            import vllm

            raise LoadError(
                f"vLLM {vllm.__version__}: this model runner ({type(self.model_runner).__name__}) has other seams than 0.27.1's"
            )
        tokenizer = None
        if not self.model_config.skip_tokenizer_init:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.model_config.tokenizer)
        self.tapgrid = WorkerHost(self.model_runner, tokenizer, (self.vllm_config.additional_config or {}).get(TAPS))
        WORKERS.append(self)

    def execute_model(self, scheduler_output: Any) -> Any:
        host = self.tapgrid
        if host is not None:
            for new in scheduler_output.scheduled_new_reqs:
                host.admit(new.req_id, new.sampling_params)
        return super().execute_model(scheduler_output)

    def tapgrid_collect(self, ids: list[str], packed: bool = True) -> Any:
        """collective_rpc: what `ids` saved."""
        assert self.tapgrid is not None
        return self.tapgrid.collect(ids, packed=packed)
