"""Elements of several live tensors on accelerators, read or written together.

One kernel visits all elements of a dtype, up to `_MOST` at a time, and its input or output crosses
the bus in one copy. Without the kernels, PyTorch's operators visit one tensor after another.

The kernel finds the elements by a table. `DeviceBatch.make_ready` sends it while the engine still
generates, so that comparing and writing them, while it is paused, are launches alone.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.format import device_factors
from engine_ext.kernels import gather_scatter as host
from engine_ext.kernels.triton import runs_kernels
from engine_ext.placement.device_memory import DeviceMemory, Kept, host_room
from engine_ext.placement.live_elements import DeviceElements, DeviceRows

Elements = DeviceElements | DeviceRows
Bits = list[torch.Tensor]  # of each `Elements`, as integers, [n] each
Sums = tuple[int, int]  # modulo 2 ** 64

_MOST: Final = 1 << 24  # elements at a time
_numbers = itertools.count()  # of groups: no two that are alive have the same


class DeviceBatch:
    """Elements on accelerators; none of them twice.

    Args:
        elements: of each live tensor, or of many; each has a number, from 0 on.
        memory: for the tables; None: nothing is reserved.
    """

    def __init__(self, elements: Sequence[Elements], memory: DeviceMemory | None = None) -> None:
        self.elements = elements
        self._alone: list[int] = []  # their numbers
        self._groups: list[_Group] = []
        self._read: dict[int, torch.Tensor] = {}  # of those alone
        self._new: dict[int, torch.Tensor] = {}  # of those alone
        memory = memory or DeviceMemory()
        groups: dict[tuple[torch.device, torch.dtype, torch.dtype], _Group] = {}
        for number, one in enumerate(elements):
            if not runs_kernels(one.flat.device):
                self._alone.append(number)
                continue
            key = one.flat.device, one.flat.dtype, one.offsets.dtype
            group = groups.get(key)
            if group is None or group.size + one.offsets.numel() > _MOST:
                group = groups[key] = _Group(memory)
                self._groups.append(group)
            group.add(number, one)

    def read(self) -> Bits:
        """Return their bits, copies in host memory, and keep what `are_as_read` compares.

        That is a digest that the device computes. Without kernels it is the bits themselves.
        """
        self._read = {number: self.elements[number].read() for number in self._alone}
        found = dict(self._read)
        for group in self._groups:
            found.update(zip(group.numbers, group.read(), strict=True))
        return [found[number] for number in range(len(self.elements))]

    @classmethod
    def as_read(
        cls,
        rows: DeviceRows,
        new: torch.Tensor,
        old: torch.Tensor,
        kept: torch.Tensor,
        memory: DeviceMemory,
    ) -> DeviceBatch:
        """Return the batch of elements that are read already, ready to be written.

        Kernels run on their device.

        Args:
            new: their new bits, [n], see `make_ready`.
            old: their bits, [n], on the device.
            kept: the same in pinned host memory, where they need not have arrived.
        """
        batch = cls([rows], memory)
        batch.make_ready({0: new})
        for group in batch._groups:
            group.note(old, kept)
        return batch

    def make_ready(self, new: Mapping[int, torch.Tensor], *, reads: bool = False) -> None:
        """Make ready to overwrite elements.

        Args:
            new: bits by number, on their device or in pinned host memory, which stay there as long
                as the batch is used. Elements that have none are not overwritten.
            reads: whether `swap` is to overwrite them, which needs memory for the old bits.
        """
        self._new = {number: new[number] for number in self._alone if number in new}
        for group in self._groups:
            group.make_ready(new)
            if reads:
                group.make_room()

    def put(self) -> Iterator[int]:
        """Overwrite the elements that have new bits; yield their numbers, before it is done."""
        for group in self._groups:
            yield from group.writes
            group.put()
        for number, bits in self._new.items():
            yield number
            self.elements[number].put(bits)

    def swap(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Overwrite them like `put`, and yield the old bits in host memory, with their numbers.

        Elements without new bits are only read, if kernels visit them. `make_ready` has made room
        for the old bits, which are there once the device is synchronised. If it raises, exactly the
        elements whose bits it has yielded are overwritten, of those with new ones.
        """
        for group in self._groups:
            yield from zip(group.numbers, group.swap(), strict=True)
        for number, bits in self._new.items():
            one = self.elements[number]
            assert isinstance(one, DeviceElements)
            yield number, one.swap(bits)

    def undo(self) -> Iterator[int]:
        """Put the old bits back where kernels have put new ones; yield the numbers of these.

        The device reads the old bits until it is synchronised: the batch must live as long.

        Raises:
            Exception: of the first group that could not be restored; all others are.
        """
        failures = list[Exception]()
        for group in self._groups:
            if group.is_written:
                try:
                    group.undo()
                except Exception as error:
                    failures.append(error)
                else:
                    yield from group.writes
        if failures:
            raise failures[0]

    def end_write(self) -> list[int]:
        """Free what only the write needs, once the device is synchronised after it.

        Return the numbers of the elements that `undo` does not restore: kernels have not written
        them.
        """
        left = [*self._alone]
        for group in self._groups:
            group.end_write()
            left += () if group.is_written else group.numbers
        return left


