"""Overwrite single elements of a live tensor on an accelerator, and return the old ones.

Nothing is specialised on sizes or alignments, so one compilation at start-up serves every sync: a
compilation during a commit would delay generation.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from engine_ext.kernels.triton import current

BLOCK: Final = 1024  # elements of a program


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["live", "offsets", "new", "old"]
)
def exchange_elements(live, offsets, new, old, count, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    where = tl.load(offsets + at, mask=inside, other=0).to(tl.int64)
    if KEEP:
        tl.store(old + at, tl.load(live + where, mask=inside), mask=inside)
    tl.store(live + where, tl.load(new + at, mask=inside), mask=inside)


def put(flat: torch.Tensor, offsets: torch.Tensor, bits: torch.Tensor) -> None:
    """Overwrite elements of a 1-D integer tensor [n]; all tensors are on one device.

    `offsets` are int32 or int64 [k], each in [0, n), unique; `bits` is [k], dtype of `flat`. Both
    are contiguous.
    """
    _launch(flat, offsets, bits, None)


def swap(flat: torch.Tensor, offsets: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Overwrite elements as `put`, and return the old ones, [k] on the same device."""
    old = torch.empty_like(bits)
    _launch(flat, offsets, bits, old)
    return old


def _launch(
    flat: torch.Tensor, offsets: torch.Tensor, bits: torch.Tensor, old: torch.Tensor | None
) -> None:
    count = offsets.numel()
    if not count:
        return
    kept = bits if old is None else old  # unused, but the kernel needs a pointer
    with current(flat.device):
        grid = (triton.cdiv(count, BLOCK),)
        exchange_elements[grid](flat, offsets, bits, kept, count, KEEP=old is not None, BLOCK=BLOCK)
