"""Expand the gaps of many tensors' elements on an accelerator, and prepare the writes of a rank.

A stream is read three times, a block of symbols at a time: the first pass sums how far each block
goes, the second one counts which elements are on this rank, and the third one writes where these
are in live memory, their old and new bits, and the terms of the change's digest. Between the
passes the blocks before each block are summed up. One launch serves all tensors of a batch,
whatever their sizes.

Nothing is specialised on sizes or alignments, as in `gather_scatter`. Flat indices are int64.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from engine_ext.kernels.triton import current
from engine_ext.kernels.triton.block_sums import BLOCK as DIGEST_BLOCK
from engine_ext.kernels.triton.block_sums import _curve, _mix

BLOCK: Final = 1024  # symbols of a program

# A row is a box of live memory: the live tensor's address; the box's first flat index, and one more
# than its last; the offset of its first element; its first dimension's number and how many it has;
# the seeds of the digest in both lanes. A dimension, outermost first: size, stride in flat indices,
# stride in live memory. A program: its item, the symbols of the item before it, how many it has.

ITEM_COLUMNS: Final = 12
"""An item is some symbols of a tensor and a row of it: the row; where the lowest bytes of its
symbols begin; where the next ones do, or -1 if there are none; one more than the index before; the
tensor's size; where its values begin, and how many there are; its first and last program; the
distance of two symbols' bytes; where their two upper bytes are, or -1 if there are none; the symbol
that does not end a gap, or -1."""

_COLUMNS: Final = tl.constexpr(ITEM_COLUMNS)
_DIGEST_BLOCK: Final = tl.constexpr(DIGEST_BLOCK)


@triton.jit
def _bytes(symbols, start, at, inside):
    """Load a byte of each symbol, int64; 0 where there is none."""
    there = inside & (at * 0 + start >= 0)
    return tl.load(symbols + start + at, mask=there, other=0).to(tl.int64)


@triton.jit
def _symbols(program, item, symbols, BLOCK: tl.constexpr):
    """Load a program's symbols, int64, 0 beyond its last; and which of them end a gap."""
    number = tl.arange(0, BLOCK)
    inside = number < tl.load(program + 2)
    at = (tl.load(program + 1) + number) * tl.load(item + 9)
    upper = tl.load(item + 10)
    found = _bytes(symbols, tl.load(item + 1), at, inside)
    found += _bytes(symbols, tl.load(item + 2), at, inside) << 8
    found += _bytes(symbols, upper, at, inside) << 16
    found += _bytes(symbols, upper, at + 1, inside) << 24
    return found, inside & (found != tl.load(item + 11))


@triton.jit
def sum_symbols(programs, items, symbols, sums, BLOCK: tl.constexpr):
    """Write how many gaps end in each program, and how far its symbols go; int64."""
    number = tl.program_id(0).to(tl.int64)
    program = programs + 3 * number
    item = items + _COLUMNS * tl.load(program)
    found, ends = _symbols(program, item, symbols, BLOCK)
    count = tl.sum(ends.to(tl.int64), 0)
    tl.store(sums + 2 * number, count)
    tl.store(sums + 2 * number + 1, tl.sum(found, 0) + count)


@triton.jit
def _locate(program, item, symbols, before, rows, dims, BLOCK: tl.constexpr):
    """Find a program's elements.

    Returns, for each symbol: whether it ends the gap before an element of the row's box; the
    element's flat index, its number among the item's values, and its offset in live memory.
    """
    found, ends = _symbols(program, item, symbols, BLOCK)
    index = tl.cumsum(found + ends.to(tl.int64), 0) + tl.load(before + 1) + tl.load(item + 3) - 1
    value = tl.cumsum(ends.to(tl.int32), 0).to(tl.int64) + tl.load(before) - 1
    row = rows + 8 * tl.load(item)
    start = tl.load(row + 1)
    here = ends & (value < tl.load(item + 6)) & (index < tl.load(item + 4))
    here = here & (index >= start) & (index < tl.load(row + 2))
    rest = tl.where(here, index - start, 0)
    offset = tl.zeros((BLOCK,), tl.int64) + tl.load(row + 3)
    dim = dims + 3 * tl.load(row + 4)
    for _ in range(tl.load(row + 5).to(tl.int32)):
        source = tl.load(dim + 1)
        position = rest // source
        rest -= position * source
        here = here & (position < tl.load(dim))
        offset += position * tl.load(dim + 2)
        dim += 3
    return here & (rest == 0), index, value, offset


@triton.jit
def count_elements(programs, items, symbols, before, rows, dims, counts, BLOCK: tl.constexpr):
    """Write how many elements of each program are in its row's box; int64."""
    number = tl.program_id(0).to(tl.int64)
    program = programs + 3 * number
    item = items + _COLUMNS * tl.load(program)
    here, _, _, _ = _locate(program, item, symbols, before + 2 * number, rows, dims, BLOCK)
    tl.store(counts + number, tl.sum(here.to(tl.int32), 0).to(tl.int64))