def overwrite(elements: Sequence[Elements], bits: Sequence[torch.Tensor]) -> None:
    """Overwrite elements by bits in host memory or on their device, a group at a time."""
    batch = DeviceBatch(elements)
    for group in batch._groups:
        own = [bits[number] for number in group.numbers]
        device = elements[group.numbers[0]].flat.device
        if not all(one.device == device or one.is_pinned() for one in own):
            own = upload([one.cpu() for one in own], device)
        group.make_ready(dict(zip(group.numbers, own, strict=True)))
        group.put()
        group.forget()  # another one needs its memory
    for number in batch._alone:
        elements[number].put(bits[number])


def are_as_read(batches: Sequence[DeviceBatch]) -> bool:
    """Return whether the elements of batches have the bits that `read` has returned.

    With kernels no bits cross the bus: each device adds up one digest of all of its groups, which
    is read once.
    """
    on_devices: dict[torch.device, list[_Group]] = defaultdict(list)
    for group in (group for batch in batches for group in batch._groups):
        on_devices[group.device].append(group)
    added = [(_sum_up(groups), groups) for groups in on_devices.values()]
    # Every device is waited for: what its kernel reads might be freed after the answer.
    found = [(_modulo(sums.tolist()), groups) for sums, groups in added]
    return all(
        sums == _total(group.expected for group in groups) for sums, groups in found
    ) and all(
        batch.elements[number].holds(bits)
        for batch in batches
        for number, bits in batch._read.items()
    )


def _sum_up(groups: Sequence[_Group]) -> torch.Tensor:
    """Launch the digests of groups of one device; return their sum, int64 [2] there."""
    sums = groups[0].sums
    sums.zero_()
    for group in groups:
        group.add_to(sums)
    return sums


def _modulo(lanes: Sequence[int]) -> Sums:
    one, other = (lane % (1 << 64) for lane in lanes)
    return one, other


