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

from engine_ext.compiled import array, compile_loop, made_once
from engine_ext.errors import MalformedPart, NotUpdatable
from engine_ext.wire.frame import deflate, inflate
from engine_ext.wire.limits import Limits
from engine_ext.wire.manifest import ParamEntry, longest_symbol

_SYMBOLS: Final[dict[int, np.dtype[Any]]] = {1: np.dtype(np.uint8), 2: np.dtype("<u2")}
_MAX_NUMEL: Final = Limits().max_numel
# Skips of 255 for each element from which bytes are not even tried; it bounds their memory too.
_TOO_SPARSE: Final = 16


class _Loops(NamedTuple):
    write: Callable[[Any, int, Any], int]
    read: Callable[[Any, int, Any], int]


def stream_bytes(indices: NDArray[np.int64]) -> int:
    """About the length of the stream of some ascending indices."""
    nnz = indices.size
    return nnz and min(nnz + (int(indices[-1]) + 1 - nnz) // 255, 2 * nnz)


def encode_gaps(indices: NDArray[np.int64]) -> tuple[NDArray[np.uint8], int]:
    """The gap stream of one param.

    Args:
        indices: int64 [nnz], ascending, unique, from 0.

    Returns:
        The stream, uint8 [bytes], low plane first, and the bytes of a symbol: 1 or 2, whichever
        compresses better.

    Raises:
        ValueError: the indices are not ascending, or beyond any tensor.
    """
    nnz = indices.size
    if not nnz:
        return np.empty(0, np.uint8), 1
    largest = int(indices.max())
    if largest >= _MAX_NUMEL:
        raise ValueError(f"an index of {largest}; tensors have at most {_MAX_NUMEL} elements")
    skips = max(0, largest + 1 - nnz) // 255
    if skips <= nnz:
        return _symbols(indices, 1, largest), 1
    wide = _symbols(indices, 2, largest).view(np.uint8).reshape(-1, 2).T.reshape(-1)
    if skips <= _TOO_SPARSE * nnz:
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


def _symbols(indices: NDArray[np.int64], width: int, largest: int) -> NDArray[Any]:
    longest = longest_symbol(width)
    loops = _loops(width)
    if loops is None:
        return _write_by_numpy(indices, longest).astype(_SYMBOLS[width])
    # So many symbols suffice as long as the gaps are not negative, and then the loop ends.
    skips = max(0, largest + 1 - indices.size) // longest
    out = np.empty(indices.size + skips, _SYMBOLS[width])
    count = loops.write(np.ascontiguousarray(indices), longest, out)
    if count < 0:
        raise _not_ascending()
    return out[:count]


def _write_by_numpy(indices: NDArray[np.int64], longest: int) -> NDArray[np.int64]:
    gaps = np.diff(indices, prepend=np.int64(-1)) - 1
    if gaps.min() < 0:
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


def _write_loop(indices: Any, longest: Any, out: Any) -> Any:
    """What numba compiles; returns the number of symbols, -1 where indices do not ascend."""
    at = 0
    following = 0
    for k in range(indices.size):
        gap = indices[k] - following
        if gap < 0:
            return -1
        following = indices[k] + 1
        while gap >= longest:
            out[at] = longest
            at += 1
            gap -= longest
        out[at] = gap
        at += 1
    return at


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


@made_once
def _loops(width: int) -> _Loops | None:
    """The loops for symbols of `width` bytes; None without numba."""
    try:
        from numba import types
    except ImportError:
        return None
    word, symbol = types.int64, f"uint{8 * width}"
    indices, out = array(types, "int64"), array(types, "int64", readonly=False)
    symbols, written = array(types, symbol), array(types, symbol, readonly=False)
    return _Loops(
        compile_loop(_write_loop, word(indices, word, written)),
        compile_loop(_read_loop, word(symbols, word, out)),
    )


def _not_ascending() -> ValueError:
    return ValueError("indices are negative or not ascending")


def warm_up() -> None:
    """Compile the loops now, so that the first sync does not wait for it."""
    for width in _SYMBOLS:
        _loops(width)
