"""How a tensor differs from the snapshot: its elements, or what a device has encoded of them.

A device sends a byte and a half for each element to the host: its gap and its difference. A sync of
differences posts these very bytes, and the snapshot advances by them. Whoever else needs indices,
old or new bits has them decoded, with the snapshot's own bits as the old ones: until it advances.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from delta_sender.diff.listed import ListedShare
from engine_ext.format import (
    PACKED_ENCODINGS,
    Digest,
    EncodedDifferences,
    bytes_suffice,
    decode_gaps,
    loops,
    position_bytes,
    read_differences,
    read_streams,
)
from engine_ext.kernels import gather_scatter

Bits = NDArray[Any]  # unsigned ints [n]

# Elements that are decoded at a time, unless one tensor has more: they stay in a core's cache.
_AT_ONCE: Final = 1 << 16
_SKIP: Final = loops.BYTE_SKIP
_LARGE: Final = 1 << 31  # elements of a tensor whose indices take 8 bytes


class Elements(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Changed elements of a tensor, or all of them.

    Attributes:
        indices: Flat indices, ascending, int32 or int64 [nnz]; None: dense.
        old, new: Bit patterns [nnz], or [numel] if dense; a dense `old` can be the snapshot's own
            memory.
        stream: The gap stream of the indices; None if it was not made, or if another form might be
            smaller.
    """

    indices: NDArray[Any] | None
    old: Bits
    new: Bits
    stream: NDArray[np.uint8] | None = None

    def position_bytes(self, encoding: str) -> int:
        """Return the bytes of the indices, before compression."""
        assert self.indices is not None
        return position_bytes(encoding, self.indices)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that are not the snapshot's."""
        held = 0 if self.indices is None else self.indices.nbytes + self.old.nbytes
        return self.new.nbytes + held + (0 if self.stream is None else self.stream.nbytes)

    @property
    def own(self) -> dict[str, NDArray[Any]]:
        """These arrays, by name."""
        arrays: dict[str, NDArray[Any]] = {"new": self.new}
        if self.indices is not None:
            arrays |= {"indices": self.indices, "old": self.old}
        if self.stream is not None:
            arrays["stream"] = self.stream
        return arrays

    def with_own(self, arrays: dict[str, Any]) -> Elements:
        """Return the same with other memory for its arrays."""
        return msgspec.structs.replace(self, **arrays)


class Moment:
    """The time until a snapshot advances."""

    has_passed = False


