"""Where a checkpoint tensor's elements lie in live memory on this rank.

A placement is a list of strided segments. One segment says that a strided box of the checkpoint
tensor (row-major flat coordinates) lies in a strided box of one live tensor. It has all of the
engine's own name mapping, fusing and slicing, because it is read off the engine's own loader
(`engine_ext.tracing.trace`), and it is believed only after `engine_ext.placement.certify` has compared both
sides byte by byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.model.storage_index import LiveTensor


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
    """A move of a live tensor's elements.

    Either the engine made it after loading, or the loader before it copied, in an order that no
    strides can say. Element ``p`` of a segment's box lies at
    ``p // block * block + permutation[p % block]``.

    Attributes:
        permutation: int32 or int64 [block]; each of 0 .. block-1 once.
    """

    permutation: NDArray[Any]

    @property
    def block(self) -> int:
        """Elements that are moved among themselves (one expert, say)."""
        return len(self.permutation)

    def move(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the elements lie that the loader wrote to these offsets; int64, same shape."""
        within = offsets % self.block
        moved: NDArray[np.int64] = offsets - within + self.permutation[within]
        return moved

    def then(self, later: Repack) -> Repack:
        """This move and then another one, as one.

        Both blocks divide the tensor's extent, so that theirs in common does too.
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
        live: the live tensor written to.
        offset: element offset of the box in `live.flat()`.
        strides: element strides of the box in `live.flat()`, one per dimension of `sizes`.
        sizes: extent of the box in elements, per dimension.
        source_offset: flat index of the box's first element in the checkpoint tensor.
        source_strides: strides of the box in flat checkpoint indices.
        python_copy: the loader wrote through Python's ``Tensor.copy_``, which is the one kind of
            write a masked apply can intercept.
        repack: how the box's elements were moved within the live tensor; None: not at all.
        recast: they were cast on their way. Numbers survive that, but the bits of a NaN may not.
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
        """The live elements, shaped `sizes`; writes go to the model.

        Only the box: with a `repack`, other elements than the loader wrote lie in it.
        """
        flat = self.live.flat()
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + self.offset)

    def source_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements of a contiguous checkpoint tensor, shaped `sizes`."""
        offset = tensor.storage_offset() + self.source_offset
        return tensor.as_strided(self.sizes, self.source_strides, offset)


class Status(str, Enum):
    """What is known of a checkpoint tensor on this rank."""

    UNJUDGED = "unjudged"
    EXACT = "exact"
    CAST = "cast"
    NOT_ON_RANK = "not on this rank"
    IGNORED = "ignored"
    UNCERTIFIED = "uncertified"


@dataclass(slots=True)
class Placed:
    """A checkpoint tensor, its segments on this rank and what is known of them.

    Attributes:
        spec: the checkpoint tensor.
        segments: where its elements lie; empty when this rank holds none of them.
        status: `UNJUDGED` between tracing and certification, one of the others afterwards.
            `IGNORED` means that no rank holds it, because the loader drops it.
        reason: why it is `UNCERTIFIED`, empty otherwise.
        used: the loader does more with it than look at it, so that it may lie out of sight.
        recomputed: derived tensors, by their paths, that are computed again when it is written.
    """

    spec: TensorSpec
    segments: list[Segment] = field(default_factory=list)
    status: Status = Status.UNJUDGED
    reason: str = ""
    used: bool = False
    recomputed: tuple[str, ...] = ()

    def refuse(self, reason: str) -> None:
        """Mark the tensor as one that cannot be updated exactly; the first reason stands."""
        if self.status is not Status.UNCERTIFIED:
            self.status, self.reason = Status.UNCERTIFIED, reason


Placement = dict[str, Placed]
