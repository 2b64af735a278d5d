"""Decode gaps to offsets in live memory on an accelerator.

The positions cross the bus as they were received, which is one or two bytes for most elements,
while offsets take four or eight. Decoding and writing are separate kernels, because the old values,
the ranks' vote and an undo, which needs the offsets too, come between them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from engine_ext.kernels.triton import current

BLOCK: Final = 1024  # symbols of a program
_SIGNED: Final = {1: np.uint8, 2: np.int16, 4: np.int32}  # the integers that torch works with


@triton.jit
def _symbols(symbols, skip, size, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load a block's symbols, and 1 for each that ends a gap; int64, 0 beyond the last."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    symbol = tl.load(symbols + at, mask=inside, other=0).to(tl.int64) & ((1 << (8 * WIDTH)) - 1)
    return symbol, (inside & (symbol != skip)).to(tl.int64)


@triton.jit(
    do_not_specialize=["skip", "size"], do_not_specialize_on_alignment=["symbols", "moves", "ends"]
)
def sum_gaps(symbols, skip, size, moves, ends, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Sum by how much each block advances the index, and count the gaps that end in it."""
    symbol, ending = _symbols(symbols, skip, size, WIDTH, BLOCK)
    tl.store(moves + tl.program_id(0), tl.sum(symbol + ending, 0))
    tl.store(ends + tl.program_id(0), tl.sum(ending, 0))


@triton.jit(
    do_not_specialize=["skip", "size", "first", "last", "shift"],
    do_not_specialize_on_alignment=["symbols", "moves", "ends", "offsets"],
)
def write_offsets(
    symbols,
    skip,
    size,
    moves,
    ends,
    first,
    last,
    shift,
    offsets,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the offset that each gap leads to, for the gaps from `first` to below `last`."""
    symbol, ending = _symbols(symbols, skip, size, WIDTH, BLOCK)
    moved = symbol + ending
    block = tl.program_id(0)
    index = tl.load(moves + block) - tl.sum(moved, 0) + tl.cumsum(moved, 0) - 1
    number = tl.load(ends + block) - tl.sum(ending, 0) + tl.cumsum(ending, 0) - 1
    wanted = (ending != 0) & (number >= first) & (number < last)
    tl.store(offsets + (number - first), (index - shift).to(offsets.dtype.element_ty), mask=wanted)


def decode(
    symbols: NDArray[Any],
    skip: int,
    chosen: slice,
    shift: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Decode gaps to the offsets of the elements that they lead to.

    Args:
        symbols: unsigned ints [n] of 1, 2 or 4 bytes in host memory, any alignment; already
            checked: the last one ends a gap, and no index is beyond the tensor.
        skip: the symbol that skips as many elements and does not end the gap; -1 if none does.
        chosen: which gaps to decode, with start and stop; the result is [stop - start].
        shift: subtracted from every index.
        dtype: int32 or int64, wide enough for the result.
    """
    offsets = torch.empty(chosen.stop - chosen.start, dtype=dtype, device=device)
    if not offsets.numel():
        return offsets
    size, width = symbols.size, symbols.itemsize
    # A copy: the wire's buffers are read-only, and torch has no read-only tensors.
    sent = torch.from_numpy(symbols.view(_SIGNED[width]).copy()).to(device)
    grid = (triton.cdiv(size, BLOCK),)
    sums = torch.empty((2, *grid), dtype=torch.int64, device=device)
    with current(device):
        sum_gaps[grid](sent, skip, size, sums[0], sums[1], WIDTH=width, BLOCK=BLOCK)
        moves, ends = sums.cumsum(1)
        bounds = chosen.start, chosen.stop, shift
        write_offsets[grid](
            sent, skip, size, moves, ends, *bounds, offsets, WIDTH=width, BLOCK=BLOCK
        )
    return offsets