class EncodedElements(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Changed elements of a tensor, as its device has encoded them; see `decoded`.

    Attributes:
        symbols: The gap stream of their indices, of 1-byte symbols.
        end: One more than the last index.
        differences: New minus old bits.
        held: The tensor in the snapshot, [numel].
        moment: When that has the old bits.
    """

    symbols: NDArray[np.uint8]
    end: int
    differences: EncodedDifferences
    held: Bits
    moment: Moment

    @property
    def stream(self) -> NDArray[np.uint8] | None:
        """See `Elements`."""
        return self.symbols if bytes_suffice(self.differences.size, self.end) else None

    def position_bytes(self, encoding: str) -> int:
        """See `Elements`."""
        nnz = self.differences.size
        if encoding in PACKED_ENCODINGS:
            return min(nnz + (self.end - nnz) // _SKIP, 2 * nnz)
        return (4 if encoding == "indices" or self._has_wide_gap else 2) * nnz

    @property
    def _has_wide_gap(self) -> bool:
        """Whether a gap takes more than two bytes."""
        if self.symbols.size - self.differences.size < (1 << 16) // _SKIP:
            return False
        ends = np.flatnonzero(self.symbols != _SKIP)
        gaps = (np.diff(ends, prepend=-1) - 1) * _SKIP + self.symbols[ends]
        return bool(gaps.max() >= 1 << 16)

    @property
    def nbytes(self) -> int:
        """See `Elements`."""
        return self.symbols.nbytes + self.differences.nbytes

    @property
    def own(self) -> dict[str, NDArray[Any]]:
        """See `Elements`."""
        nibbles, escaped = self.differences.nibbles, self.differences.escaped
        return {"symbols": self.symbols, "nibbles": nibbles, "escaped": escaped}

    def with_own(self, arrays: dict[str, Any]) -> EncodedElements:
        """See `Elements`."""
        size = self.differences.size
        differences = EncodedDifferences(arrays["nibbles"], arrays["escaped"], size)
        return msgspec.structs.replace(self, symbols=arrays["symbols"], differences=differences)


AnyElements: TypeAlias = Elements | EncodedElements


def decoded(elements: Iterable[AnyElements], *, with_old: bool = True) -> Iterator[Elements]:
    """Yield the elements of some changes, decoded where they are encoded.

    Args:
        with_old: Whether old bits are needed; else those that are decoded have none.

    Raises:
        RuntimeError: The snapshot has moved on from an old bit that is needed.
        ValueError: A stream or differences are not those of as many elements.
    """
    waiting: list[EncodedElements] = []
    for one in elements:
        if isinstance(one, EncodedElements):
            waiting.append(one)
            continue
        if waiting:
            yield from _decode(waiting, with_old)
            waiting = []
        yield one
    yield from _decode(waiting, with_old)


def _decode(encoded: Sequence[EncodedElements], with_old: bool) -> Iterator[Elements]:
    for group in _groups(encoded):
        check_moment(group)
        places, differences = _read(group)
        sizes = [one.differences.size for one in group]
        held = gather_scatter.read_many([one.held for one in group], sizes, places)
        new = held + differences if with_old else np.add(held, differences, out=held)
        old = held if with_old else held[:0]
        start = 0
        for one, size in zip(group, sizes, strict=True):
            own = slice(start, start + size)
            yield Elements(places[own], old[own], new[own], one.stream)
            start += size


def add(encoded: Iterable[EncodedElements]) -> None:
    """Add differences to the tensors that hold the old bits: each once.

    Raises:
        ValueError: See `decoded`.
    """
    for group in _groups(encoded):
        places, differences = _read(group)
        sizes = [one.differences.size for one in group]
        gather_scatter.add_many([one.held for one in group], sizes, places, differences)


def check_moment(encoded: Iterable[EncodedElements]) -> None:
    """Raise RuntimeError if the snapshot has moved on from the old bits of any."""
    if any(one.moment.has_passed for one in encoded):
        raise RuntimeError("the snapshot has moved on from the old bits of these changes")


def _read(group: Sequence[EncodedElements]) -> tuple[NDArray[Any], Bits]:
    """Return the indices and differences of all, one after another."""
    differences = read_differences([one.differences for one in group])
    first = group[0]
    if len(group) == 1 and first.held.size >= _LARGE:
        places = decode_gaps(first.symbols, 1, first.held.size)
        if places.size != differences.size:
            raise ValueError("the gap stream is that of other elements")
        return places, differences
    symbols = np.concatenate([one.symbols for one in group]) if group[1:] else first.symbols
    lengths, nnz, numels = np.array(
        [(one.symbols.size, one.differences.size, one.held.size) for one in group], np.int64
    ).T
    columns = (np.ascontiguousarray(column) for column in (lengths, nnz, numels))
    return read_streams(symbols, *columns), differences


def _groups(encoded: Iterable[EncodedElements]) -> Iterator[list[EncodedElements]]:
    """Yield neighbours of one width, of a bounded number of elements; a large one is alone."""
    group: list[EncodedElements] = []
    elements = 0
    for one in encoded:
        size = one.differences.size
        is_other = bool(group) and group[0].held.dtype != one.held.dtype
        is_large = one.held.size >= _LARGE
        if group and (is_other or is_large or elements + size > _AT_ONCE):
            yield group
            group, elements = [], 0
        if is_large:
            yield [one]
            continue
        group.append(one)
        elements += size
    if group:
        yield group


class Change(msgspec.Struct, frozen=True, eq=False, gc=False):
    """How a tensor differs from what it is compared with.

    Attributes:
        dtype, shape: As in the checkpoint.
        elements: Those that differ; private copies.
        nnz: How many.
        digest: What the change adds to a digest, under the name in the snapshot; None if not asked
            for.
        nonfinite: How many have become NaN or infinite; None: not counted yet.
        listed: The same elements on the device that has found them; empty if it does not keep them.
    """

    dtype: str
    shape: tuple[int, ...]
    elements: AnyElements
    nnz: int
    digest: Digest | None = None
    nonfinite: int | None = None
    listed: Sequence[ListedShare] = ()

    @property
    def is_dense(self) -> bool:
        """Whether it has all elements of the tensor."""
        return isinstance(self.elements, Elements) and self.elements.indices is None

    @property
    def width(self) -> int:
        """Bytes of an element."""
        one = self.elements
        return (one.new if isinstance(one, Elements) else one.held).itemsize

    @property
    def stream(self) -> NDArray[np.uint8] | None:
        """The gap stream of the indices; see `Elements`."""
        return self.elements.stream

    @property
    def escaped(self) -> float | None:
        """The share of differences that take more than a nibble, if it is known."""
        if isinstance(self.elements, EncodedElements):
            return self.elements.differences.escaped_share
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays that are not the snapshot's."""
        return self.elements.nbytes

    def without_old(self) -> Change:
        """Return it without what is not needed once it was sent; see `Snapshot.without_old`."""
        one = self.decoded()
        bare = Elements(one.indices, one.new[:0], one.new)
        return msgspec.structs.replace(self, elements=bare, listed=())

    def decoded(self) -> Elements:
        """Return its elements; see the function of that name."""
        one = self.elements
        return one if isinstance(one, Elements) else next(decoded([one]))
