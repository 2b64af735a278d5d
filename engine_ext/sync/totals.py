"""Sums over the params of a sync on one rank, which the commit needs, and finds ready.

A sync of a mixture of experts has tens of thousands of params. To walk over them takes longer than
to write them. So the thread that stages a part does it, and all later sums are over parts.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine_ext.format import Digest
from engine_ext.sync.digest_table import NO_CHANGES, Changes, DigestTable, sums_of, total_of
from engine_ext.sync.staged import StagedModule, StagedPart
from engine_ext.sync.writes import PartWrites

_Replicas = dict[tuple[int, ...], Digest]


class Advance:
    """What a change makes of the digests of the tensors that a rank counts elements of.

    Attributes:
        start: the digests before.
        numbers: of these tensors in it, int64 [tensors].
        sums: the changes of their digests.
    """

    __slots__ = ("numbers", "start", "sums")

    def __init__(self, start: DigestTable, changes: Changes, *, full: bool) -> None:
        self.start = start
        numbers = start.find(changes.names)
        held = numbers >= 0  # else another rank counts it
        self.numbers, sums = numbers[held], changes.sums[held]
        self.sums = sums - start.of(self.numbers) if full else sums

    @classmethod
    def joined(cls, start: DigestTable, parts: Sequence[Advance]) -> Advance:
        """Return that of several changes of different elements."""
        found = cls(start, NO_CHANGES, full=False)
        if parts:
            found.sums = np.concatenate([part.sums for part in parts])
            found.numbers = np.concatenate([part.numbers for part in parts])
        return found


class PartTotals:
    """Sums over the params of a part on this rank.

    Attributes:
        sent: the tensors that the part sends, by name.
        numel: elements of all of these.
        nnz: elements that it changes, on all ranks together; without those skipped.
        counted: elements that this rank counts.
        writes: of the params.
        live_names: the live tensors that these are to.
        undo_bytes: host memory that their undo takes.
        keeps: whether all of their old values are kept.
        changes: the params' `change`, by tensor.
        names: those of the params.
        added, replaced: sum of the params' `change` and `replaced`.
        advance: of the digests, see `DeltaApplier.stage`; None if nothing has found it.
    """

    __slots__ = (
        *("_entries", "_replicated", "_streamed", "added", "advance", "changes", "counted"),
        *("keeps", "live_names", "names", "nnz", "numel", "replaced", "sent", "undo_bytes"),
        "writes",
    )

    def __init__(self, part: StagedPart) -> None:
        params, streamed, entries = part.params, part.streamed, part.manifest.params
        self._entries, self._streamed = entries, streamed
        apart = frozenset(streamed.names)
        own = (entry.numel for entry in entries if entry.name not in apart)
        self.numel = int(streamed.numel.sum()) + sum(own)
        self.nnz = part.nnz
        self.counted = sum(param.counted for param in params) + int(streamed.counted.sum())
        writes = [w for param in params if not param.tied for w in param.writes]
        writes += part.together
        self.writes = PartWrites(writes)
        self.live_names = frozenset(name for write in writes for name in write.live_names)
        self.undo_bytes = sum(write.undo_bytes for write in writes)
        self.keeps = all(write.keep for write in writes)
        sums = np.concatenate([sums_of(param.change for param in params), streamed.change])
        self.changes = Changes([*(param.name for param in params), *streamed.names], sums)
        self.names = frozenset(self.changes.names)
        skips = len(entries) != len(self.names)
        self.sent = frozenset(entry.name for entry in entries) if skips else self.names
        self.added = total_of(sums)
        self.replaced = Digest.total(
            param.replaced for param in params if param.replaced is not Digest.ZERO
        )
        self._replicated = {p.name: p.replicas for p in params if p.replicas}
        self.advance: Advance | None = None

    def replicas(self) -> _Replicas:
        """Return the digests of the changes by the ranks that hold the same elements."""
        found = self._streamed.replicas()
        for replicas in self._replicated.values():
            _add(found, replicas)
        return found

    def replicas_of(self, name: str) -> _Replicas:
        """Return the same of one tensor."""
        return self._replicated.get(name) or self._streamed.replicas_of(name)

    def numels(self, names: Container[str]) -> dict[str, int]:
        """Return the elements of some tensors that the part sends, by name."""
        return {entry.name: entry.numel for entry in self._entries if entry.name in names}


def part_totals(part: StagedPart) -> PartTotals:
    """Return the totals of a part; the params must not change any more."""
    known: PartTotals | None = part.own
    if known is None:
        known = part.own = PartTotals(part)
    return known


@dataclass(slots=True, eq=False)
class SyncTotals:
    """Sums over the parts of a sync on this rank.

    Attributes:
        others: the sync's other parts.
        parts: of each part.
        modules: those that were rebuilt for the sync, by path; see `add_modules`.
        writes: of each part, and of the rebuilt modules.
        live_names: as of `PartTotals`, of all parts.
        undo_bytes, keeps: as of `PartTotals`, for all of the writes.
        nnz: as of `PartTotals`, of all parts.
        numel: elements of the tensors that the parts have sent.
        names: of these tensors.
        is_apart: whether no two params are of the same tensor.
        proven: whether a part declares the digest after the sync.
        is_checked: whether `DeltaApplier.check_sync` has accepted the parts.
        advance: of the digests; None if nothing has found it.
    """

    others: tuple[StagedPart, ...]
    parts: list[PartTotals]
    writes: list[PartWrites]
    live_names: frozenset[str]
    undo_bytes: int
    keeps: bool
    nnz: int
    numel: int
    names: frozenset[str]
    is_apart: bool
    proven: bool
    is_checked: bool = False
    advance: Advance | None = None
    modules: dict[str, StagedModule] = field(default_factory=dict)

    def add_modules(self, modules: Mapping[str, StagedModule], writes: PartWrites | None) -> None:
        """Add modules that were rebuilt with these parts, by path; raises nothing.

        Args:
            writes: all of theirs; None if there are none.
        """
        self.modules.update(modules)
        if writes is not None:
            self.writes.append(writes)
            self.undo_bytes += sum(write.undo_bytes for write in writes.all)
            self.keeps &= all(write.keep for write in writes.all)

    def replicated(self, name: str) -> _Replicas:
        """Return the digests of a tensor's changes by the ranks that hold the same elements."""
        found: _Replicas = {}
        for part in self.parts:
            _add(found, part.replicas_of(name))
        return found

    def summary(self) -> dict[str, Any]:
        """Return this rank's share of a sync for the others, see `consensus.rank_summary`."""
        replicas: _Replicas = {}
        for part in self.parts:
            _add(replicas, part.replicas())
        return {
            "counted": sum(part.counted for part in self.parts),
            "changes": [(part.added - part.replaced).hex() for part in self.parts],
            "added": Digest.total(part.added for part in self.parts).hex(),
            "replicas": [[list(ranks), change.hex()] for ranks, change in replicas.items()],
        }

    def sent(self, skipped: Counter[str]) -> tuple[int, int, int]:
        """Return what the sync has sent without the tensors skipped.

        Returns:
            How many elements; of how many tensors; how many elements these have.
        """
        left_out = self.names & skipped.keys()
        nnz = self.nnz - sum(skipped[name] for name in left_out)
        elements = self.numel - (sum(_numels(self.parts, left_out).values()) if left_out else 0)
        return nnz, len(self.names) - len(left_out), elements


