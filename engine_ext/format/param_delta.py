"""The changed elements of one param, as a part is encoded from them and decoded to them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.format.positions import position_bytes
from engine_ext.format.ulp_differences import EncodedDifferences


class ParamDelta(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The changed elements of one param, in checkpoint coordinates.

    A part has thousands of them, so they are made fast and are unknown to the garbage collector.

    Attributes:
        dtype: By its manifest name.
        indices: int64 or int32 [nnz], ascending unique flat indices; None means dense.
        values: The new elements' bit patterns, unsigned ints of the dtype's width; [nnz], or
            [numel] if dense. They can be a read-only view of the part's buffer.
        differences: Whether the values are new minus old bit patterns modulo 2**width; never
            dense.
        stream: The gap stream of `indices`, if it is known before encoding.
        cleared: None, or [nnz]: then the new bits are ``(old & ~cleared) ^ values``; never dense.
        new_checksum: Of the tensor's whole new bytes; with `cleared`, and only then.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    indices: NDArray[np.int64] | None
    values: NDArray[Any]
    differences: bool = False
    stream: NDArray[np.uint8] | None = None
    cleared: NDArray[Any] | None = None
    new_checksum: str | None = None

    @property
    def needs_old(self) -> bool:
        """Whether the new values depend on the old ones."""
        return self.differences or self.cleared is not None

    def new_bits(self, old: NDArray[Any], start: int, stop: int, chosen: Any) -> NDArray[Any]:
        """Return the new bits of ``values[start:stop][chosen]``, given the old ones of these."""
        values = self.values[start:stop][chosen]
        if self.cleared is None:
            new: NDArray[Any] = old + values
            return new
        changed: NDArray[Any] = (old & ~self.cleared[start:stop][chosen]) ^ values
        return changed

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nnz(self) -> int:
        """Elements that the part sends."""
        return self.values.size

    def payload_bytes(self, encoding: str) -> int:
        """Return the bytes of its positions and values, before compression."""
        sent = 0 if self.indices is None else position_bytes(encoding, self.indices)
        return sent + self.values.nbytes


class EncodedDelta(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The changed elements of one param as a ``gap8_ulp`` part has them.

    Attributes:
        name, dtype, shape: As of `ParamDelta`.
        stream: The gap stream of their indices, of 1-byte symbols; uint8 [bytes].
        values: Their differences.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stream: NDArray[np.uint8]
    values: EncodedDifferences

    @property
    def nnz(self) -> int:
        """Elements that the part sends."""
        return self.values.size
