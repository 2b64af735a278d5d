"""What is done where the weights lie, when that is an accelerator: kernels, and copies beside them.

The kernels are written in Triton, which is optional: they are used for tensors on a CUDA device
(ROCm's go by that name too) where Triton can be imported. Elsewhere PyTorch's operators do the
same, and the tests hold the kernels against them.

No accelerator was at hand when this was written. The kernels are run by Triton's interpreter, on
the CPU, and compiled to machine code for NVIDIA GPUs, which says that they compile and what they
compute, and nothing of how fast they are or of what only a real device shows. So they are tried on
each device before they are used on it, and left alone where they fail.
"""

from __future__ import annotations

import logging

import torch

from engine_ext.kernels.jit import made_once

logger = logging.getLogger(__name__)


def runs_kernels(device: torch.device) -> bool:
    """Whether tensors on this device are handled by the Triton kernels.

    The first call for a device compiles them, and tries them on it (`engine_ext.kernels.triton.self_test`).
    """
    return device.type == "cuda" and _proven(device)


@made_once
def _proven(device: torch.device) -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    logger.info("trying the Triton kernels on %s; seconds, once on a machine", device)
    try:
        from engine_ext.kernels.triton import self_test

        wrong = self_test.wrong(device)
    except Exception as error:  # whatever it is, the operators do without
        wrong = [f"{type(error).__name__}: {error}"]
    if wrong:
        problem = "; ".join(wrong)
        logger.warning("no Triton kernels on %s, PyTorch's operators instead: %s", device, problem)
    return not wrong
