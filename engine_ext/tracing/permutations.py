"""Orders of elements that strides cannot say, found in an array of element numbers.

Where the elements of one contiguous range were only put in another order, `shuffle` gives the
order; `by_source` cuts an array so that each part has elements of one source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.tracing.strided_boxes import ElementIds, highest, stretches

# Elements that are looked at at a time.
_CHUNK: Final = 1 << 22


def by_source(
    numbers: ElementIds, offset: int, strides: Sequence[int]
) -> list[tuple[ElementIds, int]]:
    """Cut the array along one dimension into stretches that hold elements of one source each.

    Args:
        numbers, offset, strides: as of `boxes`.

    Returns:
        The stretches, each with its offset in memory; one, the whole, where there is no such
        dimension.
    """
    starts = torch.tensor(numbers.starts)
    for dim, stride in enumerate(strides):
        ends = [f(numbers.values, dim).contiguous() for f in (_lowest, highest)]
        source, other = (torch.bucketize(end, starts, right=True) for end in ends)
        if torch.equal(source, other):
            return [
                (
                    ElementIds(numbers.values.narrow(dim, start, count), numbers.starts),
                    offset + start * stride,
                )
                for start, count in stretches(source)
            ]
    return [(numbers, offset)]


def shuffle(numbers: ElementIds, strides: Sequence[int]) -> tuple[int, NDArray[np.int32]] | None:
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
    low, high = int(flat.min()), int(flat.max())
    one_source = numbers.source(low) == numbers.source(high)
    if low == 0 or not one_source or high - low + 1 != len(flat):
        return None
    places = torch.full((len(flat),), -1, dtype=torch.int32)
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK].long() - low
        places[part] = torch.arange(start, start + len(part), dtype=torch.int32)
    return None if bool((places < 0).any()) else (low, places.numpy())


def _dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a box fills its memory from its first to its last element."""
    inner = 1
    for stride, size in sorted((d, n) for n, d in zip(sizes, strides, strict=True) if n > 1):
        if stride != inner:
            return False
        inner *= size
    return True


def _lowest(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The lowest number of every slice along a dimension."""
    others = [d for d in range(values.dim()) if d != dim]
    return values.amin(others) if others else values
