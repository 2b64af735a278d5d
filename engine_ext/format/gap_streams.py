"""Encode positions as gap streams, as the ``gap8_exp`` and ``gap8_ulp`` encodings do.

The gap stream of a param with flat indices idx[0] < idx[1] < ... holds each gap
``idx[k] - idx[k-1] - 1``, with idx[-1] = -1, as symbols of 1 byte or 2 bytes::

    symbol          meaning
    0 .. M - 1      adds its value to the gap and ends it
    M               adds M to the gap, which continues   (M = 255, or 65535 with 2 bytes)

A stream of 2-byte symbols is split into two planes, all low bytes, then all high bytes. The
``__positions__`` tensor is one zstd frame of the 1-byte streams and low planes of all params, then
the high planes of all params: low bytes hardly compress, high bytes compress well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.errors import MalformedPart, NotUpdatable
from engine_ext.format.manifest import Limits, ParamEntry, skip_symbol
from engine_ext.format.small_arrays import in_groups, joined
from engine_ext.format.zstd_frames import compress_planes, decompress_planes
from engine_ext.kernels import array, compile_loop, made_with_numba

_SYMBOLS: Final[dict[int, np.dtype[Any]]] = {1: np.dtype(np.uint8), 2: np.dtype("<u2")}
_MAX_NUMEL: Final = Limits().max_numel
# Skips of 255 per element above which 1-byte symbols are not tried; it also bounds their memory.
_TOO_SPARSE: Final = 16
_NOT_ASCENDING: Final = "indices are negative or not ascending"


class _Loops(NamedTuple):
    write: Callable[[Any, int, int, Any], int]
    read: dict[int, Callable[[Any, int, Any], tuple[int, int]]]  # by the bytes of an index


def index_dtype(numel: int) -> np.dtype[Any]:
    """Return the dtype of the decoded indices of a tensor: int32 if all of them fit, else int64."""
    return np.dtype(np.int32 if numel <= 1 << 31 else np.int64)


def stream_bytes(indices: NDArray[np.int64]) -> int:
    """Return about the bytes of the stream of ascending indices, int64 [nnz]."""
    nnz = indices.size
    return nnz and min(nnz + (int(indices[-1]) + 1 - nnz) // 255, 2 * nnz)


def bytes_suffice(nnz: int, end: int) -> bool:
    """Return whether 1-byte symbols surely suffice: at most one skip per element on average.

    Args:
        nnz: Elements of a param.
        end: One more than the index of the last one.
    """
    return max(0, end - nnz) // 255 <= nnz


def byte_stream(indices: NDArray[np.int64], start: int) -> NDArray[np.uint8]:
    """Encode a piece of a param's indices as a stream of 1-byte symbols, uint8 [bytes].

    Args:
        indices: int64 [n], ascending, unique, from `start`; ValueError if they are not.
        start: one more than the index before the first.
    """
    if not indices.size:
        return np.empty(0, np.uint8)
    return _symbols(indices, 1, int(indices.max()), start)


def join_streams(
    pieces: Sequence[tuple[NDArray[Any], NDArray[np.uint8]]],
) -> NDArray[np.uint8] | None:
    """Return the same as `encode_gaps` of all pieces; None if that might choose 2-byte symbols.

    Args:
        pieces: The indices [n] of each, ascending over all, and the `byte_stream` of all but its
            first index.
    """
    pieces = [(indices, stream) for indices, stream in pieces if indices.size]
    nnz = sum(indices.size for indices, _ in pieces)
    if pieces and not bytes_suffice(nnz, int(pieces[-1][0][-1]) + 1):
        return None
    streams: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)]
    following = 0
    for indices, stream in pieces:
        skips, rest = divmod(int(indices[0]) - following, 255)
        streams += [np.full(skips, 255, np.uint8), np.array([rest], np.uint8), stream]
        following = int(indices[-1]) + 1
    return np.concatenate(streams)


def check_streams(streams: Sequence[NDArray[np.uint8]], indices: Sequence[NDArray[Any]]) -> None:
    """Raise ValueError if a stream of 1-byte symbols is not that of its indices.

    They are compared in full, because a wrong stream would put values in wrong places.

    Args:
        streams: One per param, from `join_streams`.
        indices: Likewise, int32 or int64 [nnz].
    """
    for group in in_groups(indices):
        if not _encode(streams[group], indices[group]):
            raise ValueError("the gap stream is that of other indices")


def encode_gaps(indices: NDArray[np.int64]) -> tuple[NDArray[np.uint8], int]:
    """Encode one param's indices as a gap stream: uint8 [bytes], low plane first.

    With it comes its bytes per symbol, 1 or 2, whichever compresses better.

    Args:
        indices: int64 [nnz], ascending, unique, from 0.

    Raises:
        ValueError: The indices are not ascending, or beyond any tensor.
    """
    nnz = indices.size
    if not nnz:
        return np.empty(0, np.uint8), 1
    largest = int(indices.max())
    if largest >= _MAX_NUMEL:
        raise ValueError(f"an index of {largest}; tensors have at most {_MAX_NUMEL} elements")
    if bytes_suffice(nnz, largest + 1):
        return _symbols(indices, 1, largest), 1
    wide = _symbols(indices, 2, largest).view(np.uint8).reshape(-1, 2).T.reshape(-1)
    if (largest + 1 - nnz) // 255 <= _TOO_SPARSE * nnz:
        narrow = _symbols(indices, 1, largest)
        wide_bytes = compress_planes(*wide.reshape(2, -1), search=True).size
        if compress_planes(narrow, search=True).size <= wide_bytes:
            return narrow, 1
    return wide, 2


def pack_streams(
    streams: Sequence[NDArray[np.uint8]], widths: Sequence[int], *, stored: bool = False
) -> NDArray[np.uint8]:
    """Compress the streams of all params into the ``__positions__`` tensor, uint8 [bytes].

    Args:
        streams: One per param, from `encode_gaps`; empty for a dense one.
        widths: Bytes of their symbols; 0 for a dense one.
        stored: See `compress_planes`.
    """
    none = np.empty(0, np.uint8)
    wide = [width == 2 for width in widths]
    low = [
        stream[: stream.size // 2] if two else stream
        for stream, two in zip(streams, wide, strict=True)
    ]
    high = [stream[stream.size // 2 :] for stream, two in zip(streams, wide, strict=True) if two]
    planes = (np.concatenate([none, *own]) for own in (low, high))
    return compress_planes(*planes, search=True, stored=stored)


def unpack_streams(positions: NDArray[np.uint8], params: Sequence[ParamEntry]) -> NDArray[np.uint8]:
    """Return the streams of all params, one after another, each low plane first; uint8 [bytes].

    The inverse of `pack_streams`.

    Raises:
        MalformedPart: The frame is corrupt, or declares another size than the manifest.
    """
    size = params[-1].pos_end if params else 0
    content = decompress_planes(positions, size, size, "the gap streams")
    wide = [(p.pos_start, p.pos_end) for p in params if p.pos_width == 2]
    if not wide:
        return content
    streams = np.empty_like(content)
    done, start = 0, 0  # bytes of the result, and of the streams and low planes
    high = size - sum(end - begin for begin, end in wide) // 2
    for begin, end in [*wide, (size, size)]:
        plain, half = begin - done, (end - begin) // 2
        streams[done:begin] = content[start : start + plain]
        start += plain
        streams[begin : begin + half] = content[start : start + half]
        streams[begin + half : end] = content[high : high + half]
        start, high, done = start + half, high + half, end
    return streams


def decode_gaps(stream: NDArray[np.uint8], width: int, numel: int) -> NDArray[Any]:
    """Decode a gap stream to `index_dtype` [nnz], ascending, unique, in [0, numel).

    The inverse of `encode_gaps`; `width`, the bytes of a symbol, divides the stream's length.

    Raises:
        MalformedPart: The last gap does not end.
        NotUpdatable: The gaps run past the tensor.
    """
    dtype = index_dtype(numel)
    if not stream.size:
        return np.empty(0, dtype)
    symbols, skip = join_planes(stream, width), skip_symbol(width)
    if symbols[-1] == skip:
        raise MalformedPart("the gap stream ends within a gap")
    loops = _loops(width)
    if loops is None:
        indices = _read_by_numpy(symbols, skip)
        end = int(indices[-1]) + 1
        indices = indices.astype(dtype, copy=False)
    else:
        out = np.empty(symbols.size, dtype)  # what stays unwritten takes no memory
        count, end = loops.read[dtype.itemsize](symbols, skip, out)
        indices = out[:count]
    if end > numel:
        raise NotUpdatable("the gaps run past the tensor", numel=numel)
    return indices


def decode_many_gaps(
    streams: Sequence[NDArray[np.uint8]], params: Sequence[ParamEntry]
) -> list[NDArray[Any] | None]:
    """Decode small gap streams in few compiled calls.

    Returns:
        For each param what `decode_gaps` returns, but as a view of a common array; None if
        `decode_gaps` must be asked: without numba, of a large tensor, for symbols of 2 bytes, and
        for what is refused.
    """
    found: list[NDArray[Any] | None] = [None] * len(streams)
    loop = _read_many()
    if loop is None:
        return found
    plain = [
        number
        for number, (entry, stream) in enumerate(zip(params, streams, strict=True))
        if entry.pos_width == 1 and entry.numel <= 1 << 31 and entry.nnz <= stream.size
    ]
    own = [streams[number] for number in plain]
    for group in in_groups(own):
        entries = [params[number] for number in plain[group]]
        symbols = np.ascontiguousarray(joined(own[group]))
        lengths, counts, numels = (
            np.array(sizes, np.int64)
            for sizes in (
                [stream.size for stream in own[group]],
                [entry.nnz for entry in entries],
                [entry.numel for entry in entries],
            )
        )
        out = _read_all(loop, symbols, lengths, counts, numels)
        if out is None:
            continue
        start = 0
        for number, count in zip(plain[group], counts.tolist(), strict=True):
            found[number] = out[start : start + count]
            start += count
    return found


def read_streams(
    symbols: NDArray[np.uint8],
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    numels: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Decode streams of 1-byte symbols that come one after another: the indices of each, int32.

    Args:
        symbols: uint8 [bytes], contiguous.
        lengths, counts: Symbols and indices of each stream, int64 [streams], from 1.
        numels: Elements of each tensor, below 2**31.

    Raises:
        ValueError: A stream does not end, has more or fewer indices, or goes past its tensor.
    """
    loop = _read_many()
    if loop is not None:
        found = _read_all(loop, symbols, lengths, counts, numels)
    else:
        ends = np.cumsum(lengths)
        own = [
            _read_by_numpy(symbols[end - length : end], 255)
            for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]
        fit = [
            indices.size == count and indices[-1] < numel
            for indices, count, numel in zip(own, counts.tolist(), numels.tolist(), strict=True)
        ]
        whole = all(fit) and not (symbols[ends - 1] == 255).any()
        found = np.concatenate([np.empty(0, np.int32), *own]).astype(np.int32) if whole else None
    if found is None:
        raise ValueError("the gap streams are not those of as many elements")
    return found


