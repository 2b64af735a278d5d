"""Find how tensors on an accelerator differ from the snapshot, by their bits, many at a time.

The tensors stay on their device. A batch of them is compared there in three steps: how many
elements differ; which they are, the gap streams of their indices and the digests of their changes;
and the copy of streams and bits to the host. About one byte per index crosses the bus. The host
needs the numbers of one step for the next one, and waits for those while the device works on
another batch. Streams are decoded in the comparison's threads.

On the CPU the steps are the same; there it is tested, with the kernels under Triton's interpreter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from delta_sender.diff.compare import Bits, Difference
from delta_sender.diff.copy_streams import CopyStreams
from delta_sender.diff.device import DeviceSide
from delta_sender.diff.listed import Listed, ListedShare
from engine_ext.format import (
    ChangedElements,
    Digest,
    bytes_suffice,
    device_streams,
    join_streams,
    read_streams,
)
from engine_ext.kernels import host_bits
from engine_ext.kernels.triton import runs_change_kernels

_BATCH_BYTES: Final = 256 << 20
# The same if it takes memory of its own until it is compared: of copies, or of uploaded elements.
_COPIED_BYTES: Final = 64 << 20
# Elements of a piece, and most that are listed at once: each takes up to 25 bytes of the device. A
# multiple of any program's elements, so that memory is aligned in every piece as in the tensor.
_PIECE: Final = 1 << 23


class _Piece(NamedTuple):
    """Elements of one tensor in a batch."""

    old: Callable[[], torch.Tensor]
    new: torch.Tensor
    start: int
    name: str | None
    index_dtype: np.dtype[Any]  # of the tensor's indices


class _Found(NamedTuple):
    """What differs in a piece; its stream counts from the piece's start."""

    start: int
    indices: NDArray[Any]  # in the tensor
    old: Bits
    new: Bits
    digest: Digest
    stream: NDArray[np.uint8]
    listed: ListedShare | None


@dataclass(slots=True)
class _Own:
    """The changed pieces of a group, whose elements are listed together.

    Attributes:
        counts: How many elements of each have changed.
        sizes: How many each has.
        starts: The index in its tensor at which each begins.
        index: The dtype of each one's indices.
        totals: Symbols of each, and both lanes of its change's digest, int64 [pieces, 3].
        listed: The elements of all, if the device keeps them.
    """

    counts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    starts: list[int]
    index: list[np.dtype[Any]]
    totals: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 3), np.int64))
    listed: Listed | None = None


@dataclass(slots=True)
class _Batch:
    """Pieces of one device and dtype."""

    pieces: list[_Piece] = field(default_factory=list)
    nbytes: int = 0
    steps: Iterator[None] | None = None  # once it has begun
    # By the number of each piece that has changed, where its result will be.
    found: dict[int, tuple[Future[list[_Found]], int]] = field(default_factory=dict)


