"""Which parts belong together, and what may be committed: the receiver's state, without I/O.

Every rank keeps one `SyncState` and gets the same calls in the same order, so that all ranks decide
alike. For the same reason the caller passes the time. Nothing here touches a weight; an error
raised here always leaves the engine unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from engine_ext.errors import (
    BaseMismatch,
    Conflict,
    EngineUncertain,
    MalformedPart,
    SyncInProgress,
    VersionConflict,
    WeightsAsleep,
)
from engine_ext.wire import PartId
from engine_ext.wire.operations import Admission, Delivery, StagedSync


@dataclass(slots=True)
class _Slot:
    identity: str
    file: str | None = None
    staged: bool = False


@dataclass(frozen=True, slots=True)
class _Committed:
    """What is known of a committed version."""

    identities: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()
    delivery: Delivery = field(default_factory=Delivery)


@dataclass(slots=True)
class Sync:
    """A sync that has parts, but is not committed."""

    version: int
    base_version: int | None
    sync_id: str | None
    full: bool
    continues: bool
    apart: bool
    counted: bool
    folder: str | None
    last_part_at: float
    num_parts: int | None = None
    slots: dict[int, _Slot] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every part has arrived and is staged."""
        return len(self.slots) == self.num_parts and all(s.staged for s in self.slots.values())


