"""Write the gap streams of changed elements on an accelerator, and sum their digest's terms.

`engine_ext.format.gap_streams` defines the symbols, here of one byte, and the sums are those of
`engine_ext.format.digest`. Elements of many pieces of tensors come one after another; each piece
has a stream of its own. First each program counts its symbols, then each writes them to the offset
given by the counts of the programs before it. A table says which elements each program has; `rows`
makes it.
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
_COLUMNS: Final = 4
SKIP: Final = 255  # the symbol that skips as many elements


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


@triton.jit(do_not_specialize_on_alignment=["table", "places", "counts"])
def count_symbols(table, places, counts, BLOCK: tl.constexpr, SKIP: tl.constexpr):
    row = table + 4 * tl.program_id(0).to(tl.int64)
    _, inside, _, gap = _gaps(row, places, BLOCK)
    tl.store(counts + tl.program_id(0), tl.sum(inside.to(tl.int32) + gap // SKIP, 0))


@triton.jit(
    do_not_specialize_on_alignment=[
        *("table", "places", "was", "now", "ends", "symbols", "seeds", "factors", "sums")
    ]
)
def write_symbols(
    table,
    places,
    was,
    now,
    ends,
    symbols,
    seeds,
    factors,
    sums,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SKIP: tl.constexpr,
    DIGEST_BLOCK: tl.constexpr,
):
    """Write the symbol that ends each gap, and a program's two sums; skips are there before."""
    program = tl.program_id(0)
    row = table + 4 * program.to(tl.int64)
    first, inside, here, gap = _gaps(row, places, BLOCK)
    skips = gap // SKIP
    done = tl.load(ends + program - 1, mask=program > 0, other=0)
    to = done + tl.cumsum(inside.to(tl.int32) + skips, 0) - 1
    tl.store(symbols + to, (gap - skips * SKIP).to(tl.uint8), mask=inside)

    at = first + tl.arange(0, BLOCK)
    after = _curve(tl.load(now + at, mask=inside, other=0), WIDTH)
    before = _curve(tl.load(was + at, mask=inside, other=0), WIDTH)
    curve = tl.where(inside, after - before, 0)
    seed = seeds + 2 * tl.load(row + 3)
    block, within = (here // DIGEST_BLOCK).to(tl.uint64), here % DIGEST_BLOCK
    for lane in tl.static_range(2):
        factor = tl.load(factors + lane * DIGEST_BLOCK + within).to(tl.uint64)
        number = _mix(tl.load(seed + lane).to(tl.uint64) + block) | 1
        total = tl.sum(curve * factor * number, 0)
        tl.store(sums + 2 * program.to(tl.int64) + lane, total.to(tl.int64))


def rows(
    sizes: NDArray[np.int64], starts: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a table, int64 [programs, 4], and the number of programs up to the end of each piece.

    Args:
        sizes: Elements of each piece, in the order in which they are listed.
        starts: The index in its tensor at which each piece begins.
    """
    programs = -(-sizes // BLOCK)
    ends = np.cumsum(programs)
    number = np.repeat(np.arange(sizes.size), programs)
    done = (np.arange(number.size) - (ends - programs)[number]) * BLOCK
    table = np.empty((number.size, _COLUMNS), np.int64)
    table[:, 0] = (np.cumsum(sizes) - sizes)[number] + done
    table[:, 1] = np.minimum(sizes[number] - done, BLOCK)
    table[:, 2] = np.where(done > 0, -1, np.array(starts, np.int64)[number])
    table[:, 3] = number
    return table, ends


def write(
    table: torch.Tensor,
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    last: torch.Tensor,
    seeds: torch.Tensor,
    factors: torch.Tensor,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the streams of all pieces, without waiting for the device.

    Args:
        table: See `rows`, on the device; at least one element.
        found: Places, old and new bits, [n] each, as `compact.write` returns them.
        last: The last program of each piece, int64 [pieces].
        seeds: Of the names of the pieces' tensors, int64 [pieces, 2].
        factors: a(0, j), then a(1, j), int64 [2048].
        most: Symbols for which there is to be room, below 2**31.

    Returns:
        The streams one after another, uint8 [most]; and int64 [pieces, 3]: how many symbols there
        are up to the end of each piece, and both lanes' sums over new minus old elements up to
        there, modulo 2**64.
    """
    places, was, now = found
    device, programs = places.device, len(table)
    counts = torch.empty(programs, dtype=torch.int32, device=device)
    sums = torch.empty((programs, 2), dtype=torch.int64, device=device)
    symbols = torch.full((most,), SKIP, dtype=torch.uint8, device=device)
    with current(device):
        count_symbols[(programs,)](table, places, counts, BLOCK=BLOCK, SKIP=SKIP)
        ends = counts.cumsum(0, dtype=torch.int32)
        write_symbols[(programs,)](
            *(table, places, was, now, ends, symbols, seeds, factors, sums),
            WIDTH=was.itemsize,
            BLOCK=BLOCK,
            SKIP=SKIP,
            DIGEST_BLOCK=_DIGEST_BLOCK,
        )
    totals = torch.cat([ends.to(torch.int64)[:, None], sums.cumsum(0)], 1)
    return symbols, totals[last]