class DeviceComparisons:
    """Compares tensors on devices, in batches. To be used by one thread, on its current streams.

    Args:
        side: Has what they are compared with.
        pool: Its threads make arrays of what the device has found.
        streams: Whether gap streams are wanted.
        copied: Whether the tensors are copies that are freed when they are compared.
    """

    def __init__(self, side: DeviceSide, pool: Executor, *, streams: bool, copied: bool) -> None:
        self._side, self._pool, self._streams = side, pool, streams
        self._copied = copied
        self._filling: dict[tuple[Any, ...], _Batch] = {}
        self._running: list[Iterator[None]] = []  # steps of at most two batches

    def begin(
        self, key: str, bits: Bits, new: torch.Tensor, digested: str | None
    ) -> Callable[[], Difference]:
        """Begin to compare a tensor with the snapshot, or soon.

        Return a function that waits for the result, to be called in the same thread.

        Args:
            key, bits: Name and bits in the snapshot, which the `DeviceSide` has made ready.
            new: Integers of the same width, contiguous [n], on the device. It must not change until
                the result has been asked for.
            digested: The name to digest the change under; None: it is not digested.

        Raises:
            ValueError: The tensors differ in size or in the width of an element.
        """
        if (bits.size, bits.itemsize) != (new.numel(), new.itemsize) or new.ndim != 1:
            raise ValueError("old and new are not of one size and element size")
        device = new.device
        index = np.dtype(np.int32 if new.numel() < 1 << 31 else np.int64)
        is_large = self._side.is_mirrored(key) and not self._copied
        most = _BATCH_BYTES if is_large else _COPIED_BYTES
        kind = device, new.dtype, most
        places = []
        for start in range(0, new.numel(), _PIECE):
            these = slice(start, min(start + _PIECE, new.numel()))
            own = new[these]
            batch = self._filling.get(kind)
            if batch is not None and batch.nbytes + own.nbytes > most:
                self._launch(kind)
                batch = None
            if batch is None:
                batch = self._filling[kind] = _Batch()
            places.append((batch, len(batch.pieces)))
            old = self._side.old(key, bits, device, these)
            batch.pieces.append(_Piece(old, own, start, digested, index))
            batch.nbytes += own.nbytes
        return partial(self._wait, places, index, bits.dtype, digested is not None)

    def _launch(self, kind: tuple[Any, ...]) -> None:
        """Begin a batch; the one before takes its next step, and those before that are ended."""
        batch = self._filling.pop(kind)
        batch.steps = self._compare(batch)
        next(batch.steps)
        for number, earlier in enumerate(reversed(self._running)):
            next(earlier, None)
            if number:
                deque(earlier, 0)  # to the end
        self._running = [*self._running[-1:], batch.steps]

    def _wait(
        self,
        places: Sequence[tuple[_Batch, int]],
        index: np.dtype[Any],
        bits: np.dtype[Any],
        digested: bool,
    ) -> Difference:
        found = []
        for batch, number in places:
            if batch.steps is None:
                self._launch(next(k for k, one in self._filling.items() if one is batch))
            assert batch.steps is not None
            deque(batch.steps, 0)  # to the end
            if number in batch.found:
                future, at = batch.found[number]
                found.append(future.result()[at])
        return self._joined(found, index, bits, digested)

    def _joined(
        self, found: list[_Found], index: np.dtype[Any], bits: np.dtype[Any], digested: bool
    ) -> Difference:
        """Return what differs in a tensor, whose changed pieces these are."""
        change = Digest.total(one.digest for one in found) if digested else None
        listed = [share for one in found if (share := one.listed) is not None]
        if len(listed) < len(found):
            listed = []
        if len(found) == 1 and not found[0].start:
            (one,) = found
            suffice = bytes_suffice(one.indices.size, int(one.indices[-1]) + 1)
            stream = one.stream if self._streams and suffice else None
            return Difference(one.indices, one.old, one.new, change, stream, listed)
        stream = None
        if self._streams:
            stream = join_streams([(one.indices, _without_first(one)) for one in found])
        indices, old, new = (
            np.concatenate([np.empty(0, dtype), *arrays])
            for dtype, arrays in (
                (index, [one.indices for one in found]),
                (bits, [one.old for one in found]),
                (bits, [one.new for one in found]),
            )
        )
        return Difference(indices, old, new, change, stream, listed)

    def _compare(self, batch: _Batch) -> Iterator[None]:
        """Compare a batch; at each step the device has been given work, whose result is needed.

        At the end the memory of its tensors is let go.
        """
        pieces, batch.pieces = batch.pieces, []
        streams = self._side.streams(pieces[0].new.device)
        old, new = [piece.old() for piece in pieces], [piece.new for piece in pieces]
        listing = _list(old, new, [piece.start for piece in pieces], streams)
        wait_for_ends = streams.download(listing.ends)
        yield
        ends = [0, *wait_for_ends().tolist()]
        counts = [end - before for before, end in pairwise(ends)]
        for group in _groups(counts):
            chosen = [number for number in group if counts[number]]
            if not chosen:
                continue
            before, nnz = ends[group.start], ends[group.stop] - ends[group.start]
            places, was, now = listing.write(group, before, nnz)
            own = _Own(
                np.array([counts[number] for number in chosen], np.int64),
                np.array([new[number].numel() for number in chosen], np.int64),
                [pieces[number].start for number in chosen],
                [pieces[number].index_dtype for number in chosen],
            )
            names = [pieces[number].name or "" for number in chosen]
            elements = ChangedElements(
                *(places, was, now, own.counts, own.starts, names, int(own.sizes.sum()))
            )
            symbols, totals = device_streams(elements, streams.send)
            wide = any(index.itemsize > 4 for index in own.index)
            own.listed = self._side.keep(places, now, wide=wide)
            del places, elements
            wait_for_totals = streams.download(totals)
            yield
            own.totals = np.diff(wait_for_totals().numpy(), axis=0, prepend=np.int64(0))
            lengths = int(own.totals[:, 0].sum())
            waits = [streams.download(one) for one in (symbols[:lengths], was, now)]
            del symbols, was, now
            future = self._pool.submit(_found, waits, own)
            batch.found |= {number: (future, at) for at, number in enumerate(chosen)}


