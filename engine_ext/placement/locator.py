"""Find the offsets in live memory of flat checkpoint indices.

A segment is a strided box on both sides. Its dimensions are sorted by source stride and merged if
both sides allow it, so that a whole tensor, a row shard and an expert each become one range:
locating in it is a slice and a subtraction. A column shard keeps two dimensions and costs a
division for each row. The dimensions of a box must nest, which `engine_ext.placement.ownership`
checks; in a box that does not, some elements are not found, but none is found in a wrong place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.kernels import array, compile_loop, made_once
from engine_ext.placement.ownership import merge_dims
from engine_ext.placement.segments import Segment

_Int64s = NDArray[np.int64]
Offsets = NDArray[Any]  # int32 [n], or int64 if the live tensor is too large for that


class LiveBox(NamedTuple):
    """A segment without repack and copies.

    Attributes:
        start, end: its first index, and one more than its last.
        offset: of its first element in live memory.
        dims: size, source stride and live stride of each dimension, outermost first; int64 [n, 3].
    """

    start: int
    end: int
    offset: int
    dims: _Int64s


class Locator:
    """Finds the elements of one segment; its `repack` is applied to the offsets.

    Attributes:
        offset_dtype: numpy dtype of the offsets: int32 if every offset fits, else int64.
        ends: the box's first index, and one more than its last.
        shift: index minus offset if the box is one run in the checkpoint and in memory, else None.
    """

    def __init__(self, segment: Segment) -> None:
        # (size, source stride, live stride) of each dimension
        dims = zip(segment.sizes, segment.source_strides, segment.strides, strict=True)
        longer = [dim for dim in dims if dim[0] != 1]
        self._copies = _copies([(size, live) for size, source, live in longer if source == 0])
        merged = merge_dims(dim for dim in longer if dim[1] != 0)
        self._dims = np.array(merged, np.int64).reshape(-1, 3)
        self._start = segment.source_offset
        self._end = self._start + 1 + sum((size - 1) * source for size, source, _ in merged)
        self._offset = segment.offset
        self._empty = 0 in segment.sizes
        self._repack = segment.repack
        self.offset_dtype: Any = np.int32 if segment.live.flat().numel() <= 1 << 31 else np.int64
        self._is_range = not merged or (len(merged) == 1 and merged[0][1:] == (1, 1))
        if not self._is_range:
            _compiled()  # compiles the loop, which the first sync would otherwise wait for
        self.ends = self._start, self._end
        is_run = self._is_range and self._copies is None and self._repack is None
        self.shift = self._start - self._offset if is_run else None

    @property
    def copies(self) -> int:
        """How many copies of each element the box holds."""
        return 1 if self._copies is None else len(self._copies)

    @property
    def box(self) -> LiveBox | None:
        """The box, which is not empty; None if elements of it are moved or come several times."""
        if self._empty or self._copies is not None or self._repack is not None:
            return None
        return LiveBox(self._start, self._end, self._offset, self._dims)

    @property
    def is_box(self) -> bool:
        """Whether no repack moves the offsets, so that `elements_in` has them."""
        return self._repack is None

    def within(self, indices: NDArray[Any]) -> slice:
        """Return which of the ascending indices, int32 or int64 [n], are between the box's ends."""
        if self._empty or not indices.size:
            return slice(0, 0)
        if indices[0] >= self._start and indices[-1] < self._end:
            return slice(0, indices.size)
        # np.searchsorted would copy int32 indices to the int64 of what is searched.
        return slice(bisect_left(indices, self._start), bisect_left(indices, self._end))

    def overlap(self, start: int, stop: int) -> tuple[int, int]:
        """Return the part of the range `start` to `stop` that is between the box's ends."""
        if self._empty:
            return start, start
        first = min(max(start, self._start), stop)
        return first, max(first, min(stop, self._end))

    def elements_in(
        self, start: int, stop: int, device: torch.device, copy: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """List the box's elements from index `start` to below `stop`, computed on a device.

        Args:
            copy: which of the `copies` of each element. The segment has no repack.

        Returns:
            Their flat checkpoint indices, ascending, and their offsets in `segment.live.flat()`;
            int64 [n] each.
        """
        first, last = (0, 0) if self._empty else (self._count_below(at) for at in (start, stop))
        number = torch.arange(first, last, device=device)
        indices = torch.full_like(number, self._start)
        offsets = torch.full_like(
            number, self._offset + (0 if self._copies is None else int(self._copies[copy]))
        )
        for size, source, live in self._dims[::-1].tolist():
            position, number = number % size, number // size
            indices += position * source
            offsets += position * live
        return indices, offsets

    def _count_below(self, index: int) -> int:
        """Return how many of the box's elements have a smaller index."""
        rest, count, inside = max(index - self._start, 0), 0, True
        for size, source, _ in self._dims.tolist():
            position, rest = divmod(rest, source)
            count = count * size + (min(position, size) if inside else 0)
            inside &= position < size
        return count + bool(rest and inside)

    def __call__(self, indices: _Int64s) -> tuple[slice | _Int64s, Offsets]:
        """Find which of the ascending flat checkpoint indices, int64 [n], are in the box.

        Returns:
            These (a slice, or int64 positions in `indices`), and their offsets in
            `segment.live.flat()`. If the box holds several copies of an element, they are
            consecutive.
        """
        within = self.within(indices)
        chosen: slice | _Int64s = within
        if self._is_range:
            offsets: Offsets = indices[within] - (self._start - self._offset)
        else:
            chosen, offsets = _in_box(indices[within], self._start, self._offset, self._dims)
            chosen += within.start
        if self._copies is not None:
            chosen = np.repeat(np.arange(indices.size)[chosen], len(self._copies))
            offsets = (offsets[:, None] + self._copies).reshape(-1)
        if self._repack is not None:
            offsets = self._repack.move(offsets.astype(np.int64, copy=False))
        return chosen, offsets.astype(self.offset_dtype, copy=False)


def _copies(dims: list[tuple[int, int]]) -> _Int64s | None:
    """Return the live offsets of the copies of one broadcast element, or None without copies."""
    offsets = np.zeros(1, np.int64)
    for size, live in dims:
        offsets = (offsets[:, None] + np.arange(size) * live).reshape(-1)
    return offsets if dims else None


def _in_box(indices: _Int64s, start: int, offset: int, dims: _Int64s) -> tuple[_Int64s, _Int64s]:
    """Return the positions of the indices that are in a box, and their live offsets."""
    loop = _compiled()
    if loop is None:
        return _in_box_by_numpy(indices, start, offset, dims)
    positions, offsets = np.empty(indices.size, np.int64), np.empty(indices.size, np.int64)
    count = loop(np.ascontiguousarray(indices), start, offset, dims.reshape(-1), positions, offsets)
    return positions[:count], offsets[:count]


def _in_box_by_numpy(
    indices: _Int64s, start: int, offset: int, dims: _Int64s
) -> tuple[_Int64s, _Int64s]:
    rest = indices - start
    kept = np.ones(len(rest), np.bool_)
    offsets = np.full(len(rest), offset, np.int64)
    for size, source, live in dims.tolist():
        position, rest = np.divmod(rest, source)
        kept &= position < size
        offsets += position * live
    kept &= rest == 0
    return np.flatnonzero(kept), offsets[kept]


def box_loop(indices: Any, start: Any, offset: Any, dims: Any, positions: Any, offsets: Any) -> Any:
    """Fill `positions` and `offsets` and return the count; compiled by numba.

    Indices ascend, so most have the same row as the one before: the same position in all dimensions
    but the last. Only a new row costs divisions.
    """
    last = dims.size - 3
    size, step, live = dims[last], dims[last + 1], dims[last + 2]
    count: Any = 0
    row, end, row_live, row_inside = 0, 0, 0, False
    for k in range(indices.size):
        index = indices[k] - start
        if index >= end:
            row, end, row_live, row_inside = 0, 1 << 62, offset, True
            for d in range(0, last, 3):
                position = (index - row) // dims[d + 1]
                row += position * dims[d + 1]
                end = min(end, row + dims[d + 1])
                row_live += position * dims[d + 2]
                row_inside &= position < dims[d]
        position = index - row
        inside = row_inside
        if step != 1:
            inside &= position % step == 0
            position //= step
        positions[count] = k
        offsets[count] = row_live + position * live
        count += np.int64(inside & (position < size))
    return count


@made_once
def _compiled() -> Callable[..., int] | None:
    try:
        from numba import types
    except ImportError:
        return None
    word, out = types.int64, array(types, "int64", readonly=False)
    words = array(types, "int64")
    return compile_loop(box_loop, word(words, word, word, words, out, out))
