"""Find how two tensors in host memory differ, by their bits: the first step of a sparse sync.

Large tensors are compared by several threads, on chunks whose results stay in a core's cache until
they are digested and their gaps are written: memory is read once. Small ones are compared many at a
time, in one compiled call that goes through a table of addresses: a call for each tensor gives up
the interpreter lock and waits for it again, which takes longer than a small tensor.

The compiled loop makes a mask of one cache line of both tensors at a time. At a density of some
percent a line has zero, one or two elements that differ, which no branch predictor foresees; so two
are written for every line, and the wrong ones are overwritten. It runs without the interpreter
lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from delta_sender.diff.change import Bits, Elements
from engine_ext.format import Digest, byte_stream, change_digest, join_streams, loops
from engine_ext.kernels import (
    LINE,
    array,
    bits_of,
    compile_loop,
    differing_mask,
    host_bits,
    made_with_numba,
    memory_at,
    popcount,
    prefetch,
    register_intrinsics,
    trailing_zeros,
)

_AHEAD: Final = 64  # lines to prefetch; the hardware's own prefetch is shorter


class Difference(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The elements that differ.

    Attributes:
        indices: Their flat indices, ascending; int32 [nnz], int64 for 2**31 elements or more.
        old, new: Their bits, unsigned ints [nnz], copies. Small tensors might have views of arrays
            that they share, also of indices and streams.
        change: Summand of the tensor's digest; None if no name was given.
        stream: The gap stream of the indices, in bytes; None if it was not asked for, or if another
            form might be smaller.
    """

    indices: NDArray[Any]
    old: Bits
    new: Bits
    change: Digest | None
    stream: NDArray[np.uint8] | None

    @property
    def elements(self) -> Elements:
        """The elements of the tensor's change."""
        return Elements(self.indices, self.old, self.new, self.stream)


def find_differing(old: Any, new: Any, start: Any, found: Any, was: Any, now: Any) -> Any:
    """Write what differs, and return how many; compiled by numba. Writes two per line at least."""
    count: Any = 0
    elements = LINE // old.itemsize
    whole = old.size // elements * elements
    for first in range(0, whole, elements):
        prefetch(old, first + _AHEAD * elements)
        prefetch(new, first + _AHEAD * elements)
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


@made_with_numba
def loop_of(types: Any, width: int) -> Callable[..., int]:
    """Return the loop for elements of `width` bytes; None without numba."""
    register_intrinsics()
    bits = array(types, f"uint{8 * width}")
    indices = array(types, "int64", readonly=False)
    out = array(types, f"uint{8 * width}", readonly=False)
    arguments = bits, bits, types.int64, indices, out, out
    return compile_loop(find_differing, types.int64(*arguments))


# Compiled loops know global functions by plain names.
_digest_sums, _write_gaps, _SKIP = loops.digest_sums, loops.write_gaps, loops.BYTE_SKIP

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor, str | None]  # old, new, name


class _Scratch(threading.local):
    """Memory of a thread for what a loop finds; it is touched only as far as needed."""

    def __init__(self) -> None:
        self.size = -1
        self.fit(0)

    def fit(self, elements: int) -> None:
        if elements > self.size:
            self.size = elements
            most = elements + 2  # the loop writes two elements ahead
            self.indices = np.empty(most, np.int64)
            self.old, self.new = np.empty(most, np.uint64), np.empty(most, np.uint64)
            self.symbols = np.empty(2 * most, np.uint8)  # at most one skip for each element


_scratch: Final = _Scratch()


def compare_batch(pairs: Sequence[Pair], *, streams: bool) -> list[Difference] | None:
    """Compare pairs of small tensors; see `Comparisons`.

    Args:
        pairs: Contiguous tensors in host memory, the two of a pair of one size, all of one element
            size. Their addresses are all that is taken from them, as making an array of each
            takes longer than to compare it.

    Returns:
        For each what `compare` returns, but views of common arrays; None if it must be asked:
        without numba, and for memory that is not aligned.
    """
    width = pairs[0][0].element_size()
    loop = batch_loop_of(width)
    addresses = np.array([(old.data_ptr(), new.data_ptr()) for old, new, _ in pairs], np.uint64)
    sizes = np.array([old.numel() for old, _, _ in pairs], np.int64)
    if not addresses[sizes > 0].all():
        raise ValueError("a tensor's memory has been freed")
    if loop is None or (addresses % width).any():
        return None
    bits = np.dtype(f"u{width}")
    seeds = np.array(
        [(0, 0) if name is None else loops.digest_seeds(name) for *_, name in pairs], np.uint64
    )
    _scratch.fit(int(sizes.sum()))
    counts, ends = np.empty((2, sizes.size), np.int64)
    lanes = np.empty((sizes.size, 2), np.uint64)
    places = _scratch.indices
    old, new = _scratch.old.view(bits), _scratch.new.view(bits)
    symbols = _scratch.symbols if streams else _scratch.symbols[:0]
    found, written = loop(
        *(addresses, sizes, seeds, loops.DIGEST_FACTORS, np.empty(0, bits)),
        *(places, old, new, symbols, counts, ends, lanes),
    )
    indices, was, now = places[:found].astype(np.int32), old[:found].copy(), new[:found].copy()
    stream = symbols[:written].copy()
    differences = []
    start = at = 0
    for (*_, name), size, count, end, sums in zip(
        pairs, sizes.tolist(), counts.tolist(), ends.tolist(), lanes.tolist(), strict=True
    ):
        own = slice(start, start + count)
        gaps = None
        if end >= 0 and size:
            gaps, at = stream[at:end], end
        change = None if name is None else Digest(*sums)
        differences.append(Difference(indices[own], was[own], now[own], change, gaps))
        start += count
    return differences


