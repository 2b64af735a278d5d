"""Segments by the addresses of their bytes: which of them have live elements in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine_ext.model.storage_index import extent
from engine_ext.placement.segments import Placement, Segment

Write = list[tuple[str | None, Segment]]
"""One write of the loader's to live memory: what it wrote where; None is no checkpoint tensor."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A segment by the addresses of its bytes.

    Attributes:
        start, end: address of its first byte, and just past its last.
        name: the checkpoint tensor; None for what is none.
        write: the boxes of one write have no element in common.
    """

    start: int
    end: int
    name: str | None
    segment: Segment
    write: int

    @classmethod
    def of(cls, segment: Segment, name: str | None, write: int) -> ByteRange:
        view = segment.live_view()
        start = view.data_ptr()
        return cls(start, start + extent(view) * view.element_size(), name, segment, write)

    @property
    def dense(self) -> bool:
        """Whether it holds every byte from its first to its last."""
        width = self.segment.live.tensor.element_size()
        return math.prod(self.segment.sizes) * width == self.end - self.start

    def mark(self, memory: torch.Tensor, first: int, unit: int) -> torch.Tensor:
        """Its view of `memory`, of which each element stands for `unit` bytes from `first` on."""
        width = self.segment.live.tensor.element_size() // unit
        strides = [stride * width for stride in self.segment.strides]
        offset = (self.start - first) // unit
        return memory.as_strided([*self.segment.sizes, width], [*strides, 1], offset)


def refuse_shared_memory(placement: Placement, writes: Sequence[Write]) -> None:
    """Refuse tensors whose live elements are not theirs alone.

    Two tensors lie in the same elements where an engine ties weights that the checkpoint keeps
    apart: a delta for one would silently change the other. What the loader writes beside the
    checkpoint's tensors it would write again, over elements that a delta leaves out. And where it
    writes two elements of one tensor to the same place, only the later one counts.

    Args:
        placement: as traced; it is marked.
        writes: all that the loader wrote to live memory.
    """
    boxes = [ByteRange.of(s, name, n) for n, write in enumerate(writes) for name, s in write]
    for one, other in overlaps(boxes):
        for box, by in ((one, other), (other, one)):
            if box.name is None:
                continue
            if by.name is None:
                reason = f"the loader also writes other values over it, in {box.segment.live.name}"
            elif by.name == box.name:
                reason = f"the loader writes parts of it over others, in {box.segment.live.name}"
            else:
                reason = f"shares the memory of {box.segment.live.name} with {by.name}"
            placement[box.name].refuse(reason)


def overlaps(boxes: Iterable[ByteRange]) -> Iterator[tuple[ByteRange, ByteRange]]:
    """Pairs of boxes of different writes that have an element in common.

    Left out are a tensor's elements that are written to one place twice, and two boxes that are
    no checkpoint tensor's.
    """
    found = sorted(boxes, key=lambda box: (box.start, box.end))
    for position, one in enumerate(found):
        for other in found[position + 1 :]:
            if other.start >= one.end:
                break
            if one.write == other.write or one.name == other.name is None:
                continue
            if one.name == other.name and one.segment == other.segment:
                continue
            if one.dense or _common(one, other):
                yield one, other


def _common(one: ByteRange, other: ByteRange) -> bool:
    """Whether two boxes have a byte in common; `one` starts first."""
    widths = [box.segment.live.tensor.element_size() for box in (one, other)]
    unit = math.gcd(*widths, other.start - one.start)
    memory = torch.zeros((max(one.end, other.end) - one.start) // unit, dtype=torch.bool)
    one.mark(memory, one.start, unit).fill_(True)
    return bool(other.mark(memory, one.start, unit).any())
