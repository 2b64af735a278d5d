"""Certification: live memory compared with known checkpoint bytes, through the placement.

A placement says where the loader put each element; it does not say that the element is still
there. Engines repack, transpose and transform weights after loading, sometimes into the same
storage with the same shape. So a placement counts only for tensors whose live bytes were seen
to be the checkpoint's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from engine_ext.dtypes import torch_bits_dtype
from engine_ext.placement import Placed, Placement, Segment, Status
from engine_ext.repack import gather_live


def certify(placement: Placement, checkpoint: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Judge every placed tensor by the checkpoint's bytes.

    Args:
        placement: as traced; every `UNJUDGED` entry is given its final status.
        checkpoint: (name, tensor) pairs of the checkpoint that the engine was loaded from.

    The model is only read. A tensor that `checkpoint` does not hold stays uncertified.
    """
    for name, tensor in checkpoint:
        placed = placement.get(name)
        if placed is not None and placed.status is Status.UNJUDGED:
            _judge(placed, tensor)
    for placed in placement.values():
        if placed.status is Status.UNJUDGED:
            placed.refuse("its bytes were not among the checkpoint's")


def _judge(placed: Placed, tensor: torch.Tensor) -> None:
    if tuple(tensor.shape) != placed.spec.shape or tensor.dtype != placed.spec.dtype:
        placed.refuse("the checkpoint changed while the engine was starting")
        return
    source = tensor.detach().contiguous()
    if all(s.live.tensor.dtype == source.dtype for s in placed.segments):
        status = Status.EXACT
    else:
        status = Status.CAST
    wrong = next((s for s in placed.segments if not holds(s, source)), None)
    if wrong is None:
        placed.status = status
    else:
        placed.refuse(
            f"the bytes in {wrong.live.name} are not the checkpoint's: the engine moved or "
            "changed them after loading"
        )


def holds(segment: Segment, source: torch.Tensor) -> bool:
    """Whether the live box holds exactly the bits of the checkpoint tensor's box.

    Args:
        segment: a box of the tensor.
        source: the contiguous checkpoint tensor, on any device.
    """
    live = gather_live(segment)
    expected = segment.source_view(source).to(device=live.device, dtype=live.dtype)
    bits = torch_bits_dtype(live.dtype)
    return torch.equal(live.contiguous().view(bits), expected.contiguous().view(bits))


def summary(placement: Placement) -> dict[str, int]:
    """How many tensors have each status."""
    return dict(Counter(placed.status.value for placed in placement.values()))
