"""The plan: what one rank knows about the checkpoint, agreed with the other ranks at start-up.

It combines the certified placement, the ranks that hold each element, and the set of tensors that
the digest covers. Deltas are staged by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.dtypes import NAME_OF_TORCH, TORCH_DTYPE, name_of
from engine_ext.format import Digest, change_digest, device_digest, tensor_digest
from engine_ext.kernels import Bits, same_device
from engine_ext.placement.casts import appended_bits, as_host, checkpoint_bits
from engine_ext.placement.certify import Certified
from engine_ext.placement.ownership import box_of, boxes, resolve
from engine_ext.placement.segments import Placed, Placement, Segment, Status, TensorSpec
from engine_ext.placement.targets import Target, make_targets
from engine_ext.ranks import RankGroup

_SCAN_ELEMENTS = 1 << 20
# The limit for a run on a device, where a piece costs a launch: 16 us of an H100's time.
_DEVICE_SCAN_ELEMENTS = 1 << 24
_SCAN_INDICES = 1 << 15  # if indices are needed, too: their temporaries stay in a core's cache
# The loader reads the tensor, but no copy of it was found on the rank.
_UNSEEN = "unseen"
_DROPPED = "dropped"
_GIVEN_UP = (Status.UNCERTIFIED, Status.IGNORED, Status.NOT_ON_RANK)
# Casts that keep the checkpoint's bits recoverable from live memory, also those of NaNs.
_WIDENED = {torch.bfloat16: (torch.float32,)}


@dataclass(frozen=True, slots=True)
class Plan:
    """The placement of every checkpoint tensor on this rank, agreed with the other ranks.

    Attributes:
        placement: certified; the status of each tensor is final.
        targets: the segments on this rank of each tensor that can be updated.
        held: the tensors that some rank holds; the same on every rank.
        digested: the tensors that the digest covers; the same on every rank.
        dropped: names of tied tensors that the checkpoint does not hold and that the loader of
            every rank drops, with the tensors' own specs.
        tied: by name, the tensor that it shares memory with on this rank: names that are dropped,
            and tensors of the checkpoint. A sync must give both the same values.
    """

    rank: int
    placement: Placement
    targets: dict[str, tuple[Target, ...]]
    held: frozenset[str]
    digested: frozenset[str]
    dropped: Mapping[str, TensorSpec] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)

    def writes(self, name: str) -> bool:
        """Return whether a tensor is written; else it is tied to one that has the same place."""
        other = self.tied.get(name)
        placed = self.placement.get(name)
        if other is None or placed is None:
            return True
        return placed.segments != self.placement[other].segments

    def ignores(self, name: str) -> TensorSpec | None:
        """Return the spec of a tensor that no rank uses, or None if a rank uses it."""
        placed = self.placement.get(name)
        if placed is None:
            return self.dropped.get(name)
        return placed.spec if placed.status is Status.IGNORED else None

    def table(self) -> list[dict[str, Any]]:
        """Return one row per checkpoint tensor and name in `dropped`, as JSON."""
        dropped = {n: Placed(spec, status=Status.IGNORED) for n, spec in self.dropped.items()}
        return [
            {
                "name": name,
                "dtype": name_of(placed.spec.dtype),
                "shape": list(placed.spec.shape),
                "status": placed.status.value,
                "reason": placed.reason,
                "live": sorted({s.live.name for s in placed.segments}),
                "repacked": any(s.repack is not None for s in placed.segments),
                "recomputed": list(placed.recomputed),
                "digested": name in self.digested,
                "tied_to": self.tied.get(name, ""),
            }
            for name, placed in {**self.placement, **dropped}.items()
        ]

    def scan(self, threads: int = 1, known: Certified | None = None) -> dict[str, Digest]:
        """Return, by tensor, the digest of the elements that this rank counts, from live memory.

        If this rank holds several copies of an element, the first one counts. Boxes that the
        certification has digested (`known`) are not read again.
        """
        found: dict[str, Digest] = {}
        pieces = []
        for name in self.digested:
            boxes_known = {} if known is None else known.get(name, {})
            taken = set()
            for piece in self.pieces(name):
                number = piece[0]
                box = box_of(self.targets[name][number].segment)
                if box not in boxes_known:
                    pieces.append((name, *piece))
                elif number not in taken:
                    taken.add(number)
                    found[name] = found.get(name, Digest.ZERO) + boxes_known[box]
        with ThreadPoolExecutor(threads, initializer=same_device()) as pool:
            digests = pool.map(lambda piece: self.piece_digest(*piece), pieces)
            for (name, *_), digest in zip(pieces, digests, strict=True):
                found[name] = found.get(name, Digest.ZERO) + digest
        return found

    def scan_all(self) -> tuple[dict[str, Digest], dict[tuple[str, str], set[str]]]:
        """Return what `scan` does, and the digests of what is held more than once; in one pass.

        All copies of a box of elements have one digest, on all ranks, while nothing but syncs has
        written to them.

        Returns:
            The digests of the elements that this rank counts; and by tensor and box of its elements
            the digests of the copies on this rank, in hex.
        """
        counted: dict[str, Digest] = {}
        shared: dict[tuple[str, str], set[str]] = {}
        for name in self.digested:
            targets = self.targets.get(name, ())
            firsts = Counter(target.first for target in targets)
            copies: dict[tuple[int, int], Digest] = {}
            for number, start, copy in self.pieces(name, copies=True):
                digest = self.piece_digest(name, number, start, copy)
                copies[number, copy] = copies.get((number, copy), Digest.ZERO) + digest
            for (number, copy), digest in copies.items():
                one = targets[number]
                if one.ranks[0] == self.rank and one.first == number and copy == 0:
                    counted[name] = counted.get(name, Digest.ZERO) + digest
                if len(one.ranks) > 1 or firsts[one.first] > 1 or one.locator.copies > 1:
                    box = str(box_of(one.segment))
                    shared.setdefault((name, box), set()).add(digest.hex())
        return counted, shared

    def pieces(self, name: str, *, copies: bool = False) -> Iterator[tuple[int, int, int]]:
        """Yield the pieces in which `piece_digest` takes a tensor, each once.

        They are those of the elements that this rank counts, the first copy of each; or with
        `copies` everything that this rank holds of it.

        Yields:
            The target's number, the flat index that the piece begins at, and which copy of the
            elements in the target it is.
        """
        for number, target in enumerate(self.targets.get(name, ())):
            if not copies and (target.ranks[0] != self.rank or target.first != number):
                continue
            box = box_of(target.segment)  # an empty one has one piece, too
            for copy in range(target.locator.copies if copies else 1):
                for start in range(box.start, max(box.end, box.start + 1), _step(target)):
                    yield number, start, copy

    def piece_digest(self, name: str, number: int, start: int, copy: int = 0) -> Digest:
        """Return the digest of one of `pieces` from live memory."""
        target, dtype = self.targets[name][number], NAME_OF_TORCH[self.placement[name].spec.dtype]
        stop = max(start, min(start + _step(target), box_of(target.segment).end))
        shift = target.locator.shift
        if _is_digested_on_device(target, dtype):
            if shift is not None:
                return device_digest(name, target.flat[start - shift : stop - shift], start=start)
            places, offsets = target.locator.elements_in(start, stop, target.flat.device, copy)
            return device_digest(name, target.flat[offsets], places)
        if shift is not None:
            memory = as_host(target.flat[start - shift : stop - shift].cpu())
            return _live_digest(name, memory, target.dtype, dtype, None, start)
        total = Digest.ZERO
        step = _SCAN_INDICES if target.host is not None else _SCAN_ELEMENTS
        for begin in range(start, stop, step):
            indices = np.arange(begin, min(begin + step, stop))
            chosen, elements = target.find(indices)
            once = slice(copy, None, target.locator.copies)
            memory = as_host(elements.read())[once]
            total += _live_digest(name, memory, target.dtype, dtype, indices[chosen][once])
        return total


def _step(target: Target) -> int:
    # Elements that are no run take 48 bytes of a device each: their indices are computed.
    is_run = target.host is None and target.locator.shift is not None
    return _DEVICE_SCAN_ELEMENTS if is_run else _SCAN_ELEMENTS


def _is_digested_on_device(target: Target, dtype: str) -> bool:
    """Whether live memory on a device has the checkpoint's bits in the order of the checkpoint."""
    unchanged = target.dtype == TORCH_DTYPE[dtype] and target.locator.is_box
    return target.host is None and unchanged


