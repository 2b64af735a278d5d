"""How a tensor differs from the snapshot: its elements, or what a device has encoded of them.

A device sends a byte and a half for each element to the host: its gap and its difference. A sync of
differences posts these very bytes, and the snapshot advances by them. Whoever else needs indices,
old or new bits has them decoded, with the snapshot's own bits as the old ones: until it advances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    position_bytes,
    read_differences,
    read_streams,
    skip_symbol,
)
from engine_ext.kernels import gather_scatter

Bits = NDArray[Any]  # unsigned ints [n]

# Elements that are decoded at a time, unless one tensor has more: they stay in a core's cache.
_AT_ONCE: Final = 1 << 16
_SKIP: Final = skip_symbol(1)
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
    def own(self) -> dict[str, NDArray[Any]]:
        """All arrays that are not the snapshot's, by name."""
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
        # A gap of more than two bytes takes so many skips.
        is_wide = encoding == "indices" or self.symbols.size - nnz > (1 << 16) // _SKIP
        return (4 if is_wide else 2) * nnz

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


def decoded(elements: Sequence[AnyElements]) -> list[Elements]:
    """Return the elements of some changes, decoded where they are encoded.

    Raises:
        ValueError: A stream or differences are not those of as many elements.
    """
    found = [one for one in elements if isinstance(one, Elements)]
    if len(found) == len(elements):
        return found
    encoded = [one for one in elements if isinstance(one, EncodedElements)]
    assert not any(one.moment.has_passed for one in encoded), "the snapshot has moved on"
    made = iter(
        [
            Elements(indices, old, old + differences, one.stream)
            for one, indices, differences in _read(encoded)
            for old in [gather_scatter.read(one.held, indices)]
        ]
    )
    return [one if isinstance(one, Elements) else next(made) for one in elements]


def add(encoded: Sequence[EncodedElements]) -> None:
    """Add differences to the tensors in the snapshot, which advances: each once.

    Raises:
        ValueError: See `decoded`.
    """
    for one, indices, differences in _read(encoded):
        gather_scatter.add(one.held, indices, differences)


def _read(
    encoded: Sequence[EncodedElements],
) -> Iterator[tuple[EncodedElements, NDArray[Any], Bits]]:
    """Yield each with its indices and differences: views of arrays that it shares with others."""
    for group in _groups(encoded):
        nnz = np.array([one.differences.size for one in group], np.int64)
        places = _places(group, nnz)
        differences = read_differences([one.differences for one in group])
        start = 0
        for one, count in zip(group, nnz.tolist(), strict=True):
            own = slice(start, start + count)
            yield one, places[own], differences[own]
            start += count


def _places(group: Sequence[EncodedElements], nnz: NDArray[np.int64]) -> NDArray[Any]:
    """Return the indices of all."""
    if group[0].held.size >= _LARGE:
        indices = decode_gaps(group[0].symbols, 1, group[0].held.size)
        if indices.size != nnz[0]:
            raise ValueError("the gap stream is that of other elements")
        return indices
    symbols = group[0].symbols
    if len(group) > 1:
        symbols = np.concatenate([one.symbols for one in group])
    lengths = np.array([one.symbols.size for one in group], np.int64)
    numels = np.array([one.held.size for one in group], np.int64)
    return read_streams(symbols, lengths, nnz, numels)


def _groups(encoded: Sequence[EncodedElements]) -> Iterator[list[EncodedElements]]:
    """Yield neighbours of one width, of a bounded number of elements; a large one is alone."""
    group: list[EncodedElements] = []
    elements = 0
    for one in encoded:
        size = one.differences.size if one.held.size < _LARGE else _LARGE
        other = group and group[0].held.dtype != one.held.dtype
        if group and (other or elements + size > _AT_ONCE):
            yield group
            group, elements = [], 0
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
        return sum(array.nbytes for array in self.elements.own.values())

    def decoded(self) -> Elements:
        """Return its elements; see the function of that name."""
        return decoded([self.elements])[0]
