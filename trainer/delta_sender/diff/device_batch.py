"""Find how tensors on an accelerator differ from the snapshot, by their bits, many at a time.

The tensors stay on their device. A batch of them is compared there in three steps: how many
elements differ; which they are, their gaps and differences, encoded, and the digests of their
changes; and the copy of what is encoded to the host: about a byte and a half of each element
crosses the bus. The host needs the numbers of one step for the next one, and waits for those while
the device works on another batch. The last copies are waited for in the comparison's threads.

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

from delta_sender.diff.change import Change, EncodedElements, Moment
from delta_sender.diff.copy_streams import CopyStreams
from delta_sender.diff.device import DeviceSide
from delta_sender.diff.listed import Listed, ListedShare
from delta_sender.diff.observations import exponent_of
from engine_ext.answers import some_of
from engine_ext.format import (
    ChangedElements,
    Digest,
    EncodedDifferences,
    ParamDelta,
    encode_on_device,
    join_differences,
    loops,
)
from engine_ext.kernels import host_bits
from engine_ext.kernels.triton import runs_change_kernels

_BATCH_BYTES: Final = 256 << 20
# The same if it takes memory of its own until it is compared: of copies, or of uploaded elements.
_COPIED_BYTES: Final = 64 << 20
# Elements of a piece, and most that are listed at once: each takes up to 20 bytes of the device, of
# 8-byte dtypes 38. A multiple of any program's elements, so that memory is aligned in every piece
# as in the tensor.
_PIECE: Final = 1 << 23


class _Piece(NamedTuple):
    """Elements of one tensor in a batch."""

    old: Callable[[], torch.Tensor]
    new: torch.Tensor
    start: int
    name: str
    exponent: int  # of the tensor's dtype, see `ChangedElements`
    is_wide: bool  # whether an index of the tensor can be 2**31 or more


class _Found(NamedTuple):
    """What differs in a piece; its stream counts from the piece's start."""

    start: int
    end: int  # one more than the last index, in the tensor
    stream: NDArray[np.uint8]
    differences: EncodedDifferences
    digest: Digest
    nonfinite: int
    listed: ListedShare | None


