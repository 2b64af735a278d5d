"""Elements of live memory that a sync reads, compares and overwrites."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.format import Digest, device_sums, tensor_digest
from engine_ext.kernels import (
    Bits,
    Offsets,
    bits_of,
    download_box,
    gather_scatter,
    host_bits,
    upload_box,
)
from engine_ext.placement.device_memory import Lease
from engine_ext.placement.repacked import flat_bits
from engine_ext.placement.segments import Segment

_COPIED_BYTES: Final = 8 << 20  # at a time, of a box that is digested
SAMPLED: Final = 256  # one of so many elements is compared before the write, in 1 % of its time


class LiveElements(Protocol):
    """Some elements of live memory."""

    @property
    def nbytes(self) -> int:
        """Memory that their offsets take, without what is reserved of a device."""

    def read(self) -> Any:
        """Return their bits, a copy in host memory."""

    def holds(self, bits: Any) -> bool:
        """Return whether these are their bits."""

    def put(self, bits: Any) -> None:
        """Overwrite them; takes what `read` returns."""


class HostElements(msgspec.Struct, eq=False, gc=False):
    """Single elements of a live tensor in host memory.

    Attributes:
        flat: the live tensor as integers, [extent].
        offsets: the elements, [n].
    """

    flat: Bits
    offsets: Offsets

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes

    def read(self) -> Bits:
        return gather_scatter.read(self.flat, self.offsets)

    def holds(self, bits: Bits) -> bool:
        return gather_scatter.holds(self.flat, self.offsets, bits)

    def seems_to_hold(self, bits: Bits) -> bool:
        """Return whether a sample of the elements has these bits."""
        return gather_scatter.holds(self.flat, self.offsets, bits, SAMPLED)

    def put(self, bits: Bits) -> None:
        gather_scatter.write(self.flat, self.offsets, bits)

    def swap(self, bits: Bits) -> Bits:
        """Overwrite them and return the old bits, in one pass that cannot fail in between."""
        return gather_scatter.swap(self.flat, self.offsets, bits)

    def swap_checked(self, bits: Bits, old: Bits) -> bool:
        """Overwrite them; return whether they had the bits `old`, which then holds those found."""
        return gather_scatter.swap_checked(self.flat, self.offsets, bits, old)

    def within(self, tensor: torch.Tensor) -> HostElements:
        """Return the same elements of another tensor in host memory, with the same layout."""
        return HostElements(host_bits(flat_bits(tensor)), self.offsets)


@dataclass(slots=True)
class DeviceElements:
    """Single elements of a live tensor on another device; new bits can be there, too.

    Attributes:
        flat: the live tensor as integers, [extent].
        offsets: the elements, [n], on the same device or in pinned host memory.
        lease: of the memory of `offsets`, see `engine_ext.placement.device_memory`.
    """

    flat: torch.Tensor
    offsets: torch.Tensor
    lease: Lease | None = None

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes if self.lease is None else 0

    def read(self) -> torch.Tensor:
        return gather_scatter.gather(self.flat, self._places()).cpu()

    def holds(self, bits: torch.Tensor) -> bool:
        live = gather_scatter.gather(self.flat, self._places())
        return torch.equal(live, bits.to(self.flat.device))

    def put(self, bits: torch.Tensor) -> None:
        gather_scatter.scatter(self.flat, self._places(), bits.to(self.flat.device))

    def swap(self, bits: torch.Tensor) -> torch.Tensor:
        """Overwrite them and return the old bits in host memory, in one pass."""
        return gather_scatter.exchange(self.flat, self._places(), bits.to(self.flat.device))

    def within(self, tensor: torch.Tensor) -> DeviceElements:
        """Return the same elements of another tensor on the device, with the same layout."""
        return DeviceElements(flat_bits(tensor), self.offsets, self.lease)

    def _places(self) -> torch.Tensor:
        return self.offsets.to(self.flat.device)


class LiveTensors(NamedTuple):
    """Live tensors on devices.

    Attributes:
        flats: each as integers, [extent].
        addresses: int64 [tensors].
        names: one for each.
    """

    flats: Sequence[torch.Tensor]
    addresses: NDArray[np.int64]
    names: Sequence[str]


@dataclass(slots=True, eq=False)
class DeviceRows:
    """Single elements of many live tensors of one dtype on a device, row after row.

    A row has elements of one tensor: those of an expert, in a tensor that holds many of them.

    Attributes:
        tensors: the live tensors, and others.
        numbers: which of them each row is of, int64 [rows].
        counts: how many elements each row has, int64 [rows].
        offsets: the elements, [n], on the device or in pinned host memory.
        lease: of the memory of `offsets`, see `engine_ext.placement.device_memory`.
    """

    tensors: LiveTensors
    numbers: NDArray[np.int64]
    counts: NDArray[np.int64]
    offsets: torch.Tensor
    lease: Lease | None = None

    @property
    def flat(self) -> torch.Tensor:
        """One of the live tensors: all have its dtype and device."""
        return self.tensors.flats[int(self.numbers[0])]

    @property
    def addresses(self) -> NDArray[np.int64]:
        """The address of each row's live tensor, int64 [rows]."""
        return self.tensors.addresses[self.numbers]

    @property
    def names(self) -> list[str]:
        """The names of the live tensors, each once."""
        return [self.tensors.names[number] for number in np.unique(self.numbers).tolist()]

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes if self.lease is None else 0

    def of(self, row: int) -> tuple[str, DeviceElements]:
        """Return a row's elements, and the name of its live tensor."""
        end, number = int(self.counts[: row + 1].sum()), int(self.numbers[row])
        own = self.offsets[end - int(self.counts[row]) : end]
        flat = self.tensors.flats[number]
        return self.tensors.names[number], DeviceElements(flat, own, self.lease)

    def read(self) -> torch.Tensor:
        return torch.cat([one.read() for one in self._each()])

    def holds(self, bits: torch.Tensor) -> bool:
        return all(map(DeviceElements.holds, self._each(), self._split(bits)))

    def put(self, bits: torch.Tensor) -> None:
        for one, own in zip(self._each(), self._split(bits), strict=True):
            one.put(own)

    def _each(self) -> Iterator[DeviceElements]:
        numbers = self.numbers.tolist()
        for number, own in zip(numbers, self._split(self.offsets), strict=True):
            yield DeviceElements(self.tensors.flats[number], own, self.lease)

    def _split(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(whole, self.counts.tolist())


@dataclass(slots=True)
class WholeBox:
    """All elements of a segment without a repack; bits have the segment's shape."""

    segment: Segment
    nbytes: ClassVar[int] = 0

    def _box(self) -> torch.Tensor:
        return bits_of(self.segment.live_view())

    def read(self, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Return their bits; `memory` is a result for the same segment, which is used again."""
        box = self._box()
        bits = self._memory(box, memory)
        download_box(box, bits)
        return bits

    def swaps(self, bits: torch.Tensor) -> bool:
        """Return whether `swap` can overwrite them by these bits."""
        box = self._box()
        return box.device.type == "cpu" and box.is_contiguous() and bits.is_contiguous()

    def swap(self, bits: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Overwrite them and return the old bits, in one pass that cannot fail in between."""
        box = self._box()
        old = self._memory(box, memory)
        gather_scatter.swap_all(box, bits, old)
        return old

    @staticmethod
    def _memory(box: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
        if memory is not None:
            return memory
        # Allocated by numpy, which asks for huge pages: without them, page faults take twice as
        # long as the copy.
        return gather_scatter.signed(np.empty(box.shape, f"u{box.itemsize}"))

    def holds(self, bits: torch.Tensor) -> bool:
        return torch.equal(self._box(), bits.to(self.segment.live.tensor.device))

    def put(self, bits: torch.Tensor) -> None:
        upload_box(self._box(), bits)

    def sums(self) -> torch.Tensor:
        """Return the lanes of their `box_digest`, int64 [2] on their device; nothing waits."""
        box = self._box()
        sums = torch.zeros(2, dtype=torch.int64, device=box.device)
        start = 0
        for piece in _pieces(box):
            sums += device_sums("", piece.reshape(-1), start=start)
            start += piece.numel()
        return sums

    def within(self, tensor: torch.Tensor) -> WholeBox:
        """Return the same box of another tensor with the same layout."""
        return WholeBox(replace(self.segment, live=replace(self.segment.live, tensor=tensor)))


def box_digest(bits: torch.Tensor) -> Digest:
    """Return the digest of the bits of a `WholeBox` in host memory, contiguous."""
    return tensor_digest("", host_bits(bits.reshape(-1)))


def hold_digests(boxes: Sequence[tuple[WholeBox, Digest]]) -> bool:
    """Return whether boxes on devices hold bits of these digests; each device is read once."""
    added: dict[torch.device, list[tuple[torch.Tensor, Digest]]] = defaultdict(list)
    for box, digest in boxes:
        added[box.segment.live.tensor.device].append((box.sums(), digest))
    return all(
        Digest(*found) == digest
        for own in added.values()
        for found, (_, digest) in zip(
            torch.stack([sums for sums, _ in own]).tolist(), own, strict=True
        )
    )


def _pieces(box: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a box in pieces, in order; those that must be copied to be contiguous are small."""
    if box.is_contiguous() or box.nbytes <= _COPIED_BYTES:
        yield box
        return
    dim = next(number for number, size in enumerate(box.shape) if size > 1)
    for piece in torch.split(box, max(1, _COPIED_BYTES * box.shape[dim] // box.nbytes), dim):
        yield from _pieces(piece)
