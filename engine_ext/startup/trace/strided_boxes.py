"""Find strided boxes in an array of element ids.

The array gives, for every element of a box of memory, the source and its element that are held
there. Most loaders leave a few boxes of constant strides in it: a transpose is one, a concatenation
a few.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch

# Elements compared at a time.
_CHUNK: Final = 1 << 22
# The longest repeating pattern along a dimension that is looked for; interleaved tensors leave one.
_MAX_PERIOD: Final = 64


@dataclass(frozen=True, slots=True)
class ElementIds:
    """The source element that every element of a box holds.

    Attributes:
        values: int32 or int64 on the CPU, in the box's shape; 0 is no source's element.
        starts: ascending. Source i has the ids from ``starts[i]`` (at least 1) to below
            ``starts[i + 1]``, one per element; the last entry belongs to no source.
    """

    values: torch.Tensor
    starts: Sequence[int]

    def source(self, element_id: int) -> int:
        """Return the number of the source that an id belongs to; -1 if none."""
        return bisect_right(self.starts, element_id) - 1


@dataclass(frozen=True, slots=True)
class StridedBox:
    """A box of memory whose element ids are constant strides apart.

    Attributes:
        offset, sizes, strides: of the box in memory.
        first: id of the first element; 0 if no element belongs to a source.
        steps: strides of the ids, none negative; all 0 if `first` is 0.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    steps: tuple[int, ...]

    @property
    def last(self) -> int:
        """The highest id in the box."""
        return self.first + sum((n - 1) * s for n, s in zip(self.sizes, self.steps, strict=True))


class _TooManyBoxes(Exception): ...


def find_boxes(
    ids: ElementIds, offset: int, strides: Sequence[int], most: int
) -> list[StridedBox] | None:
    """Cut the array into boxes that hold elements of one source each, or of none.

    The ids are those of a box of memory with at least one element, at `offset` and with `strides`.
    The boxes cover the array exactly; None if more than `most` are needed.
    """
    try:
        return _Cutter(ids, most).cut(ids.values, offset, tuple(strides))
    except _TooManyBoxes:
        return None