def compare_table(
    addresses: Any,
    sizes: Any,
    seeds: Any,
    factors: Any,
    like: Any,
    places: Any,
    old: Any,
    new: Any,
    symbols: Any,
    counts: Any,
    ends: Any,
    lanes: Any,
) -> Any:
    """Compiled: compare each pair, one after another; return the elements and symbols in all.

    An end is that of the tensor's symbols; -1 if they are not wanted, or might not be the smallest.
    """
    start = end = np.int64(0)
    for k in range(sizes.size):
        before = memory_at(addresses[k, 0], sizes[k], like)
        after = memory_at(addresses[k, 1], sizes[k], like)
        count = find_differing(before, after, 0, places[start:], old[start:], new[start:])
        found = places[start : start + count]
        was, now = old[start : start + count], new[start : start + count]
        lanes[k, 0], lanes[k, 1] = _digest_sums(seeds[k, 0], seeds[k, 1], factors, found, now, was)
        counts[k], ends[k] = count, -1
        if symbols.size:
            gaps = found[count - 1] + 1 - count if count else 0
            if gaps // _SKIP <= count:
                end += _write_gaps(found, np.uint64(0), np.uint64(_SKIP), symbols[end:])
                ends[k] = end
        start += count
    return start, end


@made_with_numba
def batch_loop_of(types: Any, width: int) -> Callable[..., tuple[int, int]]:
    """Return the loop for elements of `width` bytes; None without numba."""
    from numba.extending import register_jitable

    register_intrinsics()
    loops.register()
    register_jitable(find_differing)
    bits, word = f"uint{8 * width}", types.int64
    out = array(types, bits, readonly=False)
    words, symbols = array(types, "int64", readonly=False), array(types, "uint8", readonly=False)

    def table(dtype: Any) -> Any:
        return types.Array(dtype, 2, "C")

    arguments = (
        *(table(types.uint64), words, table(types.uint64), array(types, "uint64")),
        *(array(types, bits), words, out, out, symbols, words, words, table(types.uint64)),
    )
    return compile_loop(compare_table, types.UniTuple(word, 2)(*arguments))


_CHUNK: Final = 1 << 21  # elements that a thread compares at a time; a multiple of any line's


class Comparisons:
    """Compares tensors in a pool: large ones in chunks, several small ones at a time.

    A thread that handed over each small tensor alone would mostly wait for the interpreter
    lock. To be used by one thread.

    Args:
        pool: Its threads compare.
        streams: Whether gap streams are wanted.
    """

    def __init__(self, pool: Executor, *, streams: bool = False) -> None:
        self._pool, self._streams = pool, streams
        self._batches: dict[int, _Batch] = {}  # those to add to, by the bytes of an element

    def begin(
        self, old: torch.Tensor, new: torch.Tensor, name: str | None
    ) -> Callable[[], Difference]:
        """Begin to compare two tensors, or soon; return a function that waits for the result.

        Args:
            old, new: In host memory, contiguous, of one size and element size. They must not
                change until the result has been asked for.
            name: The tensor's name, if the change of its digest is wanted.

        Raises:
            ValueError: The tensors differ in size or element size.
        """
        size, width = old.numel(), old.element_size()
        if new.numel() != size or new.element_size() != width:
            raise ValueError("old and new are not of one size and element size")
        if size >= _CHUNK:
            # First what came before: its results are asked for first, and would be found last.
            for waiting in [*self._batches.values()]:
                self._submit(waiting)
            return _begin_large(_bits(old), _bits(new), name, self._pool, self._streams)
        batch = self._batches.get(width)
        if batch is None:
            batch = self._batches[width] = _Batch(width)
        result = _Waiting(self, batch, len(batch.pairs))
        batch.pairs.append((old, new, name))
        batch.elements += size
        if batch.elements >= _CHUNK:
            self._submit(batch)
        return result

    def wait_for(self, batch: _Batch) -> list[Difference]:
        """Return what a batch's thread has found."""
        if batch.future is None:
            self._submit(batch)
        assert batch.future is not None
        return batch.future.result()

    def _submit(self, batch: _Batch) -> None:
        del self._batches[batch.width]
        batch.future = self._pool.submit(self._compare_all, batch.pairs)

    def _compare_all(self, pairs: list[Pair]) -> list[Difference]:
        found = compare_batch(pairs, streams=self._streams)
        if found is None:
            found = [
                compare(_bits(old), _bits(new), name, streams=self._streams)
                for old, new, name in pairs
            ]
        pairs.clear()  # the caller can free them before it asks for all results
        return found


