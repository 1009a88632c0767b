"""The client's side of the vLLM engine: boots it with our worker, sends interventions, collects their saves."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapters.engines.ahead import mend
from adapters.engines.graphs import has_cuda, is_hybrid, splitting
from adapters.engines.settings import environment, vllm_arguments
from adapters.engines.versions import check_arguments, check_version, shut_down
from adapters.engines.wire import Carried, Kept
from adapters.errors import LoadError
from adapters.points import Location, Points, dimensions, family_of
from adapters.runtime import Ask, Output
from adapters.taps import declared
from adapters.work import Settings

WORKER = "adapters.engines.vllm_worker.Worker"
# The key of the declared taps in `additional_config`. It is part of the compile cache's key, which the worker class is
# not: without it a tapped engine would load an untapped artifact and no tap would ever fire.
TAPS = "tapgrid_taps"
BUFFERS = "tapgrid_buffers"
# The key under which a request carries its interventions in `SamplingParams.extra_args`.
EXTRA = "tapgrid"
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class VLLMEngine:
    """vLLM with our worker class; one step loop of our own, so that a request can be ended from inside."""

    gradients = False
    # Whether the model is split over ranks.
    sharded = False

    def __init__(self, llm: Any, arguments: dict[str, Any], host: Any) -> None:
        from vllm.sampling_params import RequestOutputKind

        self.llm, self.core, self.arguments = llm, llm.llm_engine, arguments
        # The worker's side, where it lives in this process.
        self.host, self.in_process = host, host is not None
        self.running = False
        self._final = RequestOutputKind.FINAL_ONLY
        config = self.core.model_config
        self.points = Points(family_of(config.hf_text_config.model_type), "vllm", dimensions(config.hf_text_config))
        self.tokenizer = None if config.skip_tokenizer_init else llm.get_tokenizer()
        if host is not None:
            host.tokenizer = self.tokenizer
        generation = config.try_get_generation_config()
        self.eos_token_id = generation.get("eos_token_id", getattr(config.hf_text_config, "eos_token_id", None))
        self.max_tokens: int | None = config.max_model_len
        self.caching = bool(self.core.vllm_config.cache_config.enable_prefix_caching)

    def run(self, asks: Sequence[Ask]) -> list[Output]:
        if self.running:
            raise LoadError("this engine is already inside a run: an intervention cannot start another one on it")
        ids: dict[str, Ask] = {}
        self.running = True
        try:
            self._submit(asks, ids)
            final = self._serve(ids)
        except BaseException:
            self.core.abort_request(list(ids), internal=True)
            self._collect(ids)
            if self.host is not None:
                self.host.carried.clear()
            raise
        finally:
            self.running = False
        kept = self._collect(ids)
        return [self._output(a, final.get(id, ()), kept.get(id)) for id, a in ids.items()]

    def _submit(self, asks: Sequence[Ask], ids: dict[str, Ask]) -> None:
        """Hand every request to the engine; fills `ids` as it goes, so that what was handed over can be taken back."""
        from vllm import SamplingParams

        packed: dict[Any, bytes] = {}
        for a in asks:
            s, carried = a.sampling, self._carried(a, packed)
            params = SamplingParams(
                temperature=s.temperature,
                seed=s.seed,
                max_tokens=s.max_new_tokens,
                ignore_eos=True,
                stop_token_ids=list(s.stop_token_ids),
                detokenize=False,
                output_kind=self._final,
                extra_args=None if carried is None else {EXTRA: carried},
                # What a cache would have hidden is recomputed, and what an edit leaves in it nobody else may read.
                skip_reading_prefix_cache=True if carried is not None and self.caching else None,
            )
            prompt: dict[str, Any] = {"prompt_token_ids": list(a.prompt)}
            if carried is not None and self.caching:
                prompt["cache_salt"] = a.id
            ids[self.core.add_request(a.id, prompt, params)] = a

    def _carried(self, ask: Ask, packed: dict[Any, bytes]) -> str | bytes | None:
        """What goes along with a request: the name of what lies ready in this process, or bytes; None without work."""
        if not ask.work:
            return None
        if self.host is not None:
            self.host.carried[ask.id] = Carried(ask.fns, ask.check_finite, ask.body)
            return ask.id
        same = (*map(id, ask.fns), ask.check_finite, ask.check_ranks)
        if same not in packed:
            packed[same] = Carried(ask.fns, ask.check_finite, check_ranks=ask.check_ranks).packed()
        return packed[same]

    def _serve(self, ids: Mapping[str, Ask]) -> dict[str, tuple[int, ...]]:
        """Step the engine until every request has ended; new token ids by internal id."""
        core, host = self.core, self.host
        by_name = {id.rsplit("-", 1)[0]: id for id in ids}
        final: dict[str, tuple[int, ...]] = {}
        while core.has_unfinished_requests():
            for out in core.step():
                if out.finished and out.request_id in by_name:
                    final[by_name[out.request_id]] = tuple(out.outputs[0].token_ids)
            if host is not None and host.ended:
                if host.il.interrupt is not None:
                    interrupt, host.il.interrupt = host.il.interrupt, None
                    raise interrupt
                self._end_early(host.ended, final)
        return final

    def _end_early(self, ended: dict[str, int], final: dict[str, tuple[int, ...]]) -> None:
        """Abort requests that ended themselves, once the tokens that they keep have come out of the engine."""
        states = self.core.output_processor.request_states
        for id, keeps in list(ended.items()):
            if id not in states:
                continue
            tokens = states[id].detokenizer.output_token_ids
            if len(tokens) >= keeps:
                final[id] = tuple(tokens)
                self.core.abort_request([id], internal=True)

    def _collect(self, ids: Mapping[str, Ask]) -> dict[str, Kept]:
        """What every request with work left."""
        carried = [id for id, a in ids.items() if a.work]
        if not carried:
            return {}
        found = self._fetch(carried) if self.host is None else self.host.collect(carried, packed=False)
        return {id: kept for id, kept in zip(carried, found, strict=True) if kept is not None}

    def _fetch(self, carried: list[str]) -> list[Kept | None]:
        """What the worker in its own process kept for these requests."""
        answers = self.llm.collective_rpc("tapgrid_collect", args=(carried,))[0]
        return [kept and kept.unpacked() for kept in pickle.loads(answers)]

    def _output(self, ask: Ask, tokens: tuple[int, ...], kept: Kept | None) -> Output:
        if not ask.work:
            return Output(ask.id, ask.prompt, tokens, tokenizer=self.tokenizer)
        if kept is None:
            raise LoadError(
                f"request {ask.id} carried an intervention and the worker never saw it: "
                "is another plugin replacing the worker class?"
            )
        # An engine in another process learns late that a request has ended: what came after is not its own.
        own = tokens[: kept.tokens] if kept.stopped or kept.error is not None else tokens
        return Output(ask.id, ask.prompt, own, kept.saves, kept.error, kept.stopped, self.tokenizer)

    @property
    def taps(self) -> Sequence[str] | None:
        return self._configured(TAPS)

    @property
    def buffers(self) -> Sequence[str]:
        return self._configured(BUFFERS) or ()

    def declared(self) -> list[Location]:
        return declared(self.taps or (), self.points)

    def buffered(self) -> list[Location]:
        """The points at which `Capture` and `Add` run inside the graph, in the model's order."""
        return declared(self.buffers, self.points)

    def _configured(self, key: str) -> Sequence[str] | None:
        found: Sequence[str] | None = (self.arguments.get("additional_config") or {}).get(key)
        return found

    def describe(self) -> dict[str, Any]:
        """The engine arguments that this engine booted with, as plain data."""
        return dict(self.arguments)

    def close(self) -> None:
        if self.host is not None:
            from adapters.engines.vllm_worker import WORKERS

            WORKERS[:] = [w for w in WORKERS if w.tapgrid is not self.host]
        shut_down(self.core.engine_core)
        self.llm = self.core = self.host = None


