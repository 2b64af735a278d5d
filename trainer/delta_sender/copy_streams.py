"""Copies between an accelerator and host memory, beside what the accelerator computes.

Each direction has a stream of its own. Events keep the order: a copy begins when what it reads is
there, and whoever uses it waits for its end. Memory that one stream has allocated and another one
uses is recorded on that other one, so that the allocator does not give it away too early. Where
there are no streams nothing is copied, and the order is that of the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Copies:
    """The copies of one device.

    Args:
        device: the accelerator, or the CPU, for which all of this does nothing.
        cuda: what makes streams and events; torch's.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._streams = device.type == "cuda"
        if self._streams:
            self._up, self._down = cuda.Stream(device), cuda.Stream(device)

    def fetch(self, host: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy to the device.

        Args:
            host: in host memory, pinned if the copy is to go on beside other work. It must stay as
                it is until what uses the copy is through.

        Returns:
            What has the thread's current stream wait for the copy, and gives it.
        """
        if not self._streams:
            return lambda: host
        with self._cuda.stream(self._up):
            there = host.to(self._device, non_blocking=True)
            arrived = self._up.record_event()

        def use() -> torch.Tensor:
            current = self._cuda.current_stream(self._device)
            current.wait_event(arrived)
            there.record_stream(current)
            return there

        return use

    def bring(self, there: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy to pinned host memory, once the thread's current stream has got this far.

        Args:
            there: on the device.

        Returns:
            What waits for the copy, and gives it.
        """
        if not self._streams:
            return lambda: there
        made = self._cuda.current_stream(self._device).record_event()
        host = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        with self._cuda.stream(self._down):
            self._down.wait_event(made)
            host.copy_(there, non_blocking=True)
            there.record_stream(self._down)
            arrived = self._down.record_event()

        def use() -> torch.Tensor:
            arrived.synchronize()
            return host

        return use

    def settle(self) -> None:
        """Wait until the thread's current stream has done all that it was given."""
        if self._streams:
            self._cuda.current_stream(self._device).synchronize()
