"""Live tensors as targets of writes: a segment, its locator and its elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.kernels.gather_scatter import Bits, bits_of, host_bits
from engine_ext.kernels.triton import runs_kernels
from engine_ext.placement.live_elements import DeviceElements, HostElements
from engine_ext.placement.locator import Locator, offset_dtype
from engine_ext.placement.ownership import SourceBox, box_of
from engine_ext.placement.segments import Segment
from engine_ext.wire.positions import Positions


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One segment of a certified tensor, with all that staging needs to know of it.

    Attributes:
        segment: where the elements lie.
        locator: finds them.
        ranks: the ranks that hold the same elements, ascending; the first one counts them.
        first: which of the tensor's targets is the first with these elements on this rank; the
            others are copies of it.
        dtype: the live tensor's.
        flat: the live tensor as integers, 1-D.
        host: the same memory, where it is the host's.
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
        """Whether the elements lie in host memory as in the checkpoint, in one run."""
        return self.host is not None and self.locator.shift is not None

    def find(
        self, indices: NDArray[np.int64], sent: Positions | None = None
    ) -> tuple[Any, HostElements | DeviceElements]:
        """Which of some ascending indices lie here, and where; see `Locator`.

        Args:
            indices: int64 [n].
            sent: what all of them were decoded from, if that is known.
        """
        shift, device = self.locator.shift, self.flat.device
        if self.host is not None and shift is not None:
            # As they are: offsets of their own would only cost memory.
            within = self.locator.within(indices)
            return within, HostElements(self.host, indices[within], shift)
        gaps = sent.gaps() if sent and shift is not None and runs_kernels(device) else None
        if gaps is not None and shift is not None:
            from engine_ext.kernels.triton.gap_decode import decode

            within = self.locator.within(indices)
            decoded = decode(*gaps, within, shift, _offset_dtype(self.flat), device)
            return within, DeviceElements(self.flat, decoded)
        chosen, offsets = self.locator(indices)
        if self.host is not None:
            return chosen, HostElements(self.host, offsets)
        return chosen, DeviceElements(self.flat, torch.from_numpy(offsets).to(device))


def make_targets(
    segments: Sequence[Segment], holders: dict[SourceBox, tuple[int, ...]]
) -> tuple[Target, ...]:
    """The targets of a certified tensor.

    Args:
        segments: of its placement on this rank.
        holders: the ranks that hold a box of it.
    """
    found = [box_of(segment) for segment in segments]
    targets = []
    for segment, box in zip(segments, found, strict=True):
        flat = bits_of(segment.live.flat())
        host = host_bits(flat) if flat.device.type == "cpu" else None
        runs_kernels(flat.device)  # they are compiled now, and not when the first sync waits for it
        first, dtype = found.index(box), segment.live.tensor.dtype
        targets.append(Target(segment, Locator(segment), holders[box], first, dtype, flat, host))
    return tuple(targets)


def _offset_dtype(flat: torch.Tensor) -> torch.dtype:
    return torch.int32 if offset_dtype(flat.numel()) is np.int32 else torch.int64
