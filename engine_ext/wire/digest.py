"""Compute the digest: an order-independent 128-bit hash of weights, updated in O(nnz).

Definition, complete enough to implement it elsewhere. All arithmetic is on unsigned 64-bit integers
modulo 2**64. Lane ``k`` (0 or 1) of a set of elements is the sum over them of ::

    m(m(xxh3_64(name, seed=k) + index) ^ bits)

    m(x):  x ^= x >> 30;  x *= 0xbf58476d1ce4e5b9      (the finaliser of splitmix64)
           x ^= x >> 27;  x *= 0x94d049bb133111eb
           x ^= x >> 31

where ``name`` is the checkpoint tensor's name in UTF-8, ``index`` the element's flat index in
the checkpoint tensor, and ``bits`` the element's bit pattern in the checkpoint dtype,
zero-extended. It is written as 32 lower-case hex digits, lane 0 first; for no elements it is zero.

A sum has no order: the digests of chunks, tensors and ranks add up, and a change of some elements
adds the digest of their new values and subtracts that of their old ones.

numba (extra ``fast``) is used if it is installed, otherwise numpy, with the same result. Neither
uses an OpenMP pool, and both release the GIL while they work. With numba the first call for a
width, even with empty arrays, compiles the loop or loads it from numba's cache.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from engine_ext.kernels import array, compile_loop, made_once

_MODULUS: Final = 1 << 64
_NUMPY_CHUNK: Final = 1 << 14  # elements whose 64-bit temporaries stay in a core's cache
_NUMBA_CHUNK: Final = 1 << 18  # elements; long enough for threads to work side by side
_MUL1, _MUL2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT1, _SHIFT2, _SHIFT3 = np.uint64(30), np.uint64(27), np.uint64(31)

Bits = NDArray[Any]  # unsigned ints
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Digest:
    """Two sums modulo 2**64; the digests of disjoint sets of elements add up."""

    lane0: int
    lane1: int
    ZERO: ClassVar[Digest]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lane0", self.lane0 % _MODULUS)
        object.__setattr__(self, "lane1", self.lane1 % _MODULUS)

    def __add__(self, other: Digest) -> Digest:
        return Digest(self.lane0 + other.lane0, self.lane1 + other.lane1)

    def __sub__(self, other: Digest) -> Digest:
        return Digest(self.lane0 - other.lane0, self.lane1 - other.lane1)

    def hex(self) -> str:
        """Return 32 lower-case hex digits, lane 0 first."""
        return f"{self.lane0:016x}{self.lane1:016x}"

    __str__ = hex

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Parse the output of `hex`; ValueError for any other text."""
        if not re.fullmatch(r"[0-9a-f]{32}", text):
            raise ValueError(f"a digest is 32 lower-case hex digits, not {text[:80]!r}")
        return cls(int(text[:16], 16), int(text[16:], 16))


Digest.ZERO = Digest(0, 0)


def tensor_digest(
    name: str, values: Bits, indices: Indices | None = None, start: int = 0, threads: int = 1
) -> Digest:
    """Return the digest of elements of one tensor.

    Args:
        values: Bit patterns, unsigned ints as wide as the checkpoint dtype, [n]; read-only,
            unaligned and strided memory is fine.
        indices: Flat indices of the values, int64 [n], from 0, each element once. None if the
            values are dense, at `start`, `start` + 1, ...
        start: Flat index of the first of dense values.
        threads: How many threads share the work, at most.

    Raises:
        TypeError: `values` or `indices` has another dtype.
        ValueError: Wrong shapes; a negative `start`, or one together with indices.
    """
    return _array_digest(name, indices, values, None, start, threads)


def change_digest(
    name: str, indices: Indices | None, old: Bits, new: Bits, start: int = 0
) -> Digest:
    """Return the digest of `new` minus that of `old`, in one pass: what a change adds.

    Arguments and errors are those of `tensor_digest`; `old` and `new` have one dtype and shape.
    """
    return _array_digest(name, indices, new, old, start, threads=1)


