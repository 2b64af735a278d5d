"""Which ranks hold which elements of a checkpoint tensor, and which rank counts them.

After certification the ranks exchange the source boxes of their segments once. From these every
rank computes, for each box, the ranks that hold exactly these elements; the lowest of them counts
the elements, for the digest and for the check that every element of a delta is on some rank. The
boxes of two ranks must be equal or disjoint and must cover the tensor, or it is uncertified.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine_ext.placement.segments import Placement, Segment, Status


@dataclass(frozen=True, slots=True, order=True)
class SourceBox:
    """The checkpoint elements of a segment, from flat index `start` on, in canonical form.

    `dims` are (size, stride) pairs, outermost first, merged as far as possible.
    """

    start: int
    dims: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        return math.prod(size for size, _ in self.dims)

    @property
    def end(self) -> int:
        return self.start + 1 + sum((size - 1) * stride for size, stride in self.dims)

    @property
    def nested(self) -> bool:
        """Whether the strides prove that every element is in the box only once."""
        inner = 0
        for size, stride in reversed(self.dims):
            if stride <= inner:
                return False
            inner += (size - 1) * stride
        return True

    def indices(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return all flat indices of the box."""
        found = np.full(1, self.start, np.int64)
        for size, stride in self.dims:
            found = (found[:, None] + np.arange(size) * stride).reshape(-1)
        return found


def box_of(segment: Segment) -> SourceBox:
    """Return the checkpoint elements of a segment."""
    dims = zip(segment.sizes, segment.source_strides, strict=True)
    merged = merge_dims(dim for dim in dims if dim[0] != 1 and dim[1] != 0)
    return SourceBox(segment.source_offset, tuple(merged))


def merge_dims(dims: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Sort dimensions by source stride, outermost first, and merge contiguous ones.

    Each is its size, its source stride and any other strides; two are merged if all strides allow.
    """
    merged: list[tuple[int, ...]] = []
    for size, *strides in sorted(dims, key=lambda dim: -dim[1]):
        if merged and merged[-1][1:] == tuple(size * stride for stride in strides):
            merged[-1] = (merged[-1][0] * size, *strides)
        else:
            merged.append((size, *strides))
    return merged


# Lists in place of tuples, if a box came from another replica.
RankBoxes = Mapping[str, Sequence[tuple[int, Sequence[Sequence[int]]]]]


def boxes(placement: Placement) -> RankBoxes:
    """Return this rank's boxes by tensor, in a form that can be sent to the other ranks."""
    return {
        name: [(box.start, box.dims) for box in map(box_of, placed.segments)]
        for name, placed in placement.items()
        if placed.segments
    }


Holders = dict[str, dict[SourceBox, tuple[int, ...]]]


def resolve(placement: Placement, by_rank: Sequence[RankBoxes]) -> Holders:
    """Compute which ranks hold each box, and refuse the tensors whose boxes do not fit together.

    Takes `boxes` of every rank, in rank order. Returns, by tensor and box, the ranks that hold it,
    ascending.
    """
    holders: Holders = {}
    for name, placed in placement.items():
        found: defaultdict[SourceBox, list[int]] = defaultdict(list)
        for rank, ranks_boxes in enumerate(by_rank):
            for box in {SourceBox(s, tuple(map(tuple, d))) for s, d in ranks_boxes.get(name, [])}:
                found[box].append(rank)
        holders[name] = {box: tuple(ranks) for box, ranks in found.items()}
        if not found or placed.status is Status.UNCERTIFIED:
            continue
        if not all(box.nested for box in found):
            placed.refuse("the loader copies some of its elements several times")
        elif any(_overlap(*pair) for pair in _near(sorted(found))):
            placed.refuse("the ranks' parts of it overlap without being equal")
        elif (held := sum(box.numel for box in found)) != placed.spec.numel:
            placed.refuse(f"{placed.spec.numel - held} of its elements are on no rank")
    return holders


def _near(ordered: Sequence[SourceBox]) -> Iterator[tuple[SourceBox, SourceBox]]:
    """Yield the pairs whose second box starts before the first one ends; takes them in order."""
    for number, one in enumerate(ordered):
        for at in range(number + 1, len(ordered)):
            if ordered[at].start >= one.end:
                break
            yield one, ordered[at]


def _overlap(a: SourceBox, b: SourceBox) -> bool:
    if _apart(a, b):
        return False
    return bool(np.intersect1d(a.indices(), b.indices(), assume_unique=True).size)


def _apart(a: SourceBox, b: SourceBox) -> bool:
    """Return whether two boxes with the same strides are provably disjoint in some dimension."""
    if [d[1] for d in a.dims] != [d[1] for d in b.dims]:
        return False
    difference = b.start - a.start
    for position, ((size_a, stride), (size_b, _)) in enumerate(zip(a.dims, b.dims, strict=True)):
        rest = zip(a.dims[position + 1 :], b.dims[position + 1 :], strict=True)
        inner = sum((max(x[0], y[0]) - 1) * x[1] for x, y in rest)
        if stride <= 2 * inner:
            return False
        steps = round(difference / stride)
        difference -= steps * stride
        if steps >= size_a or -steps >= size_b:
            return True
    return difference != 0
