"""Many writes: those to host memory are divided between threads, those to devices go together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from engine_ext.placement import SAMPLED, DeviceBatch, DeviceElements, DeviceRows, LiveElements
from engine_ext.sync.staged import Write
from engine_ext.sync.thread_pool import ThreadPool

_ON_DEVICES: Final = (DeviceElements, DeviceRows)


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


def put_all(writes: Sequence[Write], threads: ThreadPool, *, compares: bool) -> None:
    """Write the new bits of all; see `Write.put`, which compares in host memory only.

    Raises:
        BaseMismatch: see `Write.put`.
        Exception: some are written; `undo_all` takes them back.
    """
    on_devices, others = _divided(writes)
    reading = [write for write in on_devices if write.keep and write.old is None]
    known = [write for write in on_devices if not (write.keep and write.old is None)]
    if reading:
        batch = DeviceBatch([_elements(write) for write in reading])
        for number, old in batch.swap([write.new for write in reading]):
            reading[number].old, reading[number].written = old, True
    for write in known:
        write.written = True
    if known:
        DeviceBatch([_elements(write) for write in known]).put([write.new for write in known])
    threads.map(lambda write: write.put(compares), others, _size)


def undo_all(writes: Sequence[Write], threads: ThreadPool) -> None:
    """Write the old bits back where new ones were written."""
    on_devices, others = _divided([write for write in writes if write.written])
    if on_devices:
        DeviceBatch([_elements(w) for w in on_devices]).put([write.old for write in on_devices])
        for write in on_devices:
            write.written = False
    threads.map(Write.undo, others, _size)


def are_unchanged(writes: Sequence[Write], threads: ThreadPool, *, sampled: bool) -> bool:
    """Return whether live memory still holds the old bits, as far as they are known.

    Args:
        sampled: whether a sample of those is compared that `put_all` compares, too.
    """
    on_devices, others = _divided([write for write in writes if write.old is not None])
    read = {id(write.batch): write.batch for write in on_devices if write.batch is not None}
    if not all(batch.is_as_read() for batch in read.values()):
        return False
    alone = [write for write in on_devices if write.batch is None]
    if alone:
        batch = DeviceBatch([_elements(write) for write in alone])
        if not batch.holds([write.old for write in alone]):
            return False
    if not sampled:
        return all(threads.map(Write.unchanged, others, _size))
    return all(threads.map(Write.seems_unchanged, [*_sample(others)], _size))


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
