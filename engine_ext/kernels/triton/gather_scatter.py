"""Single elements of a live tensor on an accelerator: overwritten, and the old ones kept.

Nothing is specialised on sizes or alignments, so that one compilation at start-up serves every
sync: one that happened during a commit would hold generation up.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from engine_ext.kernels.triton.launch import current

BLOCK: Final = 1024  # elements of a program


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["live", "offsets", "new", "old"],
)
def exchange_elements(live, offsets, new, old, count, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    where = tl.load(offsets + at, mask=inside, other=0).to(tl.int64)
    if KEEP:
        tl.store(old + at, tl.load(live + where, mask=inside), mask=inside)
    tl.store(live + where, tl.load(new + at, mask=inside), mask=inside)


def put(flat: torch.Tensor, offsets: torch.Tensor, bits: torch.Tensor) -> None:
    """Overwrite elements of a 1-D integer tensor.

    Args:
        flat: [n], live memory as integers.
        offsets: int32 or int64 [k], contiguous, each at least 0 and below n, unique.
        bits: [k], dtype of `flat`, contiguous. All are on one device.
    """
    _launch(flat, offsets, bits, None)


def swap(flat: torch.Tensor, offsets: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """`put`, in one pass with a copy of the old elements, [k] on the same device."""
    old = torch.empty_like(bits)
    _launch(flat, offsets, bits, old)
    return old


def _launch(
    flat: torch.Tensor, offsets: torch.Tensor, bits: torch.Tensor, old: torch.Tensor | None
) -> None:
    count = offsets.numel()
    if not count:
        return
    kept = bits if old is None else old  # something must be given
    with current(flat.device):
        grid = (triton.cdiv(count, BLOCK),)
        exchange_elements[grid](flat, offsets, bits, kept, count, KEEP=old is not None, BLOCK=BLOCK)
