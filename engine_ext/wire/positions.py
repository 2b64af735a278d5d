"""Positions of one param: ascending flat indices to bytes, and back."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.errors import MalformedPart, NotUpdatable
from engine_ext.wire.gap_streams import decode_gaps, encode_gaps, joined, stream_bytes
from engine_ext.wire.manifest import (
    ENCODINGS,
    PACKED_ENCODINGS,
    POSITION_WIDTHS,
    longest_symbol,
)

__all__ = ["ENCODINGS", "Positions", "decode_positions", "encode_positions", "position_bytes"]

_GAP_DTYPE: Final[dict[int, np.dtype[Any]]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
# so many gaps of up to 2**32 - 1 cannot overflow the int64 of their running sum
_MAX_POSITIONS: Final = 2**31 - 1


class Positions(NamedTuple):
    """One param's positions as they travelled, decompressed; arguments of `decode_positions`."""

    encoding: str
    raw: NDArray[np.uint8]
    width: int

    def gaps(self) -> tuple[NDArray[Any], int] | None:
        """What is added up to the indices.

        Returns:
            Symbols, unsigned ints [n], and the one that skips as many elements with the gap going
            on, -1 where none does; None where the positions are absolute.
        """
        if self.encoding in PACKED_ENCODINGS:
            return joined(self.raw, self.width), longest_symbol(self.width)
        return None if self.encoding == "indices" else (self.raw.view(_GAP_DTYPE[self.width]), -1)


def encode_positions(
    encoding: str, indices: NDArray[np.int64], stream: NDArray[np.uint8] | None = None
) -> tuple[NDArray[np.uint8], int]:
    """Encode one param's flat indices.

    Args:
        encoding: One of `ENCODINGS`.
        indices: int32 or int64 [nnz], ascending, unique, from 0.
        stream: their gap stream, where it is known; of use where the encoding has one.

    Returns:
        The bytes, uint8 [nnz * pos_width], and ``pos_width``: 4 for ``indices``; 2 for gaps
        that all fit uint16 (none do), else 4. Where the encoding compresses, the gap stream
        that is to be compressed, and the bytes of its symbols.

    Raises:
        ValueError: Unknown encoding; indices not ascending; an index of 2**31 or more with
            ``indices``; with ``deltas`` a gap of 2**32 or more; with the gap8 ones an index
            beyond any tensor, or a stream of others.
    """
    if encoding not in ENCODINGS:
        raise ValueError(f"unknown encoding {encoding!r}")
    if encoding in PACKED_ENCODINGS:
        # With a stream only their number and the last one are looked at.
        wide = indices if stream is not None else indices.astype(np.int64, copy=False)
        return encode_gaps(wide, stream)
    gaps = np.diff(indices, prepend=np.int64(-1))
    gaps -= 1
    if gaps.size and gaps.min() < 0:
        raise ValueError("indices are negative or not ascending")
    if encoding == "indices":
        if indices.size and indices[-1] >= 2**31:
            raise ValueError("an index that int32 cannot carry; use 'deltas'")
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
) -> NDArray[np.int64]:
    """Decode one param's positions and check them.

    Args:
        encoding: One of `ENCODINGS`.
        raw: uint8 [nnz * pos_width], or a gap stream; any alignment.
        pos_width: Bytes of one position.
        numel: Elements of the tensor.

    Returns:
        int64 [nnz], ascending, unique, in [0, numel).

    Raises:
        MalformedPart: `pos_width` is none of the encoding's, or does not divide the bytes; a gap
            stream ends within a gap.
        NotUpdatable: An index is out of range or not ascending.
    """
    if pos_width not in POSITION_WIDTHS.get(encoding, ()) or raw.size % pos_width:
        raise MalformedPart(f"{raw.size} bytes of {encoding} positions, pos_width {pos_width}")
    if encoding in PACKED_ENCODINGS:
        return decode_gaps(raw, pos_width, numel)
    nnz = raw.size // pos_width
    if nnz == 0:
        return np.empty(0, np.int64)
    if nnz > min(numel, _MAX_POSITIONS):
        raise _bad_index(numel)
    if encoding == "indices":
        indices = raw.view("<i4").astype(np.int64)
        if indices[0] < 0 or not (indices[1:] > indices[:-1]).all():
            raise _bad_index(numel)
    else:
        indices = raw.view(_GAP_DTYPE[pos_width]).astype(np.int64)
        indices += 1
        np.cumsum(indices, out=indices)
        indices -= 1
    if indices[-1] >= numel:
        raise _bad_index(numel)
    return indices


def position_bytes(encoding: str, indices: NDArray[np.int64]) -> int:
    """Bytes of the positions before any compression; of a gap stream about so many.

    Args:
        encoding: One of `ENCODINGS`.
        indices: int64 [nnz], ascending, unique, from 0.
    """
    if encoding in PACKED_ENCODINGS:
        return stream_bytes(indices)
    if encoding == "indices":
        return 4 * indices.size
    largest = max(int(indices[0]), int(np.diff(indices).max(initial=0)) - 1) if indices.size else 0
    return (2 if largest < 2**16 else 4) * indices.size


def _bad_index(numel: int) -> NotUpdatable:
    return NotUpdatable("index out of range or not ascending", numel=numel)
