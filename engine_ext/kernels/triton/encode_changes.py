"""Encode changed elements on an accelerator: gaps and differences, and their digest's terms.

`engine_ext.format.gap_streams` defines the symbols of gaps, here of one byte,
`engine_ext.format.ulp_differences` the nibbles and escapes of differences, and the sums are those
of `engine_ext.format.digest`. Elements of many pieces of tensors come one after another; each piece
has a stream and nibbles of its own. First each program counts its symbols and escapes, then each
writes them to the offset given by the counts of the programs before it. A table says which elements
each program has; `rows` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from engine_ext.kernels.triton import current
from engine_ext.kernels.triton.block_sums import BLOCK as _DIGEST_BLOCK
from engine_ext.kernels.triton.block_sums import _curve, _mix

BLOCK: Final = 1024  # elements of a program
SKIP: Final = 255  # the symbol that skips as many elements
ESCAPE: Final = 15  # the nibble of a difference that is escaped

_COLUMNS: Final = tl.constexpr(6)


@triton.jit
def _gaps(row, places, BLOCK: tl.constexpr):
    """Return which elements a program has, where they are, and the gap before each."""
    first, count, start = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    at = tl.arange(0, BLOCK)
    inside = at < count
    here = tl.load(places + first + at, mask=inside, other=0)
    # `start` is -1 if the piece begins with an earlier program.
    follows = at >= tl.where(start < 0, 0, 1)
    before = tl.load(places + first + at - 1, mask=inside & follows, other=0)
    gap = here - tl.where(follows, before + 1, start)
    return first, inside, here, tl.where(inside, gap, 0).to(tl.int32)


@triton.jit
def _zigzag(was, now, WIDTH: tl.constexpr):
    """Return new minus old bits, zigzag-encoded; int64, where negative ones are 2**63 and more."""
    apart = now.to(tl.int64) - was.to(tl.int64)
    if WIDTH < 8:
        half = 1 << (8 * WIDTH - 1)
        apart = ((apart + half) & (2 * half - 1)) - half
    return (apart << 1) ^ (apart >> 63)


@triton.jit(do_not_specialize_on_alignment=["table", "places", "was", "now", "counts"])
def count_symbols(
    table,
    places,
    was,
    now,
    counts,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SKIP: tl.constexpr,
    ESCAPE: tl.constexpr,
):
    """Write how many symbols and escaped differences each program has."""
    program = tl.program_id(0).to(tl.int64)
    first, inside, _, gap = _gaps(table + _COLUMNS * program, places, BLOCK)
    at = first + tl.arange(0, BLOCK)
    before = tl.load(was + at, mask=inside, other=0)
    zigzag = _zigzag(before, tl.load(now + at, mask=inside, other=0), WIDTH)
    is_large = inside & ((zigzag < 0) | (zigzag >= ESCAPE))
    tl.store(counts + 2 * program, tl.sum(inside.to(tl.int32) + gap // SKIP, 0))
    tl.store(counts + 2 * program + 1, tl.sum(is_large.to(tl.int32), 0))


@triton.jit(
    do_not_specialize=["most"],
    do_not_specialize_on_alignment=[
        *("table", "places", "was", "now", "ends", "symbols", "nibbles", "escaped"),
        *("seeds", "factors", "sums"),
    ],
)
def write_symbols(
    table,
    places,
    was,
    now,
    ends,
    symbols,
    nibbles,
    escaped,
    seeds,
    factors,
    sums,
    most,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SKIP: tl.constexpr,
    ESCAPE: tl.constexpr,
    DIGEST_BLOCK: tl.constexpr,
):
    """Write the symbol that ends each gap, the differences, and a program's three sums.

    The skips are there before.
    """
    program = tl.program_id(0).to(tl.int64)
    row = table + _COLUMNS * program
    first, inside, here, gap = _gaps(row, places, BLOCK)
    skips = gap // SKIP
    done = tl.load(ends + 2 * program - 2, mask=program > 0, other=0)
    to = done + tl.cumsum(inside.to(tl.int32) + skips, 0) - 1
    # Places of a tensor that has changed since it was counted can be any numbers.
    is_room = inside & (to >= 0) & (to < most)
    tl.store(symbols + to, (gap - skips * SKIP).to(tl.uint8), mask=is_room)

    at = first + tl.arange(0, BLOCK)
    after = tl.load(now + at, mask=inside, other=0)
    before = tl.load(was + at, mask=inside, other=0)
    zigzag = _zigzag(before, after, WIDTH)
    is_large = inside & ((zigzag < 0) | (zigzag >= ESCAPE))
    done = tl.load(ends + 2 * program - 1, mask=program > 0, other=0)
    to = done + tl.cumsum(is_large.to(tl.int32), 0) - 1
    tl.store(escaped + to, zigzag.to(escaped.dtype.element_ty), mask=is_large)
    small = tl.where(is_large, ESCAPE, zigzag).to(tl.int32)  # 0 beyond the last element
    two = tl.reshape(small, (BLOCK // 2, 2)) << (4 * tl.arange(0, 2))[None, :]
    pair = tl.arange(0, BLOCK // 2)
    is_pair = 2 * pair < tl.load(row + 1)
    tl.store(nibbles + tl.load(row + 4) + pair, tl.sum(two, 1).to(tl.uint8), mask=is_pair)

    curve = tl.where(inside, _curve(after, WIDTH) - _curve(before, WIDTH), 0)
    seed = seeds + 2 * tl.load(row + 3)
    block, within = (here // DIGEST_BLOCK).to(tl.uint64), here & (DIGEST_BLOCK - 1)
    for lane in tl.static_range(2):
        factor = tl.load(factors + lane * DIGEST_BLOCK + within).to(tl.uint64)
        number = _mix(tl.load(seed + lane).to(tl.uint64) + block) | 1
        total = tl.sum(curve * factor * number, 0)
        tl.store(sums + 3 * program + lane, total.to(tl.int64))
    mask = tl.load(row + 5)
    whole = inside & (mask != 0) & ((after.to(tl.int64) & mask) == mask)
    tl.store(sums + 3 * program + 2, tl.sum(whole.to(tl.int64), 0))


def rows(
    sizes: NDArray[np.int64], starts: Sequence[int], exponents: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a table, int64 [programs, 6], and the number of programs up to the end of each piece.

    Args:
        sizes: Elements of each piece, in the order in which they are listed.
        starts: The index in its tensor at which each piece begins.
        exponents: The bits that are set in each piece's NaNs and infinities; 0: it has none.
    """
    programs, halves = -(-sizes // BLOCK), (sizes + 1) // 2
    ends = np.cumsum(programs)
    number = np.repeat(np.arange(sizes.size), programs)
    done = (np.arange(number.size) - (ends - programs)[number]) * BLOCK
    table = np.empty((number.size, _COLUMNS.value), np.int64)
    table[:, 0] = (np.cumsum(sizes) - sizes)[number] + done
    table[:, 1] = np.minimum(sizes[number] - done, BLOCK)
    table[:, 2] = np.where(done > 0, -1, np.array(starts, np.int64)[number])
    table[:, 3] = number
    table[:, 4] = (np.cumsum(halves) - halves)[number] + done // 2
    table[:, 5] = exponents[number]
    return table, ends


def write(
    table: torch.Tensor,
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    last: torch.Tensor,
    seeds: torch.Tensor,
    factors: torch.Tensor,
    most: int,
    halves: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode the elements of all pieces, without waiting for the device.

    Args:
        table: See `rows`, on the device; at least one element.
        found: Places, old and new bits, [n] each, as `compact.write` returns them.
        last: The last program of each piece, int64 [pieces].
        seeds: Of the names of the pieces' tensors, int64 [pieces, 2].
        factors: a(0, j), then a(1, j), int64 [2048].
        most: Symbols for which there is to be room, below 2**31.
        halves: Bytes of all nibbles.

    Returns:
        The streams one after another, uint8 [most]; the nibbles, uint8 [halves]; the escaped
        differences, [n] of the dtype of the bits; and int64 [pieces, 5]: up to the end of each
        piece, how many symbols there are, both lanes' sums over new minus old elements, modulo
        2**64, how many escaped differences, and new elements that are NaN or infinite.
    """
    places, was, now = found
    device, programs = places.device, len(table)
    counts = torch.empty((programs, 2), dtype=torch.int32, device=device)
    sums = torch.empty((programs, 3), dtype=torch.int64, device=device)
    symbols = torch.full((most,), SKIP, dtype=torch.uint8, device=device)
    nibbles = torch.empty(halves, dtype=torch.uint8, device=device)
    escaped = torch.empty_like(now)
    sizes = {"WIDTH": was.itemsize, "BLOCK": BLOCK, "SKIP": SKIP, "ESCAPE": ESCAPE}
    with current(device):
        count_symbols[(programs,)](table, places, was, now, counts, **sizes)
        ends = counts.cumsum(0, dtype=torch.int32)
        write_symbols[(programs,)](
            *(table, places, was, now, ends, symbols, nibbles, escaped, seeds, factors, sums),
            most,
            **sizes,
            DIGEST_BLOCK=_DIGEST_BLOCK,
        )
    until, summed = ends[last].to(torch.int64), sums.cumsum(0)[last]
    totals = [until[:, :1], summed[:, :2], until[:, 1:], summed[:, 2:]]
    return symbols, nibbles, escaped, torch.cat(totals, 1)
