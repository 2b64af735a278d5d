"""Find permutations, which strides cannot express, in an array of element ids.

If a box holds the elements of one contiguous range in another order, `find_permutation` returns
the order; `split_by_source` cuts an array into parts that hold elements of one source each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.startup.trace.strided_boxes import ElementIds, equal_runs, is_contiguous, slice_max

# Elements per step of a loop over a large array.
_CHUNK: Final = 1 << 22


def split_by_source(
    ids: ElementIds, offset: int, strides: Sequence[int]
) -> list[tuple[ElementIds, int]]:
    """Cut what `find_boxes` takes along one dimension into parts of one source each.

    Returns the parts with their offsets in memory; the whole array if no dimension allows it.
    """
    starts = torch.tensor(ids.starts)
    for dim, stride in enumerate(strides):
        ends = [f(ids.values, dim).contiguous() for f in (_slice_min, slice_max)]
        source, other = (torch.bucketize(end, starts, right=True) for end in ends)
        if torch.equal(source, other):
            runs = [(n, ids.values.narrow(dim, n, count)) for n, count in equal_runs(source)]
            return [(ElementIds(part, ids.starts), offset + n * stride) for n, part in runs]
    return [(ids, offset)]


def find_permutation(
    ids: ElementIds, strides: Sequence[int]
) -> tuple[int, NDArray[np.int32]] | None:
    """Find the order in which a box holds a contiguous range of one source, each element once.

    Returns:
        The lowest id, and int32 [n]: for each id from there on, the element's position in memory
        from the box's start. None if the box is not dense or does not hold such a range.
    """
    dims = sorted((d, n) for n, d in zip(ids.values.shape, strides, strict=True) if n > 1)
    if not is_contiguous((n for _, n in dims), (d for d, _ in dims)):
        return None
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    flat = ids.values.permute(order).reshape(-1)
    low, high = int(flat.min()), int(flat.max())
    one_source = ids.source(low) == ids.source(high)
    if low == 0 or not one_source or high - low + 1 != len(flat):
        return None
    places = torch.full((len(flat),), -1, dtype=torch.int32)
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK].long() - low
        places[part] = torch.arange(start, start + len(part), dtype=torch.int32)
    return None if bool((places < 0).any()) else (low, places.numpy())


def _slice_min(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the lowest id of every slice along a dimension."""
    others = [d for d in range(values.dim()) if d != dim]
    return values.amin(others) if others else values