def _live_digest(
    name: str,
    bits: Bits,
    live: torch.dtype,
    dtype: str,
    indices: NDArray[np.int64] | None,
    start: int = 0,
) -> Digest:
    """Return the digest of bits of live memory, which is the checkpoint's if none was changed."""
    found = tensor_digest(name, checkpoint_bits(bits, live, dtype), indices, start)
    appended = appended_bits(bits, live, dtype)
    if appended is not None:
        none = np.zeros_like(appended)
        found += change_digest(f"{name}, appended", indices, none, appended, start)
    return found


def make_plan(
    placement: Placement,
    ranks: RankGroup,
    dropped: Mapping[str, TensorSpec] | None = None,
    tied: Mapping[str, str] | None = None,
) -> Plan:
    """Agree with the other ranks on which rank holds what. All ranks must call it.

    Args:
        placement: this rank's certified placement; tensors that contradict the other ranks'
            become uncertified in it. Tensors that no rank holds become ignored, or uncertified
            if some rank's loader uses them, because it might keep a copy that was not found.
        dropped: the other names of tied tensors that this rank's loader is proven to drop.
        tied: the checkpoint's tensors that this rank's loader drops, each with the one that it is
            tied to. One that some rank refuses is not compared with that: it is never written.
    """
    holders = resolve(placement, ranks.all_gather(boxes(placement)))
    own = {n: (_state(p), covered(p)) for n, p in placement.items()}
    everywhere = ranks.all_gather(own | dict.fromkeys(dropped or {}, (_DROPPED, True)))
    absent = {Status.NOT_ON_RANK.value, Status.IGNORED.value}
    held = frozenset(n for n in placement if any(r[n][0] not in absent for r in everywhere))
    unseen = {n for n in held if all(r[n][0] in (*absent, _UNSEEN) for r in everywhere)}
    for name, placed in placement.items():
        if name in unseen:
            placed.refuse("the loader reads it, but no copy of it was found on any rank")
        elif name not in held:
            placed.status = Status.IGNORED
    targets = {
        name: make_targets(placed.segments, holders[name])
        for name, placed in placement.items()
        if placed.status in (Status.EXACT, Status.CAST, Status.REBUILT)
    }
    digested = frozenset(name for name in held - unseen if all(r[name][1] for r in everywhere))
    agreed = {n: s for n, s in (dropped or {}).items() if all(n in states for states in everywhere)}
    refused = Status.UNCERTIFIED.value
    pairs = {name: spec.name for name, spec in agreed.items()} | {
        name: other
        for name, other in (tied or {}).items()
        if all(states[name][0] != refused for states in everywhere)
    }
    return Plan(ranks.rank, placement, targets, held, digested, agreed, pairs)


