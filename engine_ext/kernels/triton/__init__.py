"""Triton kernels for weights on an accelerator.

Triton is optional. The kernels are used for tensors on a CUDA device (ROCm devices have the same
name in PyTorch) if Triton can be imported. Otherwise PyTorch's operators do the same work, and the
tests compare the kernels with them.

The kernels were written without access to an accelerator: they were run by Triton's interpreter on
the CPU, and compiled for NVIDIA GPUs. This shows that they compile and what they compute, but not
how fast they are or what only a real device reveals. So each is tested on a device before it is
used there (`engine_ext.kernels.triton.self_test`), and not used if the test fails.
"""

from __future__ import annotations

import logging

import torch

from engine_ext.kernels.jit import made_once

logger = logging.getLogger(__name__)


def runs_kernels(device: torch.device) -> bool:
    """Return whether the Triton kernels are used on this device; the first call tests them."""
    return device.type == "cuda" and _pass_self_test(device)


@made_once
def _pass_self_test(device: torch.device) -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    message = "compiling and testing the Triton kernels on %s; takes seconds, once per machine"
    logger.info(message, device)
    try:
        from engine_ext.kernels.triton import self_test

        wrong = self_test.wrong(device)
    except Exception as error:  # whatever it is, PyTorch's operators are used instead
        wrong = [f"{type(error).__name__}: {error}"]
    if wrong:
        message = "not using Triton kernels on %s but PyTorch's operators: %s"
        logger.warning(message, device, "; ".join(wrong))
    return not wrong
