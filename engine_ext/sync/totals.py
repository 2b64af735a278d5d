"""Sums over the params of a sync on one rank, which the commit needs, and finds ready.

A sync of a mixture of experts has tens of thousands of params. To walk over them takes longer than
to write them. So the thread that stages a part does it, and all later sums are over parts.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_ext.format import Digest
from engine_ext.sync.staged import StagedModules, StagedPart
from engine_ext.sync.writes import PartWrites

_Replicas = dict[tuple[int, ...], Digest]


class Advance:
    """What some changes make of the digests of the tensors that a rank counts elements of.

    Attributes:
        start: the digests before.
        after, changes: the digest after the changes of each tensor among them, and the difference.
        total: the sum of the differences.
    """

    __slots__ = ("after", "changes", "start", "total")

    def __init__(
        self, start: Mapping[str, Digest], changes: Mapping[str, Digest], *, full: bool
    ) -> None:
        self.start = start
        self.after: dict[str, Digest] = {}
        self.changes: dict[str, Digest] = {}
        for name, change in changes.items():
            held = start.get(name)
            if held is not None:  # else another rank counts it
                self.changes[name] = change - held if full else change
                self.after[name] = change if full else held + change
        self.total = Digest.total(self.changes.values())

    @classmethod
    def joined(cls, start: Mapping[str, Digest], parts: Sequence[Advance]) -> Advance:
        """Return that of several changes of different tensors."""
        found = cls(start, {}, full=False)
        for part in parts:
            found.after.update(part.after)
            found.changes.update(part.changes)
        found.total = Digest.total(part.total for part in parts)
        return found


class PartTotals:
    """Sums over the params of a part on this rank.

    Attributes:
        numel: elements of each tensor that the part has sent, by name.
        nnz: elements that it changes, on all ranks together; without those skipped.
        counted: elements that this rank counts.
        writes: of the params.
        live_names: the live tensors that these are to.
        undo_bytes: host memory that their undo takes.
        keeps: whether all of their old values are kept.
        added, replaced: sum of the params' `change` and `replaced`.
        by_name: the params' `change` by tensor.
        replicated: by tensor, the params' `replicas`.
        advance: of the digests, see `DeltaApplier.stage`; None if nothing has found it.
    """

    __slots__ = (
        *("added", "advance", "by_name", "counted", "keeps", "live_names", "nnz", "numel"),
        *("replaced", "replicated", "undo_bytes", "writes"),
    )

    def __init__(self, part: StagedPart) -> None:
        self.numel = {entry.name: entry.numel for entry in part.manifest.params}
        self.nnz = part.nnz
        self.counted = sum(param.counted for param in part.params)
        writes = [w for param in part.params if not param.tied for w in param.writes]
        writes += part.together
        self.writes = PartWrites(writes)
        self.live_names = frozenset(name for write in writes for name in write.live_names)
        self.undo_bytes = sum(write.undo_bytes for write in writes)
        self.keeps = all(write.keep for write in writes)
        self.added = Digest.total(param.change for param in part.params)
        self.replaced = Digest.total(
            param.replaced for param in part.params if param.replaced is not Digest.ZERO
        )
        self.by_name: dict[str, Digest] = {}
        self.replicated: dict[str, _Replicas] = {}
        for param in part.params:
            before = self.by_name.get(param.name)
            self.by_name[param.name] = param.change if before is None else before + param.change
            if param.replicas:
                _add(self.replicated.setdefault(param.name, {}), param.replicas)
        self.advance: Advance | None = None


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
        modules: of each part the modules that were rebuilt for the sync, and how many there were.
        parts: of each part.
        writes: of each part, and of the rebuilt modules.
        live_names, undo_bytes, keeps: as of `PartTotals`, for all of these.
        nnz, numel: as of `PartTotals`, of all parts.
        names: of the tensors that the parts have sent.
        is_apart: whether no two params are of the same tensor.
        proven: whether a part declares the digest after the sync.
        is_checked: whether `DeltaApplier.check_sync` has accepted the parts.
        advance: of the digests; None if nothing has found it.
    """

    others: tuple[StagedPart, ...]
    modules: list[tuple[StagedModules, int]]
    parts: list[PartTotals]
    writes: list[PartWrites]
    live_names: frozenset[str]
    undo_bytes: int
    keeps: bool
    nnz: int
    numel: dict[str, int]
    names: frozenset[str]
    is_apart: bool
    proven: bool
    is_checked: bool = False
    advance: Advance | None = None

    @property
    def by_name(self) -> dict[str, Digest]:
        """By tensor the digest of its change; in a full sync, of its new values."""
        found: dict[str, Digest] = {}
        for part in self.parts:
            if found.keys().isdisjoint(part.by_name):
                found.update(part.by_name)
                continue
            for name, change in part.by_name.items():
                found[name] = found.get(name, Digest.ZERO) + change
        return found

    def replicated(self, name: str) -> _Replicas:
        """Return the digests of a tensor's changes by the ranks that hold the same elements."""
        found: _Replicas = {}
        for part in self.parts:
            _add(found, part.replicated.get(name, {}))
        return found

    def summary(self) -> dict[str, Any]:
        """Return this rank's share of a sync for the others, see `consensus.rank_summary`."""
        replicas: _Replicas = {}
        for part in self.parts:
            for found in part.replicated.values():
                _add(replicas, found)
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
        left_out = [name for name in skipped if name in self.numel]
        nnz = self.nnz - sum(skipped[name] for name in left_out)
        elements = sum(self.numel.values()) - sum(self.numel[name] for name in left_out)
        return nnz, len(self.numel) - len(left_out), elements