@dataclass(slots=True)
class _Own:
    """The changed pieces of a group, whose elements are encoded together.

    Attributes:
        counts: How many elements of each have changed.
        starts: The index in its tensor at which each begins.
        totals: What `DeviceEncoded` has in `totals`, for each piece alone; int64 [pieces, 6].
        listed: The elements of all, if the device keeps them.
    """

    counts: NDArray[np.int64]
    starts: list[int]
    totals: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 6), np.int64))
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
        pool: Its threads wait for what the device has encoded.
        copied: Whether the tensors are copies that are freed when they are compared.
    """

    def __init__(self, side: DeviceSide, pool: Executor, *, copied: bool) -> None:
        self._side, self._pool, self._copied = side, pool, copied
        self._filling: dict[tuple[Any, ...], _Batch] = {}
        self._running: list[Iterator[None]] = []  # steps of at most two batches

    def begin(self, key: str, held: ParamDelta, new: torch.Tensor) -> Callable[[], Change]:
        """Begin to compare a tensor with the snapshot, or soon.

        Return a function that waits for the change, which can have no elements; to be called in the
        same thread.

        Args:
            key, held: Its name, under which the change is digested, and itself in the snapshot,
                which the `DeviceSide` has made ready.
            new: Integers of the same width, contiguous [n], on the device. It must not change until
                the result has been asked for.

        Raises:
            ValueError: The tensors differ in size or in the width of an element.
        """
        bits, exponent = held.values, exponent_of(held.dtype)
        if (bits.size, bits.itemsize) != (new.numel(), new.itemsize) or new.ndim != 1:
            raise ValueError("old and new are not of one size and element size")
        device = new.device
        is_wide = new.numel() >= 1 << 31
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
            batch.pieces.append(_Piece(old, own, start, key, exponent, is_wide))
            batch.nbytes += own.nbytes
        return partial(self._wait, places, held, self._side.moment)

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
        self, places: Sequence[tuple[_Batch, int]], held: ParamDelta, moment: Moment
    ) -> Change:
        found = []
        for batch, number in places:
            if batch.steps is None:
                self._launch(next(k for k, one in self._filling.items() if one is batch))
            assert batch.steps is not None
            deque(batch.steps, 0)  # to the end
            if number in batch.found:
                future, at = batch.found[number]
                found.append(future.result()[at])
        bits = held.values
        none = EncodedDifferences(np.empty(0, np.uint8), bits[:0], 0)
        differences = join_differences([one.differences for one in found] or [none])
        end = found[-1].end if found else 0
        elements = EncodedElements(_joined(found), end, differences, bits, moment)
        listed = [share for one in found if (share := one.listed) is not None]
        return Change(
            held.dtype,
            held.shape,
            elements,
            differences.size,
            Digest.total(one.digest for one in found),
            sum(one.nonfinite for one in found),
            listed if len(listed) == len(found) else [],
        )

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
                [pieces[number].start for number in chosen],
            )
            names = [pieces[number].name for number in chosen]
            exponents = [pieces[number].exponent for number in chosen]
            numel = sum(new[number].numel() for number in chosen)
            elements = ChangedElements(
                places, was, now, own.counts, own.starts, names, exponents, numel
            )
            encoded = encode_on_device(elements, streams.send)
            wide = any(pieces[number].is_wide for number in chosen)
            own.listed = self._side.keep(places, now, wide=wide)
            del places, was, now, elements
            wait_for_totals = streams.download(encoded.totals)
            wait_for_changed = streams.download(listing.changed)
            yield
            if wait_for_changed().item():
                raise ValueError(
                    "tensors have changed while they were compared, among "
                    f"{some_of(set(names))}: they must keep "
                    "their values until the sync ends"
                )
            own.totals = wait_for_totals().numpy().copy()
            own.totals[:, :5] = np.diff(own.totals[:, :5], axis=0, prepend=np.int64(0))
            symbols, escaped = own.totals[:, 0].sum(), own.totals[:, 3].sum()
            sent = encoded.symbols[:symbols], encoded.nibbles, encoded.escaped[:escaped]
            del encoded
            waits = [streams.download(one) for one in sent]
            del sent
            future = self._pool.submit(_found, waits, own)
            batch.found |= {number: (future, at) for at, number in enumerate(chosen)}


class _Listing(Protocol):
    """Lists the elements of pairs that differ; see `engine_ext.kernels.triton.compact.Pairs`."""

    ends: torch.Tensor
    changed: torch.Tensor

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
        self.changed = torch.zeros(1, dtype=torch.int32, device=self.ends.device)

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
        if indices.numel() != nnz:  # the counts of each pair are not looked at
            raise ValueError("tensors have changed while they were compared")
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


def _found(waits: Sequence[Callable[[], torch.Tensor]], own: _Own) -> list[_Found]:
    """Wait for what is copied to the host, and return what differs in each piece."""
    # Copies: memory that is pinned is not given back to the system.
    symbols, nibbles, escaped = (host_bits(wait()).copy() for wait in waits)
    found = []
    at = half = large = first = 0
    for start, count, (length, lane0, lane1, several, nonfinite, last) in zip(
        own.starts, own.counts.tolist(), own.totals.tolist(), strict=True
    ):
        pairs = (count + 1) // 2
        differences = EncodedDifferences(
            nibbles[half : half + pairs], escaped[large : large + several], count
        )
        stream, digest = symbols[at : at + length], Digest(lane0, lane1)
        share = None if own.listed is None else ListedShare(own.listed, first, count)
        found.append(_Found(start, last + 1, stream, differences, digest, nonfinite, share))
        at, half, large, first = at + length, half + pairs, large + several, first + count
    return found


def _joined(found: Sequence[_Found]) -> NDArray[np.uint8]:
    """Return the stream of a tensor, whose changed pieces these are."""
    if len(found) == 1 and not found[0].start:
        return found[0].stream
    streams: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)]
    following = 0  # one more than the last index before the piece
    for one in found:
        skips = int((one.stream != loops.BYTE_SKIP).argmax())  # of the piece's first gap
        gap = one.start - following + skips * loops.BYTE_SKIP + int(one.stream[skips])
        more, rest = divmod(gap, loops.BYTE_SKIP)
        streams += [np.full(more, loops.BYTE_SKIP, np.uint8), np.array([rest], np.uint8)]
        streams.append(one.stream[skips + 1 :])
        following = one.end
    return np.concatenate(streams)
