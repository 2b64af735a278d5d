"""Choose the device that a kernel is launched on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device current: Triton launches there, whatever device the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