def _total(sums: Iterator[Sums]) -> Sums:
    return _modulo([sum(lane) for lane in zip(*sums, strict=True)])


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
    """Elements of live tensors of one dtype on one device, with offsets of one dtype.

    Attributes:
        numbers, size: of the elements; how many single ones.
        writes: the numbers of those that have new bits.
        is_written: whether they are put, and not undone since.
        expected: the digest of the elements as they were read.
        sums: where digests are added up, int64 [2] on the device.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self.numbers: list[int] = []
        self.size = 0
        self.writes: list[int] = []
        self.is_written = False
        self.expected: Sums = (0, 0)
        self._memory = memory
        self._number = next(_numbers)
        self._elements: list[Elements] = []
        self._counts: list[int] = []  # of each
        self._table: Kept | None = None
        self._new: Bits = []  # the table has only their addresses
        self._kept: torch.Tensor | None = None  # the old bits of all, see `host_room`

    def add(self, number: int, elements: Elements) -> None:
        """Add elements under a number."""
        count = elements.offsets.numel()
        self.numbers.append(number)
        self.size += count
        self._elements.append(elements)
        self._counts.append(count)

    @property
    def device(self) -> torch.device:
        return self._flat.device

    @property
    def _flat(self) -> torch.Tensor:
        return self._elements[0].flat

    def make_ready(self, new: Mapping[int, torch.Tensor]) -> None:
        """Send the table, with the new bits that some of the elements have."""
        writes = [number for number in self.numbers if number in new]
        bits = [new[number] for number in writes]
        is_same = len(bits) == len(self._new) and all(map(is_, bits, self._new))
        if self._table is not None and writes == self.writes and is_same:
            return
        self.writes, self._new = writes, bits
        self._send([new.get(number) for number in self.numbers])

    def end_write(self) -> None:
        """Free the new bits; the table stays for an undo, which does not look at them."""
        self._new = []

    def forget(self) -> None:
        """Free what `make_ready` has sent."""
        self._table, self._new = None, []

    def note(self, old: torch.Tensor, kept: torch.Tensor) -> None:
        """Learn the bits of all elements, on their device and in pinned host memory."""
        self._visit(old=old, sums=self.sums, stored=True)
        self._kept, self.expected = kept, _modulo(self.sums.tolist())

    def read(self) -> Bits:
        """Return the bits in host memory, and keep their digest."""
        kept = self.make_room()
        self.writes, self._new = [], []
        self._send([None] * len(self.numbers))
        self._visit(old=kept, sums=self.sums, keep=True)
        self.expected = _modulo(self.sums.tolist())  # the bits have arrived, too
        return self._split(kept)

    def make_room(self) -> torch.Tensor:
        """Allocate the memory of the old bits, [size], for a pause in which nothing can fail."""
        self._kept = host_room(self.size, self._flat.dtype, self.device)
        return self._kept

    def add_to(self, sums: torch.Tensor) -> None:
        """Add the digest of the elements as they are; nothing waits for the device."""
        self._visit(sums=sums)

    def put(self) -> None:
        self.is_written = True
        self._visit(write=True)

    def swap(self) -> Bits:
        """Overwrite the elements; return the old bits in host memory, where they will arrive."""
        assert self._kept is not None
        self._visit(old=self._kept, keep=True, write=True)
        self.is_written = True
        return self._split(self._kept)

    def undo(self) -> None:
        """Put the old bits back where there were new ones; nothing is allocated."""
        assert self._kept is not None
        self._visit(old=self._kept, stored=True, write=True)
        self.is_written = False

    def _visit(
        self,
        *,
        old: torch.Tensor | None = None,
        sums: torch.Tensor | None = None,
        keep: bool = False,
        stored: bool = False,
        write: bool = False,
    ) -> None:
        from engine_ext.kernels.triton import gather_scatter

        assert self._table is not None
        gather_scatter.visit(
            self._table.bits.view(-1, gather_scatter.COLUMNS),
            self._flat,
            device_factors(self.device),
            wide=self._is_wide,
            old=old,
            sums=sums,
            group=self._number,
            keep=keep,
            stored=stored,
            write=write,
        )

    @property
    def _is_wide(self) -> bool:
        return self._elements[0].offsets.dtype == torch.int64

    def _send(self, new: Sequence[torch.Tensor | None]) -> None:
        """Send the table of the elements and of the new bits that there are."""
        from engine_ext.kernels.triton import gather_scatter

        width = self._flat.itemsize
        sent = [0 if bits is None else bits.data_ptr() for bits in new]
        pairs = zip(self._elements, sent, strict=True)
        columns: list[NDArray[np.int64]] = []
        # Tens of thousands of either kind, and not of both.
        for are_rows, some in itertools.groupby(pairs, key=_are_rows):
            if are_rows:
                columns += [_addresses(one, own) for one, own in some]
            else:
                columns.append(np.array([_address(one, own) for one, own in some], np.int64).T)
        joined = np.concatenate(columns, 1)
        table = gather_scatter.rows(*joined, width=width, wide=self._is_wide)
        self._table = self._memory.keep(torch.from_numpy(table).view(-1), self.device)
        self.sums = torch.zeros(2, dtype=torch.int64, device=self.device)

    def _split(self, whole: torch.Tensor) -> Bits:
        return [*torch.split(whole, self._counts)]


def _are_rows(pair: tuple[Elements, int]) -> bool:
    return isinstance(pair[0], DeviceRows)


def _address(one: Elements, new: int) -> tuple[int, int, int, int]:
    """Return what `gather_scatter.rows` takes of elements of one tensor; `new` is an address."""
    return one.flat.data_ptr(), one.offsets.data_ptr(), new, one.offsets.numel()


def _addresses(rows: Elements, new: int) -> NDArray[np.int64]:
    """Return the same of each row, int64 [4, rows]; no row has new bits if `new` is 0."""
    assert isinstance(rows, DeviceRows)
    before = np.cumsum(rows.counts) - rows.counts
    places = rows.offsets.data_ptr() + before * rows.offsets.itemsize
    sent = new + before * rows.flat.itemsize if new else np.zeros_like(before)
    return np.stack([rows.addresses, places, sent, rows.counts])
