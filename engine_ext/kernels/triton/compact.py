"""List the elements of two tensors on an accelerator that differ, in order: stream compaction.

Memory is read twice: first each block counts its differing elements, then each writes them to the
offset given by the counts of the blocks before it.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from engine_ext.kernels.triton import current

BLOCK: Final = 1024  # elements of a program


@triton.jit
def _blocks(old, new, size, BLOCK: tl.constexpr):
    """Load a block's indices, old and new bits, and 1 for each element that differs."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(old + at, mask=at < size, other=0)
    after = tl.load(new + at, mask=at < size, other=0)
    return at, before, after, (before != after).to(tl.int32)


@triton.jit
def count_differing(old, new, size, counts, BLOCK: tl.constexpr):
    _, _, _, differs = _blocks(old, new, size, BLOCK)
    tl.store(counts + tl.program_id(0), tl.sum(differs, 0))


@triton.jit(do_not_specialize=["start"])
def write_differing(old, new, size, ends, start, places, was, now, BLOCK: tl.constexpr):
    at, before, after, differs = _blocks(old, new, size, BLOCK)
    first = tl.load(ends + tl.program_id(0)) - tl.sum(differs, 0)
    to = first + tl.cumsum(differs, 0) - 1
    tl.store(places + to, (start + at).to(places.dtype.element_ty), mask=differs != 0)
    tl.store(was + to, before, mask=differs != 0)
    tl.store(now + to, after, mask=differs != 0)


def count(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Count the elements that differ up to the end of each block, int64 [blocks].

    The tensors hold integers of one dtype, contiguous [n], on one device, which is not waited for.
    """
    blocks = triton.cdiv(old.numel(), BLOCK)
    counts = torch.empty(blocks, dtype=torch.int32, device=old.device)
    if blocks:
        with current(old.device):
            count_differing[(blocks,)](old, new, old.numel(), counts, BLOCK=BLOCK)
    return counts.cumsum(0)


def write(
    old: torch.Tensor,
    new: torch.Tensor,
    ends: torch.Tensor,
    nnz: int,
    start: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """List the elements that differ, without waiting for the device.

    Args:
        old, new: see `count`; unchanged since.
        ends, nnz: the result of `count`, and its last entry, 0 if there is none.
        start: index of the first element.
        dtype: int32 or int64, wide enough for the last index.

    Returns:
        Their indices, ascending, and their old and new bits, [nnz] each.
    """
    device = old.device
    places = torch.empty(nnz, dtype=dtype, device=device)
    was, now = (torch.empty(nnz, dtype=old.dtype, device=device) for _ in range(2))
    if nnz:
        with current(device):
            write_differing[(ends.numel(),)](
                old, new, old.numel(), ends, start, places, was, now, BLOCK=BLOCK
            )
    return places, was, now
