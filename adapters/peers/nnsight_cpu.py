"""nnsight's vLLM engine on a CPU: its worker class is hard-wired to vLLM's GPU worker, so these subclasses put the
same overrides on vLLM's CPU worker. Nothing of either package is edited, and on a GPU none of this is used.

Imported by vLLM in the worker process, by name; `CPUVLLM` names it.
"""

from __future__ import annotations

from typing import Any

from nnsight.modeling.vllm import VLLM
from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner
from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


class CPURunner(NNsightGPUModelRunner, CPUModelRunner):  # type: ignore[misc]  # both bases are untyped
    """nnsight's overrides, whose `super()` calls land on the CPU runner."""


class CPUNNsightWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with nnsight's runner, and the calls that nnsight makes on its workers by name."""

    def init_device(self) -> None:
        super().init_device()
        if type(self.model_runner) is not CPUModelRunner:
            raise NotImplementedError(f"expected vLLM's CPUModelRunner, got {type(self.model_runner).__name__}")
        self.model_runner.__class__ = CPURunner

    collect_nnsight: Any = NNsightGPUWorker.collect_nnsight
    nnsight_request_count: Any = NNsightGPUWorker.nnsight_request_count
    nnsight_register: Any = NNsightGPUWorker.nnsight_register
    nnsight_clear_registered: Any = NNsightGPUWorker.nnsight_clear_registered


class CPUVLLM(VLLM):  # type: ignore[misc]
    """`nnsight.modeling.vllm.VLLM` whose engine boots the worker above."""

    _WORKER_CLS = f"{__name__}.CPUNNsightWorker"
