"""Encode values as byte planes with the exponents compressed, as ``gap8_exp`` does.

Every bit pattern of ``w`` bytes is rotated left by one bit, so that the sign becomes its last bit.
The highest byte of a bfloat16 is then its exponent, and the other byte its mantissa and sign; a
float16 has its exponent and three bits of mantissa in the highest byte. Weights have few different
exponents, while the lower bytes do not compress. The encoding is lossless for every dtype.

Layout of the ``__values__`` tensor, with ``nnz`` elements per param::

    bytes               content
    nnz * (w - 1)       param by param: w - 1 planes of nnz bytes, the more significant one first
    the rest            one zstd frame of sum(nnz) bytes: the highest bytes, param by param
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import bits_dtype, itemsize
from engine_ext.errors import MalformedPart
from engine_ext.format.manifest import ParamEntry
from engine_ext.format.small_arrays import in_groups, joined
from engine_ext.format.zstd_frames import compress_planes, decompress_planes
from engine_ext.kernels import array, compile_loop, made_with_numba

_Bytes = NDArray[np.uint8]


def encode_planes(values: Sequence[NDArray[Any]], *, stored: bool = False) -> _Bytes:
    """Encode all params' values, each unsigned ints of the dtype's width, [nnz], to uint8 [bytes].

    The result is the ``__values__`` tensor; see the top of this module, and for `stored`
    `engine_ext.format.zstd_frames.compress_planes`.
    """
    if values and values[0].itemsize <= 2:  # a param has one lower plane at most
        values = [joined(values[group]) for group in in_groups(values)]
    planes = [_split(bits) for bits in values]
    highest = np.concatenate([np.empty(0, np.uint8), *(own for own, _ in planes)])
    frame = compress_planes(highest, search=False, stored=stored)
    return np.concatenate([*(own for _, own in planes), frame])


def decode_planes(raw: _Bytes, params: Sequence[ParamEntry]) -> _Bytes:
    """Decode the values of all params; the inverse of `encode_planes`.

    Returns:
        They are in the widths of the params' dtypes, one param's after another's; uint8 [bytes].

    Raises:
        MalformedPart: A plane is cut short, or the frame is corrupt or declares another size.
    """
    lower_end = sum(entry.nnz * (itemsize(entry.dtype) - 1) for entry in params)
    if raw.size < lower_end:
        raise MalformedPart(f"the values have {raw.size} bytes; {lower_end} are not compressed")
    nnz = sum(entry.nnz for entry in params)
    highest = decompress_planes(raw[lower_end:], nnz, nnz, "the exponents")
    kinds = {bits_dtype(entry.dtype) for entry in params}
    if len(kinds) == 1 and max(kind.itemsize for kind in kinds) <= 2:
        return _join(highest, raw[:lower_end], kinds.pop()).view(np.uint8)
    found = [np.empty(0, np.uint8)]
    start = 0
    for entry in params:
        bits = bits_dtype(entry.dtype)
        stop = start + entry.nnz * (bits.itemsize - 1)
        own = _join(highest[entry.val_start : entry.val_end], raw[start:stop], bits)
        found.append(own.view(np.uint8))
        start = stop
    return np.concatenate(found)


def _split(bits: NDArray[Any]) -> tuple[_Bytes, _Bytes]:
    """Split bit patterns [n] into highest bytes [n] and lower planes [(width - 1) * n]."""
    width = bits.itemsize
    loops = _loops() if width == 2 else None
    if loops is not None:
        highest, lower = np.empty(bits.size, np.uint8), np.empty(bits.size, np.uint8)
        loops.split(np.ascontiguousarray(bits), highest, lower)
        return highest, lower
    rotated = bits << 1 | bits >> (8 * width - 1)
    planes = rotated.view(np.uint8).reshape(-1, width).T[::-1]
    return planes[0], planes[1:].reshape(-1)


def _join(highest: _Bytes, lower: _Bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Join highest bytes [n] and lower planes [(width - 1) * n] to bit patterns [n]."""
    out: NDArray[Any] = np.empty(highest.size, dtype)
    loops = _loops() if dtype.itemsize == 2 else None
    if loops is not None:
        loops.join(highest, lower, out)
        return out
    rotated = out.view(np.uint8).reshape(-1, dtype.itemsize)
    rotated[:, -1] = highest
    rotated[:, :-1] = lower.reshape(dtype.itemsize - 1, highest.size)[::-1].T
    return out >> 1 | out << (8 * dtype.itemsize - 1)


def _split_loop(bits: Any, highest: Any, lower: Any) -> None:
    """Compiled: `_split` for patterns of two bytes."""
    for k in range(bits.size):
        rotated = bits[k] << np.uint16(1) | bits[k] >> np.uint16(15)
        highest[k] = rotated >> np.uint16(8) & np.uint16(255)
        lower[k] = rotated & np.uint16(255)


def _join_loop(highest: Any, lower: Any, out: Any) -> None:
    """Compiled: `_join` for patterns of two bytes."""
    for k in range(out.size):
        rotated = np.uint16(highest[k]) << np.uint16(8) | np.uint16(lower[k])
        out[k] = rotated >> np.uint16(1) | rotated << np.uint16(15)


class _Loops(NamedTuple):
    split: Callable[[Any, Any, Any], None]
    join: Callable[[Any, Any, Any], None]


@made_with_numba
def _loops(types: Any) -> _Loops:
    """Compile the loops for patterns of two bytes; None without numba."""
    bits, planes = array(types, "uint16"), array(types, "uint8")
    written, out = (array(types, kind, readonly=False) for kind in ("uint8", "uint16"))
    return _Loops(
        compile_loop(_split_loop, types.void(bits, written, written)),
        compile_loop(_join_loop, types.void(planes, planes, out)),
    )


def warm_up() -> None:
    """Compile the loops now, so that the first sync does not wait for the compiler."""
    _loops()