def _state(placed: Placed) -> str:
    """Return the status of a tensor as the other ranks need to know it."""
    return _UNSEEN if placed.used and placed.status is Status.NOT_ON_RANK else placed.status.value


def covered(placed: Placed) -> bool:
    """Return whether the checkpoint's bits can be recovered from live memory on this rank."""
    if placed.status in (Status.NOT_ON_RANK, Status.EXACT, Status.REBUILT):
        return True
    return placed.status in (Status.CAST, Status.UNJUDGED) and keeps_bits(placed)


def keeps_bits(placed: Placed) -> bool:
    """Return whether the copies into live memory keep all of the checkpoint's bits."""
    wider = _WIDENED.get(placed.spec.dtype, ())
    return all(s.live.tensor.dtype in (placed.spec.dtype, *wider) for s in placed.segments)


def place_again(plan: Plan, traced: Placement, moved: AbstractSet[str]) -> tuple[Plan, list[str]]:
    """Return the plan of the memory to which something has moved tensors since.

    Where a tensor has the same layout, and the engine's loader writes the same elements to the same
    places in it, the placement holds there, too. The contents of the new memory are not known, so
    only a ``full`` sync can be written to it.

    Args:
        plan: certified; its placement is updated in place, unless some tensor cannot be followed.
        traced: of the same checkpoint, traced anew; not certified.
        moved: names of the live tensors.

    Returns:
        The plan, and the tensors of the checkpoint that the loader would write elsewhere. If there
        are any, it is the same plan.
    """
    affected = {
        name: placed
        for name, placed in plan.placement.items()
        if placed.status not in _GIVEN_UP and any(s.live.name in moved for s in placed.segments)
    }
    elsewhere = [name for name, placed in affected.items() if not _is_alike(placed, traced[name])]
    if elsewhere:
        return plan, sorted(elsewhere)
    targets = dict(plan.targets)
    for name, placed in affected.items():
        placed.segments[:] = traced[name].segments
        holders = {box_of(target.segment): target.ranks for target in targets[name]}
        targets[name] = make_targets(placed.segments, holders)
    return replace(plan, targets=targets), []


def _is_alike(placed: Placed, traced: Placed) -> bool:
    """Return whether two placements of one tensor differ by the addresses alone."""
    return list(map(_relative, placed.segments)) == list(map(_relative, traced.segments))


def _relative(segment: Segment) -> tuple[Any, ...]:
    return (
        *(segment.live.name, segment.offset, segment.strides, segment.sizes),
        *(segment.source_offset, segment.source_strides),
        *(segment.python_copy, segment.repack, segment.recast),
    )
