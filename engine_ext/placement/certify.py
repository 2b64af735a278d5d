"""Certification: prove a placement by comparing live memory with known checkpoint bytes.

A placement says where the loader wrote each element. It does not prove that the element is still
there: engines repack, transpose and transform weights after loading, sometimes into the same
storage with the same shape. Therefore a tensor can be updated only after every one of its live
elements was compared, bit by bit, with the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from engine_ext.dtypes import torch_bits_dtype
from engine_ext.kernels import bits_of
from engine_ext.placement.repacked import gather_live
from engine_ext.placement.segments import Placed, Placement, Segment, Status


def certify_placement(
    placement: Placement,
    checkpoint: Iterable[tuple[str, torch.Tensor]],
    *,
    moves_known: bool = True,
) -> None:
    """Compare every traced tensor with the checkpoint and set its status.

    The model is only read. A tensor that `checkpoint` does not contain becomes uncertified.

    Args:
        placement: the traced placement; the status of every `UNJUDGED` entry is set.
        checkpoint: (name, tensor) pairs of the checkpoint that the engine loaded.
        moves_known: whether the placement includes everything the engine does after loading. If
            not, a tensor whose elements are all equal is refused, because its bytes are the same
            in any order.
    """
    for name, tensor in checkpoint:
        placed = placement.get(name)
        if placed is not None and placed.status is Status.UNJUDGED:
            _judge(placed, tensor, moves_known)
    for placed in placement.values():
        if placed.status is Status.UNJUDGED:
            placed.refuse("its bytes were not among the checkpoint's")


def summary(placement: Placement) -> dict[str, int]:
    """Return how many tensors have each status."""
    return dict(Counter(placed.status.value for placed in placement.values()))


def uncertified(placement: Placement) -> dict[str, str]:
    """Return why tensors cannot be updated exactly, by name."""
    return {n: p.reason for n, p in placement.items() if p.status is Status.UNCERTIFIED}


def _judge(placed: Placed, tensor: torch.Tensor, moves_known: bool) -> None:
    if tuple(tensor.shape) != placed.spec.shape or tensor.dtype != placed.spec.dtype:
        placed.refuse("the checkpoint changed while the engine was starting")
        return
    source = tensor.detach().contiguous()
    if not moves_known and _all_equal(source):
        placed.refuse(
            "all its elements are the same, and what the engine does after loading was not "
            "observed: the bytes cannot prove where each element is"
        )
        return
    wrong = next((segment for segment in placed.segments if not holds(segment, source)), None)
    if wrong is not None:
        placed.refuse(
            f"the bytes in {wrong.live.name} are not the checkpoint's: the engine moved or "
            "changed them after loading"
        )
    elif all(segment.live.tensor.dtype == source.dtype for segment in placed.segments):
        placed.status = Status.EXACT
    else:
        placed.status = Status.CAST


def _all_equal(source: torch.Tensor) -> bool:
    bits = bits_of(source.view(-1))
    return bits.numel() > 1 and bool((bits == bits[0]).all())


def holds(segment: Segment, source: torch.Tensor) -> bool:
    """Return whether the live box has exactly the bits of the contiguous checkpoint tensor's."""
    live = gather_live(segment)
    expected = segment.source_view(source).to(device=live.device, dtype=live.dtype)
    bits = torch_bits_dtype(live.dtype)
    return torch.equal(live.contiguous().view(bits), expected.contiguous().view(bits))
