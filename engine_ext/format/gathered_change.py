"""Read the old values of a delta from live memory and digest the change, in one compiled pass.

`gather_change` gives what `engine_ext.kernels` gathers and `change_digest` computes of it. In
separate passes the elements wait for memory first and for the arithmetic afterwards; here the one
hides the other, and there are no temporary arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_ext.format import digest
from engine_ext.format.digest import Digest, change_digest
from engine_ext.kernels import (
    AHEAD,
    array,
    compile_loop,
    gather_scatter,
    made_with_numba,
    prefetch,
    register_intrinsics,
)

_BLOCK, _ONE = digest._BLOCK, digest._ONE
_BLOCK_BITS = np.uint64(digest._BLOCK_SIZE.bit_length() - 1)
_WITHIN = _BLOCK - _ONE
_NONE, _AHEAD = np.uint64(0), np.uint64(AHEAD)
_AT_ONCE = np.uint64(256)  # elements whose factors stay in the first-level cache
_mix, _curve = digest._mix, digest._curve


def gather_change(
    name: str,
    indices: NDArray[Any],
    values: NDArray[Any],
    live: NDArray[Any],
    shift: int,
    out: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    *,
    differences: bool,
) -> Digest:
    """Locate elements in a run of live memory, read them, and digest the change.

    Args:
        name: of the checkpoint tensor.
        indices: flat indices, int32 or int64 [n], ascending; ``indices - shift`` is in `live`.
        values: new bit patterns, unsigned ints, [n]; or with `differences` new minus old ones.
            Read-only and unaligned memory is fine.
        live: bit patterns of the same width, contiguous, 1-D; only read.
        out: what is filled: the offsets in `live`, int32 or int64 [n], which must hold them; the
            old and the new bit patterns, [n].

    Returns:
        The digest of the new elements minus that of the old ones.
    """
    offsets, old, new = out
    loop = _loop(live.itemsize, indices.itemsize, offsets.itemsize, differences)
    if loop is None:
        wide = indices.astype(np.int64, copy=False)
        offsets[:] = wide - shift
        old[:] = gather_scatter.read(live, offsets)
        new[:] = old + values if differences else values
        return change_digest(name, wide, old, new)
    seeds = _seeds(name)
    places, sent = np.ascontiguousarray(indices), np.ascontiguousarray(values)
    flag = True if differences else None
    sums = loop(live, shift, *seeds, digest._TABLE, places, sent, flag, offsets, old, new)
    return Digest(int(sums[0]), int(sums[1]))


@functools.lru_cache(1 << 16)
def _seeds(name: str) -> tuple[np.uint64, np.uint64]:
    """Return a tensor's seeds as the loop takes them."""
    seed0, seed1 = digest._seeds(name)
    return np.uint64(seed0), np.uint64(seed1)


def warm_up(width: int, offset_dtype: Any) -> None:
    """Compile the loops for elements of `width` bytes, so that the first sync need not wait."""
    for index in (4, 8):
        for differences in (False, True):
            _loop(width, index, np.dtype(offset_dtype).itemsize, differences)


def _gather_loop(
    live: Any,
    shift: Any,
    seed0: Any,
    seed1: Any,
    table: Any,
    places: Any,
    values: Any,
    differences: Any,
    offsets: Any,
    old: Any,
    new: Any,
) -> Any:
    """Compiled: fill the last three arrays and return the sums of the digest's lanes.

    `differences` is None or True, so that one of two loops is compiled. Unsigned numbers, because
    indexing with signed ones allows for negative ones.
    """
    if places.size and (places[-1] - places[0]) >> 10 < places.size:
        return _close(
            *(live, shift, seed0, seed1, table, places, values, differences, offsets, old, new)
        )
    total0 = total1 = sum0 = sum1 = current = np.uint64(0)
    first = np.uint64(shift)
    ahead = max(0, places.size - AHEAD)
    for begin, end in ((0, ahead), (ahead, places.size)):
        for k in range(begin, end):
            if begin < ahead:
                prefetch(live, places[k + AHEAD] - shift)
            place = np.uint64(places[k])
            offset = place - first
            offsets[k] = offset
            before = live[offset]
            old[k] = before
            after = values[k]
            if differences is not None:
                after = live.dtype.type(before + after)
            new[k] = after
            block = place >> _BLOCK_BITS
            if block != current:
                total0 += (_mix(seed0 + current) | _ONE) * sum0
                total1 += (_mix(seed1 + current) | _ONE) * sum1
                sum0 = sum1 = np.uint64(0)
                current = block
            curve = _curve(after) - _curve(before)
            factor = place & _WITHIN
            sum0 += table[factor] * curve
            sum1 += table[factor + _BLOCK] * curve
    total0 += (_mix(seed0 + current) | _ONE) * sum0
    total1 += (_mix(seed1 + current) | _ONE) * sum1
    return total0, total1


