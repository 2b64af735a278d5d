"""Stage what a part changes on accelerators and the stream table does not take, all of it at once.

Offsets are found on the host. They cross the bus in one copy, the old values come back in another,
and the new ones follow when all params are checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.kernels import typed
from engine_ext.placement import (
    DeviceBatch,
    DeviceElements,
    DeviceMemory,
    HostElements,
    Target,
    WholeBox,
    joined,
)
from engine_ext.sync.staged import Write
from engine_ext.sync.thread_pool import ThreadPool


@dataclass(frozen=True, slots=True)
class GatherRequest:
    """Elements of a live tensor that a piece of a param changes.

    Attributes:
        indices: ascending flat checkpoint indices, int32 or int64 [n].
        reads: whether their old bits are read.
    """

    target: Target
    indices: NDArray[Any]
    reads: bool


@dataclass(frozen=True, slots=True)
class GatherResult:
    """The elements of a `GatherRequest` that are in its target.

    Attributes:
        chosen: which of `indices` they are.
        old: their old bits in host memory, if they are read.
        batch: what they were read with; it can say later whether they are the same, and write them.
    """

    chosen: Any
    elements: HostElements | DeviceElements
    old: Any
    batch: DeviceBatch | None = None


def gather(
    requests: Sequence[GatherRequest], threads: ThreadPool, memory: DeviceMemory
) -> list[GatherResult]:
    """Find the elements of all requests, on devices, and read the old bits that are requested."""
    if not requests:
        return []
    found = threads.map(_find, requests)
    groups: dict[tuple[torch.device, Any], list[int]] = defaultdict(list)
    for number, one in enumerate(requests):
        groups[one.target.flat.device, one.target.locator.offset_dtype].append(number)
    located: dict[int, DeviceElements] = {}
    for (device, dtype), numbers in groups.items():
        ends = np.cumsum([found[number].count for number in numbers])
        only = found[numbers[0]]
        if len(numbers) == 1 and not only.shift and only.offsets.dtype == dtype:
            offsets = np.ascontiguousarray(only.offsets)
        else:
            # One array for all: clearing new memory takes longer than filling it.
            offsets = np.empty(ends[-1], dtype)
            views = np.split(offsets, ends[:-1])
            pairs = [*zip(numbers, views, strict=True)]
            threads.map(lambda pair: found[pair[0]].fill(pair[1]), pairs)
        sent, lease = memory.keep(torch.from_numpy(offsets), device)
        for number, end in zip(numbers, ends.tolist(), strict=True):
            own = sent[end - found[number].count : end]
            located[number] = DeviceElements(requests[number].target.flat, own, lease)
    reading = [number for number, one in enumerate(requests) if one.reads]
    batch = DeviceBatch([located[number] for number in reading], memory)
    read = batch.read()
    old = dict(zip(reading, read, strict=True))
    return [
        GatherResult(one.chosen, located[number], old.get(number), batch)
        for number, one in enumerate(found)
    ]


@dataclass(frozen=True, slots=True)
class _Found:
    """Which of the indices are in a target; their offsets, or what to subtract for these."""

    chosen: Any
    count: int
    offsets: NDArray[Any]
    shift: int

    def fill(self, offsets: NDArray[Any]) -> None:
        """Write the offsets, [count]."""
        # Computed in the wider dtype: the shift, an index and an offset might need it.
        dtype = np.result_type(self.offsets, offsets)
        np.subtract(self.offsets, self.shift, out=offsets, dtype=dtype, casting="same_kind")


def _find(request: GatherRequest) -> _Found:
    locator, indices = request.target.locator, request.indices
    shift = locator.shift
    if shift is None or not -(1 << 31) <= shift < 1 << 31:
        # Narrow indices could overflow in the locator's sums.
        chosen, offsets = locator(indices.astype(np.int64, copy=False))
        return _Found(chosen, offsets.size, offsets, 0)
    within = locator.within(indices)
    return _Found(within, within.stop - within.start, indices[within], shift)


def upload_new(writes: Sequence[Write], memory: DeviceMemory) -> None:
    """Copy the new bits of elements on devices there, if they are in host memory.

    Those of the boxes of dense params, too, as long as there is reserved memory; otherwise the
    write sends them.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Write]] = defaultdict(list)
    for write in writes:
        if isinstance(write.elements, WholeBox) and write.digest is not None:
            device = write.elements.segment.live.tensor.device
            kept = memory.reserved(write.new.reshape(-1), device)
            if kept is not None:
                write.new, write.lease = kept.bits.view(write.new.shape), kept.lease
        if isinstance(write.elements, DeviceElements) and not isinstance(write.new, torch.Tensor):
            flat = write.elements.flat
            groups[flat.device, flat.dtype].append(write)
    for (device, dtype), own in groups.items():
        new = [typed(np.ascontiguousarray(write.new), dtype) for write in own]
        sent, lease = memory.keep(joined(new), device)
        views = torch.split(sent, [one.numel() for one in new])
        for write, bits in zip(own, views, strict=True):
            write.new, write.lease = bits, lease


def keep_on_device(writes: Sequence[Write], memory: DeviceMemory) -> None:
    """Move offsets and new bits of elements on devices to memory that is there for them."""
    for write in writes:
        elements = write.elements
        if isinstance(elements, DeviceElements):
            device = elements.flat.device
            offsets, lease = memory.keep(elements.offsets, device)
            write.elements = DeviceElements(elements.flat, offsets, lease)
            write.new, write.lease = memory.keep(write.new, device)
