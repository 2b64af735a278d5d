"""Copy between a device and host memory while the device computes: the class `CopyStreams`.

On the CPU, streams do nothing; there it is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class CopyStreams:
    """The copy streams of one device; the module `cuda` makes streams and events.

    For the CPU nothing is copied, and the order is that of the calls.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._has_streams = device.type == "cuda"
        if self._has_streams:
            self._up, self._down = cuda.Stream(device), cuda.Stream(device)

    def upload(self, host: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy host memory to the device; pin it if the copy is to overlap other work.

        It must not change until the copy was used. Return a function that makes the thread's
        current stream wait for the copy, and returns it.
        """
        if not self._has_streams:
            return lambda: host
        with self._cuda.stream(self._up):
            copied = host.to(self._device, non_blocking=True)
            arrived = self._up.record_event()

        def use() -> torch.Tensor:
            current = self._cuda.current_stream(self._device)
            current.wait_event(arrived)
            copied.record_stream(current)
            return copied

        return use

    def download(self, data: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy to pinned host memory, after what the current stream has queued by now.

        Return a function that waits for the copy, and returns it.
        """
        if not self._has_streams:
            return lambda: data
        ready = self._cuda.current_stream(self._device).record_event()
        host = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=True)
        with self._cuda.stream(self._down):
            self._down.wait_event(ready)
            host.copy_(data, non_blocking=True)
            data.record_stream(self._down)
            arrived = self._down.record_event()

        def use() -> torch.Tensor:
            arrived.synchronize()
            return host

        return use

    def send(self, arrays: Sequence[NDArray[np.int64]]) -> list[torch.Tensor]:
        """Copy small arrays to the device in one copy, on the current stream."""
        whole = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
        if self._has_streams:
            whole = whole.pin_memory().to(self._device, non_blocking=True)
        parts = torch.split(whole, [array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def synchronize(self) -> None:
        """Wait until the thread's current stream has done all that is queued on it."""
        if self._has_streams:
            self._cuda.current_stream(self._device).synchronize()
