"""Sum the digest's terms over a dense range of elements on an accelerator.

``engine_ext.format.digest`` defines the sums; its table of factors and the seeds of a tensor's name
are arguments here. Memory is read once. Integers have the same bits signed and unsigned, but for
shifts and for widening, which are done on unsigned ones.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from engine_ext.kernels.triton import current

BLOCK: Final = 1024  # elements with one factor c; part of the digest's definition
_ROWS: Final = 32  # blocks of a program
_WARPS: Final = 4  # of a program: each thread has 8 elements of a block


@triton.jit
def _mix(x):
    """The finaliser of splitmix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _curve(bits, WIDTH: tl.constexpr):
    if WIDTH <= 2:
        word = (bits.to(tl.int32) & ((1 << (8 * WIDTH)) - 1)).to(tl.uint32)
        return (((word * (word + 1)) >> 1) + 1).to(tl.uint64)
    elif WIDTH == 4:
        return _mix((bits.to(tl.int64).to(tl.uint64) & 0xFFFFFFFF) + 0x9E3779B97F4A7C15)
    else:
        return _mix(bits.to(tl.uint64) + 0x9E3779B97F4A7C15)


# The other tensors are whole allocations. Were `values` specialised, the first one that is not
# aligned would be compiled for in a pause.
@triton.jit(do_not_specialize=["size", "block", "lead"], do_not_specialize_on_alignment=["values"])
def sum_terms(
    values,
    size: tl.int64,  # Triton would compile it again for 2**31 elements or more
    block,
    lead,
    seeds,
    table,
    sums,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Write a program's two sums; `lead` elements of the first block are before `values`.

    ALIGNED requires that `lead` is 0 and the address `values` a multiple of 16.

    The sum over blocks comes first, so that there is one multiplication for each element and lane,
    and one reduction for each program.
    """
    within = tl.arange(0, BLOCK)
    seed0, seed1 = tl.load(seeds).to(tl.uint64), tl.load(seeds + 1).to(tl.uint64)
    total0 = tl.zeros((BLOCK,), tl.uint64)
    total1 = tl.zeros((BLOCK,), tl.uint64)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for row in range(ROWS):
        if ALIGNED:
            start = (first + row) * BLOCK
            inside = within < size - start
            places = tl.multiple_of(values + start + within, 16)
            if start + BLOCK <= size:  # without a mask, so that a load takes 16 bytes
                bits = tl.load(places)
            else:
                bits = tl.load(places, mask=inside, other=0)
        else:
            start = (first + row) * BLOCK - lead
            inside = (within >= -start) & (within < size - start)
            bits = tl.load(values + start + within, mask=inside, other=0)
        curve = tl.where(inside, _curve(bits, WIDTH), 0)
        number = (block + first + row).to(tl.uint64)
        total0 += curve * (_mix(seed0 + number) | 1)
        total1 += curve * (_mix(seed1 + number) | 1)
    total0 *= tl.load(table + within).to(tl.uint64)
    total1 *= tl.load(table + BLOCK + within).to(tl.uint64)
    to = sums + 2 * tl.program_id(0)
    tl.store(to, tl.sum(total0, 0).to(tl.int64))
    tl.store(to + 1, tl.sum(total1, 0).to(tl.int64))


def dense(
    values: torch.Tensor, start: int, seeds: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Return both lanes' sums over contiguous elements, int64 [2] on their device.

    Args:
        values: integers of 1, 2, 4 or 8 bytes, [n].
        start: flat index of the first one in its tensor.
        seeds, table: int64 [2] and [2048] on the same device: m's argument for block 0 in each
            lane, and a(0, j), then a(1, j).
    """
    block, lead = divmod(start, BLOCK)
    programs = triton.cdiv(lead + values.numel(), BLOCK * _ROWS)
    sums = torch.empty((programs, 2), dtype=torch.int64, device=values.device)
    if programs:
        with current(values.device):
            sum_terms[(programs,)](
                values,
                values.numel(),
                block,
                lead,
                seeds,
                table,
                sums,
                WIDTH=values.itemsize,
                BLOCK=BLOCK,
                ROWS=_ROWS,
                ALIGNED=not lead and values.data_ptr() % 16 == 0,
                num_warps=_WARPS,
            )
    return sums.sum(0)
