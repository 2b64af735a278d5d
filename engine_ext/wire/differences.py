"""Values of ``gap8_ulp``: small differences of bit patterns, in half a byte each before zstd.

Nine of ten changed weights move by one unit in the last place. A difference, modulo the width of
the dtype, is zigzagged (0, -1, 1, -2, ... become 0, 1, 2, 3, ...). Below 15 it is a nibble; of
any other the nibble is 15, and it stands whole behind all nibbles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import bits_dtype
from engine_ext.errors import MalformedPart
from engine_ext.wire.frame import deflate, inflate
from engine_ext.wire.manifest import ParamEntry

_ESCAPE: Final = 15


def write_differences(values: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
    """The values tensor of a part.

    Args:
        values: Of each param, new less old bit patterns, unsigned ints of its dtype's width, [n].

    Returns:
        uint8 [bytes], `deflate`d: each param's nibbles, two a byte and the first one low, in
        bytes of its own; then all that are escaped, in the dtypes' widths.
    """
    nibbles: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)]
    escaped: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)]
    for differences in values:
        sign = differences >> (8 * differences.itemsize - 1)
        zigzag = differences << 1 ^ (0 - sign)
        small: NDArray[np.uint8] = np.zeros(zigzag.size + zigzag.size % 2, np.uint8)
        small[: zigzag.size] = np.minimum(zigzag, _ESCAPE)
        nibbles.append(small[::2] | np.left_shift(small[1::2], 4))
        escaped.append(zigzag[zigzag >= _ESCAPE].view(np.uint8))
    return deflate(np.concatenate(nibbles), np.concatenate(escaped), search=False)


def read_differences(raw: NDArray[np.uint8], params: Sequence[ParamEntry]) -> list[NDArray[Any]]:
    """The inverse of `write_differences`.

    Args:
        raw: The values tensor.
        params: Of the manifest.

    Raises:
        MalformedPart: The frame is corrupt, or its size is impossible; the escaped differences
            are not as many as the nibbles say, or one need not be; the padding is not 0.
    """
    halves = sum((entry.nnz + 1) // 2 for entry in params)
    most = halves + sum(entry.nnz * bits_dtype(entry.dtype).itemsize for entry in params)
    content = inflate(raw, halves, most, "the differences")
    found = []
    start, escaped = 0, halves
    for entry in params:
        bits = bits_dtype(entry.dtype)
        pairs = content[start : start + (entry.nnz + 1) // 2]
        start += pairs.size
        small = np.empty(2 * pairs.size, np.uint8)
        small[::2], small[1::2] = pairs & 15, pairs >> 4
        if small[entry.nnz :].any():
            raise MalformedPart("the last nibble is padding and not 0", tensor=entry.name)
        large = np.flatnonzero(small[: entry.nnz] == _ESCAPE)
        whole = content[escaped : escaped + large.size * bits.itemsize]
        escaped += large.size * bits.itemsize
        zigzag = small[: entry.nnz].astype(bits)
        if whole.size != large.size * bits.itemsize:
            raise MalformedPart("differences that are escaped are missing", tensor=entry.name)
        zigzag[large] = whole.view(bits)
        if (zigzag[large] < _ESCAPE).any():
            raise MalformedPart("a difference is escaped and fits a nibble", tensor=entry.name)
        found.append(zigzag >> 1 ^ (0 - (zigzag & 1)))
    if escaped != content.size:
        raise MalformedPart(f"{content.size - escaped} bytes behind the differences")
    return found
