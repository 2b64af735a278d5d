"""How two tensors on an accelerator differ, by their bits: `delta_sender.diff_host` for that memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine_ext.kernels.triton import runs_kernels


class Differing(NamedTuple):
    """The elements that differ, where the tensors lie.

    Attributes:
        places: their numbers, ascending; int32 or int64 [nnz].
        old, new: their bits, integers [nnz].
    """

    places: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor


def _at_once(there: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: there


def begin_differing(
    old: torch.Tensor,
    new: torch.Tensor,
    start: int,
    dtype: torch.dtype,
    bring: Callable[[torch.Tensor], Callable[[], torch.Tensor]] = _at_once,
) -> Callable[[], Differing]:
    """Have two tensors compared on the thread's current stream of their device.

    Args:
        old, new: integers of one dtype, contiguous [n], on one device. They must stay as they are
            until the result has been used.
        start: the number of the first element.
        dtype: of the places; int32 where the last element's number allows it.
        bring: begins to copy to host memory, as of `delta_sender.copy_streams.Copies`; where it
            does, what is launched after this call is not waited for.

    Returns:
        What waits for the number of those that differ, and has them written down.

    Raises:
        ValueError: the two are not alike.
    """
    if (old.dtype, old.shape, old.device) != (new.dtype, new.shape, new.device) or old.ndim != 1:
        raise ValueError("old and new are not integers of one dtype, shape and device")
    if not runs_kernels(old.device):
        return lambda: _by_operators(old, new, start, dtype)
    from engine_ext.kernels.triton import compact

    ends = compact.count(old, new)
    nnz = bring(ends[-1:])
    return lambda: Differing(*compact.write(old, new, ends, int(nnz().sum()), start, dtype))


def _by_operators(
    old: torch.Tensor, new: torch.Tensor, start: int, dtype: torch.dtype
) -> Differing:
    places = (old != new).nonzero().view(-1)
    return Differing((places + start).to(dtype), old[places], new[places])