class _Cutter:
    def __init__(self, ids: ElementIds, most: int) -> None:
        self._ids = ids
        self._starts = torch.tensor(ids.starts)
        self._most = most

    def cut(self, values: torch.Tensor, offset: int, strides: tuple[int, ...]) -> list[StridedBox]:
        """Cut a part of the array; raises _TooManyBoxes."""
        whole = self._whole(values, offset, strides)
        if whole is not None:
            return [whole]
        for dim, stride in enumerate(strides):
            parts = equal_runs(slice_max(values, dim) == 0)
            if len(parts) > 1:
                return self._concatenated(
                    self.cut(values.narrow(dim, start, count), offset + start * stride, strides)
                    for start, count in parts
                )
        found = [method(values, offset, strides) for method in (self._folded, self._sliced)]
        shortest = min((f for f in found if f is not None), key=len, default=None)
        if shortest is None:
            raise _TooManyBoxes
        return shortest

    def _concatenated(self, parts: Iterable[list[StridedBox]]) -> list[StridedBox]:
        """Return the boxes of all parts, if they are not too many."""
        found: list[StridedBox] = []
        for part in parts:
            found += part
            if len(found) > self._most:
                raise _TooManyBoxes
        return found

    def _sliced(
        self, values: torch.Tensor, offset: int, strides: tuple[int, ...]
    ) -> list[StridedBox] | None:
        """Return the boxes of the slices along the dimension with the fewest different ones."""
        found = [(dim, self._runs(values, dim)) for dim, n in enumerate(values.shape) if n > 1]
        usable = [(len(runs), dim, runs) for dim, runs in found if runs is not None]
        if not usable:
            return None
        _, dim, runs = min(usable)
        try:
            return self._concatenated(self._run(values, offset, strides, dim, *run) for run in runs)
        except _TooManyBoxes:
            return None

    def _whole(
        self, values: torch.Tensor, offset: int, strides: tuple[int, ...]
    ) -> StridedBox | None:
        """Return the array as one box, or None."""
        first = int(values[(0,) * values.dim()])
        steps = tuple(
            int(values[tuple(int(d == dim) for d in range(values.dim()))]) - first if n > 1 else 0
            for dim, n in enumerate(values.shape)
        )
        box = StridedBox(offset, tuple(values.shape), strides, first, steps)
        return box if self._is_valid(box) and _equal(values, first, steps) else None

    def _is_valid(self, box: StridedBox) -> bool:
        """Return whether all elements are of one source, and no step is negative."""
        if min(box.steps, default=0) < 0:
            return False
        source = self._ids.source
        return box.last == 0 if box.first == 0 else source(box.first) == source(box.last)

    def _runs(self, values: torch.Tensor, dim: int) -> list[tuple[int, int, int]] | None:
        """Group the slices along a dimension where each is the one before it, shifted.

        A group is (first slice, number of slices, step). Returns None if they are too many.
        """
        slices = values.movedim(dim, 0)
        count, others = len(slices), tuple(range(1, values.dim()))
        heads = _heads(values, dim)
        source = torch.bucketize(heads, self._starts, right=True)
        steps, shifted = heads[1:] - heads[:-1], source[1:] == source[:-1]
        shifted &= steps >= 0
        if others and bool(shifted.any()):
            lowest, highest = _range_of_differences(slices, others)
            shifted &= lowest == highest
        # Steps between neighbouring slices; -1 if one is not the other, shifted.
        gaps = torch.where(shifted, steps, -1).numpy()
        ends = np.append(np.flatnonzero(gaps[1:] != gaps[:-1]) + 1, len(gaps))
        runs: list[tuple[int, int, int]] = []
        first = 0
        while first < count:
            if len(runs) == self._most:
                return None
            step = int(gaps[first]) if first < len(gaps) else -1
            end = first
            if step >= 0:
                end = int(ends[np.searchsorted(ends, first, side="right")])
            runs.append((first, end + 1 - first, max(step, 0)))
            first = end + 1
        return runs

    def _run(
        self,
        values: torch.Tensor,
        offset: int,
        strides: tuple[int, ...],
        dim: int,
        first: int,
        count: int,
        step: int,
    ) -> list[StridedBox]:
        """Return the boxes of slices where each is the one before it, shifted by `step`."""
        stride, inner = strides[dim], strides[:dim] + strides[dim + 1 :]
        alone = self.cut(values.select(dim, first), offset + first * stride, inner)
        together = [
            StridedBox(b.offset, (count, *b.sizes), (stride, *b.strides), b.first, (step, *b.steps))
            for b in alone
        ]
        if all(map(self._is_valid, together)):
            return together
        return self._concatenated(
            self.cut(values.select(dim, number), offset + number * stride, inner)
            for number in range(first, first + count)
        )

    def _folded(
        self, values: torch.Tensor, offset: int, strides: tuple[int, ...]
    ) -> list[StridedBox] | None:
        """Return the boxes if slices along a dimension repeat with a period; None otherwise."""
        for dim, (size, stride) in enumerate(zip(values.shape, strides, strict=True)):
            for period in _periods(_heads(values, dim)):
                shape = (size // period, period)
                folded: torch.Tensor = values.unflatten(dim, shape)  # type: ignore[no-untyped-call]
                runs = self._runs(folded, dim)
                if runs is None or len(runs) > 1:
                    continue
                outer = (*strides[:dim], period * stride, stride, *strides[dim + 1 :])
                try:
                    return self._run(folded, offset, outer, dim, *runs[0])
                except _TooManyBoxes:
                    continue
        return None


def _periods(line: torch.Tensor) -> Iterator[int]:
    """Yield the periods with which a line of ids might repeat, shifted by a constant."""
    for period in range(2, min(_MAX_PERIOD, len(line) // 2) + 1):
        if len(line) % period == 0:
            steps = line[period:] - line[:-period]
            if int(steps[0]) >= 0 and bool((steps == steps[0]).all()):
                yield period


def equal_runs(line: torch.Tensor) -> list[tuple[int, int]]:
    """Return the runs of equal values in a line as (first, length), in order."""
    values = line.numpy()
    cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return [(start, stop - start) for start, stop in pairwise(cuts)]


def slice_max(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the highest id of every slice along a dimension."""
    others = [d for d in range(values.dim()) if d != dim]
    return values.amax(others) if others else values


def _heads(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the first element of every slice along a dimension, contiguous."""
    for other in reversed(range(values.dim())):
        if other != dim:
            values = values.select(other, 0)
    return values.contiguous()


def _range_of_differences(
    slices: torch.Tensor, others: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and highest difference between each two neighbouring slices."""
    rows = max(1, _CHUNK // max(1, slices[0].numel()))
    lowest, highest = [], []
    for start in range(0, len(slices) - 1, rows):
        stop = min(start + rows, len(slices) - 1)
        difference = slices[start + 1 : stop + 1] - slices[start:stop]
        lowest.append(difference.amin(others))
        highest.append(difference.amax(others))
    return torch.cat(lowest), torch.cat(highest)


def _equal(values: torch.Tensor, first: int, steps: tuple[int, ...]) -> bool:
    """Return whether the ids have these constant strides; compared in chunks."""
    if values.dim() and values.numel() > _CHUNK:
        rows = max(1, _CHUNK * len(values) // values.numel())
        if rows < len(values):
            parts = ((s, values[s : s + rows]) for s in range(0, len(values), rows))
            return all(_equal(part, first + s * steps[0], steps) for s, part in parts)
        if len(values) == 1:
            return _equal(values[0], first, steps[1:])
    return torch.equal(values, strided_ids(first, values.shape, steps, values.dtype))


def strided_ids(
    first: int, sizes: Sequence[int], steps: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return ids in the shape `sizes` that are constant steps apart."""
    ids = torch.full((1,) * len(sizes), first, dtype=dtype)
    for dim, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        shape = [-1 if d == dim else 1 for d in range(len(sizes))]
        ids = ids + (torch.arange(size, dtype=dtype) * step).view(shape)
    return ids


def is_contiguous(sizes: Iterable[int], strides: Iterable[int]) -> bool:
    """Return whether a box, innermost dimension first, fills its memory in this order."""
    inner = 1
    for size, stride in zip(sizes, strides, strict=True):
        if size != 1 and stride != inner:
            return False
        inner *= size
    return True
