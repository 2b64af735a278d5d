"""Compute the digest: an order-independent 128-bit hash of weights, updated in O(nnz).

Definition of the algorithm ``multilinear-1``, complete enough to implement it elsewhere. Element
``j`` of block ``b`` is element ``1024 b + j`` of the flat tensor; ``e`` is its bit pattern in the
checkpoint dtype, zero-extended. All arithmetic is on unsigned 64-bit integers modulo 2**64. Lane
``k`` (0 or 1) of a set of elements is the sum over them of ::

    c(k, b) * a(k, j) * t(e)

    a(k, j) = m((1024 k + j + 1) * 0x9e3779b97f4a7c15) | 1      (outputs of splitmix64, seed 0)
    c(k, b) = m(xxh3_64(name, seed=k) + b) | 1
    t(e)    = e (e + 1) / 2 + 1             for elements of one or two bytes
              m(e + 0x9e3779b97f4a7c15)     for wider ones

    m(x):  x ^= x >> 30;  x *= 0xbf58476d1ce4e5b9              (the finaliser of splitmix64)
           x ^= x >> 27;  x *= 0x94d049bb133111eb
           x ^= x >> 31

where ``name`` is the checkpoint tensor's name in UTF-8. It is written as 32 lower-case hex digits,
lane 0 first; for no elements it is zero. ``docs/wire-format.md`` has the argument for its strength.

A sum has no order: the digests of chunks, tensors and ranks add up, and a change of some elements
adds the digest of their new values and subtracts that of their old ones. ``t`` is not linear, so a
change also depends on the old values, and not only on how far they moved.

numba (extra ``fast``) is used if it is installed, otherwise numpy, with the same result. Neither
uses an OpenMP pool, and both release the GIL while they work. With numba the first call for a
width, even with empty arrays, compiles the loop or loads it from numba's cache.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from engine_ext.kernels import array, compile_loop, made_once
from engine_ext.structs import prepare

ALGORITHM: Final = "multilinear-1"
"""The algorithm's name in a part's metadata."""

_MODULUS: Final = 1 << 64
_BLOCK_SIZE: Final = 1024
_BLOCK: Final = np.uint64(_BLOCK_SIZE)  # numba adds signed and unsigned numbers as floats
_NUMPY_CHUNK: Final = 1 << 14  # elements whose 64-bit temporaries stay in a core's cache
_NUMBA_CHUNK: Final = 1 << 18  # elements; long enough for threads to work side by side
_MUL1, _MUL2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT1, _SHIFT2, _SHIFT3 = np.uint64(30), np.uint64(27), np.uint64(31)
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)

Bits = NDArray[Any]  # unsigned ints
Indices = NDArray[np.int64]


class Digest(msgspec.Struct, frozen=True, gc=False):
    """Two sums modulo 2**64; the digests of disjoint sets of elements add up."""

    lane0: int
    lane1: int
    ZERO: ClassVar[Digest]

    def __post_init__(self) -> None:
        if (self.lane0 | self.lane1) >> 64:  # also of a negative one
            msgspec.structs.force_setattr(self, "lane0", self.lane0 % _MODULUS)
            msgspec.structs.force_setattr(self, "lane1", self.lane1 % _MODULUS)

    def __add__(self, other: Digest) -> Digest:
        return Digest(self.lane0 + other.lane0, self.lane1 + other.lane1)

    def __sub__(self, other: Digest) -> Digest:
        return Digest(self.lane0 - other.lane0, self.lane1 - other.lane1)

    @classmethod
    def total(cls, digests: Iterable[Digest]) -> Digest:
        """Return the sum; of none it is zero."""
        lane0 = lane1 = 0
        for digest in digests:
            lane0 += digest.lane0
            lane1 += digest.lane1
        return cls(lane0, lane1)

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


prepare(Digest)


Digest.ZERO = Digest(0, 0)


def tensor_digest(
    name: str, values: Bits, indices: Indices | None = None, start: int = 0, threads: int = 1
) -> Digest:
    """Return the digest of elements of one tensor.

    Args:
        values: Bit patterns, unsigned ints as wide as the checkpoint dtype, [n]; read-only,
            unaligned and strided memory is fine.
        indices: Flat indices of the values, int32 or int64 [n], from 0, each element once. None if
            the values are dense, at `start`, `start` + 1, ...
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
    if indices is not None and indices.dtype == np.int32:
        indices = indices.astype(np.int64)
    if indices is not None and indices.dtype != np.int64:
        raise TypeError(f"indices are int32 or int64, not {indices.dtype}")
    if values.ndim != 1 or (indices is not None and indices.shape != values.shape):
        raise ValueError("values and indices are 1-d, and of one length")
    if start < 0 or (start and indices is not None):
        raise ValueError("start is not negative, and only for dense values")
    kernel = _kernel(values.dtype.itemsize, indices is not None, old is not None)
    size = _NUMPY_CHUNK if kernel in (_numpy_dense, _numpy_sparse) else _NUMBA_CHUNK
    threads = max(1, min(threads, -(-values.size // size)))
    seed0, seed1 = (np.uint64(seed) for seed in _seeds(name))

    def share(thread: int) -> Digest:
        lane0 = lane1 = 0
        for first in range(thread * size, values.size, threads * size):
            places, bits, old_bits = (
                None if found is None else np.ascontiguousarray(found[first : first + size])
                for found in (indices, values, old)
            )
            where = start + first if places is None else places
            sums = kernel(seed0, seed1, _TABLE, where, bits, old_bits)
            lane0, lane1 = lane0 + int(sums[0]), lane1 + int(sums[1])
        return Digest(lane0, lane1)

    if threads == 1:
        return share(0)
    with ThreadPoolExecutor(threads) as pool:
        return Digest.total(pool.map(share, range(threads)))


def _mix(x: Any) -> Any:
    x = (x ^ (x >> _SHIFT1)) * _MUL1
    x = (x ^ (x >> _SHIFT2)) * _MUL2
    return x ^ (x >> _SHIFT3)


_TABLE: Final = _mix(np.arange(1, 2 * _BLOCK_SIZE + 1, dtype=np.uint64) * _GAMMA) | _ONE
_TABLE.setflags(write=False)


def _numpy_dense(
    seed0: Any, seed1: Any, table: Any, start: int, bits: Any, old: Any
) -> tuple[int, int]:
    places = np.arange(start, start + bits.size)
    return _numpy_sparse(seed0, seed1, table, places, bits, old)


def _numpy_sparse(
    seed0: Any, seed1: Any, table: Any, places: Any, bits: Any, old: Any
) -> tuple[int, int]:
    blocks, within = (places // _BLOCK_SIZE).view(np.uint64), places % _BLOCK_SIZE
    curve = _numpy_curve(bits) if old is None else _numpy_curve(bits) - _numpy_curve(old)
    lane0 = (_mix(seed0 + blocks) | _ONE) * table[within] * curve
    lane1 = (_mix(seed1 + blocks) | _ONE) * table[_BLOCK_SIZE + within] * curve
    return int(lane0.sum()), int(lane1.sum())


def _numpy_curve(bits: Any) -> Any:
    wide = bits.astype(np.uint64)
    return (wide * (wide + _ONE) >> _ONE) + _ONE if bits.itemsize <= 2 else _mix(wide + _GAMMA)


def _dense_loop(seed0: Any, seed1: Any, table: Any, start: Any, bits: Any, old: Any) -> Any:
    """Compiled: the sums over a chunk of elements; numba drops the branches of None."""
    total0 = total1 = np.uint64(0)
    done = 0
    while done < bits.size:
        block, first = np.uint64((start + done) // _BLOCK_SIZE), (start + done) % _BLOCK_SIZE
        count = min(_BLOCK_SIZE - first, bits.size - done)
        # Slices, because the compiler makes no vector instructions of computed indices.
        factors0 = table[first : first + count]
        factors1 = table[_BLOCK_SIZE + first : _BLOCK_SIZE + first + count]
        new = bits[done : done + count]
        sum0 = sum1 = np.uint64(0)
        if old is None:
            for k in range(count):
                curve = _curve(new[k])
                sum0 += factors0[k] * curve
                sum1 += factors1[k] * curve
        else:
            before = old[done : done + count]
            for k in range(count):
                curve = _curve(new[k]) - _curve(before[k])
                sum0 += factors0[k] * curve
                sum1 += factors1[k] * curve
        total0 += (_mix(seed0 + block) | _ONE) * sum0
        total1 += (_mix(seed1 + block) | _ONE) * sum1
        done += count
    return total0, total1


def _sparse_loop(seed0: Any, seed1: Any, table: Any, places: Any, bits: Any, old: Any) -> Any:
    """Compiled: the sums over a chunk of single elements; fastest if their indices ascend."""
    total0 = total1 = sum0 = sum1 = last = np.uint64(0)
    for k in range(bits.size):
        place = np.uint64(places[k])
        block = place // _BLOCK
        if block != last:
            total0 += (_mix(seed0 + last) | _ONE) * sum0
            total1 += (_mix(seed1 + last) | _ONE) * sum1
            sum0 = sum1 = np.uint64(0)
            last = block
        first = place % _BLOCK
        curve = _curve(bits[k])
        if old is not None:
            curve -= _curve(old[k])
        sum0 += table[first] * curve
        sum1 += table[_BLOCK + first] * curve
    total0 += (_mix(seed0 + last) | _ONE) * sum0
    total1 += (_mix(seed1 + last) | _ONE) * sum1
    return total0, total1


def _curve(bits: Any) -> Any:
    """Return t of one element; compiled."""


@made_once
def _register_curve() -> None:
    """Register the functions of the loops with numba; ImportError if it is not installed."""
    from numba import types
    from numba.extending import overload, register_jitable

    register_jitable(_mix)

    @overload(_curve)  # type: ignore[untyped-decorator]
    def _typed_curve(bits: Any) -> Any:
        def narrow(bits: Any) -> Any:
            # The product fits 32 bits, as the compiler must know to multiply the result by 32 bits.
            word = np.uint32(bits)
            return np.uint64(np.uint32(word * (word + np.uint32(1))) >> np.uint32(1)) + _ONE

        def wide(bits: Any) -> Any:
            return _mix(np.uint64(bits) + _GAMMA)

        return narrow if bits in (types.uint8, types.uint16) else wide


@made_once
def _kernel(width: int, sparse: bool, change: bool) -> Callable[..., tuple[int, int]]:
    """Compile ``f(seed0, seed1, table, start or places, bits, old)``, the sums over a chunk."""
    try:
        from numba import types

        _register_curve()
    except ImportError:
        return _numpy_sparse if sparse else _numpy_dense
    bits, word = array(types, f"uint{8 * width}"), types.uint64
    where = array(types, "int64") if sparse else types.int64
    old = bits if change else types.none
    signature = types.UniTuple(word, 2)(word, word, array(types, "uint64"), where, bits, old)
    return compile_loop(_sparse_loop if sparse else _dense_loop, signature)