def totals(staged: Sequence[StagedPart]) -> SyncTotals:
    """Return the totals of all parts of a sync; kept with the first part.

    With another part in place of one they are made anew: modules must be rebuilt again then.
    """
    known: SyncTotals | None = staged[0].totals if staged else None
    others = staged[1:]
    is_of = known is not None and len(known.others) == len(others)
    if known is not None and is_of and all(map(operator.is_, known.others, others)):
        return known
    found = _add_up(staged)
    if staged:
        staged[0].totals = found
    return found


def _add_up(staged: Sequence[StagedPart]) -> SyncTotals:
    parts = [part_totals(part) for part in staged]
    names = frozenset[str]().union(*(part.sent for part in parts))
    numel = sum(part.numel for part in parts)
    if len(names) != sum(len(part.sent) for part in parts):
        numel = sum(_numels(parts, names).values())
    apart = len(frozenset[str]().union(*(part.names for part in parts)))
    return SyncTotals(
        others=tuple(staged[1:]),
        parts=parts,
        writes=[part.writes for part in parts],
        live_names=frozenset[str]().union(*(part.live_names for part in parts)),
        undo_bytes=sum(part.undo_bytes for part in parts),
        keeps=all(part.keeps for part in parts),
        nnz=sum(part.nnz for part in parts),
        numel=numel,
        names=names,
        is_apart=apart == sum(len(part.changes.names) for part in parts),
        proven=any(part.manifest.digest_after is not None for part in staged),
    )


def _numels(parts: Sequence[PartTotals], names: Container[str]) -> dict[str, int]:
    """Return the elements of some tensors that parts send, by name."""
    found: dict[str, int] = {}
    for part in parts:
        found.update(part.numels(names))
    return found


def _add(sums: _Replicas, more: _Replicas) -> None:
    for ranks, change in more.items():
        sums[ranks] = sums.get(ranks, Digest.ZERO) + change
