"""Where a shard is in its tensor: a box, its flat indices as the tensor's, and its digest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from delta_sender.diff.change import Bits
from engine_ext.format import Digest, tensor_digest
from engine_ext.resources import usable_cores

_CHUNK: Final = 1 << 20  # elements whose indices are made at a time


@dataclass(frozen=True, order=True)
class Box:
    """Consecutive elements of a tensor in every dimension.

    Attributes:
        shape: Of the tensor.
        offsets: First element in every dimension.
        sizes: Number of elements in every dimension.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, shape: Iterable[int], slices: Sequence[slice]) -> Box:
        """Return the box of slices, one per dimension.

        Raises:
            ValueError: Their number is not that of dimensions, or one has a step or is outside.
        """
        shape = tuple(shape)
        if len(slices) != len(shape):
            raise ValueError(f"{len(slices)} slices for the {len(shape)} dimensions of {shape}")
        offsets, sizes = [], []
        for size, one in zip(shape, slices, strict=True):
            start, stop, step = one.indices(size)
            is_outside = one.stop is not None and not 0 <= one.stop <= size
            if step != 1 or is_outside or start > stop or (one.start or 0) < 0:
                raise ValueError(f"{one} is not a range within {size} elements")
            offsets.append(start)
            sizes.append(stop - start)
        return cls(shape, tuple(offsets), tuple(sizes))

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """Return the box of all elements."""
        shape = tuple(shape)
        return cls(shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.sizes == self.shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its slices of the tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    @property
    def text(self) -> str:
        """Its ranges, as in ``[0:4, 8:16]``."""
        return f"[{', '.join(f'{one.start}:{one.stop}' for one in self.slices)}]"

    def common(self, other: Box) -> Box | None:
        """Return the elements that it shares with another box of the tensor; None without any."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends, other._ends)
        sizes = tuple(map(int.__sub__, ends, starts))
        if any(size <= 0 for size in sizes):
            return None
        return Box(self.shape, starts, sizes)

    def relative_to(self, outer: Box) -> tuple[slice, ...]:
        """Return its slices within a box that contains it."""
        starts = map(int.__sub__, self.offsets, outer.offsets)
        return tuple(slice(o, o + n) for o, n in zip(starts, self.sizes, strict=True))

    def to_global(self, indices: NDArray[Any]) -> NDArray[np.int64]:
        """Return the tensor's flat indices of the box's own; ascending ones stay ascending.

        Args:
            indices: Row-major flat indices within the box, ints [n].
        """
        (_, stride), *inner = self._dimensions
        rest: NDArray[np.int64] = indices.astype(np.int64)
        found: NDArray[np.int64] | int = self.start
        for length, inner_stride in reversed(inner):
            rest, at = np.divmod(rest, length)
            found = found + at * inner_stride
        return rest * stride + found

    @property
    def is_run(self) -> bool:
        """Whether its elements are consecutive in the tensor."""
        return len(self._dimensions) == 1 and self._dimensions[0][1] == 1

    @cached_property
    def start(self) -> int:
        """Flat index of the first element."""
        return sum(o * stride for o, stride in zip(self.offsets, self._strides, strict=True))

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(map(int.__add__, self.offsets, self.sizes))

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @cached_property
    def _dimensions(self) -> list[tuple[int, int]]:
        """Length and stride of the fewest dimensions that describe it, the outermost first."""
        merged: list[tuple[int, int]] = []
        for length, stride in zip(reversed(self.sizes), reversed(self._strides), strict=True):
            if merged and merged[0][0] * merged[0][1] == stride:  # all that is inside of it
                merged[0] = (merged[0][0] * length, merged[0][1])
            elif length != 1:
                merged.insert(0, (length, stride))
        return merged or [(1, 1)]


def box_digest(name: str, values: Bits, box: Box) -> Digest:
    """Return the digest of a part of a tensor, given its bits [n]."""
    if box.is_run:
        return tensor_digest(name, values, start=box.start, threads=usable_cores())
    digest = Digest.ZERO
    for first in range(0, values.size, _CHUNK):
        chunk = values[first : first + _CHUNK]
        where = box.to_global(np.arange(first, first + chunk.size))
        digest += tensor_digest(name, chunk, where)
    return digest