def _read_all(
    loop: Callable[[Any, Any, Any, Any, Any], bool],
    symbols: NDArray[np.uint8],
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
    numels: NDArray[np.int64],
) -> NDArray[np.int32] | None:
    """Return the indices of all streams, one after another; None if one is refused."""
    total = int(counts.sum())
    # A param writes at most one index for each of its symbols, from its start on.
    out = np.empty(total + int((lengths - counts).max(initial=0)), np.int32)
    return out[:total] if loop(symbols, lengths, counts, numels, out) else None


def join_planes(stream: NDArray[np.uint8], width: int) -> NDArray[Any]:
    """Return the symbols of a stream as unsigned ints of `width` bytes; no copy if 1."""
    if width == 1:
        return stream
    low, high = stream.reshape(2, -1)
    symbols: NDArray[Any] = low | high.astype(np.uint16) << 8
    return symbols


def _encode(streams: Sequence[NDArray[np.uint8]], indices: Sequence[NDArray[Any]]) -> bool:
    """Return whether streams of 1-byte symbols encode these indices, of one or more params."""
    symbols, places = joined(streams), joined(indices)
    loop = _match(places.itemsize)
    if loop is None:
        return all(
            np.array_equal(_read_by_numpy(stream, 255), own)
            and (not stream.size or stream[-1] != 255)
            for stream, own in zip(streams, indices, strict=True)
        )
    lengths, counts = (
        np.array([each.size for each in arrays], np.int64) for arrays in (streams, indices)
    )
    return loop(np.ascontiguousarray(symbols), lengths, np.ascontiguousarray(places), counts)


