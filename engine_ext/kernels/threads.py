"""Let threads use the accelerator of the thread that starts them.

Each thread begins with device 0: on rank 3 it would make a context there, of 0.3 to 0.5 GB. It
also begins with the device's default stream, which does not wait for the stream of the engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def same_device() -> Callable[[], None]:
    """Return what a new thread calls first, to use the CUDA device of the calling thread.

    Work that the calling thread has queued there is done when this returns. Without a CUDA device
    in use there is nothing to do (ROCm's have the same name).
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return lambda: None
    device = torch.cuda.current_device()
    torch.cuda.current_stream(device).synchronize()
    return lambda: torch.cuda.set_device(device)
