"""Elements of several live tensors on accelerators, read or written together.

One kernel visits all elements of a dtype, up to `_MOST` at a time, and its input or output crosses
the bus in one copy. Without the kernels, PyTorch's operators visit one tensor after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.format import Digest, device_digest
from engine_ext.kernels import gather_scatter as host
from engine_ext.kernels.triton import runs_kernels
from engine_ext.placement.live_elements import DeviceElements, DeviceRows

Elements = DeviceElements | DeviceRows
Bits = list[torch.Tensor]  # of each `Elements`, as integers, [n] each

# Elements at a time. An undo needs the same memory of the device, tens of megabytes, too.
_MOST: Final = 1 << 24


class DeviceBatch:
    """Elements on accelerators; none of them twice.

    Args:
        elements: of each live tensor, or of many.
    """

    def __init__(self, elements: Sequence[Elements]) -> None:
        self._size = len(elements)
        self._alone: list[tuple[int, Elements]] = []
        self._groups: list[_Group] = []
        self._read: list[tuple[Elements, torch.Tensor]] = []
        groups: dict[tuple[torch.device, torch.dtype, torch.dtype], _Group] = {}
        for number, one in enumerate(elements):
            if not runs_kernels(one.flat.device):
                self._alone.append((number, one))
                continue
            key = one.flat.device, one.flat.dtype, one.offsets.dtype
            group = groups.get(key)
            if group is None or group.size + one.offsets.numel() > _MOST:
                group = groups[key] = _Group()
                self._groups.append(group)
            group.add(number, one)

    def read(self) -> Bits:
        """Return their bits, copies in host memory, and keep what `is_as_read` compares.

        That is a digest that the device computes. Without kernels it is the bits themselves.
        """
        found: dict[int, torch.Tensor] = {number: one.read() for number, one in self._alone}
        self._read = [(one, found[number]) for number, one in self._alone]
        for group in self._groups:
            found.update(zip(group.numbers, group.read(), strict=True))
        return [found[number] for number in range(self._size)]

    @classmethod
    def as_read(cls, rows: DeviceRows, old: torch.Tensor) -> DeviceBatch:
        """Return the batch of elements that are read already; their bits, [n], are on the device.

        Kernels run there.
        """
        batch = cls([rows])
        for group in batch._groups:
            group.note(old)
        return batch

    def is_as_read(self) -> bool:
        """Return whether the elements have the bits that `read` has returned.

        With kernels no bits cross the bus.
        """
        return all(group.is_as_read() for group in self._groups) and all(
            one.holds(bits) for one, bits in self._read
        )

    def holds(self, bits: Sequence[torch.Tensor]) -> bool:
        """Return whether the elements have these bits."""
        return all(group.holds(group.own(bits)) for group in self._groups) and all(
            one.holds(bits[number]) for number, one in self._alone
        )

    def put(self, bits: Sequence[torch.Tensor]) -> None:
        """Overwrite them by bits in host memory or on their device."""
        for group in self._groups:
            group.put(group.own(bits))
        for number, one in self._alone:
            one.put(bits[number])

    def swap(self, bits: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Overwrite them like `put`, and yield the old bits in host memory, with their numbers.

        If it raises, exactly the elements whose bits it has yielded are overwritten.
        """
        # All memory is allocated before anything is written.
        ready = [(group, group.begin_swap(group.own(bits))) for group in self._groups]
        for group, swap in ready:
            yield from zip(group.numbers, swap(), strict=True)
        for number, one in self._alone:
            assert isinstance(one, DeviceElements)
            yield number, one.swap(bits[number])


def upload(bits: Sequence[torch.Tensor], device: torch.device) -> Bits:
    """Copy 1-D tensors of one dtype in host memory to a device at once; views of one tensor."""
    return [*torch.split(joined(bits).to(device), [one.numel() for one in bits])]


