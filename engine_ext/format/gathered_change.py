"""Read the old values of a delta from live memory and digest the change, in one compiled pass.

The loop gives what `engine_ext.kernels` gathers and `change_digest` computes of it. In separate
passes the elements wait for memory first and for the arithmetic afterwards; here the one hides the
other, and there are no temporary arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine_ext.format import digest
from engine_ext.kernels import AHEAD, prefetch, register_intrinsics

_BLOCK, _ONE = digest._BLOCK, digest._ONE
_BLOCK_BITS = np.uint64(digest._BLOCK_SIZE.bit_length() - 1)
_WITHIN = _BLOCK - _ONE
_NONE, _AHEAD = np.uint64(0), np.uint64(AHEAD)
_AT_ONCE = np.uint64(256)  # elements whose factors stay in the first-level cache
_mix, _curve = digest._mix, digest._curve


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
