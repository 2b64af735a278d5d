"""What one rank knows about the checkpoint: the plan that deltas are staged by.

Made once at start-up, with one exchange among the ranks: certified placement, who holds what, and
which tensors the digest covers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.digest import Digest, tensor_digest
from engine_ext.dtypes import NAME_OF_TORCH
from engine_ext.holders import box_of, boxes, resolve
from engine_ext.kernels import bits_of, gather
from engine_ext.locate import Locator, compact
from engine_ext.placement import Placed, Placement, Status
from engine_ext.ranks import Ranks
from engine_ext.writes import Target, checkpoint_bits

_SCAN_ELEMENTS = 1 << 22
# Casts that lose nothing: the checkpoint's bits can be had back from live memory.
_WIDENED = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The placement of every checkpoint tensor on this rank, and its place among the ranks.

    Attributes:
        rank: this rank.
        placement: certified; the status of each tensor is final.
        targets: for each tensor its segments on this rank.
        held: tensors that some rank holds.
        digested: tensors that the digest covers, the same on every rank.
    """

    rank: int
    placement: Placement
    targets: dict[str, list[Target]]
    held: frozenset[str]
    digested: frozenset[str]

    @property
    def elements(self) -> int:
        """Checkpoint elements on this rank."""
        return sum(
            int(np.prod(target.segment.sizes, dtype=np.int64))
            for targets in self.targets.values()
            for target in targets
        )

    def table(self) -> list[dict[str, Any]]:
        """One row per checkpoint tensor, as JSON."""
        return [
            {
                "name": name,
                "dtype": NAME_OF_TORCH[placed.spec.dtype],
                "shape": list(placed.spec.shape),
                "status": placed.status.value,
                "reason": placed.reason,
                "live": sorted({s.live.name for s in placed.segments}),
                "repacked": any(s.repack is not None for s in placed.segments),
                "digested": name in self.digested,
            }
            for name, placed in self.placement.items()
        ]

    def scan(self) -> dict[str, Digest]:
        """The digest of every covered tensor's elements that this rank counts, from live memory."""
        found: dict[str, Digest] = {}
        for name in self.digested:
            dtype = NAME_OF_TORCH[self.placement[name].spec.dtype]
            for target in self.targets.get(name, []):
                if target.ranks[0] == self.rank:
                    digest = _target_digest(name, dtype, target, self.placement[name].spec.numel)
                    found[name] = found.get(name, Digest.ZERO) + digest
        return found


def make_plan(placement: Placement, ranks: Ranks) -> Plan:
    """Agree with the other ranks on who holds what. All ranks must call it.

    Args:
        placement: this rank's, certified; tensors that do not fit the other ranks' become
            uncertified in it, and those that no rank holds become ignored.
        ranks: the other ranks.
    """
    holders = resolve(placement, ranks.all_gather(boxes(placement)))
    mine = {name: (p.status.value, covered(p)) for name, p in placement.items()}
    everywhere = ranks.all_gather(mine)
    absent = {Status.NOT_ON_RANK.value, Status.IGNORED.value}
    held = frozenset(
        name for name in placement if any(r[name][0] not in absent for r in everywhere)
    )
    for name, placed in placement.items():
        if name not in held:
            placed.status = Status.IGNORED
    targets = {
        name: [Target(s, Locator(s), holders[name][box_of(s)]) for s in placed.segments]
        for name, placed in placement.items()
        if placed.status in (Status.EXACT, Status.CAST)
    }
    digested = frozenset(name for name in held if all(r[name][1] for r in everywhere))
    return Plan(ranks.rank, placement, targets, held, digested)


def covered(placed: Placed) -> bool:
    """Whether the checkpoint's bits can be told from live memory on this rank."""
    if placed.status in (Status.NOT_ON_RANK, Status.EXACT):
        return True
    wider = _WIDENED.get(placed.spec.dtype, ())
    return placed.status in (Status.CAST, Status.UNJUDGED) and all(
        s.live.tensor.dtype in (placed.spec.dtype, *wider) for s in placed.segments
    )


def _target_digest(name: str, dtype: str, target: Target, numel: int) -> Digest:
    total = Digest.ZERO
    for indices, bits in _target_bits(dtype, target, numel):
        total += tensor_digest(name, bits, indices)
    return total


def _target_bits(
    dtype: str, target: Target, numel: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
    """The flat indices and checkpoint bits of a segment's elements, some at a time."""
    box = box_of(target.segment)
    live = target.segment.live
    flat = bits_of(live.flat())
    for start in range(box.start, min(box.end, numel), _SCAN_ELEMENTS):
        stop = min(start + _SCAN_ELEMENTS, box.end)
        indices = np.arange(start, stop)
        chosen, offsets = target.locator(indices)
        where = compact(offsets[:: target.locator.copies], flat.numel()).to(flat.device)
        bits = checkpoint_bits(gather(flat, where), live.tensor.dtype, dtype)
        yield indices[chosen][:: target.locator.copies], bits
