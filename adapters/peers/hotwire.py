"""hotwire: steering vectors added by an operator inside vLLM's compiled graphs, named by each request.

The operator is a Triton kernel, so the column needs a GPU. A vector is a file in a folder that the engine reads; a
request names it by file, layer and scale, and a name that the engine does not know means "unsteered", without a word:
what was steered is seen in what was generated alone.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adapters.engines.settings import vllm_arguments
from adapters.peers.plugins import install_line, make_visible
from adapters.peers.vanilla import import_vllm, prompts, sampling, shut_down, version_of
from adapters.work import (
    MissingDevice,
    Nothing,
    Outcome,
    Refusal,
    Request,
    Settings,
    Shape,
    Steer,
    Work,
    layer_of,
    not_among,
)

INSTALL = install_line("hotwire-vllm", "0.1.2")
NO_GPU = (
    "hotwire's steering operator is a Triton kernel that runs on a CUDA GPU alone, and this machine has none; "
    f"on one that has: {INSTALL}"
)
ONLY_STEERS = Refusal(
    "not-expressible", "hotwire adds vectors to the output of decoder layers: it reads nothing and writes nothing else"
)
NO_WATCH = Refusal("not-expressible", "hotwire hands no activation back, so the write cannot be watched")


class Hotwire:
    """The column `hotwire`."""

    plain = False

    def boot(self, model: Path, settings: Settings) -> None:
        if not has_gpu():
            raise MissingDevice(NO_GPU)
        make_visible("hotwire-vllm", "hotwire", INSTALL)
        self._vectors = tempfile.TemporaryDirectory(prefix="hotwire-")
        os.environ["HOTWIRE_VECTORS"] = self._vectors.name
        vllm = import_vllm()
        self._arguments = vllm_arguments(model, settings, eager=False)
        self._llm = vllm.LLM(**self._arguments)
        self._sampling_params = vllm.SamplingParams

    def close(self) -> None:
        if llm := self.__dict__.pop("_llm", None):
            shut_down(llm)
        if folder := self.__dict__.pop("_vectors", None):
            folder.cleanup()

    def refuses(self, work: Work, shape: Shape) -> Refusal | None:
        if isinstance(work, Nothing):
            return None
        if not isinstance(work, Steer) or not_among([work.point], ("resid_post",)):
            return ONLY_STEERS
        return NO_WATCH if work.watch else None

    def run(self, requests: Sequence[Request], work: Work) -> list[Outcome]:
        extra = self._extra(work)
        params = [self._sampling_params(**s, extra_args=dict(extra)) for s in sampling(requests)]
        outputs = self._llm.generate(prompts(requests), params, use_tqdm=False)
        return [Outcome(tuple(o.outputs[0].token_ids)) for o in outputs]

    def _extra(self, work: Work) -> dict[str, str]:
        """The one place where a work becomes hotwire."""
        if isinstance(work, Nothing):
            return {}
        if not isinstance(work, Steer) or work.watch:
            raise NotImplementedError((NO_WATCH if isinstance(work, Steer) else ONLY_STEERS).sentence)
        name = self._registered(work)
        return {"hotwire": json.dumps({"id": name, "layer": layer_of(work.point), "scale": 1.0})}

    def _registered(self, work: Steer) -> str:
        """The vector's name, once the engine has read its file. It reads its folder at boot, so it is told to again."""
        import torch
        from hotwire import _state

        name = f"v{zlib.crc32(work.vector.tobytes()):08x}"
        file = Path(self._vectors.name) / f"{name}.pt"
        if not file.exists():
            torch.save(torch.from_numpy(work.vector), file)
            state = _state.get()
            assert state is not None, "hotwire did not patch the engine: its plugin was not loaded (VLLM_PLUGINS?)"
            state.load_store(str(file))
        return name

    def install(self, work: Work) -> None:
        raise NotImplementedError("hotwire names its vector with each request; nothing of it stays on the engine")

    def remove(self) -> None:
        """Nothing was ever installed."""

    def engine_settings(self) -> Mapping[str, Any]:
        return {
            "library": "hotwire-vllm",
            "version": version_of("hotwire-vllm"),
            "engine": version_of("vllm"),
            **self._arguments,
        }


def has_gpu() -> bool:
    """Whether there is a CUDA device, and a torch that could use it."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
