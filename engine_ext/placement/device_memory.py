"""Memory of devices that is reserved at start-up for what syncs keep there.

An engine measures what is left of a device once the model is loaded, and takes nearly all of it for
its KV cache. What a sync needs later must not make the engine's own allocations fail: offsets, new
values and the tables of the kernels that write them until the commit, offsets for the undo until
the next one. So they are put into memory that was reserved before, and into pinned host memory when
that is full: kernels read it over the bus.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

import torch

from engine_ext.kernels.triton import runs_kernels

_ALIGNMENT: Final = 512  # as PyTorch's own allocator aligns


class Lease:
    """A piece of reserved memory; it can be given to others once this object is gone."""

    __slots__ = ("_place", "_returned")

    def __init__(self, place: tuple[int, int], returned: deque[tuple[int, int]]) -> None:
        self._place, self._returned = place, returned

    def __del__(self) -> None:
        # Whatever a garbage collection interrupts: nothing is locked here.
        self._returned.append(self._place)


class Kept(NamedTuple):
    """Bits that kernels of a device can read.

    Attributes:
        bits: on the device, or in pinned host memory.
        lease: must live as long as `bits` and its views are used; None: they have own memory.
    """

    bits: torch.Tensor
    lease: Lease | None


class _Reserved:
    """The reserved memory of one device."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._free = [(0, nbytes)]  # start and size, ascending
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def lease(self, nbytes: int) -> tuple[torch.Tensor, Lease] | None:
        """Return a piece of memory, or None if no free one is large enough."""
        size = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._merge()
            for number, (start, room) in enumerate(self._free):
                if room >= size:
                    left = [(start + size, room - size)] if room > size else []
                    self._free[number : number + 1] = left
                    lease = Lease((start, size), self._returned)
                    return self.memory[start : start + nbytes], lease
        return None

    @property
    def free(self) -> int:
        """Bytes that are not leased."""
        with self._lock:
            self._merge()
            return sum(size for _, size in self._free)

    def _merge(self) -> None:
        """Take back what was returned, and join neighbours."""
        if not self._returned:
            return
        while self._returned:
            self._free.append(self._returned.popleft())
        self._free.sort()
        joined: list[tuple[int, int]] = []
        for start, size in self._free:
            if joined and sum(joined[-1]) == start:
                start, size = joined[-1][0], joined.pop()[1] + size
            joined.append((start, size))
        self._free = joined


class DeviceMemory:
    """What one rank has reserved of the devices of its weights.

    Args:
        nbytes: of each device.
        devices: those that are no CPUs.

    Raises:
        torch.OutOfMemoryError: a device has not so much left.
    """

    def __init__(self, nbytes: int = 0, devices: Iterable[torch.device] = ()) -> None:
        self._reserved = {device: _Reserved(device, nbytes) for device in devices}

    def keep(self, bits: torch.Tensor, device: torch.device) -> Kept:
        """Copy bits to where kernels of a device read them; they are there when it returns.

        Another stream can get the memory as soon as it is given back, so that no copy to it must
        be on its way then.

        Args:
            bits: 1-D and contiguous, in host memory or on the device.
        """
        if device not in self._reserved:
            return Kept(bits.to(device), None)
        kept = self.room(bits.numel(), bits.dtype, device)
        _copy(bits, kept.bits)
        return kept

    def reserved(self, bits: torch.Tensor, device: torch.device) -> Kept | None:
        """Copy bits, as `keep` does, to reserved memory; None if there is not enough of it."""
        known = self._reserved.get(device)
        found = None if known is None else known.lease(bits.nbytes)
        if found is None:
            return None
        memory, lease = found
        return Kept(_copy(bits, memory.view(bits.dtype)), lease)

    def room(self, size: int, dtype: torch.dtype, device: torch.device) -> Kept:
        """Return uninitialised bits, [size], which kernels of a device can read and write."""
        reserved = self._reserved.get(device)
        if reserved is not None:
            found = reserved.lease(size * dtype.itemsize)
            if found is not None:
                memory, lease = found
                return Kept(memory.view(dtype), lease)
            if runs_kernels(device):
                return Kept(host_room(size, dtype, device), None)
        # PyTorch's operators read nothing else.
        return Kept(torch.empty(size, dtype=dtype, device=device), None)

    def free(self, device: torch.device) -> int:
        """Return how many bytes of the reserved memory of a device are in no use."""
        return self._reserved[device].free


def _copy(bits: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Copy bits and wait for it: PyTorch does not if both are on the device."""
    to.copy_(bits)
    if bits.is_cuda:
        torch.cuda.current_stream(bits.device).synchronize()
    return to


def host_room(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialised bits in host memory, [size], which kernels of a device read and write.

    For what finds no room on the device, and for old values: only an undo reads these there.
    """
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