@functools.lru_cache(1 << 16)
def _seeds(name: str) -> tuple[int, int]:
    raw = name.encode()
    return xxhash.xxh3_64_intdigest(raw, seed=0), xxhash.xxh3_64_intdigest(raw, seed=1)


def _array_digest(
    name: str, indices: Indices | None, values: Bits, old: Bits | None, start: int, threads: int
) -> Digest:
    if values.dtype.kind != "u" or not values.dtype.isnative:
        raise TypeError(f"bit patterns are unsigned ints of the machine, not {values.dtype}")
    if old is not None and (old.dtype, old.shape) != (values.dtype, values.shape):
        raise ValueError("old and new values are not of one dtype and shape")
    if indices is not None and indices.dtype != np.int64:
        raise TypeError(f"indices are int64, not {indices.dtype}")
    if values.ndim != 1 or (indices is not None and indices.shape != values.shape):
        raise ValueError("values and indices are 1-d, and of one length")
    if start < 0 or (start and indices is not None):
        raise ValueError("start is not negative, and only for dense values")
    kernel = _kernel(values.dtype.itemsize, indices is not None, old is not None)
    size = _NUMPY_CHUNK if kernel is _numpy_sums else _NUMBA_CHUNK
    threads = max(1, min(threads, -(-values.size // size)))

    def share(thread: int) -> Digest:
        lane0 = lane1 = 0
        for first in range(thread * size, values.size, threads * size):
            places, bits, old_bits = (
                None if found is None else np.ascontiguousarray(found[first : first + size])
                for found in (indices, values, old)
            )
            skipped = start + first if indices is None else 0
            seed0, seed1 = (np.uint64((seed + skipped) % _MODULUS) for seed in _seeds(name))
            sums = kernel(seed0, seed1, places, bits, old_bits)
            lane0, lane1 = lane0 + sums[0], lane1 + sums[1]
        return Digest(lane0, lane1)

    if threads == 1:
        return share(0)
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(share, range(threads)), Digest.ZERO)


def _mix(x: Any) -> Any:
    x = (x ^ (x >> _SHIFT1)) * _MUL1
    x = (x ^ (x >> _SHIFT2)) * _MUL2
    return x ^ (x >> _SHIFT3)


def _numpy_sums(seed0: Any, seed1: Any, places: Any, bits: Any, old: Any) -> tuple[int, int]:
    index = np.arange(bits.size, dtype=np.uint64) if places is None else places.view(np.uint64)
    return _numpy_sum(index + seed0, bits, old), _numpy_sum(index + seed1, bits, old)


def _numpy_sum(index: Any, bits: Any, old: Any) -> int:
    place = _mix(index)
    total = int(_mix(place ^ bits).sum())
    return total if old is None else total - int(_mix(place ^ old).sum())


def _numba_sums(seed0: Any, seed1: Any, places: Any, bits: Any, old: Any) -> Any:
    """Compiled: the sums over a chunk; numba drops the branches of arguments that are None."""
    total0 = total1 = np.uint64(0)
    for k in range(bits.size):
        index = np.uint64(k if places is None else places[k])
        place0, place1 = _mix(seed0 + index), _mix(seed1 + index)
        total0 += _mix(place0 ^ np.uint64(bits[k]))
        total1 += _mix(place1 ^ np.uint64(bits[k]))
        if old is not None:
            total0 -= _mix(place0 ^ np.uint64(old[k]))
            total1 -= _mix(place1 ^ np.uint64(old[k]))
    return total0, total1


@made_once
def _kernel(width: int, sparse: bool, change: bool) -> Callable[..., tuple[int, int]]:
    """Compile ``f(seed0, seed1, places, bits, old)``, the sums over a chunk."""
    try:
        from numba import types
        from numba.extending import register_jitable
    except ImportError:
        return _numpy_sums
    register_jitable(_mix)
    places, bits = array(types, "int64"), array(types, f"uint{8 * width}")
    none, word = types.none, types.uint64
    arguments = word, word, places if sparse else none, bits, bits if change else none
    return compile_loop(_numba_sums, types.UniTuple(word, 2)(*arguments))
