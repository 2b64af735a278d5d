"""Values of ``gap8_exp``: the byte with the exponent compressed, the other bytes as they are.

A bit pattern is rotated left by one, so that its sign is its last bit. The highest byte of a
bfloat16 is then its exponent, and the lower one its mantissa and sign; a float16 has its exponent
and the first three bits of its mantissa in the highest. Weights have few exponents, while the
bytes below do not compress. Nothing is lost by this, whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import bits_dtype, itemsize
from engine_ext.errors import MalformedPart
from engine_ext.wire.frame import deflate, inflate
from engine_ext.wire.manifest import ParamEntry

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
        width = bits.itemsize
        rotated = bits << 1 | bits >> (8 * width - 1)
        planes = rotated.view(np.uint8).reshape(-1, width).T[::-1]
        highest.append(planes[0])
        lower.append(planes[1:].reshape(-1))
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
        width = bits.itemsize
        stop = start + entry.nnz * (width - 1)
        rotated = np.empty((entry.nnz, width), np.uint8)
        rotated[:, width - 1] = highest[entry.val_start : entry.val_end]
        rotated[:, : width - 1] = raw[start:stop].reshape(width - 1, entry.nnz)[::-1].T
        whole = rotated.view(bits).reshape(-1)
        found.append(whole >> 1 | whole << (8 * width - 1))
        start = stop
    return found
