"""Find how tensors on an accelerator differ from the snapshot, by their bits.

The tensors stay on their device. They are compared with a copy of the snapshot on the device, or
with the snapshot in pinned host memory, uploaded in chunks while earlier chunks are compared; only
what differs is copied to the host. The snapshot in host memory is the one that counts: its copy is
made from it, and follows when it advances.

On the CPU, streams do nothing and the chunks are the same; there it is tested, with the kernels
under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from delta_sender.diff.compare import Bits, Change, Difference
from engine_ext.format import change_digest
from engine_ext.kernels import gather_scatter
from engine_ext.kernels.triton import runs_kernels


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

    def synchronize(self) -> None:
        """Wait until the thread's current stream has done all that is queued on it."""
        if self._has_streams:
            self._cuda.current_stream(self._device).synchronize()


# Where the copy is that the device compares with; `auto` by the device's free memory.
SNAPSHOT_ON: Final = ("auto", "device", "host")

_CHUNK_BYTES: Final = 32 << 20
_SHARE: Final = 0.5  # most of the device's free memory that `auto` takes


class DeviceDifference(NamedTuple):
    """The elements that differ, on the tensors' device."""

    indices: torch.Tensor  # flat, ascending; int32 or int64 [nnz]
    old: torch.Tensor  # integers [nnz]
    new: torch.Tensor


def _at_once(data: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: data


def begin_device_compare(
    old: torch.Tensor,
    new: torch.Tensor,
    start: int,
    dtype: torch.dtype,
    download: Callable[[torch.Tensor], Callable[[], torch.Tensor]] = _at_once,
) -> Callable[[], DeviceDifference]:
    """Begin to compare two tensors on the thread's current stream of their device.

    Return a function that waits for the number of differing elements, and has them written.

    Args:
        old, new: Integers of one dtype, contiguous [n], on one device. They must not change until
            the result has been used.
        start: The flat index of the first element.
        dtype: The dtype of the indices; int32 if the last one allows it.
        download: Begins to copy to host memory, see `CopyStreams.download`. If it runs on a stream
            of its own, what is launched after this call is not waited for.

    Raises:
        ValueError: The tensors differ in dtype, shape or device.
    """
    if (old.dtype, old.shape, old.device) != (new.dtype, new.shape, new.device) or old.ndim != 1:
        raise ValueError("old and new are not integers of one dtype, shape and device")
    if not runs_kernels(old.device):
        return lambda: _compare_by_operators(old, new, start, dtype)
    from engine_ext.kernels.triton import compact

    ends = compact.count(old, new)
    nnz = download(ends[-1:])
    return lambda: DeviceDifference(*compact.write(old, new, ends, int(nnz().sum()), start, dtype))


def _compare_by_operators(
    old: torch.Tensor, new: torch.Tensor, start: int, dtype: torch.dtype
) -> DeviceDifference:
    indices = (old != new).nonzero().view(-1)
    return DeviceDifference((indices + start).to(dtype), old[indices], new[indices])


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

    def begin(
        self, key: str, bits: Bits, new: torch.Tensor, digested: str | None
    ) -> Callable[[], Difference]:
        """Begin to compare a tensor with what `prepare` made ready.

        Return a function that waits for the result, to be called in the same thread.

        Args:
            key, bits: Name and bits in the snapshot.
            new: Integers of the same width, contiguous [n], on the device. It must not change until
                the result has been asked for.
            digested: The name to digest the change under; None: it is not digested.
        """
        device = new.device
        streams = self._streams.setdefault(device, CopyStreams(device))
        host, mirror = gather_scatter.signed(bits), self._mirrors.get(key)
        chunk = _CHUNK_BYTES // new.itemsize
        dtype = torch.int32 if new.numel() < 1 << 31 else torch.int64

        def counted(start: int) -> Callable[[], tuple[torch.Tensor, ...]]:
            these = slice(start, start + chunk)
            old = streams.upload(host[these])() if mirror is None else mirror[these]
            return begin_device_compare(old, new[these], start, dtype, streams.download)

        ahead = counted(0)

        def wait() -> Difference:
            begun, downloads = ahead, []
            for start in range(chunk, new.numel(), chunk):
                # While one chunk is written and downloaded, the next is uploaded and counted.
                following = counted(start)
                downloads.append([streams.download(found) for found in begun()])
                begun = following
            downloads.append([streams.download(found) for found in begun()])
            found = [[gather_scatter.host_bits(use()) for use in uses] for uses in downloads]
            indices, was, now = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
            indices = indices.view(f"i{indices.itemsize}")
            change = None
            if digested is not None:
                change = change_digest(digested, indices.astype(np.int64), was, now)
            return Difference(indices, was, now, change, None)

        return wait

    @contextmanager
    def following(self, changes: Mapping[str, Change]) -> Iterator[None]:
        """Make the copies follow the snapshot, which advances by `changes` inside the block.

        If either is interrupted, the copies concerned are dropped, and made again when needed.
        """
        behind = {key: self._mirrors.pop(key) for key in changes if key in self._mirrors}
        yield
        for key, mirror in behind.items():
            _write(mirror, changes[key].indices, gather_scatter.signed(changes[key].new))
        for device in {mirror.device for mirror in behind.values()}:
            self._streams[device].synchronize()
        self._mirrors |= behind


def _write(mirror: torch.Tensor, indices: NDArray[Any] | None, new: torch.Tensor) -> None:
    if indices is None:
        mirror.copy_(new)
    else:
        where = torch.from_numpy(indices).to(mirror.device)
        gather_scatter.scatter(mirror, where, new.to(mirror.device))


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
