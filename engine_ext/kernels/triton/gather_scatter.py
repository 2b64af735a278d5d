"""Read, digest and overwrite single elements of many live tensors on an accelerator at once.

A launch takes as long as a thousand elements, and a part has a few thousand elements of each of
many tensors. So a table says where each program's elements are; `rows` makes it. It is made and
sent once, and every launch that visits these elements reads it.

Nothing is specialised on sizes, alignments or modes, so that one compilation at start-up
serves every sync: a compilation during a commit would delay generation.
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
from engine_ext.kernels.triton.block_sums import _curve, _mix

BLOCK: Final = 1024  # elements of a program; at most as many as the digest has factors of a lane
_FACTORS: Final = tl.constexpr(1024)
COLUMNS: Final = 5


@triton.jit(
    do_not_specialize=["table", "old", "group", "keep", "digest", "stored", "write"],
    do_not_specialize_on_alignment=["live_like", "sums", "factors"],
)
def visit_elements(
    table,
    live_like,
    old,
    sums,
    factors,
    group,
    keep,
    digest,
    stored,
    write,
    WIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Visit the elements of one row of the table; `live_like` has the type of all live tensors.

    `table` and `old` are addresses: they can be of pinned memory of the host. `keep`,
    `digest`, `stored` and `write` are BLOCK, or 0 if it is not done.
    """
    program = tl.program_id(0).to(tl.int64)
    row = table.to(tl.pointer_type(tl.int64)) + 5 * program
    bits = tl.pointer_type(live_like.dtype.element_ty)
    live = tl.load(row).to(bits)
    if WIDE:
        offsets = tl.load(row + 1).to(tl.pointer_type(tl.int64))
    else:
        offsets = tl.load(row + 1).to(tl.pointer_type(tl.int32))
    at = tl.arange(0, BLOCK)
    inside = at < tl.load(row + 4)
    where = tl.load(offsets + at, mask=inside, other=0).to(tl.int64)
    to = old.to(bits) + tl.load(row + 3) + at
    is_stored = inside & (at < stored)
    is_read = inside & (at >= stored) & ((at < keep) | (at < digest))
    was = tl.load(live + where, mask=is_read, other=0)
    was = tl.where(is_stored, tl.load(to, mask=is_stored, other=0), was)
    tl.store(to, was, mask=inside & (at < keep))
    if digest > 0:
        # The position counts programs, so that no two elements of a group have the same factor.
        block = (group.to(tl.int64) * 4294967296 + program).to(tl.uint64)
        curve = tl.where(inside, _curve(was, WIDTH), 0)
        sum0 = tl.sum(curve * tl.load(factors + at).to(tl.uint64), 0)
        sum1 = tl.sum(curve * tl.load(factors + _FACTORS + at).to(tl.uint64), 0)
        # Sums modulo 2 ** 64 are the same in any order.
        tl.atomic_add(sums, (sum0 * (_mix(block) | 1)).to(tl.int64), sem="relaxed")
        second = sum1 * (_mix(block + 0x9E3779B97F4A7C15) | 1)
        tl.atomic_add(sums + 1, second.to(tl.int64), sem="relaxed")
    address = tl.load(row + 2)
    written = inside & (at < tl.where(address != 0, write, 0))
    new = tl.load(address.to(bits) + at, mask=written & (at >= stored), other=0)
    tl.store(live + where, tl.where(is_stored, was, new), mask=written)


def rows(
    live: Sequence[int] | NDArray[np.int64],
    offsets: Sequence[int] | NDArray[np.int64],
    new: Sequence[int] | NDArray[np.int64],
    counts: Sequence[int] | NDArray[np.int64],
    *,
    width: int,
    wide: bool,
) -> NDArray[np.int64]:
    """Return a table, int64 [programs, 5], of some tensors' elements.

    Args:
        live, offsets, new: addresses on the device: of each tensor, of its elements' offsets, and
            of their new bits; 0: these elements are not overwritten. Offsets are unique and in the
            tensor.
        counts: elements of each tensor.
        width: bytes of an element.
        wide: whether the offsets are int64, not int32.
    """
    sizes = np.array(counts, np.int64)
    programs = -(-sizes // BLOCK)
    number = np.repeat(np.arange(sizes.size), programs)
    before = (np.cumsum(programs) - programs)[number]
    done = (np.arange(number.size) - before) * BLOCK
    starts = np.cumsum(sizes) - sizes
    sent = np.array(new, np.int64)[number]
    table = np.empty((number.size, COLUMNS), np.int64)
    table[:, 0] = np.array(live, np.int64)[number]
    table[:, 1] = np.array(offsets, np.int64)[number] + done * (8 if wide else 4)
    table[:, 2] = np.where(sent == 0, 0, sent + done * width)
    table[:, 3] = starts[number] + done
    table[:, 4] = np.minimum(sizes[number] - done, BLOCK)
    return table


def visit(
    table: torch.Tensor,
    live: torch.Tensor,
    factors: torch.Tensor,
    *,
    wide: bool,
    old: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    group: int = 0,
    keep: bool = False,
    stored: bool = False,
    write: bool = False,
) -> None:
    """Visit the elements of a table's rows. No memory is allocated, and nothing waits.

    Args:
        table: int64 [programs, 5], see `rows`; on the device or in pinned host memory.
        live: one of the live tensors, as integers: all have its dtype and device.
        factors: int64 [2048] on the device, see `block_sums.dense`.
        old: bits of the same dtype, [n], one per element, row after row; on the device or in pinned
            host memory. None if they are neither kept nor stored.
        sums: int64 [2] on the device. Two sums over all elements, each term a curve of the bits
            times an odd number that the element's place in the table gives, are added to it.
        group: below 2 ** 31; the sums of two tables whose numbers differ can be added.
        keep: whether the live elements are copied to `old`.
        stored: whether `old` takes the place of the live elements in the sums, and of the new bits
            in the write; not together with `keep`.
        write: whether the live elements are overwritten, after they were kept and digested, where
            the table has new bits.
    """
    programs = table.shape[0]
    if not programs:
        return
    modes = BLOCK * keep, BLOCK * (sums is not None), BLOCK * stored, BLOCK * write
    with current(live.device):
        visit_elements[(programs,)](
            # An address that is not read is no null: an empty tensor's would be, of 32 bits.
            *(table.data_ptr(), live, (table if old is None else old).data_ptr()),
            *(factors if sums is None else sums, factors, group, *modes),
            WIDE=wide,
            WIDTH=live.itemsize,
            BLOCK=BLOCK,
        )
