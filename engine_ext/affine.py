"""Strided boxes found in an array of element numbers.

The array says, for every element of a box of memory, which element of which source it holds. Most
loaders leave a few boxes of constant strides in it (a transpose is one, a concatenation a few);
`boxes` finds them. Where there are none but the elements of one contiguous range were only put in
another order, `shuffle` gives the order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

# Elements that are compared at a time.
_CHUNK: Final = 1 << 22
# With this many boxes or fewer, no other way of cutting is looked for.
_FEW: Final = 8
# The longest pattern along a dimension that is looked for, as tensors that take turns leave one.
_LONGEST_TURN: Final = 64
_ENDS: Final = (torch.amin, torch.amax)


@dataclass(frozen=True, slots=True)
class Numbers:
    """What every element of a box holds.

    Attributes:
        values: int32 or int64 on the CPU, one per element of the box; 0 is none of the sources'.
        starts: ascending; source i has the numbers from ``starts[i]`` (at least 1) on, one per
            element, up to below ``starts[i + 1]``. The last entry belongs to no source.
    """

    values: torch.Tensor
    starts: Sequence[int]

    def source(self, number: int) -> int:
        """Which source an element number belongs to; -1: none."""
        return bisect_right(self.starts, number) - 1


@dataclass(frozen=True, slots=True)
class Box:
    """Elements whose numbers are constant strides apart.

    Attributes:
        offset: of the first element, in the memory that the array is about.
        sizes, strides: of the box in that memory.
        first: number of the first element; 0: none of the elements is of a source.
        steps: strides of the box in numbers, none negative; all 0 where `first` is.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    steps: tuple[int, ...]

    @property
    def last(self) -> int:
        """The highest number in the box."""
        return self.first + sum((n - 1) * s for n, s in zip(self.sizes, self.steps, strict=True))


class _TooMany(Exception):
    """More boxes than allowed."""


def boxes(numbers: Numbers, offset: int, strides: Sequence[int], most: int) -> list[Box] | None:
    """Cut the array into boxes that hold elements of one source each, or of none.

    Args:
        numbers: of a box of memory, with at least one element.
        offset, strides: of that box in memory.
        most: boxes at most.

    Returns:
        The boxes, which cover the array exactly; None if it would take more than `most`.
    """
    try:
        return _Cutter(numbers, most).cut(numbers.values, offset, tuple(strides))
    except _TooMany:
        return None


class _Cutter:
    def __init__(self, numbers: Numbers, most: int) -> None:
        self._numbers = numbers
        self._starts = torch.tensor(numbers.starts)
        self._most = most
        self._left = most

    def cut(self, values: torch.Tensor, offset: int, strides: tuple[int, ...]) -> list[Box]:
        whole = self._whole(values, offset, strides)
        if whole is not None:
            self._left -= 1
            if self._left < 0:
                raise _TooMany
            return [whole]
        found = [(dim, self._runs(values, dim)) for dim, n in enumerate(values.shape) if n > 1]
        usable = [(dim, runs) for dim, runs in found if runs is not None]
        dim, runs = min(usable, key=lambda pair: len(pair[1])) if usable else (0, None)
        if runs is None or len(runs) > _FEW:
            for turning, _ in found:
                folded = self._folded(values, offset, strides, turning)
                if folded is not None:
                    return folded
        if runs is None:
            raise _TooMany
        return [
            box
            for first, count, step in runs
            for box in self._run(values, offset, strides, dim, first, count, step)
        ]

    def _whole(self, values: torch.Tensor, offset: int, strides: tuple[int, ...]) -> Box | None:
        """The array as one box, if it is one."""
        first = int(values[(0,) * values.dim()])
        steps = tuple(
            int(values[tuple(int(d == dim) for d in range(values.dim()))]) - first if n > 1 else 0
            for dim, n in enumerate(values.shape)
        )
        box = Box(offset, tuple(values.shape), strides, first, steps)
        return box if self._sound(box) and _equal(values, first, steps) else None

    def _sound(self, box: Box) -> bool:
        """Whether the box's elements are all of one source, in an order that strides can say."""
        if min(box.steps, default=0) < 0:
            return False
        source = self._numbers.source
        return box.last == 0 if box.first == 0 else source(box.first) == source(box.last)

    def _runs(self, values: torch.Tensor, dim: int) -> list[tuple[int, int, int]] | None:
        """Slices along a dimension, grouped where each is the one before it, shifted.

        Returns:
            (first slice, how many, step) of each group; None if there are too many.
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
        # Gaps between slices, coded by their step, -1 where the slices have nothing in common.
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
    ) -> Iterator[Box]:
        """The boxes of slices that are each the one before it, shifted by `step`."""
        stride, inner = strides[dim], strides[:dim] + strides[dim + 1 :]
        alone = self.cut(values.select(dim, first), offset + first * stride, inner)
        together = [
            replace(
                box,
                sizes=(count, *box.sizes),
                strides=(stride, *box.strides),
                steps=(step, *box.steps),
            )
            for box in alone
        ]
        if all(map(self._sound, together)):
            yield from together
            return
        yield from alone
        for number in range(first + 1, first + count):
            yield from self.cut(values.select(dim, number), offset + number * stride, inner)

    def _folded(
        self, values: torch.Tensor, offset: int, strides: tuple[int, ...], dim: int
    ) -> list[Box] | None:
        """The boxes, if every so many slices along a dimension are the ones before, shifted."""
        size, stride = values.shape[dim], strides[dim]
        line = _heads(values, dim)
        for turn in range(2, min(_LONGEST_TURN, size // 2) + 1):
            if size % turn:
                continue
            steps = line[turn:] - line[:-turn]
            if int(steps[0]) < 0 or not bool((steps == steps[0]).all()):
                continue
            folded: torch.Tensor = values.unflatten(dim, (size // turn, turn))  # type: ignore[no-untyped-call]
            runs = self._runs(folded, dim)
            if runs is not None and len(runs) == 1:
                turns = (*strides[:dim], turn * stride, stride, *strides[dim + 1 :])
                return list(self._run(folded, offset, turns, dim, *runs[0]))
        return None


def _heads(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The first element of every slice along a dimension; a copy."""
    for other in reversed(range(values.dim())):
        if other != dim:
            values = values.select(other, 0)
    return values.contiguous()


