"""Compare two arrays of bits and digest them, in one compiled pass.

`digest_if_equal` gives what `np.array_equal` and then `tensor_digest` give. In separate passes the
elements wait for memory first and for the arithmetic afterwards; here the one hides the other, and
there is no temporary array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_ext.format import digest
from engine_ext.format.digest import Digest, tensor_digest
from engine_ext.kernels import array, compile_loop, made_with_numba

_BLOCK_SIZE, _ONE = digest._BLOCK_SIZE, digest._ONE
_mix, _curve = digest._mix, digest._curve


def digest_if_equal(
    name: str, values: NDArray[Any], expected: NDArray[Any], start: int = 0
) -> Digest | None:
    """Return the digest of dense elements of one tensor, or None if they are not as expected.

    Args:
        name: of the checkpoint tensor.
        values: bit patterns, unsigned ints as wide as the checkpoint dtype, [n], contiguous;
            read-only and unaligned memory is fine.
        expected: the same of what they must be.
        start: flat index of the first of them, not negative.
    """
    loop = _loop(values.itemsize)
    if loop is None:
        same = np.array_equal(values, expected)
        return tensor_digest(name, values, start=start) if same else None
    seeds = [np.uint64(seed) for seed in digest._seeds(name)]
    same, lane0, lane1 = loop(*seeds, digest._TABLE, start, values, expected)
    return Digest(int(lane0), int(lane1)) if same else None


def _compared_loop(
    seed0: Any, seed1: Any, table: Any, start: Any, values: Any, expected: Any
) -> Any:
    """Compiled: whether all elements are as expected, and the sums of the digest's lanes."""
    total0 = total1 = np.uint64(0)
    done = 0
    while done < values.size:
        block, first = np.uint64((start + done) // _BLOCK_SIZE), (start + done) % _BLOCK_SIZE
        count = min(_BLOCK_SIZE - first, values.size - done)
        # Slices, because the compiler makes no vector instructions of computed indices.
        factors0 = table[first : first + count]
        factors1 = table[_BLOCK_SIZE + first : _BLOCK_SIZE + first + count]
        bits, others = values[done : done + count], expected[done : done + count]
        differing = values.dtype.type(0)
        for k in range(count):
            differing |= bits[k] ^ others[k]
        if differing != 0:
            return False, total0, total1
        sum0 = sum1 = np.uint64(0)
        for k in range(count):
            curve = _curve(bits[k])
            sum0 += factors0[k] * curve
            sum1 += factors1[k] * curve
        total0 += (_mix(seed0 + block) | _ONE) * sum0
        total1 += (_mix(seed1 + block) | _ONE) * sum1
        done += count
    return True, total0, total1


@made_with_numba
def _loop(types: Any, width: int) -> Callable[..., tuple[bool, int, int]]:
    """Compile the loop for elements of so many bytes; None without numba."""
    digest._register_curve()
    # The first sync digests elements that nothing is compared with.
    digest._kernel(width, False, False)
    word, bits = types.uint64, array(types, f"uint{8 * width}")
    arguments = word, word, array(types, "uint64"), types.int64, bits, bits
    return compile_loop(_compared_loop, types.Tuple((types.boolean, word, word))(*arguments))
