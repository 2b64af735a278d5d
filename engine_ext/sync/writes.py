"""Many writes: those to host memory are divided between threads, those to devices go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine_ext.errors import BaseMismatch
from engine_ext.kernels import ElementTable, table_of
from engine_ext.placement import (
    SAMPLED,
    DeviceBatch,
    DeviceElements,
    DeviceMemory,
    DeviceRows,
    HostElements,
    LiveElements,
    WholeBox,
    are_as_read,
    hold_digests,
    overwrite,
)
from engine_ext.sync.staged import CHANGED, UndoLog, UndoTable, Write
from engine_ext.sync.thread_pool import ThreadPool

_ON_DEVICES: Final = (DeviceElements, DeviceRows)
_SMALL: Final = 1 << 12  # elements that are written faster than a call of their own takes
_TABLE: Final = 1 << 16  # elements that a thread writes at a time


class PartWrites:
    """The writes of a part on this rank, prepared by the thread that stages it.

    Small ones to host memory are in tables; one compiled call visits all of a table. Those to
    devices are in batches, for which all that a write needs is on the devices.

    Attributes:
        all: in the part's order.
        launched: the batches.
        boxes: on devices, with the digests of their old bits where these are known.
    """

    __slots__ = (
        *("all", "launched", "boxes", "tables", "alone", "sample"),
        *("_unknown", "_pairs", "_unpaired"),
    )

    def __init__(self, writes: Sequence[Write]) -> None:
        self.all = [*writes]
        self._divide()

    def _divide(self) -> None:
        on_devices, others = _divided(self.all)
        self.launched = _launched(on_devices)
        self.boxes = [
            (write.elements, write.digest)
            for write in others
            if isinstance(write.elements, WholeBox) and write.digest is not None
        ]
        self.tables, self.alone = _tabulated(others)
        in_host = [write for write in self.alone if write.digest is None]
        self.sample = [*_sample([write for write in in_host if write.old is not None])]
        self._unknown = [write for write in self.all if write.old is None]
        # Those alone; the ones whose old bits the write reads are paired after it.
        self._pairs = [_pair(write) for write in self.alone if write.old is not None]
        self._unpaired = [write for write in self.alone if write.old is None]

    def read_old(self, memory: DeviceMemory) -> None:
        """Read the old bits that are to be kept and are not known."""
        if any(write.keep for write in self._unknown):
            read_old(self.all, memory)
            self._divide()

    def end_write(self, log: UndoLog) -> None:
        """Add to a log what restores the old bits, after they were written over."""
        for launched in self.launched:
            left = launched.batch.end_write()
            placed = (launched.writes[number] for number in left)
            log.writes += [_pair(write) for write in placed if write is not None]
            if len(left) < len(launched.writes):
                log.batches.append(launched.batch)
        log.tables += [UndoTable(table.elements, table.pairs) for table in self.tables]
        log.writes += self._pairs
        log.writes += map(_pair, self._unpaired)

    def lists(self) -> list[list[Any]]:
        """Return the lists that hold the writes: emptied, they keep none of them in memory."""
        return [
            *(self.all, self.boxes, self.alone, self.sample),
            *(self._unknown, self._pairs, self._unpaired),
            *(table.writes for table in self.tables),
            *(one.writes for one in self.launched),
            self.launched,
        ]


@dataclass(slots=True, eq=False)
class _Launched:
    """Writes to devices that go together.

    Attributes:
        batch: ready to be written.
        writes: of each of its elements; None: these are not written.
        is_known: whether it has read the old bits.
        reads: whether the old bits are read in the pass that writes.
    """

    batch: DeviceBatch
    writes: list[Write | None]
    is_known: bool
    reads: bool

    def put(self) -> None:
        """Do as `Write.put` does for each, but for the comparison."""
        if self.reads:
            for number, old in self.batch.swap():
                write = self.writes[number]
                if write is not None:  # else only read
                    write.old, write.written = old, True
            return
        for number in self.batch.put():
            self._write(number).written = True

    def undo(self) -> None:
        """Put the old bits back where the batch's kernels have put new ones."""
        for number in self.batch.undo():
            self._write(number).written = False

    def _write(self, number: int) -> Write:
        write = self.writes[number]
        assert write is not None
        return write


@dataclass(slots=True, eq=False)
class _Table:
    """Small writes to host memory, whose old bits are known.

    Attributes:
        pairs: what an undo restores, see `UndoTable`.
        written: whether all of them are, which are not looked at one by one.
    """

    writes: list[Write]
    elements: ElementTable
    pairs: list[tuple[LiveElements, Any]]
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
        if self.written:
            self.elements.write_old()
        self.written = False


