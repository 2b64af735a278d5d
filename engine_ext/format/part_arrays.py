"""The params of a part as arrays, so that what is done for each of them needs no Python.

A part of a mixture of experts has tens of thousands of small params. The manifest's numbers are
columns here, and all streams and all values are in one buffer each: objects are made of those
params alone that need some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import itemsize
from engine_ext.errors import MalformedPart
from engine_ext.format.manifest import ParamEntry

_Int64s = NDArray[np.int64]


class PartColumns(NamedTuple):
    """What the manifest says of each param; int64 [params] each.

    Attributes:
        numel: elements of its tensor.
        nnz: elements that the part sends.
        pos_width: bytes of a position or symbol; 0 if it is dense.
        pos_size: bytes of its positions.
        width: bytes of an element of its dtype.
    """

    numel: _Int64s
    nnz: _Int64s
    pos_width: _Int64s
    pos_size: _Int64s
    width: _Int64s

    @classmethod
    def of(cls, params: Sequence[ParamEntry]) -> PartColumns:
        """Return the columns of some entries of a manifest."""
        rows = [
            (
                *(entry.numel, entry.val_end - entry.val_start, entry.pos_width),
                *(entry.pos_end - entry.pos_start, itemsize(entry.dtype)),
            )
            for entry in params
        ]
        return cls(*np.array(rows, np.int64).reshape(-1, len(cls._fields)).T.copy())

    @classmethod
    def read(cls, raw: NDArray[np.uint8]) -> PartColumns:
        """Return columns that `whole` has given, uint8 [bytes]."""
        return cls(*raw.copy().view(np.int64).reshape(len(cls._fields), -1))

    def whole(self) -> NDArray[np.int64]:
        """Return all columns, one after another."""
        return np.concatenate(self)


class PartArrays:
    """An array of each param, one after another in one array of bytes.

    Args:
        whole: uint8 [bytes], contiguous; it must stay unchanged as long as views of it live.
        counts, widths: elements of each array, and the bytes of an element, a power of 2 up to 8;
            int64 [params].

    Attributes:
        whole: see above.
        begins, ends: the bytes of it that each param has, int64 [params].

    Raises:
        MalformedPart: the arrays take more bytes than there are. Kernels would read past them.
    """

    __slots__ = ("_widths", "begins", "ends", "whole")

    def __init__(self, whole: NDArray[np.uint8], counts: _Int64s, widths: _Int64s) -> None:
        sizes = counts * widths
        self.whole, self._widths = whole, widths
        self.ends: _Int64s = np.cumsum(sizes)
        self.begins: _Int64s = self.ends - sizes
        if sizes.size and self.ends[-1] > whole.size:
            raise MalformedPart(
                f"the part has {whole.size} bytes where its params take {self.ends[-1]}"
            )

    @classmethod
    def joined(cls, arrays: Sequence[NDArray[Any]]) -> PartArrays:
        """Return copies of arrays of unsigned ints, [n] each."""
        raw = [np.ascontiguousarray(array).view(np.uint8) for array in arrays]
        sizes = [(array.size, array.itemsize) for array in arrays]
        counts, widths = np.array(sizes, np.int64).reshape(-1, 2).T
        return cls(np.concatenate([np.empty(0, np.uint8), *raw]), counts, widths)

    def __len__(self) -> int:
        return self.ends.size

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return iter(self.views(range(len(self))))

    def views(self, numbers: Sequence[int]) -> list[NDArray[Any]]:
        """Return the arrays of some params, unsigned ints; copies if memory is not aligned."""
        if not numbers:
            return []
        width = int(self._widths[numbers[0]])
        if (self._widths == width).all() and not self.whole.size % width:
            typed = np.require(self.whole.view(f"<u{width}"), requirements="A")
            begins, ends = (self.begins // width).tolist(), (self.ends // width).tolist()
            return [typed[begins[number] : ends[number]] for number in numbers]
        begins, ends = self.begins.tolist(), self.ends.tolist()
        kinds = [f"<u{width}" for width in self._widths.tolist()]
        return [
            np.require(self.whole[begins[n] : ends[n]].view(kinds[n]), requirements="A")
            for n in numbers
        ]
