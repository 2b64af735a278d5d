"""Find how two tensors in host memory differ, by their bits: the first step of a sparse sync.

Large tensors are compared by several threads, on chunks whose results stay in a core's cache until
they are digested and their gaps are written: memory is read once. Of small ones a thread takes some
at a time (`delta_sender.diff.batch`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from delta_sender.diff.batch import Pair, compare_batch
from delta_sender.diff.loop import Bits, Difference, loop_of
from engine_ext.format import Digest, ParamDelta, byte_stream, change_digest, join_streams
from engine_ext.kernels import bits_of, host_bits

_CHUNK: Final = 1 << 21  # elements that a thread compares at a time; a multiple of any line's


class Change(msgspec.Struct, frozen=True, eq=False, gc=False):
    """How a tensor differs from what it is compared with; private copies, see `Difference`.

    Attributes:
        dtype, shape: As in the checkpoint.
        indices: Flat indices, ascending, int32 or int64 [nnz]; None: dense.
        old, new: Bit patterns [nnz], or [numel] if dense; a dense `old` may be the snapshot's own
            memory.
        nnz: Elements that differ.
        digest: What the change adds to a digest, under the name in the snapshot; None if not asked
            for.
        stream: The gap stream of the indices; None if it was not made.
    """

    dtype: str
    shape: tuple[int, ...]
    indices: NDArray[Any] | None
    old: Bits
    new: Bits
    nnz: int
    digest: Digest | None
    stream: NDArray[np.uint8] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its new values and their indices."""
        return self.new.nbytes + (0 if self.indices is None else self.indices.nbytes)

    @property
    def own_nbytes(self) -> int:
        """Bytes of all its arrays that are not the snapshot's."""
        stream = 0 if self.stream is None else self.stream.nbytes
        return self.nbytes + (0 if self.indices is None else self.old.nbytes) + stream

    def delta(self, name: str, values: Bits, *, differences: bool) -> ParamDelta:
        """Return its elements, to be sent under a name: new values, or new minus old ones."""
        return ParamDelta(
            name, self.dtype, self.shape, self.indices, values, differences, self.stream
        )


class Comparisons:
    """Compares tensors in a pool: large ones in chunks, several small ones at a time.

    A thread that handed over each small tensor by itself would mostly wait for the interpreter
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
        pairs.clear()  # the caller may free them before it asks for all results
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


class _Scratch(threading.local):
    """Memory of a thread that fits a chunk's results; it is touched only as far as needed."""

    def __init__(self) -> None:
        most = _CHUNK + 2  # the loop writes two elements ahead
        self.indices = np.empty(most, np.int64)
        self.old, self.new = np.empty(most, np.uint64), np.empty(most, np.uint64)


_scratch: Final = _Scratch()


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
        out = _scratch.old.view(old.dtype), _scratch.new.view(new.dtype)
        count = loop(before, after, start, _scratch.indices, *out)
        indices = _scratch.indices[:count]
        was, now = out[0][:count].copy(), out[1][:count].copy()
    change = None if name is None else change_digest(name, indices, was, now)
    following = int(indices[0]) + 1 if indices.size else 0
    stream = byte_stream(indices[1:], following) if streams else None
    narrow = np.int32 if old.size < 1 << 31 else np.int64
    return Difference(indices.astype(narrow), was, now, change, stream)
