"""Memory for what staging finds of a part: one array for all that an undo needs, one for new bits.

Memory from the system is cleared page by page when it is first touched, which takes several times
as long as staging takes to fill it. numpy asks for huge pages, but only for large arrays; those of
one piece of one tensor are small. The undo log keeps its array alive, and not that of the new bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.format import ParamDelta
from engine_ext.kernels import Bits, Offsets
from engine_ext.placement import Target

_ALIGN = 64  # bytes of a cache line, which no two threads should write to


class StagedArrays(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The elements of a sparse delta in one run of live memory, to be filled piece by piece.

    Attributes:
        start, stop: which of the delta's values they are.
        offsets: int32 or int64 [stop - start].
        old, new: unsigned ints of the live width, [stop - start].
    """

    start: int
    stop: int
    offsets: Offsets
    old: Bits
    new: Bits

    def piece(self, start: int, stop: int) -> StagedArrays:
        """Return those of the delta's values from `start` to `stop`; views."""
        if start <= self.start and stop >= self.stop:
            return self
        start = min(max(start, self.start), self.stop)
        stop = max(start, min(stop, self.stop))
        here = slice(start - self.start, stop - self.start)
        return StagedArrays(start, stop, self.offsets[here], self.old[here], self.new[here])


def allocate(
    runs: Sequence[tuple[ParamDelta, Target]], others: Sequence[tuple[int, Any]] = ()
) -> tuple[list[StagedArrays], list[tuple[Offsets, Bits, Bits]]]:
    """Return uninitialised arrays for elements of live memory.

    Args:
        runs: sparse deltas, and the runs of memory in which their elements are found.
        others: how many elements, and the dtype of their bits.

    Returns:
        For each run its arrays, and for each of the others its offsets, int32, old and new bits.
    """
    ranges, kept, sent = [], _Layout(), _Layout()
    for delta, target in runs:
        assert delta.indices is not None
        assert target.host is not None
        within = target.locator.within(delta.indices)
        ranges.append((within.start, within.stop))
        _add(kept, sent, within.stop - within.start, target.locator.offset_dtype, target.host.dtype)
    for count, bits in others:
        _add(kept, sent, count, np.int32, bits)
    undo, new = iter(kept.arrays()), iter(sent.arrays())
    staged = [StagedArrays(*ends, next(undo), next(undo), next(new)) for ends in ranges]
    return staged, [(next(undo), next(undo), next(new)) for _ in others]


def _add(kept: _Layout, sent: _Layout, count: int, offsets: Any, bits: Any) -> None:
    kept.add(count, offsets)
    kept.add(count, bits)
    sent.add(count, bits)


class _Layout:
    """Arrays that lie in one."""

    def __init__(self) -> None:
        self._size = 0
        self._views: list[tuple[int, int, np.dtype[Any]]] = []

    def add(self, count: int, dtype: Any) -> None:
        """Add an array of `count` elements."""
        dtype = np.dtype(dtype)
        nbytes = count * dtype.itemsize
        self._views.append((self._size, nbytes, dtype))
        self._size += -(-nbytes // _ALIGN) * _ALIGN

    def arrays(self) -> list[NDArray[Any]]:
        """Return the arrays in the order they were added."""
        whole = np.empty(self._size, np.uint8)
        return [whole[at : at + nbytes].view(dtype) for at, nbytes, dtype in self._views]