def _range_of_differences(
    slices: torch.Tensor, others: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest and highest difference between the elements of two slices, for each two."""
    rows = max(1, _CHUNK // max(1, slices[0].numel()))
    lowest, highest = [], []
    for start in range(0, len(slices) - 1, rows):
        stop = min(start + rows, len(slices) - 1)
        difference = slices[start + 1 : stop + 1] - slices[start:stop]
        lowest.append(difference.amin(others))
        highest.append(difference.amax(others))
    return torch.cat(lowest), torch.cat(highest)


def _equal(values: torch.Tensor, first: int, steps: tuple[int, ...]) -> bool:
    """Whether the numbers are those of constant strides; compared some at a time."""
    if values.dim() and values.numel() > _CHUNK:
        rows = max(1, _CHUNK * len(values) // values.numel())
        if rows < len(values):
            parts = ((s, values[s : s + rows]) for s in range(0, len(values), rows))
            return all(_equal(part, first + s * steps[0], steps) for s, part in parts)
        if len(values) == 1:
            return _equal(values[0], first, steps[1:])
    expected = torch.full((1,) * values.dim(), first, dtype=values.dtype)
    for dim, (size, step) in enumerate(zip(values.shape, steps, strict=True)):
        shape = [-1 if d == dim else 1 for d in range(values.dim())]
        expected = expected + (torch.arange(size, dtype=values.dtype) * step).view(shape)
    return torch.equal(values, expected)


def by_source(numbers: Numbers, offset: int, strides: Sequence[int]) -> list[tuple[Numbers, int]]:
    """Cut the array along one dimension into stretches that hold elements of one source each.

    Args:
        numbers, offset, strides: as of `boxes`.

    Returns:
        The stretches, each with its offset in memory; one, the whole, where there is no such
        dimension.
    """
    starts = torch.tensor(numbers.starts)
    for dim, size in enumerate(numbers.values.shape):
        others = tuple(d for d in range(numbers.values.dim()) if d != dim)
        ends = [f(numbers.values, others) if others else numbers.values for f in _ENDS]
        lowest, highest = (torch.bucketize(end, starts, right=True).numpy() for end in ends)
        if size > 1 and np.array_equal(lowest, highest):
            cuts = [0, *(np.flatnonzero(lowest[1:] != lowest[:-1]) + 1).tolist(), size]
            return [
                (
                    Numbers(numbers.values.narrow(dim, start, stop - start), numbers.starts),
                    offset + start * strides[dim],
                )
                for start, stop in pairwise(cuts)
            ]
    return [(numbers, offset)]


def shuffle(numbers: Numbers, strides: Sequence[int]) -> tuple[int, NDArray[np.int32]] | None:
    """The order in which memory holds a contiguous range of one source, each element once.

    Args:
        numbers: of a box of memory, with at least one element.
        strides: of that box in memory.

    Returns:
        The lowest number, and int32 [n]: where in the box, counted from its start, the element
        with each number lies. None if the box is not dense or does not hold such a range.
    """
    if not _dense(numbers.values.shape, strides):
        return None
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    flat = numbers.values.permute(order).reshape(-1)
    lowest, highest = int(flat.min()), int(flat.max())
    one_source = numbers.source(lowest) == numbers.source(highest)
    if lowest == 0 or not one_source or highest - lowest + 1 != len(flat):
        return None
    places = torch.full((len(flat),), -1, dtype=torch.int32)
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK].long() - lowest
        places[part] = torch.arange(start, start + len(part), dtype=torch.int32)
    return None if bool((places < 0).any()) else (lowest, places.numpy())


def _dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a box fills its memory from its first to its last element."""
    inner = 1
    for stride, size in sorted((d, n) for n, d in zip(sizes, strides, strict=True) if n > 1):
        if stride != inner:
            return False
        inner *= size
    return True
