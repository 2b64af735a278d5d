"""Triton kernels for weights on an accelerator.

Triton is optional. The kernels are used for tensors on a CUDA device (ROCm's have the same name) if
Triton can be imported; otherwise PyTorch's operators do the same, and tests compare the two, in
Triton's interpreter on the CPU or on a device. Compilers and devices differ, so `self_test` tries
each kernel on a device before it is used there.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

import torch

from engine_ext.kernels.jit import made_once

logger = logging.getLogger(__name__)


def runs_kernels(device: torch.device) -> bool:
    """Return whether the Triton kernels are used on this device; the first call tests them."""
    return device.type == "cuda" and _pass_self_test(device, "elements")


def runs_change_kernels(device: torch.device) -> bool:
    """Return the same of those that only a sender uses: an engine need not compile them."""
    return runs_kernels(device) and _pass_self_test(device, "changes")


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device current: Triton launches there, whatever device the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@made_once
def _pass_self_test(device: torch.device, kernels: str) -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    message = "compiling and testing Triton kernels (%s) on %s; takes seconds, once per machine"
    logger.info(message, kernels, device)
    try:
        from engine_ext.kernels.triton import self_test

        wrong = self_test.TESTS[kernels](device)
    except Exception as error:  # whatever it is, PyTorch's operators are used instead
        wrong = [f"{type(error).__name__}: {error}"]
    if wrong:
        message = "not using Triton kernels on %s but PyTorch's operators: %s"
        logger.warning(message, device, "; ".join(wrong))
    return not wrong
