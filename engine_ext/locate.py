"""From flat checkpoint indices to offsets in live memory.

A segment is a strided box on both sides. Its dimensions are put in the order of their source
strides and merged where both sides allow it, so that a whole tensor, a row shard and an expert
each become one range, and locating in it is a slice and an addition. A column shard keeps two
dimensions and costs one division. Boxes that do not nest (none is known to come from a loader)
are looked up in a sorted table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.placement import Segment

_Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Dim:
    size: int
    source: int
    live: int


class Locator:
    """Locates the elements of one segment.

    Args:
        segment: the box; its `repack` is applied to what is located.
    """

    def __init__(self, segment: Segment) -> None:
        dims = [
            _Dim(size, source, live)
            for size, source, live in zip(
                segment.sizes, segment.source_strides, segment.strides, strict=True
            )
            if size != 1
        ]
        self._segment = segment
        self._copies = _copies([d for d in dims if d.source == 0])
        self._dims = _merged([d for d in dims if d.source != 0])
        self._start = segment.source_offset
        self._end = self._start + 1 + sum((d.size - 1) * d.source for d in self._dims)
        self._empty = 0 in segment.sizes
        nested = all(
            outer.source > (inner.size - 1) * inner.source
            for outer, inner in zip(self._dims, self._dims[1:], strict=False)
        )
        self._table = None if nested else _table(self._dims)

    @property
    def copies(self) -> int:
        """How many times the box holds each of its elements."""
        return 1 if self._copies is None else len(self._copies)

    def __call__(self, indices: _Int64s) -> tuple[slice | _Int64s, _Int64s]:
        """Find the elements of a delta that lie in the box.

        Args:
            indices: int64 [n], ascending flat checkpoint indices.

        Returns:
            Which of `indices` lie in the box (a slice, or int64 positions), and their int64
            offsets in `segment.live.flat()`. An element that the box holds several times comes
            as many times.
        """
        if self._empty:
            return slice(0, 0), np.empty(0, np.int64)
        first, last = np.searchsorted(indices, [self._start, self._end])
        chosen: slice | _Int64s = slice(int(first), int(last))
        relative = indices[chosen] - self._start
        kept, offsets = self._inside(relative)
        if kept is not None:
            chosen = np.flatnonzero(kept) + first
        offsets = offsets + self._segment.offset
        if self._copies is not None:
            positions = np.arange(first, last) if isinstance(chosen, slice) else chosen
            chosen = np.repeat(positions, len(self._copies))
            offsets = (offsets[:, None] + self._copies).reshape(-1)
        if self._segment.repack is not None:
            offsets = self._segment.repack.move(offsets)
        return chosen, offsets

    def _inside(self, relative: _Int64s) -> tuple[NDArray[np.bool_] | None, _Int64s]:
        """Which elements are in the box (None: all), and the live offsets of those."""
        if not self._dims:
            return None, np.zeros(len(relative), np.int64)
        if self._table is not None:
            return _looked_up(relative, *self._table)
        if len(self._dims) == 1 and self._dims[0].source == 1:
            return None, relative * self._dims[0].live if self._dims[0].live != 1 else relative
        kept = np.ones(len(relative), np.bool_)
        offsets = np.zeros(len(relative), np.int64)
        for dim in self._dims:
            position, relative = np.divmod(relative, dim.source)
            kept &= position < dim.size
            offsets += position * dim.live
        if self._dims[-1].source != 1:
            kept &= relative == 0
        return kept, offsets[kept]


def _merged(dims: list[_Dim]) -> list[_Dim]:
    """Ordered by source stride, outermost first, with adjacent dimensions that are one joined."""
    merged: list[_Dim] = []
    for dim in sorted(dims, key=lambda d: -d.source):
        outer = merged[-1] if merged else None
        if (
            outer is not None
            and outer.source == dim.size * dim.source
            and outer.live == dim.size * dim.live
        ):
            merged[-1] = _Dim(outer.size * dim.size, dim.source, dim.live)
        else:
            merged.append(dim)
    return merged


def _copies(dims: list[_Dim]) -> _Int64s | None:
    """Live offsets of the copies of one element that is broadcast, or None."""
    if not dims:
        return None
    offsets = np.zeros(1, np.int64)
    for dim in dims:
        offsets = (offsets[:, None] + np.arange(dim.size) * dim.live).reshape(-1)
    return offsets


def _table(dims: list[_Dim]) -> tuple[_Int64s, _Int64s]:
    """All elements of a box: their relative source indices, sorted, and their live offsets."""
    source = np.zeros(1, np.int64)
    live = np.zeros(1, np.int64)
    for dim in dims:
        steps = np.arange(dim.size)
        source = (source[:, None] + steps * dim.source).reshape(-1)
        live = (live[:, None] + steps * dim.live).reshape(-1)
    order = np.argsort(source, kind="stable")
    return source[order], live[order]


def _looked_up(
    relative: _Int64s, source: _Int64s, live: _Int64s
) -> tuple[NDArray[np.bool_], _Int64s]:
    found = np.searchsorted(source, relative).clip(max=len(source) - 1)
    kept = source[found] == relative
    return kept, live[found[kept]]


def compact(offsets: _Int64s, extent: int) -> torch.Tensor:
    """Offsets as a tensor of the narrowest index dtype: int32 [n] where `extent` allows it."""
    dtype: Any = np.int32 if extent <= 1 << 31 else np.int64
    return torch.from_numpy(np.ascontiguousarray(offsets.astype(dtype, copy=False)))
