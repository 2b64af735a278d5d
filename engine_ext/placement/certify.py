"""Certification: live memory compared with known checkpoint bytes, through the placement.

A placement says where the loader put each element; it does not say that the element is still
there. Engines repack, transpose and transform weights after loading, sometimes into the same
storage with the same shape. So a placement counts only for tensors whose live bytes were seen
to be the checkpoint's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from engine_ext.dtypes import torch_bits_dtype
from engine_ext.kernels.gather_scatter import bits_of, gather
from engine_ext.placement.locator import Locator, compact
from engine_ext.placement.repacked import gather_live
from engine_ext.placement.segments import Placed, Placement, Segment, Status, TensorSpec

# Elements of a tensor that a sample has at least: smaller tensors are always compared whole.
_LEAST_SAMPLED = 1 << 16


def certify(
    placement: Placement,
    checkpoint: Iterable[tuple[str, torch.Tensor]],
    sample: float = 1.0,
    *,
    moves_known: bool = True,
) -> None:
    """Judge every placed tensor by the checkpoint's bytes.

    Args:
        placement: as traced; every `UNJUDGED` entry is given its final status.
        checkpoint: (name, tensor) pairs of the checkpoint that the engine was loaded from.
        sample: which share of a large tensor's elements is compared, above 0; 1 is all of them.
            Below 1, a difference between elements that are not in the sample goes unseen.
        moves_known: whether the placement has all that the engine does after loading. If not, a
            tensor whose elements are all the same is refused: its bytes look right in any order.

    The model is only read. A tensor that `checkpoint` does not hold stays uncertified.
    """
    for name, tensor in checkpoint:
        placed = placement.get(name)
        if placed is not None and placed.status is Status.UNJUDGED:
            _judge(placed, tensor, sample, moves_known)
    for placed in placement.values():
        if placed.status is Status.UNJUDGED:
            placed.refuse("its bytes were not among the checkpoint's")


def _judge(placed: Placed, tensor: torch.Tensor, sample: float, moves_known: bool) -> None:
    if tuple(tensor.shape) != placed.spec.shape or tensor.dtype != placed.spec.dtype:
        placed.refuse("the checkpoint changed while the engine was starting")
        return
    source = tensor.detach().contiguous()
    if not moves_known and _constant(source):
        placed.refuse(
            "all its elements are the same, and what the engine does after loading was not seen: "
            "the bytes cannot show where each of them lies"
        )
        return
    if all(s.live.tensor.dtype == source.dtype for s in placed.segments):
        status = Status.EXACT
    else:
        status = Status.CAST
    indices = _sampled(placed.spec, sample)
    wrong = next(
        (
            segment
            for segment in placed.segments
            if not (
                holds(segment, source)
                if indices is None
                else holds_sample(segment, source, indices)
            )
        ),
        None,
    )
    if wrong is None:
        placed.status = status
    else:
        placed.refuse(
            f"the bytes in {wrong.live.name} are not the checkpoint's: the engine moved or "
            "changed them after loading"
        )


def _constant(source: torch.Tensor) -> bool:
    bits = bits_of(source.view(-1))
    return bits.numel() > 1 and bool((bits == bits[0]).all())


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


def holds_sample(segment: Segment, source: torch.Tensor, indices: NDArray[np.int64]) -> bool:
    """Whether live memory holds the bits of some checkpoint elements, where they lie in the box.

    Args:
        segment: a box of the tensor.
        source: the contiguous checkpoint tensor, on any device.
        indices: int64 [n], ascending flat checkpoint indices.
    """
    locator = Locator(segment)
    chosen, offsets = locator(indices)
    flat = segment.live.flat()
    where = compact(offsets, flat.numel()).to(flat.device)
    expected = source.view(-1)[torch.from_numpy(indices[chosen]).to(source.device)]
    return torch.equal(
        gather(bits_of(flat), where), bits_of(expected.to(device=flat.device, dtype=flat.dtype))
    )


def _sampled(spec: TensorSpec, share: float) -> NDArray[np.int64] | None:
    """Which elements to compare, ascending; None for all. The same at every start."""
    count = max(_LEAST_SAMPLED, round(spec.numel * share))
    if share >= 1 or count >= spec.numel:
        return None
    generator = np.random.default_rng(xxhash.xxh3_64_intdigest(spec.name.encode()))
    ends = np.array([0, spec.numel - 1])
    return np.unique(np.concatenate([ends, generator.integers(0, spec.numel, count)]))


def summary(placement: Placement) -> dict[str, int]:
    """How many tensors have each status."""
    return dict(Counter(placed.status.value for placed in placement.values()))