@dataclass(slots=True)
class _Batch:
    """Small tensors that one thread compares, all of one element size."""

    width: int
    pairs: list[Pair] = field(default_factory=list)
    elements: int = 0
    future: Future[list[Difference]] | None = None
    found: list[Difference] | None = None


class _Waiting(msgspec.Struct, eq=False):
    """Waits for one tensor of a batch. There is one for each: a closure would be five objects."""

    comparisons: Comparisons
    batch: _Batch
    number: int

    def __call__(self) -> Difference:
        batch = self.batch
        if batch.found is None:
            batch.found = self.comparisons.wait_for(batch)
        return batch.found[self.number]


def _bits(tensor: torch.Tensor) -> Bits:
    """Return a contiguous tensor in host memory as its bits, [n]; no copy."""
    return host_bits(bits_of(tensor.detach().view(-1)))


def _begin_large(
    old: Bits, new: Bits, name: str | None, pool: Executor, streams: bool
) -> Callable[[], Difference]:
    """Begin to compare two tensors chunk by chunk; see `Comparisons.begin`."""
    starts = range(0, old.size, _CHUNK)
    found: dict[int, Difference] = {}
    ending = threading.Lock()

    def compare_one(start: int) -> Difference | None:
        chunk = _compare_chunk(old, new, start, name, streams)
        with ending:
            found[start] = chunk
            last = len(found) == len(starts)
        # The thread that ends last joins them: the caller reads the next tensors.
        return _joined([found[each] for each in starts], new.dtype, name) if last else None

    futures = [pool.submit(compare_one, start) for start in starts]

    def wait() -> Difference:
        joined = [result for future in futures if (result := future.result()) is not None]
        return joined[0] if joined else _joined([], new.dtype, name)

    return wait


def compare(
    old: Bits, new: Bits, name: str | None = None, threads: int = 1, *, streams: bool = False
) -> Difference:
    """Compare two tensors' bits, in `threads` threads (1: the caller's).

    Args:
        old, new: Unsigned ints of one width, contiguous [n].
        name: See `Comparisons.begin`.
        streams: Whether the gap stream is wanted.

    Raises:
        ValueError: The tensors differ in dtype or shape.
    """
    _check(old, new)
    if threads > 1 and old.size > _CHUNK:
        with ThreadPoolExecutor(threads) as pool:
            return _begin_large(old, new, name, pool, streams)()
    starts = range(0, old.size, _CHUNK)
    found = [_compare_chunk(old, new, start, name, streams) for start in starts]
    return _joined(found, new.dtype, name)


def _check(old: Bits, new: Bits) -> None:
    if (old.dtype, old.shape) != (new.dtype, new.shape) or old.ndim != 1 or old.dtype.kind != "u":
        raise ValueError("old and new are not unsigned ints of one dtype and shape")


def _joined(found: Sequence[Difference], dtype: np.dtype[Any], name: str | None) -> Difference:
    pieces = [(one.indices, one.stream) for one in found if one.stream is not None]
    stream = join_streams(pieces) if pieces else None
    if len(found) == 1:
        return msgspec.structs.replace(found[0], stream=stream)
    return Difference(
        np.concatenate([np.empty(0, np.int32), *(one.indices for one in found)]),
        np.concatenate([np.empty(0, dtype), *(one.old for one in found)]),
        np.concatenate([np.empty(0, dtype), *(one.new for one in found)]),
        None if name is None else Digest.total(d for one in found if (d := one.change)),
        stream,
    )


def _compare_chunk(old: Bits, new: Bits, start: int, name: str | None, streams: bool) -> Difference:
    """Return what differs in a chunk; the stream lacks the first index."""
    before, after = old[start : start + _CHUNK], new[start : start + _CHUNK]
    loop = loop_of(old.itemsize)
    if loop is None:
        indices = np.flatnonzero(before != after)
        was, now = before[indices], after[indices]
        indices += start
    else:
        before, after = np.ascontiguousarray(before), np.ascontiguousarray(after)
        _scratch.fit(_CHUNK)
        out = _scratch.old.view(old.dtype), _scratch.new.view(new.dtype)
        count = loop(before, after, start, _scratch.indices, *out)
        indices = _scratch.indices[:count]
        was, now = out[0][:count].copy(), out[1][:count].copy()
    change = None if name is None else change_digest(name, indices, was, now)
    following = int(indices[0]) + 1 if indices.size else 0
    stream = byte_stream(indices[1:], following) if streams else None
    narrow = np.int32 if old.size < 1 << 31 else np.int64
    return Difference(indices.astype(narrow), was, now, change, stream)