class _Listing(Protocol):
    """Lists the elements of pairs that differ; see `engine_ext.kernels.triton.compact.Pairs`."""

    ends: torch.Tensor

    def write(
        self, these: range, before: int, nnz: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class _ByOperators:
    """Lists the same by PyTorch's operators."""

    def __init__(
        self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], starts: Sequence[int]
    ) -> None:
        self._pairs = [*zip(old, new, starts, strict=True)]
        self.ends = torch.stack([(one != other).sum() for one, other, _ in self._pairs]).cumsum(0)

    def write(
        self, these: range, before: int, nnz: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pairs = [self._pairs[number] for number in these]
        places = [(old != new).nonzero().view(-1) for old, new, _ in pairs]
        found = [
            (at + start, old[at], new[at])
            for at, (old, new, start) in zip(places, pairs, strict=True)
        ]
        indices, was, now = (torch.cat(parts) for parts in zip(*found, strict=True))
        return indices, was, now


def _list(
    old: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor],
    starts: Sequence[int],
    streams: CopyStreams,
) -> _Listing:
    if not runs_change_kernels(new[0].device):
        return _ByOperators(old, new, starts)
    from engine_ext.kernels.triton import compact

    return compact.Pairs(old, new, starts, streams.send)


def _groups(counts: Sequence[int]) -> Iterator[range]:
    """Yield ranges of pieces, which cover all in order, of a bounded number of elements."""
    start = elements = 0
    for number, count in enumerate(counts):
        elements += count
        if elements > _PIECE and number > start:
            yield range(start, number)
            start, elements = number, count
    yield range(start, len(counts))


def _found(
    waits: Sequence[Callable[[], torch.Tensor]],
    own: _Own,
) -> list[_Found]:
    """Wait for what is copied to the host, and return what differs in each piece."""
    # Copies: memory that is pinned is not given back to the system.
    symbols, was, now = (host_bits(wait()).copy() for wait in waits)
    lengths = own.totals[:, 0].copy()
    places = read_streams(symbols, lengths, own.counts, own.sizes)
    found = []
    first = at = 0
    for start, index, count, (length, *lanes) in zip(
        own.starts, own.index, own.counts.tolist(), own.totals.tolist(), strict=True
    ):
        these = slice(first, first + count)
        indices: NDArray[Any] = places[these]
        if start or indices.dtype != index:
            indices = indices.astype(index) + index.type(start)
        stream = symbols[at : at + length]
        share = None if own.listed is None else ListedShare(own.listed, first, count)
        found.append(_Found(start, indices, was[these], now[these], Digest(*lanes), stream, share))
        first, at = first + count, at + length
    return found


def _without_first(found: _Found) -> NDArray[np.uint8]:
    """Return the stream without the symbols of the first gap."""
    return found.stream[(int(found.indices[0]) - found.start) // 255 + 1 :]
