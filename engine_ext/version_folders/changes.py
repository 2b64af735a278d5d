"""Turn the zstd frame of one tensor into the change of the tensor's elements.

Inflated, it has, in bytes of the tensor:

- ``xor``: as many as the tensor, each the new one xor the old one;
- ``overwrite``: a count as u4, as many positions as u4, ascending, then as many new bytes.

A position can be anywhere in an element; the element's other bytes keep what they are.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import bits_dtype
from engine_ext.errors import MalformedPart, NotUpdatable, TooLarge
from engine_ext.format import Limits, ParamDelta, inflate

_COUNT: Final = 4  # bytes of a count, and of a position
_INDEX: Final = 4  # of an index in a part, at least
_XOR_SPAN: Final = 1 << 20  # elements searched at a time


def find_change(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    encoding: str,
    frame: NDArray[np.uint8],
    new_checksum: str,
    limits: Limits,
) -> ParamDelta:
    """Return the change of one tensor, for the encoding ``gap8_xor``.

    Args:
        dtype, shape: of the checkpoint's tensor; by its manifest name.
        encoding: ``xor`` or ``overwrite``.
        frame: uint8 [bytes].

    Raises:
        MalformedPart: the frame is corrupt, or its content is not such a change.
        NotUpdatable: a position is out of range, or they do not ascend.
        TooLarge: the tensor, or its change with indices of 4 bytes, exceeds `limits`.
    """
    bits = bits_dtype(dtype)
    nbytes = math.prod(shape) * bits.itemsize
    if nbytes > limits.max_part_bytes:
        raise TooLarge(f"{name} has {nbytes} bytes", tensor=name, limit=limits.max_part_bytes)
    try:
        if encoding == "xor":
            content = inflate(frame, nbytes, nbytes, f"{name}, whose tensor has {nbytes} bytes")
            new = np.require(content.view(bits), requirements="A")
            _check_size(name, int(np.count_nonzero(new)), bits, limits)
            indices, flipped = _differing(new)
            cleared = np.zeros_like(flipped)
        else:
            # Here an element has 5 bytes for each of its own; as a change, 4 and its own.
            width = bits.itemsize
            changed = min(nbytes // width, limits.max_part_bytes // (_INDEX + width))
            most = _COUNT + changed * width * (_COUNT + 1)
            positions, values = _positions(inflate(frame, _COUNT, most, name), nbytes)
            begins = _begins(positions // bits.itemsize)
            _check_size(name, int(np.count_nonzero(begins)), bits, limits)
            indices, flipped, cleared = _overwritten(positions, values, begins, bits)
    except MalformedPart as error:
        error.operands["tensor"] = name
        raise
    except NotUpdatable as error:
        error.operands["tensor"] = name
        raise
    return ParamDelta(
        name, dtype, shape, indices, flipped, cleared=cleared, new_checksum=new_checksum
    )


def check_change(name: str, encoding: str, frame: NDArray[np.uint8], limits: Limits) -> None:
    """Check what `find_change` does, as far as the tensor's dtype and shape need not be known.

    Raises:
        MalformedPart, NotUpdatable: see `find_change`.
    """
    content = inflate(frame, 0, limits.max_part_bytes, name)
    if encoding == "overwrite":
        _positions(content, limits.max_part_bytes)


def _differing(bits: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the elements that are not 0, int64 [nnz], and their bits [nnz]."""
    found = [
        np.flatnonzero(bits[start : start + _XOR_SPAN]) + start
        for start in range(0, bits.size, _XOR_SPAN)
    ]
    indices = np.concatenate([np.empty(0, np.int64), *found])
    return indices, bits[indices]


def _begins(element: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Return which bytes are the first ones of their elements, given each byte's: [bytes]."""
    begins = np.ones(element.size, np.bool_)
    np.not_equal(element[1:], element[:-1], out=begins[1:])
    return begins


def _overwritten(
    positions: NDArray[np.uint32],
    values: NDArray[np.uint8],
    begins: NDArray[np.bool_],
    bits: np.dtype[Any],
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
    """Return the elements that are written to, their new bits, and which bits these are."""
    width = bits.itemsize
    indices = (positions[begins] // width).astype(np.int64)
    new: NDArray[np.uint8] = np.zeros((indices.size, width), np.uint8)
    written: NDArray[np.uint8] = np.zeros((indices.size, width), np.uint8)
    element, place = np.cumsum(begins) - 1, positions % width
    new[element, place] = values
    written[element, place] = 0xFF
    return indices, new.view(bits).reshape(-1), written.view(bits).reshape(-1)


def _positions(
    content: NDArray[np.uint8], nbytes: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Return the positions of the bytes that are written, and the bytes."""
    count = int.from_bytes(content[:_COUNT].tobytes(), "little")
    if content.size != _COUNT + count * (_COUNT + 1):
        raise MalformedPart(f"{content.size} bytes are not {count} positions and bytes")
    ends = _COUNT + count * _COUNT
    positions = content[_COUNT:ends].view("<u4")
    if count and (int(positions[-1]) >= nbytes or (positions[1:] <= positions[:-1]).any()):
        raise NotUpdatable(f"byte positions do not ascend, or are not below {nbytes}")
    return positions, content[ends:]


def _check_size(name: str, nnz: int, bits: np.dtype[Any], limits: Limits) -> None:
    nbytes = nnz * (bits.itemsize + _INDEX)
    if nbytes > limits.max_part_bytes:
        raise TooLarge(
            f"{name} has a change of {nbytes} bytes", tensor=name, limit=limits.max_part_bytes
        )
