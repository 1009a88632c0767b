"""The part that runs inside vLLM's worker: registers requests that carry interventions, and calls the interleaver
around each forward pass.

Nothing of the model runner is replaced while no such request is alive: the seams are instance attributes, set when the
first one arrives and deleted with the last.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import cloudpickle
import torch
from vllm.model_executor.layers import rotary_embedding
from vllm.platforms import current_platform

from adapters.buffers import Buffers, Part, Planned
from adapters.eager import Hooks
from adapters.engines.ahead import mend, tell
from adapters.engines.breakable import break_at_taps, check_breakable
from adapters.engines.graphs import check_split, demote_when, has_cuda, is_compiled
from adapters.engines.huge_pages import on_huge_pages
from adapters.engines.versions import check_runner
from adapters.engines.vllm import BUFFERS, EXTRA, TAPS
from adapters.engines.wire import Carried, Kept
from adapters.interleave import Interleaver, Key
from adapters.live import Job, Live
from adapters.modules import parameter
from adapters.points import LOGITS_KEY, SAMPLED_KEY, Points, dimensions, family_of
from adapters.recorded import Recorder
from adapters.rows import Slab
from adapters.taps import Taps

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

mend()  # a rank's process has only this side

# Workers of engines in this process, newest last: how a client there reaches its own without a remote call.
WORKERS: list[Worker] = []


class WorkerHost:
    """Interventions beside one model runner (interleave.Host)."""

    def __init__(self, runner: Any, taps: Sequence[str] | None) -> None:
        # The model itself: on a GPU the runner may hold it inside of what replays its graphs.
        self.runner, self.model = runner, runner.get_model()
        config = runner.model_config.hf_text_config
        self.points = Points(family_of(config.model_type), "vllm", dimensions(config)).within(self.model)
        buffers = (runner.vllm_config.additional_config or {}).get(BUFFERS, ())
        self.hooks: Hooks | Taps = Hooks(self.model) if taps is None else Taps(self.model, taps, self.points, buffers)
        self.buffers: Buffers | None = None
        if buffers:
            most = runner.vllm_config.scheduler_config
            tokens, requests = most.max_num_batched_tokens, most.max_num_seqs
            self.buffers = Buffers(self.model, buffers, self.points, taps or (), tokens=tokens, requests=requests)
        self.il = Interleaver(self)
        if isinstance(self.hooks, Taps):
            tell(self.model, self.hooks.locations, self.buffers.locations if self.buffers is not None else ())
            self.il.recorder = Recorder(self.il)
        # What the graph does for a request, by its id.
        self.planned: dict[str, Planned] = {}
        self.live: dict[str, Live] = {}
        # What requests carry, by their client's id: only an engine in this process is handed the objects themselves.
        self.carried: dict[str, Carried] = {}
        # Requests that ended themselves, and how many of their tokens they keep.
        self.ended: dict[str, int] = {}
        # Requests whose part of the cache is to be wiped when they give it up: NaN or infinity is in it, or may be.
        self.to_wipe: set[str] = set()
        self._unpickled: dict[bytes, Carried] = {}
        self._open: list[Job] = []
        self._seams = False

    # ---- what interventions borrow

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's, read when first asked for: few interventions ask, and it is 0.2 to 0.4 s of a boot."""
        config = self.runner.model_config
        if config.skip_tokenizer_init:
            return None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(config.tokenizer)

    def attach(self, key: Key) -> None:
        self.hooks.attach(key, self.il)

    def weight(self, path: str) -> torch.Tensor:
        return parameter(self.model, path)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        # Some families' norms always hand a residual back as well.
        normed = self.model.get_submodule(self.points.at("final_norm").key[0])(x)
        return normed if isinstance(normed, torch.Tensor) else normed[0]

    def unembed(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = type(self.model).compute_logits(self.model, self.norm(x))
        return logits

    # ---- requests

    def scheduled(self, what: Any) -> None:
        """The next pass is `what`, a scheduler's output: requests have come, others have given up their part of the
        cache."""
        for id in self.to_wipe.intersection((*what.finished_req_ids, *(what.preempted_req_ids or ()))):
            self.to_wipe.remove(id)
            wipe(self.runner, id)
        for new in what.scheduled_new_reqs:
            self.admit(new.req_id, new.sampling_params)

    def admit(self, id: str, sampling_params: Any) -> None:
        """Register a new request, if it carries interventions."""
        payload = (sampling_params.extra_args or {}).get(EXTRA) if sampling_params is not None else None
        if payload is None:
            return
        if isinstance(payload, str):
            carried = self.carried.pop(payload)
        else:
            # Requests of one call share the same bytes: unpickled once, kept while anything is alive.
            carried = self._unpickled.get(payload) or cloudpickle.loads(payload)
            self._unpickled[payload] = carried
        self.il.recomputes = _may_preempt(self.runner)
        fns, why = carried.fns, None
        if self.buffers is not None and carried.body is None and not carried.check_finite:
            try:
                fns, planned = self.buffers.split(fns)
            except Exception as error:
                fns, planned, why = (), Planned(), error
            if planned.adds or planned.captures:
                self.planned[id] = planned
        self.live[id] = live = self.il.live(id.rsplit("-", 1)[0], fns, carried.body, carried.check_finite)
        self.admitted(live, carried)
        if why is not None:
            live.error, self.ended[id] = why, 0
        self._attach_seams()

    def admitted(self, live: Live, carried: Carried) -> None:
        """A request has come; nothing more is to be done for it here."""

    def kept(self, live: Live) -> Kept:
        """What a request that is over left."""
        live.close()
        return Kept(live.saves, live.error, live.stopped, live.drawn - live.spoilt)

    def collect(self, ids: Sequence[str], *, packed: bool) -> Any:
        """Take finished requests off: what they left, in the order of `ids`; None for one that never came."""
        found = []
        for id in ids:
            live = self.live.pop(id, None)
            self.planned.pop(id, None)
            self.ended.pop(id, None)
            found.append(None if live is None else self.kept(live))
        if not self.live:
            if self.buffers is not None:
                self.buffers.begin(())
            self._detach_seams()
            self.hooks.clear()
            self._unpickled.clear()
        return pickle.dumps([f and f.packed() for f in found]) if packed else found

    def busy(self) -> bool:
        """Whether any request has Python to run in its passes; what the graph does by itself needs none."""
        return any(live.passes and not live.ended for live in self.live.values())

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
        jobs, graphed = [], list[Part]()
        for i, id in enumerate(batch.req_ids[:n]):
            live = self.live.get(id)
            if live is None or live.ended:
                continue
            first, start, stop = int(computed[i]), starts[i], starts[i + 1]
            planned = self.planned.get(id)
            if planned is not None:
                graphed.append(Part(live, planned, start, stop, first))
            if live.passes:
                jobs.append(Job(live, i, first, stop - start, first < prompts[i], not discarded[i]))
        ids = kwargs.get("input_ids")
        self._open = jobs
        try:
            if self.buffers is not None:
                self.buffers.begin(graphed)
            if jobs:
                self.il.begin(Slab(starts, -1 if ids is None else ids.size(0)), jobs)
            out = self._plain[0](*args, **kwargs)
            if self.buffers is not None:
                self.il.end_recording()  # what taps had comes first, whoever served them
                self.buffers.end(graphed)
            return out
        except BaseException:
            self.to_wipe |= self._writers().keys()
            self._open = []
            self.il.abandon()
            raise

    def _compute_logits(self, hidden: torch.Tensor) -> Any:
        if writers := self._writers():
            self._look_for_spoilt(hidden, writers)
        logits = self._plain[1](hidden)
        if self._open:
            self.il.visit(LOGITS_KEY, logits)
        return logits

    def _writers(self) -> dict[str, int]:
        """Requests of this pass that have written something, and their places in its batch."""
        batch, live = self.runner.input_batch, self.live
        return {id: i for i, id in enumerate(batch.req_ids[: batch.num_reqs]) if id in live and live[id].wrote}

    def _look_for_spoilt(self, hidden: torch.Tensor, writers: Mapping[str, int]) -> None:
        """Note which of the `writers` have NaN in the cache. Whatever of it was read by one attention is in every
        coordinate of that request's last rows, `hidden` [requests, d_model]: one coordinate tells."""
        odd = ~hidden[:, 0].isfinite()
        if bool(odd.any()):
            one_each = len(hidden) == self.runner.input_batch.num_reqs
            self.to_wipe |= {id for id, i in writers.items() if not one_each or bool(odd[i])}

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        drawn = self._plain[2](*args, **kwargs)
        if self._open:
            self.il.visit(SAMPLED_KEY, drawn.sampled_token_ids)
            self.il.end()
            if any(job.live.ended for job in self._open):
                for id, live in self.live.items():
                    if live.ended and id not in self.ended:
                        self.ended[id] = live.drawn - live.spoilt
                        if live.wrote and live.error is not None:
                            self.to_wipe.add(id)  # perhaps before any row of it has come out of the model
            self._open = []
        return drawn


def _may_preempt(runner: Any) -> bool:
    """Whether the cache is too small for every request at full length, so that some may have to be computed again."""
    config = runner.vllm_config
    blocks, size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
    if not blocks or not size or config.scheduler_config.policy != "fcfs":
        return True
    groups = len(runner.kv_cache_config.kv_cache_groups)
    longest = -(-config.model_config.max_model_len // size)
    return bool(blocks - 1 < config.scheduler_config.max_num_seqs * longest * groups)


def wipe(runner: Any, id: str) -> None:
    """Zero a request's part of the cache: kernels read whole blocks, and where the next owner of one has written no
    value yet, NaN times a weight of zero is NaN. vLLM wipes for hybrid models only."""
    request = runner.requests.get(id)
    if request is None:
        return
    if not current_platform.is_cpu() and not hasattr(runner, "_kv_block_zeroer"):
        runner._init_kv_zero_meta()
    with torch.inference_mode():
        runner._zero_block_ids([block for group in request.block_ids for block in group])


def share_no_rotary_embedding() -> None:
    """vLLM keeps them for all models of a process: one that an eager engine made would bring its kernel into the graph
    of a compiled one beside it, and what listens at one engine's would hear the other's."""
    getattr(rotary_embedding, "_ROPE_DICT", {}).clear()


class Worker(PlatformWorker):  # type: ignore[misc]
    """The platform's worker, with room for interventions."""

    tapgrid: WorkerHost | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        share_no_rotary_embedding()
        with on_huge_pages() if current_platform.is_cpu() else nullcontext():
            super().load_model(*args, **kwargs)
        import vllm

        check_runner(self.model_runner, vllm.__version__)
        taps = (self.vllm_config.additional_config or {}).get(TAPS)
        if taps is not None and not is_compiled(self.model_runner.get_model()):
            check_breakable(self.model_runner)
            break_at_taps(current_platform.dispatch_key)
        self.tapgrid = host = self.tapgrid_host(taps)
        if taps is not None and has_cuda():
            if is_compiled(self.model_runner.get_model()):
                check_split(self.vllm_config.compilation_config)
            demote_when(self.model_runner.cudagraph_dispatcher, host.busy)
        WORKERS.append(self)

    def tapgrid_host(self, taps: Sequence[str] | None) -> WorkerHost:
        """Interventions beside this worker's model runner, which has loaded its model."""
        return WorkerHost(self.model_runner, taps)

    def execute_model(self, scheduler_output: Any) -> Any:
        host = self.tapgrid
        if host is not None:
            host.scheduled(scheduler_output)
        return super().execute_model(scheduler_output)

    def tapgrid_collect(self, ids: list[str], packed: bool = True) -> Any:
        """collective_rpc: what `ids` saved."""
        assert self.tapgrid is not None
        return self.tapgrid.collect(ids, packed=packed)
