"""Keep what tensors on an accelerator are compared with: a copy of the snapshot there, or uploads.

The snapshot in host memory is the one that counts, and its copy follows when it advances, by what
the device keeps of the changes that it has found. A base on a device is copied there at once, and
the snapshot is made from that copy; another base is copied to the device in the first sync. Where
there is no room, the snapshot is in pinned memory, and uploaded while earlier ones are compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from delta_sender.diff.change import Bits, Change, EncodedElements, Moment, check_moment
from delta_sender.diff.copy_streams import CopyStreams
from delta_sender.diff.listed import LISTED_SHARE, Listed, Lists, is_listed, write_listed
from engine_ext.kernels import download_box, gather_scatter, upload_box

# Where the copy is that the device compares with; `auto` by the device's free memory.
SNAPSHOT_ON: Final = ("auto", "device", "host")

_SHARE: Final = 0.5  # most of the device's free memory that `auto` takes, with lists of changes


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
        self._most: dict[torch.device, float] = {}  # bytes that copies can take
        self._mirrors: dict[str, torch.Tensor] = {}
        self._taken: Counter[torch.device] = Counter()  # bytes of these
        self._lists = Lists()
        self.moment = Moment()

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
        needed = host.nbytes if device in self._most else nbytes
        if self._mirrored(key, device, needed, uploaded) is not None:
            return bits
        return pinned(bits, device)

    def _mirrored(
        self, key: str, device: torch.device, needed: int, make: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """Make a copy on a device that has room for `needed` bytes; else return None."""
        if device not in self._most:
            most = {"device": math.inf, "host": 0.0}.get(self._snapshot_on)
            if most is None:
                most = _SHARE / (1 + LISTED_SHARE) * free_bytes(device)
            self._most[device] = most
        if self._taken[device] + needed <= self._most[device]:
            try:
                with torch.inference_mode(False):  # one of its tensors could not follow outside
                    self._keep(key, make())
                return self._mirrors[key]
            except torch.OutOfMemoryError:
                if self._snapshot_on == "device":
                    raise
        for other in [k for k, mirror in self._mirrors.items() if mirror.device == device]:
            self._drop(other)
        self._most[device] = 0.0
        return None

    def _keep(self, key: str, mirror: torch.Tensor) -> None:
        self._mirrors[key] = mirror
        self._taken[mirror.device] += mirror.nbytes

    def _drop(self, key: str) -> torch.Tensor | None:
        mirror = self._mirrors.pop(key, None)
        if mirror is not None:
            self._taken[mirror.device] -= mirror.nbytes
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

    def keep(self, places: torch.Tensor, new: torch.Tensor, *, wide: bool) -> Listed | None:
        """Keep changed elements until a copy follows; None if it would be too many, see `Lists`."""
        most = LISTED_SHARE * self._taken[places.device]
        return self._lists.keep(places, new, wide=wide, most=most)

    def drop_copies(self) -> None:
        """Free the copies; those that are needed again are uploaded."""
        for key in [*self._mirrors]:
            self._drop(key)
        self.let_go()

    def let_go(self) -> None:
        """Free what was kept of the changes that were found last."""
        self._lists.let_go()

    @contextmanager
    def following(
        self, changes: Mapping[str, Change], bits_of: Callable[[str], Bits]
    ) -> Iterator[None]:
        """Make the copies follow the snapshot, which advances by `changes` inside the block.

        Tensors whose changes their device does not keep are uploaded. If it is interrupted, their
        copies are dropped, and made again when needed.

        Args:
            bits_of: Returns a tensor's bits in the snapshot; called after the block.
        """
        elements = (one.elements for one in changes.values())
        check_moment(one for one in elements if isinstance(one, EncodedElements))
        self.moment.has_passed, self.moment = True, Moment()
        behind = {key: mirror for key in changes if (mirror := self._drop(key)) is not None}
        yield
        listed = {key: one for key in behind if is_listed(one := changes[key].listed)}
        try:
            write_listed([(behind[key], shares) for key, shares in listed.items()])
        except torch.OutOfMemoryError:
            listed = {}
        for key in behind.keys() - listed.keys():
            upload_box(behind[key], gather_scatter.signed(bits_of(key)))
        for device in {mirror.device for mirror in behind.values()}:
            self.streams(device).synchronize()
        for key, mirror in behind.items():
            self._keep(key, mirror)


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
    return torch.empty(bits.shape, dtype=bits.dtype, device="cpu", pin_memory=device.type == "cuda")
