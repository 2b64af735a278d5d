"""Encode changes of single bits, as ``gap8_xor`` does.

An element's new bits are ``(old & ~cleared) ^ flipped``. With ``cleared`` of 0 that is an xor; to
overwrite some bytes of an element, these are cleared and then flipped to the new ones.

The ``__values__`` tensor, with elements of w bytes::

    bytes               content
    sum of nnz * w      param by param: flipped, little-endian
    as many, or none    param by param: cleared; none if all of it is 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import bits_dtype
from engine_ext.errors import MalformedPart
from engine_ext.format.manifest import ParamEntry

_Bits: TypeAlias = NDArray[Any]


def encode_changes(flipped: Sequence[_Bits], cleared: Sequence[_Bits]) -> NDArray[np.uint8]:
    """Return the ``__values__`` tensor, uint8 [bytes].

    Args:
        flipped, cleared: one of each per param: unsigned ints of the dtype's width, [nnz].
    """
    arrays = [*flipped, *(cleared if any(bits.any() for bits in cleared) else ())]
    raw = [np.ascontiguousarray(bits).view(np.uint8) for bits in arrays]
    return np.concatenate([np.empty(0, np.uint8), *raw])


def decode_changes(
    raw: NDArray[np.uint8], params: Sequence[ParamEntry]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """Return all flipped bits, and all cleared ones or None; see `encode_changes`.

    Raises:
        MalformedPart: there are too few bytes, or too many.
    """
    size = sum(entry.nnz * bits_dtype(entry.dtype).itemsize for entry in params)
    if raw.size not in (size, 2 * size):
        raise MalformedPart(f"the changes have {raw.size} bytes, neither {size} nor {2 * size}")
    return raw[:size], raw[size:] if raw.size != size else None