def joined(bits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return 1-D tensors of one dtype in host memory as one, [n]; a view if they are contiguous."""
    start, at = bits[0].data_ptr(), bits[0].data_ptr()
    storage = bits[0].untyped_storage().data_ptr()
    for one in bits:
        if one.data_ptr() != at or one.untyped_storage().data_ptr() != storage:
            whole = _host_memory(sum(one.numel() for one in bits), bits[0].dtype)
            torch.cat(list(bits), out=whole)
            return whole
        at += one.nbytes
    return bits[0].as_strided(((at - start) // bits[0].itemsize,), (1,))


def _host_memory(size: int, dtype: torch.dtype) -> torch.Tensor:
    # Allocated by numpy, which asks for huge pages: page faults take longer than the copy.
    return host.signed(np.empty(size, f"u{dtype.itemsize}"))


class _Group:
    """Elements of live tensors of one dtype on one device, with offsets of one dtype."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.size = 0
        self._digest = Digest.ZERO  # of the elements as they were read, one after another
        self._elements: list[Elements] = []
        self._counts: list[int] = []  # of each

    def add(self, number: int, elements: Elements) -> None:
        """Add elements under a number."""
        count = elements.offsets.numel()
        self.numbers.append(number)
        self.size += count
        self._elements.append(elements)
        self._counts.append(count)

    def own(self, bits: Sequence[torch.Tensor]) -> Bits:
        """Return the bits of the group's tensors."""
        return [bits[number] for number in self.numbers]

    @property
    def _flat(self) -> torch.Tensor:
        return self._elements[0].flat

    def note(self, old: torch.Tensor) -> None:
        """Keep what `is_as_read` compares with the bits of all elements, on their device."""
        self._digest = device_digest("", old)

    def read(self) -> Bits:
        old = self._gathered()
        self.note(old)
        return self._split(_host_memory(old.numel(), old.dtype).copy_(old))

    def _gathered(self) -> torch.Tensor:
        """Return the elements on their device, [n]."""
        old = self._on_device()
        self._prepare(old, [], keep=True)()
        return old

    def is_as_read(self) -> bool:
        return device_digest("", self._gathered()) == self._digest

    def holds(self, bits: Bits) -> bool:
        expected = joined(bits).to(self._flat.device)
        return not self._prepare(expected, [], compare=True)().any()

    def put(self, bits: Bits) -> None:
        # Named, and so not freed before the launch: the table has only its address, and another
        # thread that allocates meanwhile would get its memory.
        sent = self._sent(bits)
        self._prepare(self._flat, sent, write=True)()

    def begin_swap(self, bits: Bits) -> Callable[[], Bits]:
        """Allocate all memory; return a function that overwrites and returns the old bits."""
        old = self._on_device()
        kept = _host_memory(old.numel(), old.dtype)
        sent = self._sent(bits)
        launch = self._prepare(old, sent, keep=True, write=True)

        def swap() -> Bits:
            launch()
            kept.copy_(old)
            sent.clear()  # not freed before
            return self._split(kept)

        return swap

    def _prepare(self, old: torch.Tensor, new: Bits, **modes: bool) -> Callable[[], torch.Tensor]:
        from engine_ext.kernels.triton import gather_scatter

        wide = self._elements[0].offsets.dtype == torch.int64
        sent = [own.data_ptr() for own in new] or [0] * len(self._elements)
        pairs = zip(self._elements, sent, strict=True)
        columns: list[NDArray[np.int64]] = []
        # Tens of thousands of either kind, and not of both.
        for are_rows, some in groupby(pairs, key=lambda pair: isinstance(pair[0], DeviceRows)):
            if are_rows:
                columns += [_addresses(one, own) for one, own in some]
            else:
                columns.append(np.array([_address(one, own) for one, own in some], np.int64).T)
        width = self._flat.itemsize
        table = gather_scatter.rows(*np.concatenate(columns, 1), width=width, wide=wide)
        return gather_scatter.prepare(table, old, wide=wide, **modes)

    def _sent(self, bits: Bits) -> Bits:
        device = self._flat.device
        if all(one.device == device or one.is_pinned() for one in bits):
            return bits
        return upload([one.cpu() for one in bits], device)

    def _on_device(self) -> torch.Tensor:
        return torch.empty(self.size, dtype=self._flat.dtype, device=self._flat.device)

    def _split(self, whole: torch.Tensor) -> Bits:
        return [*torch.split(whole, self._counts)]


def _address(one: Elements, new: int) -> tuple[int, int, int, int]:
    """Return what `gather_scatter.rows` takes of elements of one tensor; `new` is an address."""
    return one.flat.data_ptr(), one.offsets.data_ptr(), new, one.offsets.numel()


def _addresses(rows: Elements, new: int) -> NDArray[np.int64]:
    """Return the same of each row, int64 [4, rows]."""
    assert isinstance(rows, DeviceRows)
    before = np.cumsum(rows.counts) - rows.counts
    places = rows.offsets.data_ptr() + before * rows.offsets.itemsize
    return np.stack([rows.addresses, places, new + before * rows.flat.itemsize, rows.counts])
