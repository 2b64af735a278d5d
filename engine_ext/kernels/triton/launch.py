"""Where a kernel is launched."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the thread's current one: Triton launches there, wherever the tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
