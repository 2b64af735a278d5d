"""Repacked tensors: live tensors whose elements post-load processing moved without changing them.

`gather_live` and `unmoved` read them in the order in which the loader wrote them. `smallest_block`
finds the shortest permutation that describes a move.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.dtypes import torch_bits_dtype
from engine_ext.model import extent
from engine_ext.placement.segments import Repack, Segment

# Elements processed at a time, in up to eight temporaries of 8 bytes per element: 64 MiB.
CHUNK: Final = 1 << 20


def gather_live(segment: Segment) -> torch.Tensor:
    """Return the live elements of a segment, shaped `segment.sizes`, with the repack undone.

    Without a repack it is a view; else it is a copy of the range of memory that the box spans, made
    with less than 64 MiB of temporaries.
    """
    if segment.repack is None or 0 in segment.sizes:
        return segment.live_view()
    last = sum((n - 1) * s for n, s in zip(segment.sizes, segment.strides, strict=True))
    memory = flat_bits(segment.live.tensor)
    span = torch.empty(last + 1, dtype=memory.dtype, device=memory.device)
    start = 0
    for piece in unmoved(memory, segment.repack, segment.offset, segment.offset + last + 1):
        span[start : start + len(piece)] = piece
        start += len(piece)
    values = span.view(segment.live.tensor.dtype)
    return values.as_strided(segment.sizes, segment.strides)


def flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as integers, [extent]; writes go through."""
    data = tensor.detach()
    flat = data.as_strided((extent(data),), (1,), data.storage_offset())
    return flat.view(torch_bits_dtype(data.dtype))


def unmoved(memory: torch.Tensor, repack: Repack, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield the elements from `start` to `stop` in the order in which the loader wrote them.

    Takes the `memory` of the live tensor after the move, [extent], and yields copies of about
    `CHUNK` elements, [n].
    """
    block, order = repack.block, repack.permutation
    blocks = max(1, CHUNK // block)
    while start < stop:
        first = start // block * block
        if block > CHUNK:
            end = min(stop, first + block, start + CHUNK)
            yield _take(memory[first : first + block], order[start - first : end - first])
        else:
            end = min(stop, first + blocks * block)
            blocked = memory[first : -(-end // block) * block].view(-1, block)
            yield _take(blocked, order).view(-1)[start - first : end - first]
        start = end


def _take(values: torch.Tensor, order: NDArray[np.int32]) -> torch.Tensor:
    """Index the last dimension; on the CPU numpy is several times faster than torch."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.take(values.numpy(), order, axis=-1))
    return values.index_select(-1, torch.from_numpy(order).to(values.device))


def smallest_block(permutation: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the shortest permutation that gives this one when repeated block by block."""
    highest = done = 0
    small = [d for d in range(1, math.isqrt(len(permutation)) + 1) if len(permutation) % d == 0]
    divisors = {*small, *(len(permutation) // d for d in small)}
    for block in sorted(divisors)[:-1]:
        highest = max(highest, int(permutation[done:block].max()))
        done = block
        if highest < block and _repeats(permutation, block):
            return permutation[:block].copy()
    return permutation


def _repeats(permutation: NDArray[np.int32], block: int) -> bool:
    last = len(permutation) - block
    return all(
        np.array_equal(
            permutation[start : min(start + CHUNK, last)] + block,
            permutation[start + block : start + block + CHUNK],
        )
        for start in range(0, last, CHUNK)
    )
