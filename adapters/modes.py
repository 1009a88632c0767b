"""Torch's switches (gradients, inference mode, autocast) belong to the thread, and greenlets share their thread.

A user's `with torch.enable_grad():` that spans a read must not turn gradients on in the model, and the model's own
inference mode must not make inference tensors of what the user computes. Each side is given its own switches back when
it goes on: the interleaver restores the model's, `cross` restores the user's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adapters.errors import InterventionError, at_user_line

is_grad_enabled = torch.is_grad_enabled
is_inference_mode_enabled = torch.is_inference_mode_enabled
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
# The bare guard: a fifth of the cost of `torch.inference_mode`, which is a Python context manager around it.
InferenceMode: Any = torch._C._InferenceMode


def cross(switch: Callable[..., Any], *values: Any) -> Any:
    """Switch from the user's code to the model and come back with the user's switches as they were."""
    grad = is_grad_enabled()
    if is_inference_mode_enabled():
        # The model may be an ordinary one. The guard restores all of the thread's state when it is left.
        with InferenceMode(False):
            set_grad_enabled(False)
            return switch(*values)
    try:
        return switch(*values)
    finally:  # also where an error comes back instead
        if is_grad_enabled() is not grad:
            set_grad_enabled(grad)


def refuse_autocast() -> None:
    """Autocast that spans a read would make the model compute in another dtype than it was loaded with."""
    raise InterventionError(
        at_user_line(
            "a torch.autocast block is open across a read, so the model would run in it: close the block before "
            "reading the next point"
        )
    )
