"""Gap streams: the positions of the gap8 encodings before compression.

A stream is a row of symbols of one or two bytes. A symbol below the largest one ends a gap; the
largest (255, or 65535) skips that many elements, and the gap goes on. Symbols of two bytes are
split into two planes, low bytes and high bytes; those of all params are compressed behind each
other, because low bytes hardly compress and high ones well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.errors import MalformedPart, NotUpdatable
from engine_ext.kernels.jit import array, compile_loop, made_once
from engine_ext.wire.limits import Limits
from engine_ext.wire.manifest import ParamEntry, longest_symbol
from engine_ext.wire.zstd_frames import deflate, inflate

_SYMBOLS: Final[dict[int, np.dtype[Any]]] = {1: np.dtype(np.uint8), 2: np.dtype("<u2")}
_MAX_NUMEL: Final = Limits().max_numel
# Skips of 255 for each element from which bytes are not even tried; it bounds their memory too.
_TOO_SPARSE: Final = 16


class _Loops(NamedTuple):
    write: Callable[[Any, int, int, Any], int]
    read: Callable[[Any, int, Any], int]


def stream_bytes(indices: NDArray[np.int64]) -> int:
    """About the length of the stream of some ascending indices."""
    nnz = indices.size
    return nnz and min(nnz + (int(indices[-1]) + 1 - nnz) // 255, 2 * nnz)


def byte_stream(indices: NDArray[np.int64], start: int) -> NDArray[np.uint8]:
    """Of symbols of one byte, the stream of some indices, as it goes on behind those before them.

    Args:
        indices: int64 [n], ascending, unique, from `start`.
        start: the element behind the one before.

    Raises:
        ValueError: the indices are not ascending.
    """
    if not indices.size:
        return np.empty(0, np.uint8)
    return _symbols(indices, 1, int(indices.max()), start)


def joined_stream(
    pieces: Sequence[tuple[NDArray[Any], NDArray[np.uint8]]],
) -> NDArray[np.uint8] | None:
    """The stream of a whole param, of pieces that were made by themselves.

    Args:
        pieces: the indices [n] of each, ascending over all, and their `byte_stream` without the
            first one.

    Returns:
        What `encode_gaps` makes of all the indices; None where it may choose symbols of two bytes.
    """
    pieces = [(indices, stream) for indices, stream in pieces if indices.size]
    nnz = sum(indices.size for indices, _ in pieces)
    if pieces and not _suit_bytes(nnz, int(pieces[-1][0][-1]) + 1):
        return None
    streams: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)]
    following = 0
    for indices, stream in pieces:
        skips, rest = divmod(int(indices[0]) - following, 255)
        streams += [np.full(skips, 255, np.uint8), np.array([rest], np.uint8), stream]
        following = int(indices[-1]) + 1
    return np.concatenate(streams)


def encode_gaps(
    indices: NDArray[np.int64], stream: NDArray[np.uint8] | None = None
) -> tuple[NDArray[np.uint8], int]:
    """The gap stream of one param.

    Args:
        indices: int64 [nnz], ascending, unique, from 0; with a stream also int32.
        stream: what `joined_stream` made of them, where it did; every gap of it is compared, as
            values at other places than their own could be committed.

    Returns:
        The stream, uint8 [bytes], low plane first, and the bytes of a symbol: 1 or 2, whichever
        compresses better.

    Raises:
        ValueError: the indices are not ascending, or beyond any tensor; or the stream is not
            theirs.
    """
    nnz = indices.size
    if not nnz:
        return np.empty(0, np.uint8), 1
    largest = int(indices.max() if stream is None else indices[-1])
    if largest >= _MAX_NUMEL:
        raise ValueError(f"an index of {largest}; tensors have at most {_MAX_NUMEL} elements")
    if stream is not None:
        if not _belongs(stream, indices):
            raise ValueError("the gap stream is that of other indices")
        return stream, 1
    if _suit_bytes(nnz, largest + 1):
        return _symbols(indices, 1, largest), 1
    wide = _symbols(indices, 2, largest).view(np.uint8).reshape(-1, 2).T.reshape(-1)
    if (largest + 1 - nnz) // 255 <= _TOO_SPARSE * nnz:
        narrow = _symbols(indices, 1, largest)
        if deflate(narrow, search=True).size <= deflate(*wide.reshape(2, -1), search=True).size:
            return narrow, 1
    return wide, 2


def write_streams(streams: Sequence[NDArray[np.uint8]], widths: Sequence[int]) -> NDArray[np.uint8]:
    """The positions tensor of a part.

    Args:
        streams: Of each param, from `encode_gaps`; empty of a dense one.
        widths: Bytes of their symbols, 0 of a dense one.

    Returns:
        uint8 [bytes]: `deflate`d, each param's stream, or the low plane of it; then each param's
        high plane, where it has one.
    """
    low: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)]
    high: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)]
    for stream, width in zip(streams, widths, strict=True):
        symbols = stream.size // max(width, 1)
        low.append(stream[:symbols])
        high.append(stream[symbols:])
    return deflate(np.concatenate(low), np.concatenate(high), search=True)


def read_streams(
    positions: NDArray[np.uint8], params: Sequence[ParamEntry]
) -> Iterator[NDArray[np.uint8]]:
    """The inverse of `write_streams`: each param's stream.

    Args:
        positions: The positions tensor.
        params: Of the manifest.

    Raises:
        MalformedPart: The frame is corrupt, or declares another size.
    """
    size = params[-1].pos_end if params else 0
    content = inflate(positions, size, size, "the gap streams")
    symbols = [(p.pos_end - p.pos_start) // max(p.pos_width, 1) for p in params]
    start, high = 0, sum(symbols)
    for entry, count in zip(params, symbols, strict=True):
        stream = content[start : start + count]
        start += count
        if entry.pos_width == 2:
            stream = np.concatenate([stream, content[high : high + count]])
            high += count
        yield stream


def decode_gaps(stream: NDArray[np.uint8], width: int, numel: int) -> NDArray[np.int64]:
    """The inverse of `encode_gaps`, checked.

    Args:
        stream: uint8 [bytes].
        width: bytes of a symbol, 1 or 2, that divide those of the stream.
        numel: elements of the tensor.

    Returns:
        int64 [nnz], ascending, unique, in [0, numel).

    Raises:
        MalformedPart: the last gap has no end.
        NotUpdatable: the gaps run past the tensor.
    """
    if not stream.size:
        return np.empty(0, np.int64)
    symbols, longest = joined(stream, width), longest_symbol(width)
    if symbols[-1] == longest:
        raise MalformedPart("the gap stream ends within a gap")
    loops = _loops(width)
    if loops is None:
        indices = _read_by_numpy(symbols, longest)
    else:
        out = np.empty(symbols.size, np.int64)  # what stays unwritten takes no memory
        indices = out[: loops.read(symbols, longest, out)]
    if indices[-1] >= numel:
        raise NotUpdatable("the gaps run past the tensor", numel=numel)
    return indices


def joined(stream: NDArray[np.uint8], width: int) -> NDArray[Any]:
    """The symbols of a stream, unsigned ints of `width` bytes; no copy of single bytes."""
    if width == 1:
        return stream
    low, high = stream.reshape(2, -1)
    symbols: NDArray[Any] = low | high.astype(np.uint16) << 8
    return symbols


def _belongs(stream: NDArray[np.uint8], indices: NDArray[Any]) -> bool:
    """Whether a stream of symbols of one byte is that of these indices, int32 or int64."""
    if not stream.size or stream[-1] == 255:
        return False
    loop = _match(indices.itemsize)
    if loop is None:
        return np.array_equal(_read_by_numpy(stream, 255), indices)
    return loop(np.ascontiguousarray(stream), np.ascontiguousarray(indices))


def _suit_bytes(nnz: int, end: int) -> bool:
    """Whether symbols of one byte are surely few: on average one skip an element at most."""
    return max(0, end - nnz) // 255 <= nnz


def _symbols(indices: NDArray[np.int64], width: int, largest: int, start: int = 0) -> NDArray[Any]:
    longest = longest_symbol(width)
    loops = _loops(width)
    if loops is None:
        return _write_by_numpy(indices, start, longest).astype(_SYMBOLS[width])
    # So many symbols suffice as long as the gaps are not negative, and then the loop ends.
    skips = max(0, largest + 1 - start - indices.size) // longest
    out = np.empty(indices.size + skips, _SYMBOLS[width])
    count = loops.write(np.ascontiguousarray(indices), start, longest, out)
    if count < 0:
        raise _not_ascending()
    return out[:count]


def _write_by_numpy(indices: NDArray[np.int64], start: int, longest: int) -> NDArray[np.int64]:
    gaps = np.diff(indices, prepend=np.int64(start - 1)) - 1
    if gaps.min() < 0 or indices.min() < start:
        raise _not_ascending()
    skips, rest = np.divmod(gaps, longest)
    ends = np.cumsum(skips + 1) - 1
    symbols = np.full(int(ends[-1]) + 1, longest, np.int64)
    symbols[ends] = rest
    return symbols


def _read_by_numpy(symbols: NDArray[Any], longest: int) -> NDArray[np.int64]:
    ends = symbols != longest
    after = np.cumsum(symbols.astype(np.int64) + ends)
    indices: NDArray[np.int64] = after[ends] - 1
    return indices


def _write_loop(indices: Any, following: Any, longest: Any, out: Any) -> Any:
    """What numba compiles; returns the number of symbols, -1 where indices do not ascend.

    Unsigned, a negative gap is a huge one, and the usual gap needs one comparison only.
    """
    one = np.uint64(1)
    at = np.uint64(0)
    for k in range(indices.size):
        index = np.uint64(indices[k])
        gap = index - following
        following = index + one
        if gap >= longest:
            if (gap | index) >> np.uint64(63):
                return -1
            while gap >= longest:
                out[at] = longest
                at += one
                gap -= longest
        out[at] = gap
        at += one
    return np.int64(at)


def _read_loop(symbols: Any, longest: Any, out: Any) -> Any:
    """What numba compiles; the last symbol ends a gap, so that `out` is never overrun."""
    count: Any = 0
    index: Any = 0
    for k in range(symbols.size):
        symbol = np.int64(symbols[k])
        index += symbol
        out[count] = index
        ends = np.int64(symbol != longest)
        count += ends
        index += ends
    return count


def _match_loop(stream: Any, indices: Any) -> Any:
    """What numba compiles; the last symbol ends a gap."""
    count = 0
    index = np.int64(0)
    for symbol in stream:
        index += np.int64(symbol)
        if symbol != 255:
            if count == indices.size or indices[count] != index:
                return False
            count += 1
            index += 1
    return count == indices.size


@made_once
def _match(width: int) -> Callable[[Any, Any], bool] | None:
    """The loop for indices of `width` bytes; None without numba."""
    try:
        from numba import types
    except ImportError:
        return None
    indices = array(types, f"int{8 * width}")
    return compile_loop(_match_loop, types.boolean(array(types, "uint8"), indices))


@made_once
def _loops(width: int) -> _Loops | None:
    """The loops for symbols of `width` bytes; None without numba."""
    try:
        from numba import types
    except ImportError:
        return None
    word, unsigned, symbol = types.int64, types.uint64, f"uint{8 * width}"
    indices, out = array(types, "int64"), array(types, "int64", readonly=False)
    symbols, written = array(types, symbol), array(types, symbol, readonly=False)
    return _Loops(
        compile_loop(_write_loop, word(indices, unsigned, unsigned, written)),
        compile_loop(_read_loop, word(symbols, word, out)),
    )


def _not_ascending() -> ValueError:
    return ValueError("indices are negative or not ascending")


def warm_up() -> None:
    """Compile the loops now, so that the first sync does not wait for it."""
    for width in _SYMBOLS:
        _loops(width)
