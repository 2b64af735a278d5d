"""Add up the deltas of one tensor, version after version; of each element the last value stays.

The work is in proportion to what the versions send, however many there are: sparse deltas are
collected and sorted when they have doubled, and once many elements have changed, all of the
tensor's values are kept in place.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from engine_ext.format import ParamDelta
from engine_ext.log.catalog import CannotFold

_FLAG_BYTES: Final = 1  # of an element that is kept in place
_POSITION_BYTES: Final = 4  # at most, of an element that is encoded


class MergedDelta:
    """One delta with the effect of several of one tensor in turn; it keeps no part's buffer.

    All deltas must have values, no differences.
    """

    def __init__(self, first: ParamDelta) -> None:
        self._like = without_elements(first)
        is_small = first.numel <= np.iinfo(np.int32).max
        self._index: type[np.signedinteger[Any]] = np.int32 if is_small else np.int64
        # Ascending indices and their values; the first ones are older.
        self._sorted: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._waiting = 0  # elements of all but the first
        self._values: NDArray[Any] | None = None  # [numel], once they are kept in place
        self._changed: NDArray[np.bool_] | None = None  # [numel]; None if all are
        self.add(first)

    def add(self, delta: ParamDelta) -> None:
        """Add the next delta.

        Raises:
            CannotFold: it has another dtype or shape. Nothing is added then.
        """
        like = self._like
        if delta.indices is None:  # whatever was before
            self._like = without_elements(delta)
            self._sorted, self._waiting = [], 0
            self._values, self._changed = delta.values.copy(), None
            return
        if (like.dtype, like.shape) != (delta.dtype, delta.shape):
            raise CannotFold(
                f"{delta.name}: {like.dtype} {like.shape}, later {delta.dtype} {delta.shape}"
            )
        if self._values is not None:
            self._values[delta.indices] = delta.values
            if self._changed is not None:
                self._changed[delta.indices] = True
            return
        self._sorted.append((delta.indices.astype(self._index), delta.values.copy()))
        if len(self._sorted) > 1:
            self._waiting += delta.nnz
        if self._waiting >= self._sorted[0][0].size:
            self._sort()

    def at(self, indices: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """Return the bit patterns of some elements, [nnz], and which have changed; None if all."""
        if self._values is None and len(self._sorted) > 1:
            self._sort()
        if self._values is not None:
            changed = None if self._changed is None else self._changed[indices]
            return self._values[indices], changed
        [(known, values)] = self._sorted
        if not known.size:
            return np.zeros(indices.size, values.dtype), np.zeros(indices.size, np.bool_)
        at = np.minimum(np.searchsorted(known, indices), known.size - 1)
        return values[at], known[at] == indices

    def result(self) -> ParamDelta:
        """Return the delta."""
        if self._values is None and len(self._sorted) > 1:
            self._sort()
        if self._values is None:
            [(indices, values)] = self._sorted
            return replace(self._like, indices=indices, values=values)
        if self._changed is None:
            return replace(self._like, values=self._values)
        indices = np.flatnonzero(self._changed).astype(self._index)
        return replace(self._like, indices=indices, values=self._values[indices])

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        if self._values is None:
            return sum(indices.nbytes + values.nbytes for indices, values in self._sorted)
        return self._values.nbytes + (0 if self._changed is None else self._changed.nbytes)

    def _sort(self) -> None:
        """Make one of the sorted deltas, or keep the values in place if that takes less memory."""
        indices = np.concatenate([one for one, _ in self._sorted])
        values = np.concatenate([one for _, one in self._sorted])
        order = np.argsort(indices, kind="stable")  # so the last value of an element comes last
        indices = indices[order]
        last = np.empty(indices.size, np.bool_)
        if last.size:
            np.not_equal(indices[1:], indices[:-1], out=last[:-1])
            last[-1] = True
        indices, values = indices[last], values[order[last]]
        self._sorted, self._waiting = [(indices, values)], 0
        width, numel = values.itemsize, self._like.numel
        if indices.size * (indices.itemsize + width) > numel * (_FLAG_BYTES + width):
            self._values, self._changed = np.zeros(numel, values.dtype), np.zeros(numel, np.bool_)
            self._values[indices], self._changed[indices] = values, True
            self._sorted = []


def without_elements(delta: ParamDelta) -> ParamDelta:
    """Return a delta's name, dtype and shape; a slice of its values would keep the whole part."""
    return replace(delta, indices=None, values=np.empty(0, delta.values.dtype), stream=None)


def payload_bytes(like: ParamDelta, count: int) -> int:
    """Return the bytes of a delta's positions and values at most, before compression."""
    return count * (_POSITION_BYTES + like.values.itemsize)


def add_delta(deltas: dict[str, MergedDelta], delta: ParamDelta) -> None:
    """Add a delta to that of its tensor.

    Raises:
        CannotFold: it has another dtype or shape than before. Nothing is added then.
    """
    if (known := deltas.get(delta.name)) is None:
        deltas[delta.name] = MergedDelta(delta)
    else:
        known.add(delta)
