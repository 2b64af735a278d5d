"""Encode one param's positions, ascending flat indices, to bytes, and decode them.

For flat indices idx[0] < idx[1] < ... and idx[-1] = -1, little-endian::

    encoding                width   each position
    indices                 4       int32 idx[k]
    deltas, deltas_zstd     2, 4    uint16 or uint32 idx[k] - idx[k-1] - 1; one width per param
    gap8_exp, gap8_ulp      1, 2    symbols, see `engine_ext.format.gap_streams`
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.errors import MalformedPart, NotUpdatable
from engine_ext.format.gap_streams import (
    decode_gaps,
    encode_gaps,
    index_dtype,
    join_planes,
    stream_bytes,
)
from engine_ext.format.manifest import ENCODINGS, PACKED_ENCODINGS, POSITION_WIDTHS, skip_symbol

__all__ = ["ENCODINGS", "decode_positions", "encode_positions", "position_bytes", "split_positions"]

_GAP_DTYPE: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
# the int64 sum of so many gaps of up to 2**32 - 1 cannot overflow
_MAX_POSITIONS: Final = 2**31 - 1


class StreamPiece(NamedTuple):
    """Consecutive symbols of a param's positions, other than ``indices``.

    Attributes:
        start, stop: which of its symbols they are.
        after: one more than the index before them, with what they inherit of a gap.
        first, end: which of the param's elements they are.
    """

    start: int
    stop: int
    after: int
    first: int
    end: int


def encode_positions(encoding: str, indices: NDArray[np.int64]) -> tuple[NDArray[np.uint8], int]:
    """Encode one param's flat indices.

    Args:
        indices: int32 or int64 [nnz], ascending, unique, from 0.

    Returns:
        The bytes, uint8 [nnz * pos_width], and ``pos_width``: 4 for ``indices``; 2 if all gaps
        fit uint16 (also if there are none), else 4. With a gap8 encoding the gap stream, not yet
        compressed, and the bytes of its symbols.

    Raises:
        ValueError: Unknown encoding; indices not ascending; an index of 2**31 or more with
            ``indices``; a gap of 2**32 or more with ``deltas``; with a gap8 encoding an index
            beyond any tensor.
    """
    if encoding not in POSITION_WIDTHS:
        raise ValueError(f"unknown encoding {encoding!r}")
    if encoding in PACKED_ENCODINGS:
        return encode_gaps(indices.astype(np.int64, copy=False))
    gaps = np.diff(indices, prepend=np.int64(-1))
    gaps -= 1
    if gaps.size and gaps.min() < 0:
        raise ValueError("indices are negative or not ascending")
    if encoding == "indices":
        if indices.size and indices[-1] >= 2**31:
            raise ValueError("an index is too large for int32; use 'deltas'")
        return indices.astype("<i4").view(np.uint8), 4
    if gaps.size > _MAX_POSITIONS:
        raise ValueError("too many indices; send the param dense")
    largest = int(gaps.max()) if gaps.size else 0
    if largest >= 2**32:
        raise ValueError(f"a gap of {largest} between two indices; the most is 2**32 - 1")
    width = 2 if largest < 2**16 else 4
    return gaps.astype(_GAP_DTYPE[width]).view(np.uint8), width


def decode_positions(
    encoding: str, raw: NDArray[np.uint8], pos_width: int, numel: int
) -> NDArray[Any]:
    """Decode one param's positions to `index_dtype` [nnz], ascending, unique, in [0, numel).

    `raw` is uint8 [nnz * pos_width], or a decompressed gap stream; any alignment.

    Raises:
        MalformedPart: The encoding does not have this `pos_width`, or it does not divide the bytes;
            a gap stream ends within a gap.
        NotUpdatable: An index is out of range or not ascending.
    """
    if pos_width not in POSITION_WIDTHS.get(encoding, ()) or raw.size % pos_width:
        raise MalformedPart(f"{raw.size} bytes of {encoding} positions, pos_width {pos_width}")
    if encoding in PACKED_ENCODINGS:
        return decode_gaps(raw, pos_width, numel)
    nnz = raw.size // pos_width
    if nnz == 0:
        return np.empty(0, index_dtype(numel))
    bad_index = NotUpdatable("index out of range or not ascending", numel=numel)
    if nnz > min(numel, _MAX_POSITIONS):
        raise bad_index
    if encoding == "indices":
        indices: NDArray[Any] = raw.view("<i4").astype(np.int32)
        if indices[0] < 0 or not (indices[1:] > indices[:-1]).all():
            raise bad_index
    else:
        indices = raw.view(_GAP_DTYPE[pos_width]).astype(np.int64)
        indices += 1
        np.cumsum(indices, out=indices)
        indices -= 1
    if indices[-1] >= numel:
        raise bad_index
    return indices.astype(index_dtype(numel), copy=False)


def split_positions(
    encoding: str, raw: NDArray[np.uint8], pos_width: int, nnz: int, most: int
) -> list[StreamPiece]:
    """Divide the positions of `nnz` elements into pieces of at most so many symbols.

    Not for ``indices``. Only what is divided is read: of a single piece nothing proves that it has
    `nnz` gaps.
    """
    size = raw.size // pos_width
    if size <= most:
        return [StreamPiece(0, size, 0, 0, nnz)]
    packed = encoding in PACKED_ENCODINGS
    symbols = join_planes(raw, pos_width) if packed else raw.view(_GAP_DTYPE[pos_width])
    pieces, after, first = list[StreamPiece](), 0, 0
    for start in range(0, size, most):
        own = symbols[start : start + most]
        count = int(np.count_nonzero(own != skip_symbol(pos_width))) if packed else own.size
        pieces.append(StreamPiece(start, start + own.size, after, first, first + count))
        after, first = after + int(own.sum(dtype=np.int64)) + count, first + count
    return pieces


def position_bytes(encoding: str, indices: NDArray[np.int64]) -> int:
    """Return the bytes of the positions before compression; approximate for a gap stream."""
    if encoding in PACKED_ENCODINGS:
        return stream_bytes(indices)
    if encoding == "indices":
        return 4 * indices.size
    largest = max(int(indices[0]), int(np.diff(indices).max(initial=0)) - 1) if indices.size else 0
    return (2 if largest < 2**16 else 4) * indices.size