def _close(
    live: Any,
    shift: Any,
    seed0: Any,
    seed1: Any,
    table: Any,
    places: Any,
    values: Any,
    differences: Any,
    offsets: Any,
    old: Any,
    new: Any,
) -> Any:
    """Compiled: as `_gather_loop`, where there are no more blocks than elements.

    The factors of all blocks come first, so that nothing depends on where a block ends: a branch
    that is predicted wrongly there would hold up the prefetches. A first loop finds and reads some
    elements and multiplies their factors; the compiler makes vector instructions of the next ones.
    """
    total0 = total1 = np.uint64(0)
    first, lowest = np.uint64(shift), np.uint64(places[0]) >> _BLOCK_BITS
    count = (np.uint64(places[-1]) >> _BLOCK_BITS) - lowest + _ONE
    blocks0, blocks1 = np.empty(count, np.uint64), np.empty(count, np.uint64)
    for b in range(blocks0.size):
        blocks0[b] = _mix(seed0 + lowest + np.uint64(b)) | _ONE
        blocks1[b] = _mix(seed1 + lowest + np.uint64(b)) | _ONE
    size = np.uint64(places.size)
    last = size - _ONE
    factors0, factors1 = np.empty(_AT_ONCE, np.uint64), np.empty(_AT_ONCE, np.uint64)
    for begin in range(_NONE, size, _AT_ONCE):
        end = min(size, begin + _AT_ONCE)
        for k in range(begin, end):
            prefetch(live, np.uint64(places[min(k + _AHEAD, last)]) - first)
            place = np.uint64(places[k])
            offset = place - first
            offsets[k] = offset
            old[k] = live[offset]
            block, factor = (place >> _BLOCK_BITS) - lowest, place & _WITHIN
            factors0[k - begin] = blocks0[block] * table[factor]
            factors1[k - begin] = blocks1[block] * table[factor + _BLOCK]
        before, after, sent = old[begin:end], new[begin:end], values[begin:end]
        for k in range(after.size):
            if differences is not None:
                after[k] = before[k] + sent[k]
            else:
                after[k] = sent[k]
        for k in range(after.size):
            curve = _curve(after[k]) - _curve(before[k])
            total0 += factors0[k] * curve
            total1 += factors1[k] * curve
    return total0, total1


def register() -> None:
    """Register what the loop calls with numba; ImportError if it is not installed."""
    from numba.extending import register_jitable

    register_intrinsics()
    digest._register_curve()
    register_jitable(_close)


@made_with_numba
def _loop(
    types: Any, width: int, index: int, offset: int, differences: bool
) -> Callable[..., tuple[int, int]]:
    """Compile the loop for elements, indices and offsets of so many bytes; None without numba."""
    register()
    word, bits = types.uint64, f"uint{8 * width}"
    sent, out = array(types, bits), array(types, bits, readonly=False)
    arguments = (
        *(out, types.int64, word, word, array(types, "uint64")),
        *(array(types, f"int{8 * index}"), sent, types.boolean if differences else types.none),
        *(array(types, f"int{8 * offset}", readonly=False), out, out),
    )
    return compile_loop(_gather_loop, types.UniTuple(word, 2)(*arguments))
