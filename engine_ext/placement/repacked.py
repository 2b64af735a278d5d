"""Read checkpoint elements through a repack: what post-load processing has moved, not changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.dtypes import torch_bits_dtype
from engine_ext.model.storage_index import extent
from engine_ext.placement.segments import Repack, Segment

# Elements worked on at a time, in up to eight temporaries of 8 bytes each: 64 MiB.
CHUNK: Final = 1 << 20


def gather_live(segment: Segment) -> torch.Tensor:
    """The live elements of a segment with the repack undone.

    Returns:
        The live tensor's dtype, on its device, shaped `segment.sizes`: element by element what
        `segment.source_view` of the checkpoint tensor should be. Without a repack it is a view,
        else a copy of the stretch of memory that the box spans, made with less than 64 MiB of
        temporaries.
    """
    if segment.repack is None or 0 in segment.sizes:
        return segment.live_view()
    last = sum((n - 1) * s for n, s in zip(segment.sizes, segment.strides, strict=True))
    memory = flat_bits(segment.live.tensor)
    stretch = torch.empty(last + 1, dtype=memory.dtype, device=memory.device)
    start = 0
    for piece in unmoved(memory, segment.repack, segment.offset, segment.offset + last + 1):
        stretch[start : start + len(piece)] = piece
        start += len(piece)
    values = stretch.view(segment.live.tensor.dtype)
    return values.as_strided(segment.sizes, segment.strides)


def flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, int [extent]."""
    data = tensor.detach()
    flat = data.as_strided((extent(data),), (1,), data.storage_offset())
    return flat.view(torch_bits_dtype(data.dtype))


def unmoved(memory: torch.Tensor, repack: Repack, start: int, stop: int) -> Iterator[torch.Tensor]:
    """The elements of a stretch of memory as the loader wrote them, in order, some at a time.

    Args:
        memory: [extent], the live tensor, after the move.
        repack: the move.
        start: first element, as the loader counted them.
        stop: just past the last one.

    Yields:
        Copies of about `CHUNK` elements; [n], the dtype of `memory`.
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
            lying = memory[first : -(-end // block) * block].view(-1, block)
            yield _take(lying, order).view(-1)[start - first : end - first]
        start = end


def _take(values: torch.Tensor, order: NDArray[np.int32]) -> torch.Tensor:
    """Elements of the last dimension; on the CPU numpy is several times faster."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.take(values.numpy(), order, axis=-1))
    return values.index_select(-1, torch.from_numpy(order).to(values.device))


def smallest_block(permutation: NDArray[np.int32]) -> NDArray[np.int32]:
    """The shortest permutation that is this one when repeated, block by block."""
    highest = done = 0
    for block in _divisors(len(permutation))[:-1]:
        highest = max(highest, int(permutation[done:block].max()))
        done = block
        if highest < block and _repeats(permutation, block):
            return permutation[:block].copy()
    return permutation


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _repeats(permutation: NDArray[np.int32], block: int) -> bool:
    last = len(permutation) - block
    return all(
        np.array_equal(
            permutation[start : min(start + CHUNK, last)] + block,
            permutation[start + block : start + block + CHUNK],
        )
        for start in range(0, last, CHUNK)
    )
