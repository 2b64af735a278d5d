"""Read, compare and overwrite single elements of many live tensors on an accelerator at once.

A launch takes as long as a thousand elements, and a part has a few thousand elements of each of
many tensors. So a table says where each program's elements are; `rows` makes it.

Nothing is specialised on sizes, alignments or modes, so that one compilation at start-up
serves every sync: a compilation during a commit would delay generation.
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

BLOCK: Final = 1024  # elements of a program
_COLUMNS: Final = 5


@triton.jit(
    do_not_specialize=["keep", "compare", "write"],
    do_not_specialize_on_alignment=["table", "old", "differs"],
)
def visit_elements(
    table, old, differs, keep, compare, write, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Visit the elements of one row of the table; `old` has the type of all live tensors.

    `keep`, `compare` and `write` are BLOCK, or 0 if it is not done.
    """
    row = table + 5 * tl.program_id(0).to(tl.int64)
    bits = tl.pointer_type(old.dtype.element_ty)
    live = tl.load(row).to(bits)
    if WIDE:
        offsets = tl.load(row + 1).to(tl.pointer_type(tl.int64))
    else:
        offsets = tl.load(row + 1).to(tl.pointer_type(tl.int32))
    at = tl.arange(0, BLOCK)
    inside = at < tl.load(row + 4)
    where = tl.load(offsets + at, mask=inside, other=0).to(tl.int64)
    before = tl.load(live + where, mask=inside, other=0)
    to = old + tl.load(row + 3) + at
    tl.store(to, before, mask=inside & (at < keep))
    compared = inside & (at < compare)
    other = compared & (before != tl.load(to, mask=compared, other=0))
    tl.store(differs + tl.program_id(0), tl.sum(other.to(tl.int32), 0))
    written = inside & (at < write)
    new = tl.load(row + 2).to(bits)
    tl.store(live + where, tl.load(new + at, mask=written, other=0), mask=written)


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
            of their new bits (unused if nothing is written). Offsets are unique and in the tensor.
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
    table = np.empty((number.size, _COLUMNS), np.int64)
    table[:, 0] = np.array(live, np.int64)[number]
    table[:, 1] = np.array(offsets, np.int64)[number] + done * (8 if wide else 4)
    table[:, 2] = np.array(new, np.int64)[number] + done * width
    table[:, 3] = starts[number] + done
    table[:, 4] = np.minimum(sizes[number] - done, BLOCK)
    return table


def prepare(
    table: NDArray[np.int64],
    old: torch.Tensor,
    *,
    wide: bool,
    keep: bool = False,
    compare: bool = False,
    write: bool = False,
) -> Callable[[], torch.Tensor]:
    """Return a function that visits the elements of a table's rows without allocating memory.

    It does not wait for the device.

    Args:
        table: see `rows`.
        old: integers of the live tensors' dtype on their device. If elements are kept or compared,
            it has one per element, row after row; otherwise it is not read.
        keep: whether the elements are copied to `old`.
        compare: whether they are compared with it; not together with `keep`.
        write: whether they are overwritten, after they were kept or compared.

    The function returns how many of each row's elements differ from `old`, int32 [programs]; 0 if
    they are not compared.
    """
    device, programs = old.device, len(table)
    differs = torch.empty(programs, dtype=torch.int32, device=device)
    sent = torch.from_numpy(table).to(device)
    modes = BLOCK * keep, BLOCK * compare, BLOCK * write

    def launch() -> torch.Tensor:
        if programs:
            with current(device):
                visit_elements[(programs,)](sent, old, differs, *modes, WIDE=wide, BLOCK=BLOCK)
        return differs

    return launch