def _symbols(indices: NDArray[np.int64], width: int, largest: int, start: int = 0) -> NDArray[Any]:
    skip = skip_symbol(width)
    loops = _loops(width)
    if loops is None:
        return _write_by_numpy(indices, start, skip).astype(_SYMBOLS[width])
    # Enough symbols as long as no gap is negative, and the loop stops at a negative one.
    skips = max(0, largest + 1 - start - indices.size) // skip
    out = np.empty(indices.size + skips, _SYMBOLS[width])
    count = loops.write(np.ascontiguousarray(indices), start, skip, out)
    if count < 0:
        raise ValueError(_NOT_ASCENDING)
    return out[:count]


def _write_by_numpy(indices: NDArray[np.int64], start: int, skip: int) -> NDArray[np.int64]:
    gaps = np.diff(indices, prepend=np.int64(start - 1)) - 1
    if gaps.min() < 0 or indices.min() < start:
        raise ValueError(_NOT_ASCENDING)
    skips, rest = np.divmod(gaps, skip)
    ends = np.cumsum(skips + 1) - 1
    symbols = np.full(int(ends[-1]) + 1, skip, np.int64)
    symbols[ends] = rest
    return symbols


def _read_by_numpy(symbols: NDArray[Any], skip: int) -> NDArray[np.int64]:
    ends = symbols != skip
    after = np.cumsum(symbols.astype(np.int64) + ends)
    indices: NDArray[np.int64] = after[ends] - 1
    return indices


