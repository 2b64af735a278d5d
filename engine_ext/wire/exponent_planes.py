"""Values of ``gap8_exp``: the byte with the exponent compressed, the other bytes as they are.

A bit pattern is rotated left by one, so that its sign is its last bit. The highest byte of a
bfloat16 is then its exponent, and the lower one its mantissa and sign; a float16 has its exponent
and the first three bits of its mantissa in the highest. Weights have few exponents, while the
bytes below do not compress. Nothing is lost by this, whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import bits_dtype, itemsize
from engine_ext.errors import MalformedPart
from engine_ext.kernels.jit import array, compile_loop, made_once
from engine_ext.wire.manifest import ParamEntry
from engine_ext.wire.zstd_frames import deflate, inflate

_Bytes = NDArray[np.uint8]


def write_planes(values: Sequence[NDArray[Any]]) -> _Bytes:
    """The values tensor of a part.

    Args:
        values: Of each param, unsigned ints of its dtype's width, [n].

    Returns:
        uint8 [bytes]: param by param the planes of the lower bytes of the rotated patterns, the
        more significant one first; then the highest bytes of all params, `deflate`d.
    """
    none = np.empty(0, np.uint8)
    highest: list[_Bytes] = [none]
    lower: list[_Bytes] = [none]
    for bits in values:
        own_highest, own_lower = _split(bits)
        highest.append(own_highest)
        lower.append(own_lower)
    return np.concatenate([*lower, deflate(np.concatenate(highest), search=False)])


def read_planes(raw: _Bytes, params: Sequence[ParamEntry]) -> list[NDArray[Any]]:
    """The inverse of `write_planes`.

    Args:
        raw: The values tensor.
        params: Of the manifest.

    Raises:
        MalformedPart: A plane is cut short, or the frame is corrupt or declares another size.
    """
    lower_end = sum(entry.nnz * (itemsize(entry.dtype) - 1) for entry in params)
    if raw.size < lower_end:
        raise MalformedPart(f"the values have {raw.size} bytes; {lower_end} are not compressed")
    nnz = sum(entry.nnz for entry in params)
    highest = inflate(raw[lower_end:], nnz, nnz, "the exponents")
    found = []
    start = 0
    for entry in params:
        bits = bits_dtype(entry.dtype)
        stop = start + entry.nnz * (bits.itemsize - 1)
        found.append(_join(highest[entry.val_start : entry.val_end], raw[start:stop], bits))
        start = stop
    return found


def _split(bits: NDArray[Any]) -> tuple[_Bytes, _Bytes]:
    """The highest bytes [n] of bit patterns [n], and their lower planes [(width - 1) * n]."""
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
    """Bit patterns [n] of their highest bytes [n] and their lower planes [(width - 1) * n]."""
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
    """What numba compiles, for patterns of two bytes."""
    for k in range(bits.size):
        rotated = bits[k] << np.uint16(1) | bits[k] >> np.uint16(15)
        highest[k] = rotated >> np.uint16(8) & np.uint16(255)
        lower[k] = rotated & np.uint16(255)


def _join_loop(highest: Any, lower: Any, out: Any) -> None:
    """What numba compiles, for patterns of two bytes."""
    for k in range(out.size):
        rotated = np.uint16(highest[k]) << np.uint16(8) | np.uint16(lower[k])
        out[k] = rotated >> np.uint16(1) | rotated << np.uint16(15)


class _Loops(NamedTuple):
    split: Callable[[Any, Any, Any], None]
    join: Callable[[Any, Any, Any], None]


@made_once
def _loops() -> _Loops | None:
    """The loops for patterns of two bytes; None without numba."""
    try:
        from numba import types
    except ImportError:
        return None
    bits, planes = array(types, "uint16"), array(types, "uint8")
    written, out = (array(types, kind, readonly=False) for kind in ("uint8", "uint16"))
    return _Loops(
        compile_loop(_split_loop, types.void(bits, written, written)),
        compile_loop(_join_loop, types.void(planes, planes, out)),
    )


def warm_up() -> None:
    """Compile the loops now, so that the first sync does not wait for it."""
    _loops()
