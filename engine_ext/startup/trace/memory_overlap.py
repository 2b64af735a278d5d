"""Find segments that share live elements, by the addresses of their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from engine_ext.placement import Placement, Segment, Status

_FEW: Final = 16

Write = list[tuple[str | None, Segment]]
"""One write of the loader to live memory: segments with their checkpoint tensor, or None."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The addresses that a segment spans.

    Attributes:
        start, end: address of its first byte, and just past its last.
        name: the checkpoint tensor written there; None for anything else.
        write: number of the write; the segments of one write share no element.
    """

    start: int
    end: int
    name: str | None
    segment: Segment
    write: int

    @classmethod
    def of(cls, segment: Segment, name: str | None, write: int) -> ByteRange:
        """Return the range of a segment's elements."""
        width = segment.live.tensor.element_size()
        start = segment.live.start + segment.offset * width
        steps = zip(segment.sizes, segment.strides, strict=True)
        elements = 0 if 0 in segment.sizes else 1 + sum((n - 1) * s for n, s in steps)
        return cls(start, start + elements * width, name, segment, write)

    @property
    def dense(self) -> bool:
        """Whether the segment has every byte from its first to its last."""
        width = self.segment.live.tensor.element_size()
        return math.prod(self.segment.sizes) * width == self.end - self.start

    def mark(self, memory: torch.Tensor, first: int, unit: int) -> torch.Tensor:
        """Return its view of `memory`, one element per `unit` bytes from address `first` on."""
        width = self.segment.live.tensor.element_size() // unit
        strides = [stride * width for stride in self.segment.strides]
        offset = (self.start - first) // unit
        return memory.as_strided([*self.segment.sizes, width], [*strides, 1], offset)


def refuse_shared_memory(placement: Placement, writes: Sequence[Write]) -> None:
    """Refuse tensors whose live elements something else is written to as well.

    Two tensors share elements if an engine ties weights that the checkpoint keeps apart: a delta
    for one would silently change the other. If the loader writes other values over a tensor, it
    would write them again over elements that a delta leaves out. If it writes two elements of one
    tensor to the same place, only the later one counts.

    A few integers that another tensor is written over (the ``weight_shape`` of each part of a fused
    weight) are no weights: the loader drops all but the last.
    """
    ranges = [ByteRange.of(s, name, n) for n, write in enumerate(writes) for name, s in write]
    for name in _overwritten(placement, ranges):
        placement[name].segments, placement[name].status = [], Status.NOT_ON_RANK
        ranges = [range_ for range_ in ranges if range_.name != name]
    for one, other in overlaps(ranges):
        for range_, by in ((one, other), (other, one)):
            live = range_.segment.live.name
            if range_.name is None:
                continue
            if by.name is None:
                reason = f"the loader also writes other values over it, in {live}"
            elif by.name == range_.name:
                reason = f"the loader writes parts of it over others, in {live}"
            else:
                reason = f"shares the memory of {live} with {by.name}"
            placement[range_.name].refuse(reason)


def _overwritten(placement: Placement, ranges: Sequence[ByteRange]) -> list[str]:
    """Return the tensors of a few integers that others are written over, wholly and later."""
    later: dict[tuple[int, int], int] = {}
    for range_ in ranges:
        if range_.name is not None and range_.dense:
            later[range_.start, range_.end] = range_.write
    written: dict[str, list[bool]] = {}
    for range_ in ranges:
        if range_.name is not None:
            gone = later.get((range_.start, range_.end), -1) > range_.write
            written.setdefault(range_.name, []).append(gone)
    return [
        name
        for name, gone in written.items()
        if all(gone)
        and placement[name].status is Status.UNJUDGED
        and placement[name].spec.numel <= _FEW
        and not placement[name].spec.dtype.is_floating_point
    ]


def overlaps(ranges: Iterable[ByteRange]) -> Iterator[tuple[ByteRange, ByteRange]]:
    """Yield pairs of segments of different writes that share a byte.

    Left out are pairs of equal segments of one tensor, and pairs without a checkpoint tensor.
    """
    ordered = sorted(ranges, key=lambda range_: (range_.start, range_.end))
    for position, one in enumerate(ordered):
        for other in ordered[position + 1 :]:
            if other.start >= one.end:
                break
            if one.write == other.write or one.name == other.name is None:
                continue
            if one.name == other.name and one.segment == other.segment:
                continue
            if one.dense or _share_a_byte(one, other):
                yield one, other


def _share_a_byte(one: ByteRange, other: ByteRange) -> bool:
    """Return whether two segments share a byte; `one` starts first."""
    widths = [range_.segment.live.tensor.element_size() for range_ in (one, other)]
    unit = math.gcd(*widths, other.start - one.start)
    memory = torch.zeros((max(one.end, other.end) - one.start) // unit, dtype=torch.bool)
    one.mark(memory, one.start, unit).fill_(True)
    return bool(other.mark(memory, one.start, unit).any())