def _write_loop(indices: Any, following: Any, skip: Any, out: Any) -> Any:
    """Compiled: write the symbols; return their number, -1 if the indices do not ascend."""
    # As an unsigned number a negative gap is a huge one, so the usual gap needs one comparison.
    one = np.uint64(1)
    at = np.uint64(0)
    for k in range(indices.size):
        index = np.uint64(indices[k])
        gap = index - following
        following = index + one
        if gap >= skip:
            if (gap | index) >> np.uint64(63):
                return -1
            while gap >= skip:
                out[at] = skip
                at += one
                gap -= skip
        out[at] = gap
        at += one
    return np.int64(at)


def _read_loop(symbols: Any, skip: Any, out: Any) -> Any:
    """Compiled: decode the symbols; return how many indices there are, and one more than the last.

    The last symbol ends a gap, so `out` is never overrun. Indices that do not fit it are wrong.
    """
    count: Any = 0
    index: Any = 0
    for k in range(symbols.size):
        symbol = np.int64(symbols[k])
        index += symbol
        out[count] = index
        ends = np.int64(symbol != skip)
        count += ends
        index += ends
    return count, index


def _read_many_loop(symbols: Any, lengths: Any, counts: Any, numels: Any, out: Any) -> Any:
    """Compiled: decode streams of 1-byte symbols; return whether each has as many indices as said.

    It is False, too, if one does not end or goes past its tensor.
    """
    at = start = 0
    for k in range(lengths.size):
        stream = symbols[at : at + lengths[k]]
        if stream.size and stream[stream.size - 1] == 255:
            return False
        count, end = _read_loop(stream, 255, out[start:])
        if count != counts[k] or end > numels[k]:
            return False
        at += lengths[k]
        start += count
    return True


def _match_loop(symbols: Any, lengths: Any, indices: Any, counts: Any) -> Any:
    """Compiled: compare streams, `lengths` of symbols, with the indices of as many params."""
    start = end = 0
    for param in range(lengths.size):
        stream, own = symbols[start : start + lengths[param]], indices[end : end + counts[param]]
        count = 0
        index = np.int64(0)
        for symbol in stream:
            index += np.int64(symbol)
            if symbol != 255:
                if count == own.size or own[count] != index:
                    return False
                count += 1
                index += 1
        if count != own.size or (stream.size and stream[-1] == 255):
            return False
        start += lengths[param]
        end += counts[param]
    return True


@made_with_numba
def _match(types: Any, width: int) -> Callable[[Any, Any, Any, Any], bool]:
    """Compile the loop for indices of `width` bytes; None without numba."""
    symbols, indices = array(types, "uint8"), array(types, f"int{8 * width}")
    sizes = array(types, "int64")
    return compile_loop(_match_loop, types.boolean(symbols, sizes, indices, sizes))


@made_with_numba
def _read_many(types: Any) -> Callable[[Any, Any, Any, Any, Any], bool]:
    """Compile the loop; None without numba."""
    from numba.extending import register_jitable

    register_jitable(_read_loop)
    sizes, out = array(types, "int64"), array(types, "int32", readonly=False)
    arguments = array(types, "uint8"), sizes, sizes, sizes, out
    return compile_loop(_read_many_loop, types.boolean(*arguments))


@made_with_numba
def _loops(types: Any, width: int) -> _Loops:
    """Compile the loops for symbols of `width` bytes; None without numba."""
    word, unsigned, symbol = types.int64, types.uint64, f"uint{8 * width}"
    symbols, written = array(types, symbol), array(types, symbol, readonly=False)
    pair, found = types.UniTuple(word, 2), [(4, "int32"), (8, "int64")]
    return _Loops(
        compile_loop(_write_loop, word(array(types, "int64"), unsigned, unsigned, written)),
        {
            size: compile_loop(_read_loop, pair(symbols, word, array(types, name, readonly=False)))
            for size, name in found
        },
    )


def warm_up() -> None:
    """Compile the loops now, so that the first sync does not wait for the compiler."""
    for width in _SYMBOLS:
        _loops(width)
    _read_many()
