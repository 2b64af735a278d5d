"""Take several small arrays at a time, because a call for each takes longer than its elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# Elements of a group: they stay in a core's cache, and take far longer than a call.
_MOST: Final = 1 << 16


def in_groups(arrays: Sequence[NDArray[Any]], most: int = _MOST) -> Iterator[slice]:
    """Yield slices of `arrays`, which cover them in order.

    Args:
        arrays: Each [n], of any size.
        most: Elements that the arrays of a slice have at most, unless it is one array.
    """
    start = elements = 0
    for number, array in enumerate(arrays):
        elements += array.size
        if elements > most and number > start:
            yield slice(start, number)
            start, elements = number, array.size
    if start < len(arrays):
        yield slice(start, len(arrays))


def joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return one or more arrays, each [n] of one dtype, one after another; no copy of one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
