"""How two tensors differ, by their bits: the first step of every sparse sync.

The compiled loop makes a mask of a cache line of both at a time. At a density of some percent a
line has none, one or two elements that differ, and no processor foresees which, so two are written
down for every line, and those that were none are written over. It runs without the interpreter
lock, on chunks whose findings stay in a core's cache until they are digested and the gaps between
them are written down: memory is read once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.kernels.jit import array, compile_loop, made_once
from engine_ext.kernels.simd import (
    LINE,
    differing_mask,
    popcount,
    prefetch_to_read,
    register_intrinsics,
    trailing_zeros,
)
from engine_ext.wire.digest import Digest, change_digest
from engine_ext.wire.gap_streams import byte_stream, join_streams

_CHUNK: Final = 1 << 21  # elements that a thread compares at a time; a multiple of any line's
_AHEAD: Final = 64  # lines that are asked for before they are compared; a core's own guess is fewer


class Difference(NamedTuple):
    """The elements that differ.

    Attributes:
        indices: their flat indices, ascending; int32 [nnz], of 2**31 elements or more int64.
        old, new: their bits, unsigned ints [nnz], copies.
        change: what they add to the tensor's digest; None where no name was given.
        stream: the gap stream of the indices, of bytes; None where it was not asked for, or may not
            be the smallest.
    """

    indices: NDArray[Any]
    old: NDArray[Any]
    new: NDArray[Any]
    change: Digest | None
    stream: NDArray[np.uint8] | None


def begin_compare(
    old: NDArray[Any],
    new: NDArray[Any],
    name: str | None,
    pool: Executor,
    *,
    streams: bool = False,
) -> Callable[[], Difference]:
    """Have two tensors compared in threads.

    Args:
        old, new: Bit patterns, unsigned ints of one width, contiguous [n]. They must stay as they
            are until the result has been asked for.
        name: The tensor's, where the change of its digest is wanted.
        pool: What compares; each chunk is a task of its own.
        streams: Whether the gap stream is wanted.

    Returns:
        What waits for the result.

    Raises:
        ValueError: The two are not alike.
    """
    _check(old, new)
    starts = range(0, old.size, _CHUNK)
    found: dict[int, Difference] = {}
    ending = threading.Lock()

    def compare_one(start: int) -> Difference | None:
        chunk = _compare_chunk(old, new, start, name, streams)
        with ending:
            found[start] = chunk
            last = len(found) == len(starts)
        # Whoever ends last joins them: the caller has the next tensors to read.
        return _joined([found[each] for each in starts], new.dtype, name) if last else None

    futures = [pool.submit(compare_one, start) for start in starts]

    def wait() -> Difference:
        joined = [result for future in futures if (result := future.result()) is not None]
        return joined[0] if joined else _joined([], new.dtype, name)

    return wait


def compare(
    old: NDArray[Any],
    new: NDArray[Any],
    name: str | None = None,
    threads: int = 1,
    *,
    streams: bool = False,
) -> Difference:
    """`begin_compare`, and wait; `threads` share the work, 1 is the caller's own."""
    if threads > 1 and old.size > _CHUNK:
        with ThreadPoolExecutor(threads) as pool:
            return begin_compare(old, new, name, pool, streams=streams)()
    _check(old, new)
    starts = range(0, old.size, _CHUNK)
    found = [_compare_chunk(old, new, start, name, streams) for start in starts]
    return _joined(found, new.dtype, name)


def _check(old: NDArray[Any], new: NDArray[Any]) -> None:
    if (old.dtype, old.shape) != (new.dtype, new.shape) or old.ndim != 1 or old.dtype.kind != "u":
        raise ValueError("old and new are not unsigned ints of one dtype and shape")


def _joined(found: Sequence[Difference], dtype: np.dtype[Any], name: str | None) -> Difference:
    pieces = [(one.indices, one.stream) for one in found if one.stream is not None]
    stream = join_streams(pieces) if pieces else None
    if len(found) == 1:
        return found[0]._replace(stream=stream)
    return Difference(
        np.concatenate([np.empty(0, np.int32), *(one.indices for one in found)]),
        np.concatenate([np.empty(0, dtype), *(one.old for one in found)]),
        np.concatenate([np.empty(0, dtype), *(one.new for one in found)]),
        None if name is None else sum((d for one in found if (d := one.change)), Digest.ZERO),
        stream,
    )


class _Scratch(threading.local):
    """Memory of a thread that a chunk's findings fit into; it is touched only as far as needed."""

    def __init__(self) -> None:
        most = _CHUNK + 2  # the loop writes two places ahead
        self.indices = np.empty(most, np.int64)
        self.old, self.new = np.empty(most, np.uint64), np.empty(most, np.uint64)


_scratch: Final = _Scratch()


def _compare_chunk(
    old: NDArray[Any], new: NDArray[Any], start: int, name: str | None, streams: bool
) -> Difference:
    """What differs in a chunk; the stream is without the first index."""
    before, after = old[start : start + _CHUNK], new[start : start + _CHUNK]
    loop = _loop(old.itemsize)
    if loop is None:
        places = np.flatnonzero(before != after)
        was, now = before[places], after[places]
        places += start
    else:
        before, after = np.ascontiguousarray(before), np.ascontiguousarray(after)
        out = _scratch.old.view(old.dtype), _scratch.new.view(new.dtype)
        count = loop(before, after, start, _scratch.indices, *out)
        places = _scratch.indices[:count]
        was, now = out[0][:count].copy(), out[1][:count].copy()
    change = None if name is None else change_digest(name, places, was, now)
    following = int(places[0]) + 1 if places.size else 0
    stream = byte_stream(places[1:], following) if streams else None
    narrow = np.int32 if old.size < 1 << 31 else np.int64
    return Difference(places.astype(narrow), was, now, change, stream)


def _compare(old: Any, new: Any, start: Any, found: Any, was: Any, now: Any) -> Any:
    """What numba compiles; returns how many differ. Of a line's, two are written in any case."""
    count: Any = 0
    elements = LINE // old.itemsize
    whole = old.size // elements * elements
    for first in range(0, whole, elements):
        prefetch_to_read(old, first + _AHEAD * elements)
        prefetch_to_read(new, first + _AHEAD * elements)
        mask = differing_mask(old, new, first)
        following = mask & (mask - np.uint64(1))
        number = popcount(mask)
        for at, rest in ((count, mask), (count + 1, following)):
            k = first + (trailing_zeros(rest) & (elements - 1))
            found[at], was[at], now[at] = start + k, old[k], new[k]
        if number > 2:
            at = count + 2
            rest = following & (following - np.uint64(1))
            while rest != 0:
                k = first + trailing_zeros(rest)
                found[at], was[at], now[at] = start + k, old[k], new[k]
                at += 1
                rest &= rest - np.uint64(1)
        count += number
    for k in range(whole, old.size):
        if old[k] != new[k]:
            found[count], was[count], now[count] = start + k, old[k], new[k]
            count += 1
    return count


@made_once
def _loop(width: int) -> Callable[..., int] | None:
    """The loop for elements of `width` bytes; None without numba."""
    try:
        from numba import types
    except ImportError:
        return None
    register_intrinsics()
    bits = array(types, f"uint{8 * width}")
    indices = array(types, "int64", readonly=False)
    out = array(types, f"uint{8 * width}", readonly=False)
    arguments = bits, bits, types.int64, indices, out, out
    return compile_loop(_compare, types.int64(*arguments))
