"""The client's side of the vLLM engine: boots it with our worker, sends interventions with their requests, collects saves."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from adapters.engines.settings import environment, vllm_arguments
from adapters.errors import LoadError
from adapters.points import Location, Points, dimensions, family_of
from adapters.runtime import Ask, Output
from adapters.taps import declared
from adapters.work import Settings

WORKER = "adapters.engines.vllm_worker.Worker"
# The key of the declared taps in `additional_config`. It is part of the compile cache's key, which the worker class is
# not: without it a tapped engine would load an untapped artifact and no tap would ever fire.
TAPS = "tapgrid_taps"


class VLLMEngine:
    """vLLM with our worker class; one step loop of our own, so that a request can be ended from inside."""

    def __init__(self, llm: Any, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        from vllm.sampling_params import RequestOutputKind

        self.llm, self.core = llm, llm.llm_engine
        self._final = RequestOutputKind.FINAL_ONLY
        config = self.core.model_config
        self.points = Points(family_of(config.hf_text_config.model_type), "vllm", dimensions(config.hf_text_config))
        self.tokenizer = None if config.skip_tokenizer_init else llm.get_tokenizer()
        generation = config.try_get_generation_config()
        self.eos_token_id = generation.get("eos_token_id", getattr(config.hf_text_config, "eos_token_id", None))
        self.caching = bool(self.core.vllm_config.cache_config.enable_prefix_caching)
        self.in_process = (
            os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
            and self.core.vllm_config.parallel_config.world_size == 1
        )
        self.host: Any = None
        if self.in_process:
            from adapters.engines.vllm_worker import WORKERS

            self.host = WORKERS[-1].tapgrid

    def run(self, asks: Sequence[Ask]) -> list[Output]:
        ids = self._submit(asks)
        final = self._serve(ids)
        carried = [id for id, a in zip(ids, asks, strict=True) if a.fns or a.body is not None]
        kept = dict(zip(carried, self._collect(carried), strict=True)) if carried else {}
        return [self._output(id, a, final[id], kept.get(id)) for id, a in zip(ids, asks, strict=True)]

    def _submit(self, asks: Sequence[Ask]) -> list[str]:
        from vllm import SamplingParams

        pickled: dict[tuple[Any, ...], bytes] = {}
        ids = []
        for a in asks:
            work = bool(a.fns) or a.body is not None
            if work and a.fns not in pickled:
                pickled[a.fns] = cloudpickle.dumps(a.fns)
            s = a.sampling
            params = SamplingParams(
                temperature=s.temperature,
                seed=s.seed,
                max_tokens=s.max_new_tokens,
                ignore_eos=True,
                stop_token_ids=list(s.stop_token_ids),
                detokenize=False,
                output_kind=self._final,
                extra_args={"tapgrid": pickled[a.fns]} if work else None,
                # What a cache would have hidden is recomputed, and what an edit leaves in it nobody else may read.
                skip_reading_prefix_cache=True if work and self.caching else None,
            )
            prompt: dict[str, Any] = {"prompt_token_ids": list(a.prompt)}
            if work and self.caching:
                prompt["cache_salt"] = a.id
            if a.body is not None:
                from adapters.engines.vllm_worker import BODIES

                BODIES[a.id] = a.body
            ids.append(self.core.add_request(a.id, prompt, params))
        return ids

    def _serve(self, ids: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Step the engine until every request has ended; new token ids by internal id."""
        core, ended = self.core, self.host.ended if self.host is not None else ()
        by_name = {id.rsplit("-", 1)[0]: id for id in ids}
        final: dict[str, tuple[int, ...]] = {}
        while core.has_unfinished_requests():
            for out in core.step():
                if out.finished and out.request_id in by_name:
                    final[by_name[out.request_id]] = tuple(out.outputs[0].token_ids)
            if ended:
                self._end_early(ended, final)
        return final

    def _end_early(self, ended: set[str], final: dict[str, tuple[int, ...]]) -> None:
        states = self.core.output_processor.request_states
        for id in list(ended):
            if id in states:
                final[id] = tuple(states[id].detokenizer.output_token_ids)
                self.core.abort_request([id], internal=True)
        ended.clear()

    def _collect(self, ids: list[str]) -> list[Any]:
        if self.host is not None:
            found: list[Any] = self.host.collect(ids, packed=False)
            return found
        from adapters.engines.vllm_worker import split

        answers = pickle.loads(self.llm.collective_rpc("tapgrid_collect", args=(ids,))[0])
        return [f and (split(f[0]), f[1] and cloudpickle.loads(f[1]), f[2]) for f in answers]

    def _output(self, id: str, ask: Ask, tokens: tuple[int, ...], kept: Any) -> Output:
        if (ask.fns or ask.body is not None) and kept is None:
            raise LoadError(
                f"request {ask.id} carried an intervention and the worker never saw it: is another plugin replacing the worker class?"
            )
        saves, error, stopped = kept or ({}, None, False)
        return Output(ask.id, ask.prompt, tokens, saves, error, stopped, self.tokenizer)

    def declared(self) -> list[Location]:
        return declared((self.arguments.get("additional_config") or {}).get(TAPS, ()), self.points)

    def describe(self) -> dict[str, Any]:
        """The engine arguments that this engine booted with, as plain data."""
        return dict(self.arguments)

    def close(self) -> None:
        if self.host is not None:
            from adapters.engines.vllm_worker import WORKERS

            WORKERS[:] = [w for w in WORKERS if w.tapgrid is not self.host]
        shutdown = getattr(self.core.engine_core, "shutdown", None)
        if shutdown is not None:
            shutdown()
        self.llm = self.core = self.host = None


def load_vllm(
    path: Path, *, dtype: str, settings: Settings | None = None, taps: Sequence[str] | None = None, **overrides: Any
) -> VLLMEngine:
    """Boot vLLM on a local folder. Eager, or compiled with `taps` inside.

    `overrides` are keyword arguments of `vllm.LLM`.
    """
    settings = settings or Settings(dtype=dtype)
    for name, value in environment(settings).items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
    except ImportError as missing:
        raise LoadError(f"engine='vllm' needs vLLM, which does not import here: {missing}") from missing
    refused = {
        "pipeline_parallel_size": lambda v: v not in (None, 1),
        "speculative_config": lambda v: v is not None,
    }
    for name, is_refused in refused.items():
        if is_refused(overrides.get(name)):
            raise LoadError(
                f"{name}={overrides[name]!r} is not supported with interventions: rows of a pass would not be whole"
            )
    arguments = {**vllm_arguments(path, settings, eager=taps is None), "worker_cls": WORKER, **overrides}
    if taps is not None:
        arguments["additional_config"] = {**(overrides.get("additional_config") or {}), TAPS: list(taps)}
    return VLLMEngine(LLM(**arguments), arguments)
