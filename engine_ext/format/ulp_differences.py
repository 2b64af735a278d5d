"""Encode values as differences of bit patterns in half a byte each, as ``gap8_ulp`` does.

Nine of ten changed weights move by one unit in the last place (ulp). The difference new - old of
two bit patterns, as unsigned ints modulo their width of ``w`` bytes, is zigzag-encoded: 0, -1, 1,
-2, ... become z = 0, 1, 2, 3, ... It takes one nibble if z < 15; otherwise the nibble is 15 and z
follows in full.

The ``__values__`` tensor is one zstd frame of these bytes, with ``nnz`` elements per param::

    bytes                   content
    ceil(nnz / 2)           param by param: min(z, 15), two a byte, the first in the low nibble; the
                            last high nibble is 0 if nnz is odd
    w * (number of 15s)     param by param: every z >= 15, little-endian, w bytes each
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import bits_dtype
from engine_ext.errors import MalformedPart
from engine_ext.format.manifest import ParamEntry
from engine_ext.format.small_arrays import in_groups, joined
from engine_ext.format.zstd_frames import compress_planes, decompress_planes
from engine_ext.kernels import (
    array,
    compile_loop,
    made_with_numba,
    register_intrinsics,
    trailing_zeros,
)

_ESCAPE: Final = 15


class EncodedDifferences(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The differences of one param, encoded.

    Attributes:
        nibbles: Two a byte, uint8 [ceil(size / 2)]; the last high nibble is 0 if `size` is odd.
        escaped: Every z >= 15, unsigned ints of the dtype's width.
        size: How many differences there are.
    """

    nibbles: NDArray[np.uint8]
    escaped: NDArray[Any]
    size: int

    @property
    def nbytes(self) -> int:
        """Bytes before compression."""
        return self.nibbles.nbytes + self.escaped.nbytes

    @property
    def escaped_share(self) -> float:
        """The share of differences that take more than a nibble."""
        return self.escaped.size / max(self.size, 1)