def put_all(
    parts: Sequence[PartWrites],
    threads: ThreadPool,
    memory: DeviceMemory,
    *,
    compares: bool,
    shared: bool = False,
) -> None:
    """Write the new bits of all; see `Write.put`, which compares in host memory only.

    Args:
        memory: for what writes those whose old bits are read before.
        shared: whether two writes can be to the same memory: all old bits are read before any new
            ones are written, or one write would take the other's new bits for old ones.

    Raises:
        BaseMismatch: see `Write.put`.
        Exception: some are written; `undo_all` takes them back.
    """
    for part in parts if shared else ():
        part.read_old(memory)
    for part in parts:
        for launched in part.launched:
            launched.put()
    tables = [table for part in parts for table in part.tables]
    threads.map(lambda table: table.put(compares), tables)
    alone = [write for part in parts for write in part.alone]
    threads.map(lambda write: write.put(compares), alone, _size)


def undo_all(parts: Sequence[PartWrites], threads: ThreadPool) -> None:
    """Write the old bits back where new ones were written.

    Raises:
        Exception: the first one of a write that could not be undone; all others are.
    """
    tables = [table for part in parts for table in part.tables]
    failures = threads.map(lambda table: _failure(table.undo), tables)
    failures += [_failure(one.undo) for part in parts for one in part.launched]
    # What kernels have not written: PyTorch's operators have, or the engine's loader.
    on_devices, others = _divided([w for part in parts for w in part.all if w.written])
    failures.append(_failure(lambda: _undo_together(on_devices)))
    failures += threads.map(lambda write: _failure(write.undo), others, _size)
    for failure in failures:
        if failure is not None:
            raise failure


def _failure(step: Callable[[], None]) -> Exception | None:
    """Return what a step has raised, so that those after it are still done."""
    try:
        step()
    except Exception as error:
        return error
    return None


def _undo_together(writes: Sequence[Write]) -> None:
    overwrite([_elements(write) for write in writes], [write.old for write in writes])
    for write in writes:
        write.written = False


def are_unchanged(parts: Sequence[PartWrites], threads: ThreadPool, *, sampled: bool) -> bool:
    """Return whether live memory still holds the old bits, as far as they are known.

    Args:
        sampled: whether a sample of those is compared that `put_all` compares, too.
    """
    if not are_as_read([one.batch for part in parts for one in part.launched if one.is_known]):
        return False
    if not hold_digests([box for part in parts for box in part.boxes]):
        return False
    step = SAMPLED if sampled else 1
    tables = [table for part in parts for table in part.tables]
    if not all(threads.map(lambda table: table.elements.holds_old(step), tables)):
        return False
    if sampled:
        sample = [write for part in parts for write in part.sample]
        return all(threads.map(Write.seems_unchanged, sample, _size))
    others = [write for part in parts for write in part.alone if write.digest is None]
    return all(threads.map(Write.unchanged, others, _size))


def read_old(writes: Sequence[Write], memory: DeviceMemory) -> None:
    """Read the old bits that are to be kept and are not known; those on devices together.

    Args:
        memory: for what writes these.
    """
    unread = [write for write in writes if write.keep and write.old is None]
    on_devices, others = _divided(unread)
    if on_devices:
        batch = DeviceBatch([_elements(write) for write in on_devices], memory)
        for write, old in zip(on_devices, batch.read(), strict=True):
            write.old, write.batch = old, batch
    for write in others:
        write.read_old()


def batch_unread(writes: Sequence[Write], memory: DeviceMemory) -> None:
    """Let elements on devices whose old bits nothing has read be written in batches, too."""
    on_devices, _ = _divided([write for write in writes if write.batch is None])
    for keep in (True, False):  # old bits that are kept are read in the pass that writes
        own = [write for write in on_devices if write.keep is keep]
        batch = DeviceBatch([_elements(write) for write in own], memory)
        for write in own:
            write.batch = batch


def _launched(writes: Sequence[Write]) -> list[_Launched]:
    """Make the batches of writes to devices ready."""
    batches = {id(write.batch): write.batch for write in writes}
    own = {id(write.elements): write for write in writes}
    found = []
    for batch in batches.values():
        assert batch is not None
        placed = [own.get(id(elements)) for elements in batch.elements]
        several = [write for write in placed if write is not None]
        is_known = all(write.old is not None for write in several)
        reads = not is_known and all(write.keep for write in several)
        new = {n: write.new for n, write in enumerate(placed) if write is not None}
        batch.make_ready(new, reads=reads)
        found.append(_Launched(batch, placed, is_known, reads))
    assert sum(write is not None for one in found for write in one.writes) == len(writes)
    return found


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
            tables.append(_Table(own, table, [*map(_pair, own)]))
    return tables, alone


def _pair(write: Write) -> tuple[LiveElements, Any]:
    return write.elements, write.old


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


def restore(log: UndoLog, threads: ThreadPool) -> None:
    """Write the old bits of a log.

    Kernels read them until the device is synchronised.

    Raises:
        Exception: some might be written.
    """
    for batch in log.batches:
        for _ in batch.undo():
            pass
    on_devices = [(one, bits) for one, bits in log.writes if isinstance(one, _ON_DEVICES)]
    overwrite([one for one, _ in on_devices], [bits for _, bits in on_devices])
    threads.map(lambda table: table.elements.write_old(), log.tables)
    others = [(one, bits) for one, bits in log.writes if not isinstance(one, _ON_DEVICES)]
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
