"""Loaded by Python at its start: lets SGLang run with a torch that is built for CPUs.

The torchvision of the package index has operators for CUDA builds of torch only, and registers
fakes for operators that are then not there. Text models use none of them. SGLang 0.5.22 waits for
CUDA before it computes checksums, on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_original = torch.library.register_fake


def _register_fake(op: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(op, str) and op.startswith("torchvision::"):

        def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
            return function

        return unchanged
    return _original(op, *args, **kwargs)


torch.library.register_fake = _register_fake


def _synchronize(device: Any = None) -> None:
    """Wait for nothing: what runs on a CPU is done when it returns."""


if not torch.backends.cuda.is_built():
    torch.cuda.synchronize = _synchronize
