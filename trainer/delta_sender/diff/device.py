"""Keep what tensors on an accelerator are compared with: a copy of the snapshot there, or uploads.

The snapshot in host memory is the one that counts, and its copy follows when it advances. A base on
a device is copied there at once, and the snapshot is made from that copy; another base is copied to
the device in the first sync. Where there is no room, the snapshot is in pinned memory, and uploaded
while earlier elements are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from delta_sender.diff.compare import Bits, Change
from delta_sender.diff.copy_streams import CopyStreams
from engine_ext.kernels import download_box, gather_scatter, upload_box

# Where the copy is that the device compares with; `auto` by the device's free memory.
SNAPSHOT_ON: Final = ("auto", "device", "host")

_SHARE: Final = 0.5  # most of the device's free memory that `auto` takes
# Elements of a copy that are written at once: each takes up to 24 bytes of the device meanwhile.
_WRITTEN: Final = 1 << 20


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is compared on its device, and not in host memory."""
    return tensor.is_cuda


class DeviceSide:
    """A snapshot's copies on devices. Methods launch on the calling thread's current streams.

    A device on which a copy finds no room has none at all.

    Raises:
        ValueError: `snapshot_on` is not one of `SNAPSHOT_ON`.
    """

    def __init__(self, snapshot_on: str) -> None:
        if snapshot_on not in SNAPSHOT_ON:
            known = ", ".join(SNAPSHOT_ON)
            raise ValueError(f"snapshot_on is {snapshot_on!r}; it is one of {known}")
        self._snapshot_on = snapshot_on
        self._streams: dict[torch.device, CopyStreams] = {}
        self._room: dict[torch.device, float] = {}  # bytes that further copies can take
        self._mirrors: dict[str, torch.Tensor] = {}

    def copied(self, key: str, bits: torch.Tensor) -> Bits:
        """Copy a tensor of the base on its device, if there is room, and to host memory.

        Args:
            bits: Integers [n], contiguous.

        Returns:
            The bits in host memory: a copy of that on the device, pinned if there is none.

        Raises:
            torch.OutOfMemoryError: The snapshot is to be on the device, which has no room.
        """
        mirror = self._mirrored(key, bits.device, bits.nbytes, bits.clone)
        if mirror is None:
            memory = _pinned_memory(bits, bits.device)
            return gather_scatter.host_bits(memory.copy_(bits))
        # Allocated by numpy, which asks for huge pages: page faults take longer than the copy.
        copy: Bits = np.empty(bits.numel(), f"u{bits.itemsize}")
        download_box(mirror, gather_scatter.signed(copy))
        return copy

    def prepare(self, key: str, bits: Bits, device: torch.device, nbytes: int) -> Bits:
        """Make a tensor ready to be compared on a device; the whole snapshot has `nbytes`.

        Return its bits in memory that the snapshot should keep instead; maybe `bits` itself.

        Raises:
            torch.OutOfMemoryError: The snapshot is to be on the device, which has no room.
        """
        mirror = self._mirrors.get(key)
        if mirror is not None and mirror.device == device:
            return bits
        self._drop(key)
        host = gather_scatter.signed(bits)

        def uploaded() -> torch.Tensor:
            box = torch.empty(host.shape, dtype=host.dtype, device=device)
            upload_box(box, host)
            return box

        # The first one of a device stands for all.
        needed = host.nbytes if device in self._room else nbytes
        if self._mirrored(key, device, needed, uploaded) is not None:
            return bits
        return pinned(bits, device)

    def _mirrored(
        self, key: str, device: torch.device, needed: int, make: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """Make a copy on a device that has room for `needed` bytes; else return None."""
        if device not in self._room:
            most = {"device": math.inf, "host": 0.0}
            room = most.get(self._snapshot_on)
            self._room[device] = _SHARE * free_bytes(device) if room is None else room
        if needed <= self._room[device]:
            try:
                self._keep(key, make())
                return self._mirrors[key]
            except torch.OutOfMemoryError:
                if self._snapshot_on == "device":
                    raise
        for other in [k for k, mirror in self._mirrors.items() if mirror.device == device]:
            self._drop(other)
        self._room[device] = 0.0
        return None

    def _keep(self, key: str, mirror: torch.Tensor) -> None:
        self._mirrors[key] = mirror
        self._room[mirror.device] -= mirror.nbytes

    def _drop(self, key: str) -> torch.Tensor | None:
        mirror = self._mirrors.pop(key, None)
        if mirror is not None:
            self._room[mirror.device] += mirror.nbytes
        return mirror

    def is_mirrored(self, key: str) -> bool:
        """Return whether a device has a copy of a tensor that `prepare` made ready."""
        return key in self._mirrors

    def old(
        self, key: str, bits: Bits, device: torch.device, these: slice
    ) -> Callable[[], torch.Tensor]:
        """Begin to bring elements to the device, unless they are there.

        Return a function that makes the thread's current stream wait for them, and returns them.

        Args:
            key, bits: Name and bits in the snapshot, which `prepare` made ready.
        """
        mirror = self._mirrors.get(key)
        if mirror is not None:
            return lambda: mirror[these]
        return self.streams(device).upload(gather_scatter.signed(bits)[these])

    def streams(self, device: torch.device) -> CopyStreams:
        """Return the copy streams of a device."""
        if device not in self._streams:
            self._streams[device] = CopyStreams(device)
        return self._streams[device]

    @contextmanager
    def following(self, changes: Mapping[str, Change]) -> Iterator[None]:
        """Make the copies follow the snapshot, which advances by `changes` inside the block.

        If either is interrupted, or a device has no memory left for the changes, the copies
        concerned are dropped, and made again when needed.
        """
        behind = {key: mirror for key in changes if (mirror := self._drop(key)) is not None}
        devices = {mirror.device for mirror in behind.values()}
        yield
        for key in [*behind]:
            try:
                _write(behind[key], changes[key].indices, gather_scatter.signed(changes[key].new))
            except torch.OutOfMemoryError:
                del behind[key]
        for device in devices:
            self.streams(device).synchronize()
        for key, mirror in behind.items():
            self._keep(key, mirror)


def _write(mirror: torch.Tensor, indices: NDArray[Any] | None, new: torch.Tensor) -> None:
    if indices is None:
        mirror.copy_(new)
        return
    for start in range(0, len(indices), _WRITTEN):
        these = slice(start, start + _WRITTEN)
        where = torch.from_numpy(indices[these]).to(mirror.device)
        gather_scatter.scatter(mirror, where, new[these].to(mirror.device))


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device."""
    return int(torch.cuda.mem_get_info(device)[0])


def pinned(bits: Bits, device: torch.device) -> Bits:
    """Return bits in host memory that a device can copy from while it computes; maybe no copy."""
    host = gather_scatter.signed(bits)
    if device.type != "cuda" or host.is_pinned():
        return bits
    return gather_scatter.host_bits(_pinned_memory(host, device).copy_(host))


def _pinned_memory(bits: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return host memory for bits, pinned for a GPU."""
    return torch.empty(bits.shape, dtype=bits.dtype, pin_memory=device.type == "cuda")