class SyncState:
    """Versions, staged parts and committed parts, on one rank.

    Args:
        version: the version of the freshly loaded weights.
        stage_timeout: seconds after its last part for which a sync keeps others out.

    Attributes:
        uncertain: a write failed half-way; some weights may be new and some old.
        asleep: the engine has released the weights' memory.
        foreign: what changed the weights outside of delta sync since the last sync, or None.
        mismatched: names of tensors that this rank knows to hold other bits than the syncs have
            written, found since the last ``full`` sync. One rank that knows refuses for all.
        previous: the version before the last one, and what is known of it; None if there is no way
            back.
    """

    def __init__(self, version: int, stage_timeout: float) -> None:
        self.version = version
        self.stage_timeout = stage_timeout
        self.uncertain = False
        self.asleep = False
        self.foreign: str | None = None
        self.mismatched: frozenset[str] = frozenset()
        self.sync: Sync | None = None
        self.previous: tuple[int, _Committed] | None = None
        self._committed = _Committed()

    @property
    def engine_state(self) -> Literal["certain", "mismatched", "uncertain"]:
        """Whether the weights are known to be of one version."""
        if self.uncertain:
            return "uncertain"
        return "mismatched" if self.mismatched else "certain"

    @property
    def delivery(self) -> Delivery:
        """Whether all of the version has arrived."""
        return self._committed.delivery

    def admit(self, part: PartId, now: float) -> Admission:
        """Decide what to do with a part that has arrived at `now`, in seconds.

        Returns:
            ``new``: stage it, then call `settle`. ``staged``: it is staged or being staged
            already. ``already_applied``: it belongs to the committed sync; nothing to do. A part of
            the staged sync is never ``already_applied``, even if it has the bytes of a committed
            one: another ``full`` sync may lead to the same version.

        Raises:
            DeltaError: the part is refused; the state is unchanged, except that a stale sync may
                have been dropped.
        """
        if self.seen(part.version, part.identity) and not self._is_of(self.sync, part):
            return "already_applied"
        self.check_writable(full=part.full)
        if self.sync is not None and not self._stale(self.sync, part, now):
            return self._join(self.sync, part, now)
        self.sync = None
        self._check_base(part)
        new = Sync(
            *(part.version, part.base_version, part.sync_id, part.full, part.continues),
            *(part.apart, part.counted, part.folder, now),
        )
        admission = self._join(new, part, now)
        self.sync = new
        return admission

    def seen(self, version: int, identity: str) -> bool:
        """Return whether a part was committed at `version`, and the engine is at that version."""
        known = self.engine_state == "certain" and self.foreign is None
        return known and version == self.version and identity in self._committed.identities

    def holds(self, part: PartId) -> bool:
        """Return whether this part, not another one of its number, is in the staged sync."""
        slot = None if self.sync is None else self.sync.slots.get(part.part)
        return slot is not None and slot.identity == part.identity and self._is_of(self.sync, part)

    def check_writable(self, *, full: bool) -> None:
        """Refuse a sync that cannot be written into the weights as they are now.

        Raises:
            WeightsAsleep: the weights' memory is released.
            EngineUncertain: an earlier write failed half-way, and the sync is not ``full``.
            BaseMismatch: something else has changed the weights, or they were found to hold other
                bits, and the sync is not ``full``.
        """
        if self.asleep:
            raise WeightsAsleep("the engine has released its weights; wake it up first")
        if self.uncertain and not full:
            raise EngineUncertain("an earlier write failed half-way; send a full sync")
        if self.foreign is not None and not full:
            raise BaseMismatch(
                f"{self.foreign} changed the weights outside of delta sync; send a full sync"
            )
        if self.mismatched and not full:
            raise BaseMismatch.in_memory(self.mismatched)

    def settle(self, part: int, *, staged: bool) -> None:
        """Record that an admitted part is staged on every rank, or that it was refused."""
        if self.sync is None or part not in self.sync.slots:
            return
        if staged:
            self.sync.slots[part].staged = True
        else:
            del self.sync.slots[part]
            if not self.sync.slots:
                self.sync = None

    def drop(self) -> None:
        """Forget the staged sync."""
        self.sync = None

    def fail(self) -> None:
        """Record that some weights may be new and some old; forget the staged sync."""
        self.sync = self.previous = self.foreign = None
        self.uncertain, self.mismatched = True, frozenset()
        self._committed = _Committed()

    def check_apart(self, tensors: Iterable[str]) -> None:
        """Check that a continuation which must be apart sends none of the tensors sent before.

        Two trainers that both lead to this version would mix otherwise.

        Raises:
            VersionConflict: it does.
        """
        sync = self.sync
        if sync is None or not (sync.apart and sync.version == self.version):
            return
        again = sorted(self._committed.tensors.intersection(tensors))
        if again:
            raise VersionConflict(
                f"the delta starts from version {sync.base_version}, the engine is at "
                f"{self.version}, and the delta is no rest of that version: {again[:8]} were sent "
                "before; send a delta from there, or a full sync",
                expected=sync.base_version,
                actual=self.version,
            )

    def commit(self, tensors: Iterable[str] = (), *, proven: bool = False) -> None:
        """Record that the staged sync was written.

        Args:
            tensors: those that it has sent.
            proven: whether digests show that the weights are all of the version.
        """
        assert self.sync is not None
        sync, self.sync = self.sync, None
        self.uncertain, self.foreign = False, None
        if sync.full:
            self.mismatched = frozenset()
        slots = sync.slots.values()
        files = [slot.file for slot in slots if slot.file is not None]
        folder = sync.folder if len(files) == len(slots) else None
        identities = frozenset(slot.identity for slot in slots)
        complete = sync.full or sync.counted or proven
        if sync.continues and sync.version == self.version:
            known = self._committed
            folder = folder if folder == known.delivery.folder else None
            files += known.delivery.files
            identities |= known.identities
            tensors = known.tensors.union(tensors)
            complete = proven
        else:
            self.previous = (self.version, self._committed)
            self.version = sync.version
        delivery = Delivery(complete=complete)
        if folder is not None and not complete:
            delivery = Delivery(complete=False, folder=folder, files=sorted(files))
        self._committed = _Committed(identities, frozenset(tensors), delivery)

    def roll_back(self) -> None:
        """Record that the version before the last one was restored."""
        assert self.previous is not None
        (self.version, self._committed), self.previous = self.previous, None

    def describe(self) -> StagedSync | None:
        """Return the staged sync, or None."""
        if self.sync is None:
            return None
        return StagedSync(
            version=self.sync.version,
            base_version=self.sync.base_version,
            sync_id=self.sync.sync_id,
            full=self.sync.full,
            num_parts=self.sync.num_parts,
            parts=sorted(number for number, slot in self.sync.slots.items() if slot.staged),
        )

    def _stale(self, sync: Sync, part: PartId, now: float) -> bool:
        """Return whether this part may replace the staged sync: an old one, of another sync."""
        return not self._is_of(sync, part) and now - sync.last_part_at >= self.stage_timeout

    @staticmethod
    def _is_of(sync: Sync | None, part: PartId) -> bool:
        """Return whether a part belongs to the staged sync."""
        return sync is not None and (part.version, part.sync_id) == (sync.version, sync.sync_id)

    def _join(self, sync: Sync, part: PartId, now: float) -> Admission:
        if not self._is_of(sync, part):
            wait = max(1, math.ceil(self.stage_timeout - (now - sync.last_part_at)))
            raise SyncInProgress(
                f"a sync to version {sync.version} has staged parts; retry in {wait} s",
                staged_version=sync.version,
                staged_sync_id=sync.sync_id,
                retry_after=wait,
            )
        if (part.base_version, part.full) != (sync.base_version, sync.full):
            raise MalformedPart("the parts of this sync disagree about base_version or full")
        if None not in (sync.num_parts, part.num_parts) and sync.num_parts != part.num_parts:
            raise MalformedPart(
                "the parts of this sync disagree about num_parts: "
                f"{sync.num_parts}, {part.num_parts}"
            )
        num_parts = part.num_parts if part.num_parts is not None else sync.num_parts
        highest = max([part.part, *sync.slots])
        if num_parts is not None and highest >= num_parts:
            raise MalformedPart(f"part {highest} of a sync that has {num_parts} parts")
        known = sync.slots.get(part.part)
        if known is not None and known.identity != part.identity:
            raise Conflict(f"part {part.part} of this sync has arrived before with other bytes")
        sync.last_part_at, sync.num_parts = now, num_parts
        if known is not None:
            return "staged"
        sync.slots[part.part] = _Slot(part.identity, part.file)
        sync.counted = sync.counted and part.counted
        sync.folder = sync.folder if sync.folder == part.folder else None
        return "new"

    def _check_base(self, part: PartId) -> None:
        rest = part.continues and not (part.apart and self.delivery.complete)
        if part.full or (rest and part.version == self.version):
            return
        if part.base_version is None or part.base_version < 0:
            raise MalformedPart("version 0 has no base version; only a full sync can lead to it")
        if part.base_version != self.version:
            raise VersionConflict(
                f"the delta starts from version {part.base_version}, the engine is at "
                f"{self.version}; send a delta from there, or a full sync",
                expected=part.base_version,
                actual=self.version,
            )
        if part.version <= part.base_version:
            raise MalformedPart(
                f"a delta must lead to a later version: {part.base_version} to {part.version}"
            )
