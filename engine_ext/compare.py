"""Which elements of two tensors differ, by their bits: the first step of every sparse sync.

The compiled loop looks at a cache line of both at a time, and at its elements only where one of
them differs: without a branch for each, they become the bits of a mask. It runs without the
interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine_ext.compiled import array, compile_loop, made_once

_LINE: Final = 64  # bytes of a cache line
# The number of a single set bit: its product with a de Bruijn sequence begins with six bits that
# no other bit's begins with.
_DE_BRUIJN: Final = np.uint64(0x03F79D71B4CB0A89)
_BIT_OF: Final = np.zeros(64, np.int64)
_BIT_OF[[(int(_DE_BRUIJN) << bit & (1 << 64) - 1) >> 58 for bit in range(64)]] = range(64)
_CHUNK: Final = 1 << 18  # elements that a thread compares at a time; a multiple of any line's


def changed_elements(
    old: NDArray[Any], new: NDArray[Any], threads: int = 1
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The elements that differ.

    Args:
        old, new: Bit patterns, unsigned ints of one width, contiguous [n].
        threads: How many threads share the work; 1 is the caller's own.

    Returns:
        Their flat indices, int64 [nnz], ascending; and a copy of their new bits [nnz].

    Raises:
        ValueError: The two are not alike.
    """
    if (old.dtype, old.shape) != (new.dtype, new.shape) or old.ndim != 1 or old.dtype.kind != "u":
        raise ValueError("old and new are not unsigned ints of one dtype and shape")
    loop = _loop(old.itemsize)
    if loop is None:
        indices = np.flatnonzero(old != new)
        return indices, new[indices]
    old, new = np.ascontiguousarray(old), np.ascontiguousarray(new)

    def share(start: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        before, after = old[start : start + _CHUNK], new[start : start + _CHUNK]
        found, bits = np.empty(before.size, np.int64), np.empty(before.size, new.dtype)
        whole = before.nbytes // _LINE * _LINE // before.itemsize
        words = before[:whole].view(np.uint64), after[:whole].view(np.uint64)
        count = loop(*words, before, after, start, found, bits)
        return found[:count].copy(), bits[:count].copy()

    starts = range(0, old.size, _CHUNK)
    if threads == 1 or len(starts) < 2:
        shares = [share(start) for start in starts]
    else:
        with ThreadPoolExecutor(threads) as pool:
            shares = list(pool.map(share, starts))
    return (
        np.concatenate([np.empty(0, np.int64), *(found for found, _ in shares)]),
        np.concatenate([np.empty(0, new.dtype), *(bits for _, bits in shares)]),
    )


def _compare(
    old_words: Any, new_words: Any, old: Any, new: Any, start: Any, found: Any, bits: Any
) -> Any:
    """What numba compiles; returns how many differ."""
    count: Any = 0
    elements = 64 // old.itemsize
    lines = old_words.size // 8
    for line in range(lines):
        differs = np.uint64(0)
        for word in range(8 * line, 8 * line + 8):
            differs |= old_words[word] ^ new_words[word]
        if differs == 0:
            continue
        first = line * elements
        mask = np.uint64(0)
        for k in range(elements):
            mask |= np.uint64(old[first + k] != new[first + k]) << np.uint64(k)
        while mask != 0:
            rest = mask & (mask - np.uint64(1))
            k = first + _BIT_OF[((mask ^ rest) * _DE_BRUIJN) >> np.uint64(58)]
            found[count] = start + k
            bits[count] = new[k]
            count += 1
            mask = rest
    for k in range(lines * elements, old.size):
        if old[k] != new[k]:
            found[count] = start + k
            bits[count] = new[k]
            count += 1
    return count


@made_once
def _loop(width: int) -> Callable[..., int] | None:
    """The loop for elements of `width` bytes; None without numba."""
    try:
        from numba import types
    except ImportError:
        return None
    words, bits = array(types, "uint64"), array(types, f"uint{8 * width}")
    indices = array(types, "int64", readonly=False)
    out = array(types, f"uint{8 * width}", readonly=False)
    arguments = words, words, bits, bits, types.int64, indices, out
    return compile_loop(_compare, types.int64(*arguments))