def join_differences(pieces: Sequence[EncodedDifferences]) -> EncodedDifferences:
    """Return the differences of one or more pieces of a param, one after another."""
    if len(pieces) == 1:
        return pieces[0]
    size = sum(piece.size for piece in pieces)
    nibbles = np.zeros((size + 1) // 2, np.uint8)
    done = 0
    for piece in pieces:
        own, to = piece.nibbles, nibbles[done // 2 :]
        if done % 2:
            to[: own.size] |= own << 4
            to[1 : own.size + 1] |= (own >> 4)[: to.size - 1]
        else:
            to[: own.size] = own
        done += piece.size
    return EncodedDifferences(nibbles, np.concatenate([piece.escaped for piece in pieces]), size)


def read_differences(encoded: Sequence[EncodedDifferences]) -> NDArray[Any]:
    """Decode the differences of one or more params of one width, one after another.

    Returns:
        New minus old bit patterns, modulo 2**width, unsigned ints [sum of sizes].

    Raises:
        ValueError: The nibbles or escapes are not those of so many differences.
    """
    sizes = np.array([one.size for one in encoded], np.int64)
    pairs, escaped = joined([one.nibbles for one in encoded]), joined([e.escaped for e in encoded])
    loops = _loops(escaped.itemsize)
    found: NDArray[Any] = np.empty(0, escaped.dtype)
    fits = pairs.size == ((sizes + 1) // 2).sum()
    if fits and loops is not None:
        out = np.empty(int(sizes.sum()) + 1, escaped.dtype)
        fits, found = loops.read(pairs, escaped, sizes, out) == escaped.size, out[:-1]
    elif fits:
        large = np.concatenate([_are_escapes(one.nibbles)[: one.size] for one in encoded])
        own = [_unzigzag_nibbles(one.nibbles, one.size, escaped.dtype) for one in encoded]
        fits, found = np.count_nonzero(large) == escaped.size, np.concatenate(own)
        if fits:
            found[large] = escaped >> 1 ^ (0 - (escaped & 1))
    if not fits:
        raise ValueError("the encoded differences are not those of as many elements")
    return found


def differences_of(new: Sequence[NDArray[Any]], old: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return new minus old bit patterns of each param, modulo 2**width.

    Args:
        new, old: One of each per param: unsigned ints of one width, [nnz].
    """
    found: list[NDArray[Any]] = []
    for group in in_groups(new):
        differences = joined(new[group]) - joined(old[group])
        start = 0
        for bits in new[group]:
            found.append(differences[start : start + bits.size])
            start += bits.size
    return found


def encode_differences(
    values: Sequence[NDArray[Any] | EncodedDifferences], *, stored: bool = False
) -> NDArray[np.uint8]:
    """Encode the differences of all params to the ``__values__`` tensor, uint8 [bytes].

    Args:
        values: One per param: new minus old bit patterns, unsigned ints of the dtype's width,
            [nnz]; or the same encoded.
        stored: See `engine_ext.format.zstd_frames.compress_planes`.
    """
    none = np.empty(0, np.uint8)
    found: list[tuple[NDArray[np.uint8], NDArray[Any]]] = []
    for is_encoded, some in itertools.groupby(values, key=_is_encoded):
        own: list[Any] = [*some]
        if is_encoded:
            found += [(one.nibbles, one.escaped) for one in own]
        else:
            found += [_zigzag_nibbles(own[group]) for group in in_groups(own)]
    nibbles = np.concatenate([none, *(pairs for pairs, _ in found)])
    escaped = np.concatenate([none, *(whole.view(np.uint8) for _, whole in found)])
    return compress_planes(nibbles, escaped, search=False, stored=stored)


def _is_encoded(values: NDArray[Any] | EncodedDifferences) -> bool:
    return isinstance(values, EncodedDifferences)


def decode_differences(raw: NDArray[np.uint8], params: Sequence[ParamEntry]) -> NDArray[np.uint8]:
    """Decode the differences of all params, none dense; the inverse of `encode_differences`.

    Returns:
        They are in the widths of the params' dtypes, one param's after another's; uint8 [bytes].

    Raises:
        MalformedPart: The frame is corrupt, or its size impossible; there are more or fewer
            escaped differences than nibbles of 15, or one would fit a nibble; the padding is not 0.
    """
    halves = sum((entry.nnz + 1) // 2 for entry in params)
    most = halves + sum(entry.nnz * bits_dtype(entry.dtype).itemsize for entry in params)
    content = decompress_planes(raw, halves, most, "the differences")
    # The loop takes all params at once; if something is wrong it does not say what.
    found = _decode_all(content[:halves], content[halves:], params)
    if found is not None:
        return found.view(np.uint8)
    each = _decode_by_numpy(content, halves, params)
    return np.concatenate([np.empty(0, np.uint8), *(own.view(np.uint8) for own in each)])


def _decode_all(
    pairs: NDArray[np.uint8], escaped: NDArray[np.uint8], params: Sequence[ParamEntry]
) -> NDArray[Any] | None:
    """Decode the params in one compiled call; None without numba, and if something is wrong."""
    dtypes = {bits_dtype(entry.dtype) for entry in params}
    bits = dtypes.pop() if len(dtypes) == 1 else None
    loops = None if bits is None or escaped.size % bits.itemsize else _loops(bits.itemsize)
    if loops is None:
        return None
    sizes = np.array([entry.nnz for entry in params], np.int64)
    out: NDArray[Any] = np.empty(int(sizes.sum()) + 1, bits)
    whole = escaped.view(bits)
    return out[:-1] if loops.read(pairs, whole, sizes, out) == whole.size else None


def _decode_by_numpy(
    content: NDArray[np.uint8], halves: int, params: Sequence[ParamEntry]
) -> list[NDArray[Any]]:
    """Decode param by param; raise what `decode_differences` says, which names the tensor."""
    found = []
    start, escaped = 0, halves
    for entry in params:
        bits = bits_dtype(entry.dtype)
        pairs = content[start : start + (entry.nnz + 1) // 2]
        start += pairs.size
        if entry.nnz % 2 and pairs[-1] >> 4:
            raise MalformedPart("the padding nibble is not 0", tensor=entry.name)
        large = _are_escapes(pairs)[: entry.nnz]
        size = int(np.count_nonzero(large)) * bits.itemsize
        whole = content[escaped : escaped + size]
        escaped += size
        if whole.size != size:
            raise MalformedPart("escaped differences are missing", tensor=entry.name)
        zigzag = whole.view(bits)
        if (zigzag < _ESCAPE).any():
            raise MalformedPart("an escaped difference fits a nibble", tensor=entry.name)
        own = _unzigzag_nibbles(pairs, entry.nnz, bits)
        own[large] = zigzag >> 1 ^ (0 - (zigzag & 1))
        found.append(own)
    if escaped != content.size:
        raise MalformedPart(f"{content.size - escaped} bytes after the differences")
    return found


def _zigzag_nibbles(
    params: Sequence[NDArray[Any]],
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Return the nibbles, two a byte, and the zigzag-encoded differences that are escaped.

    Both are those of one or more params, one after another; each param begins a byte.
    """
    sizes = np.array([differences.size for differences in params], np.int64)
    differences = joined(params)
    width = differences.itemsize
    ends = np.cumsum(sizes + sizes % 2)  # of each param's nibbles
    loops = _loops(width)
    if loops is not None:
        pairs: NDArray[np.uint8] = np.empty(int(ends[-1]) // 2, np.uint8)
        whole = np.empty(differences.size, differences.dtype)
        signed = np.ascontiguousarray(differences).view(f"i{width}")
        return pairs, whole[: loops.split(signed, sizes, pairs, whole)]
    zigzag = differences << 1 ^ (0 - (differences >> (8 * width - 1)))
    small: NDArray[np.uint8] = np.zeros(int(ends[-1]), np.uint8)
    padding = np.repeat(ends - np.cumsum(sizes) - sizes % 2, sizes)  # before each difference
    small[np.arange(zigzag.size) + padding] = np.minimum(zigzag, _ESCAPE)
    return small[::2] | np.left_shift(small[1::2], 4), zigzag[zigzag >= _ESCAPE]


def _are_escapes(pairs: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which nibbles are 15, two a byte."""
    found = np.empty(2 * pairs.size, np.bool_)
    np.equal(pairs & 15, _ESCAPE, out=found[::2])
    np.greater_equal(pairs, _ESCAPE << 4, out=found[1::2])
    return found


def _unzigzag_nibbles(pairs: NDArray[np.uint8], number: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Decode nibbles, two a byte, to differences [number]."""
    out: NDArray[Any] = np.empty(2 * pairs.size, dtype)
    out[::2], out[1::2] = pairs & 15, pairs >> 4
    out = out >> 1 ^ (0 - (out & 1))
    return out[:number]


def _split_loop(differences: Any, sizes: Any, pairs: Any, whole: Any) -> Any:
    """Compiled: encode params of these sizes; return how many differences are escaped.

    `whole` has room for all of them.
    """
    count = start = at = 0
    for size in sizes:
        own, nibbles = differences[start : start + size], pairs[at:]
        for k in range(size):
            signed = np.int64(own[k])
            zigzag = np.uint64(signed << 1 ^ signed >> 63)
            if zigzag >= np.uint64(15):
                whole[count] = zigzag
                count += 1
                zigzag = np.uint64(15)
            if k % 2:
                nibbles[k // 2] |= np.uint8(zigzag << np.uint64(4))
            else:
                nibbles[k // 2] = np.uint8(zigzag)
        start += size
        at += (size + 1) // 2
    return count


def _escaped(word: Any) -> Any:
    """Return the lowest bit of each nibble of a 64-bit word that is 15."""
    both = word & word >> np.uint64(1)
    return both & both >> np.uint64(2) & np.uint64(0x1111111111111111)


def _read_loop(pairs: Any, escaped: Any, sizes: Any, out: Any) -> Any:
    """Compiled: decode params of these sizes; return how many escaped differences they have.

    It is -1 if padding is not 0, a difference is missing, or one would fit a nibble. `out` has room
    for one more.
    """
    used = at = start = 0
    for size in sizes:
        own, values = pairs[at : at + (size + 1) // 2], out[start:]
        for pair in range(own.size):
            low, high = np.int64(own[pair]) & 15, np.int64(own[pair]) >> 4
            values[2 * pair] = low >> 1 ^ -(low & 1)
            values[2 * pair + 1] = high >> 1 ^ -(high & 1)
        if size % 2 and own[own.size - 1] >> 4:
            return -1
        count = own.size // 8
        words = own[: 8 * count].view(np.uint64)
        for k in range(count + own.size - 8 * count):
            if k < count:
                first, mask = 16 * k, _escaped(words[k])
            else:
                rest = 7 * count + k
                first, mask = 2 * rest, _escaped(np.uint64(own[rest]))
            while mask != 0:
                if used == escaped.size or escaped[used] < 15:
                    return -1
                # numba adds signed and unsigned numbers as floats.
                zigzag = np.uint64(escaped[used])
                values[first + trailing_zeros(mask) // 4] = np.int64(
                    zigzag >> np.uint64(1) ^ np.uint64(0) - (zigzag & np.uint64(1))
                )
                used += 1
                mask &= mask - np.uint64(1)
        start += size
        at += own.size
    return used


class _Loops(NamedTuple):
    split: Callable[[Any, Any, Any, Any], int]
    read: Callable[[Any, Any, Any, Any], int]


@made_with_numba
def _loops(types: Any, width: int) -> _Loops:
    """Compile the loops for differences of `width` bytes; None without numba."""
    from numba.extending import register_jitable

    register_intrinsics()
    register_jitable(_escaped)
    nibbles, written = array(types, "uint8"), array(types, "uint8", readonly=False)
    bits = array(types, f"uint{8 * width}")
    out = array(types, f"uint{8 * width}", readonly=False)
    sizes, differences = array(types, "int64"), array(types, f"int{8 * width}")
    return _Loops(
        compile_loop(_split_loop, types.int64(differences, sizes, written, out)),
        compile_loop(_read_loop, types.int64(nibbles, bits, sizes, out)),
    )


def warm_up() -> None:
    """Compile the loops now, so that the first sync does not wait for the compiler."""
    for width in (1, 2, 4, 8):
        _loops(width)
