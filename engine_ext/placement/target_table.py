"""A table of targets, so that one compiled call finds the elements of many deltas.

A call for each tensor releases the interpreter lock and waits for it again, which takes longer than
to find a few thousand elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        starts: by delta, if its target is a run, the number of its first element in the target;
            otherwise where its elements begin in `positions` and `offsets`; [deltas].
        counts: how many of its elements are in the target, [deltas].
        positions: numbers of the elements in targets that are not runs, [n].
        offsets: the offsets of these in live memory, in elements, [n].
    """

    starts: _Int64s
    counts: _Int64s
    positions: _Int32s
    offsets: _Int32s


def fits_table(target: Target) -> bool:
    """Return whether a target can be in a table.

    It is one box without copies in aligned host memory, and its indices and offsets fit int32.
    """
    box = target.locator.box
    if target.host is None or not target.host.flags.aligned or box is None:
        return False
    return target.locator.offset_dtype is np.int32 and box.end <= 1 << 31


class TargetTable:
    """Targets that `fits_table` allows, a row for each.

    It has the addresses of live tensors, and does not keep their memory: the targets do.

    Attributes:
        addresses: of the live tensor, uint64 [rows].
        sizes: its elements, int64 [rows].
        is_run: see `Target.is_run`; bool [rows].
        shifts: index minus offset if it is a run, else 0; int64 [rows].
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        numbers: list[tuple[int, ...]] = []
        dims = [np.empty(0, np.int64)]
        at = 0
        for target in targets:
            box, shift = target.locator.box, target.locator.shift
            assert box is not None
            if shift is None:
                dims.append(box.dims.reshape(-1))
            end = at + dims[-1].size if shift is None else at
            numbers.append((*box[:3], at, end, target.flat.numel(), shift or 0))
            at = end
        table = np.array(numbers, np.int64).reshape(-1, 7).T.copy()
        self._start, self._end, self._offset, self._dims_at, self._dims_end = table[:5]
        self.sizes, self.shifts = table[5:]
        self._dims = np.concatenate(dims)
        self.is_run = np.array([target.is_run for target in targets], np.bool_)
        self.addresses = np.array([target.flat.data_ptr() for target in targets], np.uint64)

    def warm_up(self) -> bool:
        """Compile the loop now, so that the first sync need not wait; False without numba."""
        return _loop() is not None

    def locate(self, rows: _Int64s, indices: _Int32s, ends: _Int64s) -> LocatedElements:
        """Find the elements of some deltas, each in the target of its row.

        numba is installed; see `warm_up`.

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
