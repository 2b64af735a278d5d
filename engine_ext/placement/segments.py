"""The placement: which live memory holds each element of a checkpoint tensor on this rank.

A placement is a list of strided segments per tensor. A segment maps a strided box of the checkpoint
tensor (row-major flat coordinates) to a strided box of one live tensor. Placements are traced from
the engine's own loader (`engine_ext.startup.trace`), and therefore include its name mapping, fusing
and slicing. They are used only after `engine_ext.placement.certify` has compared both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.model import LiveTensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A checkpoint tensor without its data: name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True, eq=False)
class Repack:
    """A permutation of a live tensor's elements, block by block.

    Either the engine moves them after loading, or the loader before it copies, in an order that
    strides cannot express. Element ``p`` of a segment's box is at
    ``p // block * block + permutation[p % block]``. The permutation is int32 or int64 [block] and
    contains each of 0 to block - 1 once.
    """

    permutation: NDArray[Any]

    @property
    def block(self) -> int:
        """How many elements are permuted among themselves (one expert, for example)."""
        return len(self.permutation)

    def move(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the elements are that the loader wrote to these offsets; int64 [n]."""
        within = offsets % self.block
        moved: NDArray[np.int64] = offsets - within + self.permutation[within]
        return moved

    def then(self, later: Repack) -> Repack:
        """Compose this move with a later one.

        Both blocks divide the tensor's extent, and so does their least common multiple.
        """
        moved = later.move(self.move(np.arange(math.lcm(self.block, later.block))))
        return Repack(moved.astype(np.int32 if len(moved) < 1 << 31 else np.int64))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Repack) and np.array_equal(self.permutation, other.permutation)

    def __hash__(self) -> int:
        return hash(self.block)


@dataclass(frozen=True, slots=True)
class Segment:
    """A box of checkpoint elements and the box of live memory that holds them.

    Attributes:
        offset, strides: of the box in `live.flat()`, in elements.
        sizes: extent of the box in elements, per dimension.
        source_offset: flat index of the box's first element in the checkpoint tensor.
        source_strides: strides of the box in flat checkpoint indices.
        python_copy: whether the loader wrote it with Python's ``Tensor.copy_``, the only kind of
            write that a masked apply can intercept.
        repack: how the elements were moved within the live tensor, or None.
        recast: whether the loader cast them before the copy. The casts keep all numbers, but might
            change the bits of a NaN.
    """

    live: LiveTensor
    offset: int
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    python_copy: bool
    repack: Repack | None = None
    recast: bool = False

    def live_view(self) -> torch.Tensor:
        """Return the box of live memory, shaped `sizes`; writes go to the model.

        With a `repack`, it contains other elements than those the loader wrote there.
        """
        flat = self.live.flat()
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + self.offset)

    def source_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the box of a contiguous checkpoint tensor, shaped `sizes`."""
        offset = tensor.storage_offset() + self.source_offset
        return tensor.as_strided(self.sizes, self.source_strides, offset)


class Status(str, Enum):
    """The state of a checkpoint tensor on this rank.

    Attributes:
        UNJUDGED: traced, but not certified yet.
        EXACT: its live bytes are the checkpoint's.
        CAST: its live bytes are the checkpoint's after a cast to the live dtype.
        REBUILT: the engine computes its modules from it, and so can a sync; its segments are in the
            unprocessed weights, see `engine_ext.startup.recomputed`.
        NOT_ON_RANK: other ranks hold it.
        IGNORED: no rank holds it, because the loader drops it.
        UNCERTIFIED: it cannot be updated exactly.
    """

    UNJUDGED = "unjudged"
    EXACT = "exact"
    CAST = "cast"
    REBUILT = "rebuilt"
    NOT_ON_RANK = "not on this rank"
    IGNORED = "ignored"
    UNCERTIFIED = "uncertified"


@dataclass(slots=True)
class Placed:
    """A checkpoint tensor, its segments on this rank, and its status.

    Attributes:
        segments: empty if this rank holds none of its elements.
        status: `UNJUDGED` between tracing and certification, one of the others afterwards.
        reason: why it is `UNCERTIFIED`, else empty.
        used: whether the loader read its elements for something else than a copy into live
            memory, so that a copy might exist that was not found.
        recomputed: paths of the derived tensors that are recomputed after it is written.
    """

    spec: TensorSpec
    segments: list[Segment] = field(default_factory=list)
    status: Status = Status.UNJUDGED
    reason: str = ""
    used: bool = False
    recomputed: tuple[str, ...] = ()

    def refuse(self, reason: str) -> None:
        """Mark the tensor as one that cannot be updated exactly; keep the first reason."""
        if self.status is not Status.UNCERTIFIED:
            self.status, self.reason = Status.UNCERTIFIED, reason


Placement = dict[str, Placed]
