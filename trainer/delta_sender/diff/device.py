"""Keep what tensors on an accelerator are compared with: a copy of the snapshot there, or uploads.

The snapshot in host memory is the one that counts: its copy is made from it, and follows when it
advances. Without a copy it is in pinned memory, and uploaded while earlier elements are compared.

On the CPU, streams do nothing; there it is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from delta_sender.diff.compare import Bits, Change
from engine_ext.kernels import gather_scatter


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
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
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

    Raises:
        ValueError: `snapshot_on` is not one of `SNAPSHOT_ON`.
    """

    def __init__(self, snapshot_on: str) -> None:
        if snapshot_on not in SNAPSHOT_ON:
            known = ", ".join(SNAPSHOT_ON)
            raise ValueError(f"snapshot_on is {snapshot_on!r}; it is one of {known}")
        self._snapshot_on = snapshot_on
        self._streams: dict[torch.device, CopyStreams] = {}
        self._has_mirrors: dict[torch.device, bool] = {}
        self._mirrors: dict[str, torch.Tensor] = {}

    def prepare(self, key: str, bits: Bits, device: torch.device, nbytes: int) -> Bits:
        """Make a tensor ready to be compared on a device; the whole snapshot has `nbytes`.

        Return its bits in memory that the snapshot should keep instead; maybe `bits` itself.
        """
        mirror = self._mirrors.pop(key, None)
        if mirror is not None and mirror.device == device:
            self._mirrors[key] = mirror
            return bits
        if device not in self._has_mirrors:
            self._has_mirrors[device] = self._snapshot_on == "device" or (
                self._snapshot_on == "auto" and nbytes <= _SHARE * free_bytes(device)
            )
        if self._has_mirrors[device]:
            try:
                self._mirrors[key] = gather_scatter.signed(bits).to(device, copy=True)
                return bits
            except torch.OutOfMemoryError:
                if self._snapshot_on == "device":
                    raise
                self._has_mirrors[device] = False
        return pinned(bits, device)

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
        behind = {key: self._mirrors.pop(key) for key in changes if key in self._mirrors}
        devices = {mirror.device for mirror in behind.values()}
        yield
        for key in [*behind]:
            try:
                _write(behind[key], changes[key].indices, gather_scatter.signed(changes[key].new))
            except torch.OutOfMemoryError:
                del behind[key]
        for device in devices:
            self.streams(device).synchronize()
        self._mirrors |= behind


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
    if device.type != "cuda" or gather_scatter.signed(bits).is_pinned():
        return bits
    memory = torch.empty(bits.size, dtype=gather_scatter.signed(bits).dtype, pin_memory=True)
    copy = gather_scatter.host_bits(memory)
    copy[:] = bits
    return copy