def totals(staged: Sequence[StagedPart]) -> SyncTotals:
    """Return the totals of all parts of a sync; kept with the first part."""
    known: SyncTotals | None = staged[0].totals if staged else None
    if known is not None and not are_same(known.others, staged[1:]):
        known = None
    if known is not None and _has_modules_of(known, staged):
        return known
    found = _add_up(staged)
    if staged:
        if known is not None:
            found.is_checked, found.advance = known.is_checked, known.advance
        staged[0].totals = found
    return found


def are_same(parts: Sequence[StagedPart], others: Sequence[StagedPart]) -> bool:
    """Return whether these are the same objects, in the same order."""
    return len(parts) == len(others) and all(map(operator.is_, parts, others))


def _has_modules_of(known: SyncTotals, staged: Sequence[StagedPart]) -> bool:
    """Return whether no module was rebuilt since; they might all have been rebuilt anew."""
    return all(
        part.rebuilt is one and len(one.modules) == count
        for part, (one, count) in zip(staged, known.modules, strict=True)
    )


def _add_up(staged: Sequence[StagedPart]) -> SyncTotals:
    parts = [part_totals(part) for part in staged]
    rebuilt = [w for part in staged for one in part.rebuilt.modules.values() for w in one.writes]
    numel: dict[str, int] = {}
    for part in parts:
        numel.update(part.numel)
    names = set[str]().union(*(part.by_name for part in parts))
    return SyncTotals(
        others=tuple(staged[1:]),
        modules=[(part.rebuilt, len(part.rebuilt.modules)) for part in staged],
        parts=parts,
        writes=[*(part.writes for part in parts), *([PartWrites(rebuilt)] if rebuilt else ())],
        live_names=frozenset[str]().union(
            *(part.live_names for part in parts), (write.live for write in rebuilt)
        ),
        undo_bytes=sum(part.undo_bytes for part in parts) + sum(w.undo_bytes for w in rebuilt),
        keeps=all(part.keeps for part in parts) and all(write.keep for write in rebuilt),
        nnz=sum(part.nnz for part in parts),
        numel=numel,
        names=frozenset(numel),
        is_apart=len(names) == sum(len(part.params) for part in staged),
        proven=any(part.manifest.digest_after is not None for part in staged),
    )


def _add(sums: _Replicas, more: _Replicas) -> None:
    for ranks, change in more.items():
        sums[ranks] = sums.get(ranks, Digest.ZERO) + change
