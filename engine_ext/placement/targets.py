"""The live tensors that a certified checkpoint tensor is written to, ready for staging.

A `Target` is one segment together with everything derived from it once, at start-up: the locator of
its elements, the ranks that hold the same elements, and the live memory as integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.kernels import Bits, bits_of, host_bits, warm_up
from engine_ext.kernels.triton import runs_kernels
from engine_ext.placement.live_elements import DeviceElements, HostElements
from engine_ext.placement.locator import Locator
from engine_ext.placement.ownership import SourceBox, box_of
from engine_ext.placement.segments import Segment


def make_targets(
    segments: Sequence[Segment], holders: dict[SourceBox, tuple[int, ...]]
) -> tuple[Target, ...]:
    """Return the targets of a certified tensor, by its segments and the holders of each box.

    A loader can copy a tensor to the same place twice; that makes one target.
    """
    segments = list({_place(segment): segment for segment in segments}.values())
    boxes = [box_of(segment) for segment in segments]
    targets = []
    for segment, box in zip(segments, boxes, strict=True):
        flat = bits_of(segment.live.flat())
        host = host_bits(flat) if flat.device.type == "cpu" else None
        locator = Locator(segment)
        # Compile what the first sync would otherwise wait for.
        runs_kernels(flat.device)
        if host is not None:
            warm_up(host.itemsize, np.dtype(locator.offset_dtype).itemsize)
        first, dtype = boxes.index(box), segment.live.tensor.dtype
        targets.append(Target(segment, locator, holders[box], first, dtype, flat, host))
    return tuple(targets)


def _place(segment: Segment) -> tuple[Any, ...]:
    """Return a key; two segments share it only if they write the same elements to one place."""
    live = (segment.live.start, segment.live.tensor.dtype, segment.offset, segment.strides)
    return *live, segment.sizes, segment.source_offset, segment.source_strides, segment.repack


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One segment of a certified tensor.

    Attributes:
        ranks: the ranks that hold the same elements, ascending; the first one counts them.
        first: position, among the tensor's targets on this rank, of the first one with the same
            elements; the others are copies of it.
        flat: the live tensor as integers, 1-D.
        host: the same memory as an array; None if it is on a device.
    """

    segment: Segment
    locator: Locator
    ranks: tuple[int, ...]
    first: int
    dtype: torch.dtype
    flat: torch.Tensor
    host: Bits | None

    @property
    def is_run(self) -> bool:
        """Whether the elements are one contiguous run, in host memory and in the checkpoint."""
        return self.host is not None and self.locator.shift is not None

    def find(self, indices: NDArray[Any]) -> tuple[Any, HostElements | DeviceElements]:
        """Find the elements of a delta that are in this segment.

        Args:
            indices: ascending flat checkpoint indices, int64 [n]; int32 if the segment is one run,
                and its offsets are int32.

        Returns:
            Which of `indices` are in the segment (see `Locator`), and these elements of live
            memory.
        """
        shift = self.locator.shift
        if self.host is not None and shift is not None:
            within = self.locator.within(indices)
            offsets = (indices[within] - shift).astype(self.locator.offset_dtype, copy=False)
            return within, HostElements(self.host, offsets)
        chosen, offsets = self.locator(indices)
        if self.host is not None:
            return chosen, HostElements(self.host, offsets)
        return chosen, DeviceElements(self.flat, torch.from_numpy(offsets).to(self.flat.device))


def are_whole(targets: Sequence[Target], numel: int) -> bool:
    """Return whether all elements of a tensor are on this rank.

    Args:
        targets: of the tensor on this rank, as `make_targets` has made them.
        numel: of the tensor.
    """
    own = [target for number, target in enumerate(targets) if target.first == number]
    held = sum(math.prod(one.segment.sizes) // one.locator.copies for one in own)
    return bool(own) and held == numel