def load_vllm(
    path: Path,
    *,
    dtype: str,
    settings: Settings | None = None,
    taps: Sequence[str] | None = None,
    buffers: Sequence[str] = (),
    make: type[VLLMEngine] = VLLMEngine,
    **overrides: Any,
) -> VLLMEngine:
    """Boot vLLM on a local folder. Eager, or compiled with `taps` and `buffers` inside.

    `overrides` are keyword arguments of `vllm.LLM`; `make` is the client's class.
    """
    check_arguments(overrides)
    settings = settings or Settings(dtype=dtype)
    if not make.sharded and overrides.get("tensor_parallel_size", settings.tensor_parallel) > 1:
        raise LoadError(
            "a rank of a tensor-parallel engine holds slices: load(..., backend='sharded', tp=...) makes them whole"
        )
    arguments = {**vllm_arguments(path, settings, eager=taps is None), "worker_cls": WORKER, **overrides}
    if taps is not None:
        arguments["additional_config"] = {
            **(overrides.get("additional_config") or {}),
            TAPS: list(taps),
            BUFFERS: list(buffers),
        }
        if has_cuda():
            hybrid = is_hybrid(json.loads((path / "config.json").read_text()))
            arguments["compilation_config"] = {
                **splitting(hybrid=hybrid),
                **(overrides.get("compilation_config") or {}),
            }
    with _environment(environment(settings, cuda=has_cuda(), ahead=mend())):
        try:
            import vllm
        except ImportError as missing:
            raise LoadError(f"engine='vllm' needs vLLM, which does not import here: {missing}") from missing
        check_version(vllm.__version__)
        from adapters.engines.vllm_worker import WORKERS

        # With another engine in this process vLLM would go by the variables of that one's boot.
        vllm.envs.disable_envs_cache()
        before = len(WORKERS)
        llm = vllm.LLM(**arguments)
        host = (
            WORKERS[-1].tapgrid
            if len(WORKERS) > before and llm.llm_engine.vllm_config.parallel_config.world_size == 1
            else None
        )
    return make(llm, arguments, host)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables for a boot, where the user set none, gone afterwards (vLLM itself remembers its own for as long as the
    engine lives). The folders that vLLM leaves compilers with, where it compiled ahead of time, are as they were."""
    own = {name: value for name, value in variables.items() if name not in os.environ}
    folders = {name: os.environ[name] for name in _FOLDERS if name in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in (*own, *_FOLDERS):
            os.environ.pop(name, None)
        os.environ.update(folders)
