"""Strided boxes found in an array of element numbers.

The array says, for every element of a box of memory, which element of which source it holds. Most
loaders leave a few boxes of constant strides in it (a transpose is one, a concatenation a few);
`boxes` finds them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import torch

# Elements that are compared at a time.
_CHUNK: Final = 1 << 22
# The longest pattern along a dimension that is looked for, as tensors that take turns leave one.
_LONGEST_TURN: Final = 64


@dataclass(frozen=True, slots=True)
class ElementIds:
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
class StridedBox:
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


def boxes(
    numbers: ElementIds, offset: int, strides: Sequence[int], most: int
) -> list[StridedBox] | None:
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
    def __init__(self, numbers: ElementIds, most: int) -> None:
        self._numbers = numbers
        self._starts = torch.tensor(numbers.starts)
        self._most = most

    def cut(self, values: torch.Tensor, offset: int, strides: tuple[int, ...]) -> list[StridedBox]:
        """As of `boxes`, for a part of the array.

        Raises:
            _TooMany: that takes more than `most` boxes.
        """
        whole = self._whole(values, offset, strides)
        if whole is not None:
            return [whole]
        for dim, stride in enumerate(strides):
            parts = stretches(highest(values, dim) == 0)
            if len(parts) > 1:
                return self._within(
                    self.cut(values.narrow(dim, start, count), offset + start * stride, strides)
                    for start, count in parts
                )
        found = [way(values, offset, strides) for way in (self._folded, self._sliced)]
        shortest = min((f for f in found if f is not None), key=len, default=None)
        if shortest is None:
            raise _TooMany
        return shortest

    def _within(self, parts: Iterable[list[StridedBox]]) -> list[StridedBox]:
        """The boxes of all parts, if they are not too many."""
        found: list[StridedBox] = []
        for part in parts:
            found += part
            if len(found) > self._most:
                raise _TooMany
        return found

    def _sliced(
        self, values: torch.Tensor, offset: int, strides: tuple[int, ...]
    ) -> list[StridedBox] | None:
        """The boxes of slices along the dimension that has the fewest unlike ones."""
        found = [(dim, self._runs(values, dim)) for dim, n in enumerate(values.shape) if n > 1]
        usable = [(len(runs), dim, runs) for dim, runs in found if runs is not None]
        if not usable:
            return None
        _, dim, runs = min(usable)
        try:
            return self._within(self._run(values, offset, strides, dim, *run) for run in runs)
        except _TooMany:
            return None

    def _whole(
        self, values: torch.Tensor, offset: int, strides: tuple[int, ...]
    ) -> StridedBox | None:
        """The array as one box, if it is one."""
        first = int(values[(0,) * values.dim()])
        steps = tuple(
            int(values[tuple(int(d == dim) for d in range(values.dim()))]) - first if n > 1 else 0
            for dim, n in enumerate(values.shape)
        )
        box = StridedBox(offset, tuple(values.shape), strides, first, steps)
        return box if self._sound(box) and _equal(values, first, steps) else None

    def _sound(self, box: StridedBox) -> bool:
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
    ) -> list[StridedBox]:
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
            return together
        return self._within(
            self.cut(values.select(dim, number), offset + number * stride, inner)
            for number in range(first, first + count)
        )

    def _folded(
        self, values: torch.Tensor, offset: int, strides: tuple[int, ...]
    ) -> list[StridedBox] | None:
        """The boxes, if every so many slices along a dimension are the ones before, shifted."""
        for dim, (size, stride) in enumerate(zip(values.shape, strides, strict=True)):
            for turn in _turns(_heads(values, dim)):
                folded: torch.Tensor = values.unflatten(dim, (size // turn, turn))  # type: ignore[no-untyped-call]
                runs = self._runs(folded, dim)
                if runs is None or len(runs) > 1:
                    continue
                turns = (*strides[:dim], turn * stride, stride, *strides[dim + 1 :])
                try:
                    return self._run(folded, offset, turns, dim, *runs[0])
                except _TooMany:
                    continue
        return None


def _turns(line: torch.Tensor) -> Iterator[int]:
    """After how many numbers of a line they may begin again, shifted by a constant."""
    for turn in range(2, min(_LONGEST_TURN, len(line) // 2) + 1):
        if len(line) % turn == 0:
            steps = line[turn:] - line[:-turn]
            if int(steps[0]) >= 0 and bool((steps == steps[0]).all()):
                yield turn


def stretches(kind: torch.Tensor) -> list[tuple[int, int]]:
    """Where a line has the same value: (first, how many), one after the other."""
    values = kind.numpy()
    cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return [(start, stop - start) for start, stop in pairwise(cuts)]


def highest(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The highest number of every slice along a dimension."""
    others = [d for d in range(values.dim()) if d != dim]
    return values.amax(others) if others else values


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
