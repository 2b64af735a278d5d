"""What is done where the weights lie, when that is an accelerator: kernels, and copies beside them.

The kernels are written in Triton, which is optional: they are used for tensors on a CUDA device
(ROCm's go by that name too) where Triton can be imported. Elsewhere PyTorch's operators do the
same, and the tests hold the kernels against them.

No accelerator was at hand when this was written. The kernels are run by Triton's interpreter, on
the CPU, and compiled to machine code for NVIDIA GPUs, which says that they compile and what they
compute, and nothing of how fast they are or of what only a real device shows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from engine_ext.compiled import made_once


def runs_kernels(device: torch.device) -> bool:
    """Whether tensors on this device are handled by the Triton kernels."""
    return device.type == "cuda" and _has_triton()


@made_once
def prepare(live: torch.dtype, offsets: torch.dtype, device: torch.device) -> None:
    """Compile now what the first sync would wait for, where there are kernels.

    Args:
        live: of the live tensors, as integers.
        offsets: int32 or int64.
        device: where they lie.
    """
    if runs_kernels(device):
        from engine_ext.device import elements, gaps

        elements.warm_up(live, offsets, device)
        gaps.warm_up(offsets, device)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the thread's current one: Triton launches there, wherever the tensors lie."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@made_once
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
