"""Many writes: those to host memory are divided between threads, those to devices go together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine_ext.errors import BaseMismatch
from engine_ext.kernels import ElementTable, table_of
from engine_ext.placement import (
    SAMPLED,
    DeviceBatch,
    DeviceElements,
    DeviceRows,
    HostElements,
    LiveElements,
)
from engine_ext.sync.staged import CHANGED, Write
from engine_ext.sync.thread_pool import ThreadPool

_ON_DEVICES: Final = (DeviceElements, DeviceRows)
_SMALL: Final = 1 << 12  # elements that are written faster than a call of their own takes
_TABLE: Final = 1 << 16  # elements that a thread writes at a time


class PartWrites:
    """The writes of a part on this rank, prepared by the thread that stages it.

    Small ones to host memory are in tables; one compiled call visits all of a table.

    Attributes:
        all: in the part's order.
    """

    __slots__ = (
        *("all", "reading", "known", "batch", "tables", "alone", "sample"),
        *("_unknown", "_pairs"),
    )

    def __init__(self, writes: Sequence[Write]) -> None:
        self.all = [*writes]
        self._divide()

    def _divide(self) -> None:
        on_devices, in_host = _divided(self.all)
        self.reading = [write for write in on_devices if write.keep and write.old is None]
        self.known = [write for write in on_devices if not (write.keep and write.old is None)]
        self.batch = DeviceBatch([_elements(write) for write in self.known])
        self.tables, self.alone = _tabulated(in_host)
        self.sample = [*_sample([write for write in self.alone if write.old is not None])]
        self._unknown = [write for write in self.all if write.old is None]
        self._pairs = [(write.elements, write.old) for write in self.all if write.old is not None]

    def read_old(self) -> None:
        """Read the old bits that are to be kept and are not known."""
        if any(write.keep for write in self._unknown):
            read_old(self.all)
            self._divide()

    def undo_pairs(self) -> list[tuple[LiveElements, Any]]:
        """Return the elements that were written, with their old bits, in any order."""
        return [*self._pairs, *((write.elements, write.old) for write in self._unknown)]

    def lists(self) -> list[list[Any]]:
        """Return the lists that hold the writes: emptied, they keep none of them in memory."""
        return [
            *(self.all, self.reading, self.known, self.alone, self.sample),
            *(self._unknown, self._pairs),
            *(table.writes for table in self.tables),
        ]


@dataclass(slots=True, eq=False)
class _Table:
    """Small writes to host memory, whose old bits are known.

    Attributes:
        written: whether all of them are, which are not looked at one by one.
    """

    writes: list[Write]
    elements: ElementTable
    written: bool = False

    def put(self, compares: bool) -> None:
        """Do as `Write.put` does for each."""
        self.written = True
        if not compares:
            self.elements.write()
        elif not self.elements.swap_checked():
            raise BaseMismatch(CHANGED)

    def undo(self) -> None:
        """Do as `Write.undo` does for each."""
        for write in self.writes if self.written else ():
            write.written = True
            write.undo()
        self.written = False


def put_all(
    parts: Sequence[PartWrites], threads: ThreadPool, *, compares: bool, shared: bool = False
) -> None:
    """Write the new bits of all; see `Write.put`, which compares in host memory only.

    Args:
        shared: whether two writes can be to the same memory: all old bits are read before any new
            ones are written, or one write would take the other's new bits for old ones.

    Raises:
        BaseMismatch: see `Write.put`.
        Exception: some are written; `undo_all` takes them back.
    """
    for part in parts if shared else ():
        part.read_old()
    for part in parts:
        if part.reading:
            batch = DeviceBatch([_elements(write) for write in part.reading])
            for number, old in batch.swap([write.new for write in part.reading]):
                part.reading[number].old, part.reading[number].written = old, True
        for write in part.known:
            write.written = True
        if part.known:
            part.batch.put([write.new for write in part.known])
    tables = [table for part in parts for table in part.tables]
    threads.map(lambda table: table.put(compares), tables)
    alone = [write for part in parts for write in part.alone]
    threads.map(lambda write: write.put(compares), alone, _size)


def undo_all(parts: Sequence[PartWrites], threads: ThreadPool) -> None:
    """Write the old bits back where new ones were written."""
    threads.map(_Table.undo, [table for part in parts for table in part.tables])
    written = [write for part in parts for write in part.all if write.written]
    on_devices, others = _divided(written)
    if on_devices:
        old = [write.old for write in on_devices]
        DeviceBatch([_elements(write) for write in on_devices]).put(old)
        for write in on_devices:
            write.written = False
    threads.map(Write.undo, others, _size)


def are_unchanged(parts: Sequence[PartWrites], threads: ThreadPool, *, sampled: bool) -> bool:
    """Return whether live memory still holds the old bits, as far as they are known.

    Args:
        sampled: whether a sample of those is compared that `put_all` compares, too.
    """
    on_devices = [write for part in parts for write in part.known if write.old is not None]
    read = {id(write.batch): write.batch for write in on_devices if write.batch is not None}
    if not all(batch.is_as_read() for batch in read.values()):
        return False
    alone = [write for write in on_devices if write.batch is None]
    if alone:
        batch = DeviceBatch([_elements(write) for write in alone])
        if not batch.holds([write.old for write in alone]):
            return False
    step = SAMPLED if sampled else 1
    tables = [table for part in parts for table in part.tables]
    if not all(threads.map(lambda table: table.elements.holds_old(step), tables)):
        return False
    if sampled:
        sample = [write for part in parts for write in part.sample]
        return all(threads.map(Write.seems_unchanged, sample, _size))
    others = [write for part in parts for write in part.alone]
    return all(threads.map(Write.unchanged, others, _size))


def read_old(writes: Sequence[Write]) -> None:
    """Read the old bits that are to be kept and are not known; those on devices together."""
    unread = [write for write in writes if write.keep and write.old is None]
    on_devices, others = _divided(unread)
    if on_devices:
        batch = DeviceBatch([_elements(write) for write in on_devices])
        for write, old in zip(on_devices, batch.read(), strict=True):
            write.old, write.batch = old, batch
    for write in others:
        write.read_old()


def _tabulated(writes: Sequence[Write]) -> tuple[list[_Table], list[Write]]:
    """Return tables of the small writes whose old bits are known, and the other writes."""
    alone: list[Write] = []
    groups: dict[tuple[Any, Any], list[list[Write]]] = {}
    room: dict[tuple[Any, Any], int] = {}
    for write in writes:
        elements = write.elements
        single = isinstance(elements, HostElements) and write.comparable
        if not single or write.new.size > _SMALL:
            alone.append(write)
            continue
        assert isinstance(elements, HostElements)
        kind = elements.flat.dtype, elements.offsets.dtype
        if room.get(kind, 0) <= 0:
            groups.setdefault(kind, []).append([])
            room[kind] = _TABLE
        groups[kind][-1].append(write)
        room[kind] -= elements.offsets.size
    tables = []
    for own in (group for found in groups.values() for group in found):
        table = table_of([*map(_arrays, own)]) if len(own) > 1 else None
        if table is None:
            alone += own
        else:
            tables.append(_Table(own, table))
    return tables, alone


def _arrays(write: Write) -> tuple[Any, Any, Any, Any]:
    assert isinstance(write.elements, HostElements)
    return write.elements.flat, write.elements.offsets, write.new, write.old


def _sample(writes: Sequence[Write]) -> Iterator[Write]:
    """Leave out small writes that `put` compares: of so many elements one is looked at."""
    passed = SAMPLED
    for write in writes:
        if write.comparable:
            passed += write.old.size
            if passed < SAMPLED:
                continue
            passed = 0
        yield write


def restore(pairs: Sequence[tuple[LiveElements, Any]], threads: ThreadPool) -> None:
    """Write bits to elements of live memory."""
    on_devices = [(one, bits) for one, bits in pairs if isinstance(one, _ON_DEVICES)]
    if on_devices:
        DeviceBatch([one for one, _ in on_devices]).put([bits for _, bits in on_devices])
    others = [(one, bits) for one, bits in pairs if not isinstance(one, _ON_DEVICES)]
    threads.map(lambda pair: pair[0].put(pair[1]), others, lambda pair: int(pair[1].nbytes))


def _divided(writes: Sequence[Write]) -> tuple[list[Write], list[Write]]:
    """Return the writes of elements on devices, and the others."""
    divided: tuple[list[Write], list[Write]] = [], []
    for write in writes:
        divided[not isinstance(write.elements, _ON_DEVICES)].append(write)
    return divided


def _size(write: Write) -> int:
    return int(write.new.nbytes)


def _elements(write: Write) -> DeviceElements | DeviceRows:
    assert isinstance(write.elements, _ON_DEVICES)
    return write.elements
