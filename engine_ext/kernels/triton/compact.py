"""List the elements that differ of many pairs of tensors on an accelerator: stream compaction.

Memory is read twice: first each program counts its differing elements, then each writes them to the
offset given by the counts of the programs before it. One launch visits many pairs, all of integers
of one dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from engine_ext.kernels.triton import current

BLOCK: Final = 4096  # elements of a program
_WARPS: Final = 8  # of a program: each thread has 16 elements
_ALIGNED: Final = 16  # bytes that one load takes


@triton.jit
def _load_pair(pairs, number, program, like, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the index of a program's first element, and old and new bits; 0 after the last one."""
    row = pairs + 5 * tl.load(number)
    bits = tl.pointer_type(like.dtype.element_ty)
    done = (program.to(tl.int64) - tl.load(row + 4)) * BLOCK
    old, new = tl.load(row).to(bits) + done, tl.load(row + 1).to(bits) + done
    left = tl.load(row + 2) - done
    at = tl.arange(0, BLOCK)
    if ALIGNED:
        old, new = tl.multiple_of(old, 16), tl.multiple_of(new, 16)
    if left >= BLOCK:  # without a mask, so that a load takes 16 bytes
        before, after = tl.load(old + at), tl.load(new + at)
    else:
        before = tl.load(old + at, mask=at < left, other=0)
        after = tl.load(new + at, mask=at < left, other=0)
    return tl.load(row + 3) + done, before, after


@triton.jit(do_not_specialize_on_alignment=["pairs", "numbers", "like", "counts"])
def count_differing(pairs, numbers, like, counts, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    program = tl.program_id(0)
    _, before, after = _load_pair(pairs, numbers + program, program, like, BLOCK, ALIGNED)
    tl.store(counts + program, tl.sum((before != after).to(tl.int32), 0))


@triton.jit(
    do_not_specialize=["base", "listed"],
    do_not_specialize_on_alignment=[
        *("pairs", "numbers", "ends", "places", "was", "now", "changed")
    ],
)
def write_differing(
    pairs,
    numbers,
    ends,
    base,
    listed,
    places,
    was,
    now,
    changed,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Write what the programs from `base` on have found, `listed` elements after the first ones.

    `changed` is set if that is more or less than was counted.
    """
    program = tl.program_id(0) + base
    first = tl.load(ends + program - 1, mask=program > 0, other=0)
    end = tl.load(ends + program)
    if end > first:
        start, before, after = _load_pair(pairs, numbers + program, program, was, BLOCK, ALIGNED)
        differs = (before != after).to(tl.int32)
        to = first - listed + tl.cumsum(differs, 0) - 1
        tl.store(changed, 1, mask=tl.sum(differs, 0) != end - first)
        # A tensor that has changed since it was counted must not write into others.
        kept = (differs != 0) & (to < end - listed)
        place = start + tl.arange(0, BLOCK)
        tl.store(places + to, place, mask=kept)
        tl.store(was + to, before, mask=kept)
        tl.store(now + to, after, mask=kept)


class Pairs:
    """Pairs of contiguous memory, old and new integers, whose differing elements are listed.

    The device is not waited for.

    Args:
        old, new: One of each per pair, [n], n > 0, all of one dtype on one device; fewer than 2**31
            elements in all. They must not change before all is written.
        starts: The index of each pair's first element.
        send: Copies int64 arrays to the device.

    Attributes:
        ends: How many elements differ up to the end of each pair, int32 [pairs], on the device.
        changed: Whether `write` has found others, as they have changed since; int32 [1], likewise.
    """

    def __init__(
        self,
        old: Sequence[torch.Tensor],
        new: Sequence[torch.Tensor],
        starts: Sequence[int],
        send: Callable[[Sequence[NDArray[np.int64]]], Sequence[torch.Tensor]],
    ) -> None:
        addresses = np.array([[one.data_ptr() for one in side] for side in (old, new)], np.uint64)
        sizes = np.array([one.numel() for one in new], np.int64)
        programs = -(-sizes // BLOCK)
        self._programs = np.cumsum(programs)  # up to the end of each pair
        self._aligned = not (addresses % _ALIGNED).any()
        rows = [*addresses.view(np.int64), sizes, np.array(starts), self._programs - programs]
        table = np.stack(rows, 1)
        self._pairs, programs_there, last = send([table, programs, self._programs - 1])
        self._like, count = new[0], int(self._programs[-1])
        self._numbers = torch.repeat_interleave(programs_there, output_size=count)
        counts = torch.empty(count, dtype=torch.int32, device=self._like.device)
        with current(counts.device):
            count_differing[(count,)](
                *(self._pairs, self._numbers, self._like, counts),
                BLOCK=BLOCK,
                ALIGNED=self._aligned,
                num_warps=_WARPS,
            )
        self._ends = counts.cumsum(0, dtype=torch.int32)
        self.ends = self._ends[last]
        self.changed = torch.zeros(1, dtype=torch.int32, device=self._like.device)

    def write(
        self, these: range, before: int, nnz: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """List the elements of consecutive pairs that differ.

        Args:
            these: The numbers of the pairs.
            before: How many elements of the pairs before them differ, by `ends`.
            nnz: How many of theirs do, at least one.

        Returns:
            Their indices, int64, ascending in each pair, and their old and new bits, [nnz] each.
        """
        device = self._like.device
        places = torch.empty(nnz, dtype=torch.int64, device=device)
        was, now = (torch.empty(nnz, dtype=self._like.dtype, device=device) for _ in range(2))
        base = int(self._programs[these.start - 1]) if these.start else 0
        with current(device):
            write_differing[(int(self._programs[these.stop - 1]) - base,)](
                *(self._pairs, self._numbers, self._ends, base, before),
                *(places, was, now, self.changed),
                BLOCK=BLOCK,
                ALIGNED=self._aligned,
                num_warps=_WARPS,
            )
        return places, was, now
