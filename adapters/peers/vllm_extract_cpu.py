"""vLLM's hidden-state files on a CPU: its connector copies through CUDA streams and pinned memory, of which there are
none here, so this subclass copies without. Nothing of the package is edited, and on a GPU none of this is used.

Imported by vLLM, by name.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class CPUConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]  # the base is untyped
    """The connector, whose files are written before the step that writes them returns."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        size = self._block_size
        slots = (torch.tensor(pending.block_ids)[:, None] * size + torch.arange(size)).flatten()
        rows = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        save_file({"hidden_states": rows.contiguous(), "token_ids": pending.token_ids.clone()}, pending.filename)
        if (lock := self._lock_fds.pop(pending.req_id, None)) is not None:
            os.close(lock)  # which releases whoever waits to read
