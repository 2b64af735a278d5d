"""A stream of a device for staging, so that it neither waits for the engine's work nor delays it.

All threads of a process share the stream of a device: what one leaves there is complete before
another's kernels run, and memory that the first has freed can be the second's. A second stream
copies results to the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from engine_ext.kernels.jit import made_once


class StagingStream:
    """The stream of a device, for one thread's work; on the CPU everything is done at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._copied: list[torch.cuda.Event] = []

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let the thread's work go to the stream."""
        if not self._on_gpu:
            yield
            return
        with torch.cuda.stream(_streams(self.device)[0]):
            yield

    def upload(self, arrays: Sequence[np.ndarray[Any, Any]], dtype: torch.dtype) -> torch.Tensor:
        """Copy arrays of one width to the device, one after another, without waiting for it."""
        size = sum(array.size for array in arrays)
        sent = torch.empty(size, dtype=dtype, device="cpu", pin_memory=self._on_gpu)
        if size:
            np.concatenate(arrays, out=sent.numpy().view(arrays[0].dtype))
        # PyTorch keeps the pinned memory from others until the copy is done.
        return sent.to(self.device, non_blocking=True)

    def begin_download(self, bits: torch.Tensor) -> torch.Tensor:
        """Begin to copy bits to pinned memory; they are there after `wait`."""
        if not self._on_gpu:
            return bits.clone()
        own, copies = _streams(self.device)
        kept = torch.empty(bits.shape, dtype=bits.dtype, device="cpu", pin_memory=True)
        copies.wait_stream(own)
        with torch.cuda.stream(copies):
            kept.copy_(bits, non_blocking=True)
            bits.record_stream(copies)
        self._copied.append(copies.record_event())
        return kept

    def wait(self) -> None:
        """Wait for all work and downloads that were begun, of other threads too."""
        if self._on_gpu:
            _streams(self.device)[0].synchronize()
        while self._copied:
            self._copied.pop().synchronize()


@made_once
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
