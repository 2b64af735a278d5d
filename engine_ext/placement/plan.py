"""What one rank knows about the checkpoint: the plan that deltas are staged by.

Made once at start-up, with one exchange among the ranks: certified placement, who holds what, and
which tensors the digest covers.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine_ext.dtypes import NAME_OF_TORCH
from engine_ext.placement.casts import as_host, checkpoint_bits
from engine_ext.placement.ownership import box_of, boxes, resolve
from engine_ext.placement.segments import Placed, Placement, Status
from engine_ext.placement.targets import Target, make_targets
from engine_ext.ranks import Ranks
from engine_ext.wire.digest import Digest, tensor_digest

_SCAN_ELEMENTS = 1 << 20
_SCAN_INDICES = 1 << 15  # where indices are made too, their temporaries stay in a core's cache
# Of a tensor that is not on a rank, as far as can be seen, though its loader uses it.
_UNSEEN = "unseen"
# Casts from which the checkpoint's bits can be had back from live memory, NaNs too.
_WIDENED = {torch.bfloat16: (torch.float32,)}


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
    targets: dict[str, tuple[Target, ...]]
    held: frozenset[str]
    digested: frozenset[str]

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
                "recomputed": list(placed.recomputed),
                "digested": name in self.digested,
            }
            for name, placed in self.placement.items()
        ]

    def scan(self, threads: int = 1) -> dict[str, Digest]:
        """The digest of every covered tensor's elements that this rank counts, from live memory.

        Where this rank holds copies of them, it is that of the first.
        """
        pieces = [
            (name, target, start)
            for name in self.digested
            for number, target in enumerate(self.targets.get(name, ()))
            if target.ranks[0] == self.rank and target.first == number
            for start in _starts(target)
        ]
        found: dict[str, Digest] = {}
        with ThreadPoolExecutor(threads) as pool:
            digests = pool.map(lambda piece: self._piece_digest(*piece), pieces)
            for (name, _, _), digest in zip(pieces, digests, strict=True):
                found[name] = found.get(name, Digest.ZERO) + digest
        return found

    def _piece_digest(self, name: str, target: Target, start: int) -> Digest:
        dtype = NAME_OF_TORCH[self.placement[name].spec.dtype]
        stop = max(start, min(start + _SCAN_ELEMENTS, box_of(target.segment).end))
        shift = target.locator.shift
        if shift is not None and target.host is not None:
            live = target.host[start - shift : stop - shift]
            bits = checkpoint_bits(live, target.dtype, dtype)
            return tensor_digest(name, bits, start=start)
        total = Digest.ZERO
        step = _SCAN_INDICES if target.host is not None else _SCAN_ELEMENTS
        for begin in range(start, stop, step):
            indices = np.arange(begin, min(begin + step, stop))
            chosen, place = target.find(indices)
            once = slice(None, None, target.locator.copies)
            bits = checkpoint_bits(as_host(place.read()), target.dtype, dtype)
            total += tensor_digest(name, bits[once], indices[chosen][once])
        return total


def make_plan(placement: Placement, ranks: Ranks) -> Plan:
    """Agree with the other ranks on who holds what. All ranks must call it.

    Args:
        placement: this rank's, certified; tensors that do not fit the other ranks' become
            uncertified in it. Those that no rank holds become ignored, or uncertified where some
            rank's loader does something with them: it may put them where nobody looks.
        ranks: the other ranks.
    """
    holders = resolve(placement, ranks.all_gather(boxes(placement)))
    mine = {name: (_state(p), covered(p)) for name, p in placement.items()}
    everywhere = ranks.all_gather(mine)
    absent = {Status.NOT_ON_RANK.value, Status.IGNORED.value}
    held = frozenset(
        name for name in placement if any(r[name][0] not in absent for r in everywhere)
    )
    unseen = {n for n in held if all(r[n][0] in (*absent, _UNSEEN) for r in everywhere)}
    for name, placed in placement.items():
        if name in unseen:
            placed.refuse("the loader puts it where it cannot be followed")
        elif name not in held:
            placed.status = Status.IGNORED
    targets = {
        name: make_targets(placed.segments, holders[name])
        for name, placed in placement.items()
        if placed.status in (Status.EXACT, Status.CAST)
    }
    digested = frozenset(name for name in held - unseen if all(r[name][1] for r in everywhere))
    return Plan(ranks.rank, placement, targets, held, digested)


def _state(placed: Placed) -> str:
    """What the other ranks must know of a tensor's status."""
    return _UNSEEN if placed.used and placed.status is Status.NOT_ON_RANK else placed.status.value


def covered(placed: Placed) -> bool:
    """Whether the checkpoint's bits can be told from live memory on this rank."""
    if placed.status in (Status.NOT_ON_RANK, Status.EXACT):
        return True
    wider = _WIDENED.get(placed.spec.dtype, ())
    return placed.status in (Status.CAST, Status.UNJUDGED) and all(
        s.live.tensor.dtype in (placed.spec.dtype, *wider) for s in placed.segments
    )


def _starts(target: Target) -> range:
    """Where the pieces begin in which a segment is read; an empty one has a piece too."""
    box = box_of(target.segment)
    return range(box.start, max(box.end, box.start + 1), _SCAN_ELEMENTS)
