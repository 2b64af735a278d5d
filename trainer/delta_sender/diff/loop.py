"""The loop that finds which elements of two arrays differ.

It makes a mask of one cache line of both at a time. At a density of some percent a line has zero,
one or two elements that differ, which no branch predictor foresees; so two are written for every
line, and the wrong ones are overwritten. It runs without the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.format import Digest
from engine_ext.kernels import (
    LINE,
    array,
    compile_loop,
    differing_mask,
    made_with_numba,
    popcount,
    prefetch,
    register_intrinsics,
    trailing_zeros,
)

Bits = NDArray[Any]  # unsigned ints [n]

_AHEAD: Final = 64  # lines to prefetch; the hardware's own prefetch is shorter


class Difference(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The elements that differ.

    Attributes:
        indices: Their flat indices, ascending; int32 [nnz], int64 for 2**31 elements or more.
        old, new: Their bits, unsigned ints [nnz], copies. Small tensors may have views of arrays
            that they share, also of indices and streams.
        change: What they add to the tensor's digest; None if no name was given.
        stream: The gap stream of the indices, in bytes; None if it was not asked for, or may not be
            the smallest.
    """

    indices: NDArray[Any]
    old: Bits
    new: Bits
    change: Digest | None
    stream: NDArray[np.uint8] | None


def find_differing(old: Any, new: Any, start: Any, found: Any, was: Any, now: Any) -> Any:
    """Write what differs, and return how many; compiled by numba. Writes two per line at least."""
    count: Any = 0
    elements = LINE // old.itemsize
    whole = old.size // elements * elements
    for first in range(0, whole, elements):
        prefetch(old, first + _AHEAD * elements)
        prefetch(new, first + _AHEAD * elements)
        mask = differing_mask(old, new, first)
        following = mask & (mask - np.uint64(1))
        number = popcount(mask)
        for at, rest in ((count, mask), (count + 1, following)):
            k = first + (trailing_zeros(rest) & (elements - 1))
            found[at], was[at], now[at] = start + k, old[k], new[k]
        if number > 2:
            at = count + 2
            rest = following & (following - np.uint64(1))
            while rest != 0:
                k = first + trailing_zeros(rest)
                found[at], was[at], now[at] = start + k, old[k], new[k]
                at += 1
                rest &= rest - np.uint64(1)
        count += number
    for k in range(whole, old.size):
        if old[k] != new[k]:
            found[count], was[count], now[count] = start + k, old[k], new[k]
            count += 1
    return count


@made_with_numba
def loop_of(types: Any, width: int) -> Callable[..., int]:
    """Return the loop for elements of `width` bytes; None without numba."""
    register_intrinsics()
    bits = array(types, f"uint{8 * width}")
    indices = array(types, "int64", readonly=False)
    out = array(types, f"uint{8 * width}", readonly=False)
    arguments = bits, bits, types.int64, indices, out, out
    return compile_loop(find_differing, types.int64(*arguments))
