"""How a trainer's tensors differ from the snapshot where these lie on an accelerator.

The tensors stay there. What they are compared with is a copy of the snapshot on the device, or the
snapshot itself, in pinned host memory, of which the next chunk is brought up while one is compared;
only what differs comes back. Either way the snapshot in host memory is the one that counts: its
copy is made of it, and follows when it moves.

No accelerator was at hand when this was written: it is tested on the CPU, where streams are nothing
and the chunks are the same, and the kernels under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from delta_sender.copy_streams import Copies
from delta_sender.diff_host import Difference
from delta_sender.differing import begin_differing
from engine_ext.kernels import gather_scatter
from engine_ext.wire.digest import change_digest

# Where the copy is that the device compares with; `auto` by the device's free memory.
KEPT_ON: Final = ("auto", "device", "host")

_CHUNK_BYTES: Final = 32 << 20
_SHARE: Final = 0.5  # most of the device's free memory that `auto` takes

Bits = NDArray[Any]  # unsigned ints [n]


class Change(Protocol):
    """What the snapshot is moved by: new bits, and where, None if everywhere."""

    @property
    def places(self) -> NDArray[Any] | None: ...

    @property
    def new(self) -> Bits: ...


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor is compared where it lies, and not in host memory."""
    return tensor.device.type == "cuda"


class DeviceSide:
    """The devices' side of a snapshot. Its methods launch on the calling thread's current streams.

    Args:
        kept_on: one of `KEPT_ON`.

    Raises:
        ValueError: `kept_on` is another.
    """

    def __init__(self, kept_on: str) -> None:
        if kept_on not in KEPT_ON:
            raise ValueError(f"a snapshot on {kept_on!r}; it is one of {', '.join(KEPT_ON)}")
        self._kept_on = kept_on
        self._copies: dict[torch.device, Copies] = {}
        self._keeps: dict[torch.device, bool] = {}  # copies of the snapshot on the device
        self._mirrors: dict[str, torch.Tensor] = {}

    def hold(self, kept: str, held: Bits, device: torch.device, nbytes: int) -> Bits:
        """Make a tensor of the snapshot ready to be compared on a device.

        Args:
            kept: its name.
            held: its bits.
            device: where.
            nbytes: of the whole snapshot.

        Returns:
            The bits in memory that the snapshot should keep instead; `held` if that will do.
        """
        mirror = self._mirrors.pop(kept, None)
        if mirror is not None and mirror.device == device:
            self._mirrors[kept] = mirror
            return held
        if device not in self._keeps:
            self._keeps[device] = self._kept_on == "device" or (
                self._kept_on == "auto" and nbytes <= _SHARE * free_bytes(device)
            )
        if self._keeps[device]:
            try:
                self._mirrors[kept] = gather_scatter.signed(held).to(device, copy=True)
                return held
            except torch.OutOfMemoryError:
                if self._kept_on == "device":
                    raise
                self._keeps[device] = False
        return pinned(held, device)

    def begin(
        self, kept: str, held: Bits, new: torch.Tensor, digested: str | None
    ) -> Callable[[], Difference]:
        """Have a tensor compared with what was made ready by `hold`.

        Args:
            kept, held: name and bits in the snapshot.
            new: integers of the same width, contiguous [n], on the device. It must stay as it is
                until the result has been asked for.
            digested: the name to digest the change under; None: it is not digested.

        Returns:
            What waits for the result, in the same thread.
        """
        device = new.device
        copies = self._copies.setdefault(device, Copies(device))
        host, mirror = gather_scatter.signed(held), self._mirrors.get(kept)
        chunk = _CHUNK_BYTES // new.itemsize
        dtype = torch.int32 if new.numel() < 1 << 31 else torch.int64

        def counted(start: int) -> Callable[[], tuple[torch.Tensor, ...]]:
            these = slice(start, start + chunk)
            old = copies.fetch(host[these])() if mirror is None else mirror[these]
            return begin_differing(old, new[these], start, dtype, copies.bring)

        ahead = counted(0)

        def wait() -> Difference:
            begun, brought = ahead, []
            for start in range(chunk, new.numel(), chunk):
                # While the one is written down, and on its way, the next is fetched and counted.
                following = counted(start)
                brought.append([copies.bring(found) for found in begun()])
                begun = following
            brought.append([copies.bring(found) for found in begun()])
            found = [[gather_scatter.host_bits(use()) for use in uses] for uses in brought]
            places, was, now = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
            places = places.view(f"i{places.itemsize}")
            change = None
            if digested is not None:
                change = change_digest(digested, places.astype(np.int64), was, now)
            return Difference(places, was, now, change, None)

        return wait

    @contextmanager
    def following(self, changes: Mapping[str, Change]) -> Iterator[None]:
        """Let the copies follow the snapshot, which moves inside; `Change` by name.

        If either is cut short, the copies concerned are gone, and made anew when they are needed.
        """
        behind = {kept: self._mirrors.pop(kept) for kept in changes if kept in self._mirrors}
        yield
        for kept, mirror in behind.items():
            _write(mirror, changes[kept].places, gather_scatter.signed(changes[kept].new))
        for device in {mirror.device for mirror in behind.values()}:
            self._copies[device].settle()
        self._mirrors |= behind


def _write(mirror: torch.Tensor, places: NDArray[Any] | None, new: torch.Tensor) -> None:
    if places is None:
        mirror.copy_(new)
    else:
        where = torch.from_numpy(places).to(mirror.device)
        gather_scatter.scatter(mirror, where, new.to(mirror.device))


def free_bytes(device: torch.device) -> int:
    """Memory of a device that nobody has taken."""
    return int(torch.cuda.mem_get_info(device)[0])


def pinned(held: Bits, device: torch.device) -> Bits:
    """Bits in host memory that a device copies from while it computes; `held` if it is that."""
    if device.type != "cuda" or gather_scatter.signed(held).is_pinned():
        return held
    there = torch.empty(held.size, dtype=gather_scatter.signed(held).dtype, pin_memory=True)
    found = gather_scatter.host_bits(there)
    found[:] = held
    return found