@triton.jit(
    do_not_specialize=["offsets", "new", "adds"],
    do_not_specialize_on_alignment=["values", "old"],
)
def stage_elements(
    programs,
    items,
    symbols,
    before,
    rows,
    dims,
    starts,
    values,
    table,
    offsets,
    new,
    old,
    sums,
    adds,
    WIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the elements in the boxes, one program's after another's, and the digest's sums.

    `offsets` and `new` are addresses: they can be of pinned memory of the host.
    """
    number = tl.program_id(0).to(tl.int64)
    program = programs + 3 * number
    item = items + _COLUMNS * tl.load(program)
    here, index, value, offset = _locate(
        program, item, symbols, before + 2 * number, rows, dims, BLOCK
    )
    row = rows + 8 * tl.load(item)
    bits = tl.pointer_type(old.dtype.element_ty)
    was = tl.load(tl.load(row).to(bits) + offset, mask=here, other=0)
    sent = tl.load(values + tl.load(item + 5) + value, mask=here, other=0)
    now = tl.where(adds != 0, was + sent, sent)
    to = tl.load(starts + number) + tl.cumsum(here.to(tl.int32), 0) - 1
    if WIDE:
        tl.store(offsets.to(tl.pointer_type(tl.int64)) + to, offset, mask=here)
    else:
        tl.store(offsets.to(tl.pointer_type(tl.int32)) + to, offset.to(tl.int32), mask=here)
    tl.store(new.to(bits) + to, now, mask=here)
    tl.store(old + to, was, mask=here)
    block, within = (index // _DIGEST_BLOCK).to(tl.uint64), index % _DIGEST_BLOCK
    curve = tl.where(here, _curve(now, WIDTH) - _curve(was, WIDTH), 0)
    seed0, seed1 = tl.load(row + 6).to(tl.uint64), tl.load(row + 7).to(tl.uint64)
    factor0 = tl.load(table + within, mask=here, other=0).to(tl.uint64)
    factor1 = tl.load(table + _DIGEST_BLOCK + within, mask=here, other=0).to(tl.uint64)
    term0 = curve * factor0 * (_mix(seed0 + block) | 1)
    term1 = curve * factor1 * (_mix(seed1 + block) | 1)
    tl.store(sums + 2 * number, tl.sum(term0, 0).to(tl.int64))
    tl.store(sums + 2 * number + 1, tl.sum(term1, 0).to(tl.int64))


class Boxes(NamedTuple):
    """Where the tensors of a rank are on a device: int64 [rows, 8] and [dimensions, 3]."""

    rows: torch.Tensor
    dims: torch.Tensor


class Located(NamedTuple):
    """The streams of a batch, and what the first two passes have found; all on the device.

    Attributes:
        symbols: uint8 [bytes].
        programs, items: int64 [programs, 3] and [items, 12]; a row for each, see above.
        before: of each program, the elements and the index before it, from its item's first
            program on; int64 [programs, 2].
        starts: how many elements are in the boxes of all programs before, int64 [programs].
        found: of each item, how many gaps end, how far they go, and how many elements are in the
            box; int64 [items, 3].
    """

    boxes: Boxes
    symbols: torch.Tensor
    programs: torch.Tensor
    items: torch.Tensor
    before: torch.Tensor
    starts: torch.Tensor
    found: torch.Tensor


def locate(
    boxes: Boxes, symbols: torch.Tensor, programs: torch.Tensor, items: torch.Tensor
) -> Located:
    """Do the first two passes, without waiting for the device; arguments as of `Located`.

    There is at least one item, and each has a program.
    """
    device, count = symbols.device, programs.shape[0]
    first, last, item = items[:, 7], items[:, 8], programs[:, 0]
    sums = torch.empty((count, 2), dtype=torch.int64, device=device)
    counts = torch.empty(count, dtype=torch.int64, device=device)
    with current(device):
        sum_symbols[(count,)](programs, items, symbols, sums, BLOCK=BLOCK)
        until = sums.cumsum(0)
        before_item = (until - sums)[first]
        before = until - sums - before_item[item]
        count_elements[(count,)](programs, items, symbols, before, *boxes, counts, BLOCK=BLOCK)
    ends = counts.cumsum(0)
    starts = ends - counts
    found = torch.cat([until[last] - before_item, (ends[last] - starts[first])[:, None]], 1)
    return Located(boxes, symbols, programs, items, before, starts, found)


def stage(
    located: Located,
    values: torch.Tensor,
    table: torch.Tensor,
    offsets: torch.Tensor,
    new: torch.Tensor,
    old: torch.Tensor,
    *,
    adds: bool,
) -> torch.Tensor:
    """Do the third pass, without waiting for the device.

    Args:
        values: integers of the live tensors' dtype on the device, those of all items.
        table: int64 [2048], see `block_sums.dense`.
        offsets: int32 or int64, for all elements in the boxes, item after item; written.
        new, old: of the dtype of `values`, likewise. Only `old` must be on the device; the others
            can be in pinned memory of the host.
        adds: whether the new bits are the old ones plus the values.

    Returns:
        The sums of the digest's lanes, new minus old, of each item; int64 [items, 2].
    """
    count, device = located.programs.shape[0], old.device
    sums = torch.empty((count, 2), dtype=torch.int64, device=device)
    with current(device):
        stage_elements[(count,)](
            *(located.programs, located.items, located.symbols, located.before, *located.boxes),
            *(located.starts, values, table, offsets.data_ptr(), new.data_ptr(), old, sums),
            int(adds),
            WIDE=offsets.dtype == torch.int64,
            WIDTH=old.itemsize,
            BLOCK=BLOCK,
        )
    until = sums.cumsum(0)  # as unsigned numbers the sums wrap around, and so do their differences
    return until[located.items[:, 8]] - (until - sums)[located.items[:, 7]]
