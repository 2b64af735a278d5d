"""Targets by the number, so that one compiled call finds the elements of many deltas.

A call for each tensor gives up the interpreter lock and waits for it again, which takes longer than
to find a few thousand elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.kernels import array, compile_loop, made_with_numba
from engine_ext.placement.locator import box_loop
from engine_ext.placement.targets import Target

_Int64s = NDArray[np.int64]
_Int32s = NDArray[np.int32]


class LocatedElements(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Which elements of some deltas, one after another, are in their targets.

    Attributes:
        starts: of each delta whose target is a run, the number of its first element that is in it;
            of another one, where its elements begin in `positions` and `offsets`; [deltas].
        counts: how many are in it, [deltas].
        positions: numbers of the elements in targets that are not runs.
        offsets: likewise, of live memory.
    """

    starts: _Int64s
    counts: _Int64s
    positions: _Int32s
    offsets: _Int32s


class TargetTable:
    """Targets in host memory, each one box of at most 2**31 elements.

    It holds the addresses of the live tensors, and the targets, which keep their memory.

    Args:
        targets: any; those that are something else get no row.

    Attributes:
        rows: by the position in `targets`, the number of the row, or None.
        addresses, sizes, shifts: of each row: address and elements of the live tensor, and index
            minus offset if it is a run.
        is_run: of each row, see `Target.is_run`.
    """

    def __init__(self, targets: Iterable[Target]) -> None:
        self.rows: list[int | None] = []
        self._targets: list[Target] = []
        numbers: list[tuple[int, ...]] = []
        dims: list[_Int64s] = []
        at = 0
        for target in targets:
            box = target.locator.box
            if box is None or not _fits(target):
                self.rows.append(None)
                continue
            self.rows.append(len(self._targets))
            self._targets.append(target)
            shift = target.locator.shift
            size = 0 if shift is not None else box.dims.size
            shape = (at, at + size, target.flat.numel(), 0 if shift is None else shift)
            numbers.append((box.start, box.end, box.offset, *shape))
            if size:
                dims.append(box.dims.reshape(-1))
                at += size
        table = np.array(numbers, np.int64).reshape(-1, 7).T.copy()
        self._start, self._end, self._offset, self._dims_at, self._dims_end = table[:5]
        self.sizes, self.shifts = table[5:]
        self._dims = np.concatenate([np.empty(0, np.int64), *dims])
        self.is_run = np.array([target.is_run for target in self._targets], np.bool_)
        self.addresses = np.array([t.flat.data_ptr() for t in self._targets], np.uint64)

    def warm_up(self) -> bool:
        """Compile the loop now, so that the first sync need not wait; False without numba."""
        return _loop() is not None

    def locate(self, rows: _Int64s, indices: _Int32s, ends: _Int64s) -> LocatedElements:
        """Find the elements of some deltas, each in the target of its row; numba is installed.

        Args:
            rows: of each delta, [deltas].
            indices: their ascending flat checkpoint indices, one delta after another.
            ends: of each delta's indices, [deltas].
        """
        counts, starts = np.empty((2, rows.size), np.int64)
        is_run = self.is_run[rows]
        most = 0 if is_run.all() else indices.size
        positions, offsets = np.empty((2, most), np.int32)
        loop = _loop()
        assert loop is not None
        found = loop(
            *(indices, ends, self._start[rows], self._end[rows], self._offset[rows], is_run),
            *(self._dims, self._dims_at[rows], self._dims_end[rows]),
            *(starts, counts, positions, offsets),
        )
        return LocatedElements(starts, counts, positions[:found].copy(), offsets[:found].copy())


def _fits(target: Target) -> bool:
    """Return whether a target is in aligned host memory, and indices and offsets are narrow."""
    if target.host is None or not target.host.flags.aligned:
        return False
    box = target.locator.box
    return target.locator.offset_dtype is np.int32 and box is not None and box.end <= 1 << 31


def _locate_all(
    indices: Any,
    ends: Any,
    lowest: Any,
    beyond: Any,
    offset: Any,
    is_run: Any,
    dims: Any,
    dims_at: Any,
    dims_end: Any,
    starts: Any,
    counts: Any,
    positions: Any,
    offsets: Any,
) -> Any:
    """Compiled: fill the last four arrays; return how much of the last two is filled."""
    at = begin = np.int64(0)
    for k in range(ends.size):
        end = ends[k]
        first = begin + np.searchsorted(indices[begin:end], lowest[k])
        last = begin + np.searchsorted(indices[begin:end], beyond[k])
        begin = end
        if is_run[k]:
            starts[k], counts[k] = first, last - first
            continue
        own = dims[dims_at[k] : dims_end[k]]
        found, places = positions[at:], offsets[at:]
        count = box_loop(indices[first:last], lowest[k], offset[k], own, found, places)
        for number in range(count):
            found[number] += first
        starts[k], counts[k] = at, count
        at += count
    return at


@made_with_numba
def _loop(types: Any) -> Callable[..., int]:
    """Compile the loop; None without numba."""
    from numba.extending import register_jitable

    register_jitable(box_loop)
    words, out = array(types, "int64"), array(types, "int64", readonly=False)
    indices, narrow = array(types, "int32"), array(types, "int32", readonly=False)
    arguments = (
        *(indices, words, words, words, words, array(types, "boolean")),
        *(words, words, words, out, out, narrow, narrow),
    )
    return compile_loop(_locate_all, types.int64(*arguments))
