"""Which parts belong together, and what may be committed: the receiver's state, without I/O.

Every rank keeps one `SyncState` and is told the same things in the same order, so that all ranks
decide alike. Time is an argument, given by the caller, for the same reason. Nothing here touches
a weight; an error raised here always leaves the engine unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from engine_ext.errors import (
    BaseMismatch,
    Conflict,
    EngineUncertain,
    MalformedPart,
    SyncInProgress,
    VersionConflict,
    WeightsAsleep,
)
from engine_ext.wire.identity import PartId

Admission = Literal["new", "staged", "already_applied"]


@dataclass(slots=True)
class _Slot:
    identity: str
    staged: bool = False


@dataclass(slots=True)
class Sync:
    """A sync that has parts, but is not committed yet."""

    version: int
    base_version: int | None
    sync_id: str | None
    full: bool
    continues: bool
    last_part_at: float
    num_parts: int | None = None
    slots: dict[int, _Slot] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Every part has arrived and is staged."""
        return (
            self.num_parts is not None
            and len(self.slots) == self.num_parts
            and all(slot.staged for slot in self.slots.values())
        )


class SyncState:
    """Versions, staged parts and what was committed, on one rank.

    Args:
        version: the version of the freshly loaded weights.
        stage_timeout: seconds after its last part for which a sync keeps others out.
    """

    def __init__(self, version: int, stage_timeout: float) -> None:
        self.version = version
        self.stage_timeout = stage_timeout
        self.uncertain = False
        self.asleep = False
        # What has changed the weights since the last sync, other than a sync; None: nothing.
        self.foreign: str | None = None
        self.sync: Sync | None = None
        self._committed: set[str] = set()
        # Version and committed parts before the last version; None where it cannot be gone back to.
        self.previous: tuple[int, set[str]] | None = None

    def admit(self, part: PartId, now: float) -> Admission:
        """Decide what becomes of a part that has arrived.

        Args:
            part: what the part says it is.
            now: seconds on a clock that all callers share.

        Returns:
            ``new``: stage it, then call `settle`. ``staged``: it is staged or being staged
            already. ``already_applied``: it belongs to the committed sync; nothing to do. A part of
            the staged sync does not, also if it has the bytes of a committed one: another ``full``
            sync may lead to the same version.

        Raises:
            EngineUncertain, WeightsAsleep, SyncInProgress, VersionConflict, Conflict,
            MalformedPart: as their docstrings say; the state is unchanged, but for a stale sync
            that was dropped.
        """
        if self.seen(part.version, part.identity) and not self._is_of(self.sync, part):
            return "already_applied"
        self.check_writable(full=part.full)
        if self.sync is not None and not self._stale(self.sync, part, now):
            return self._join(self.sync, part, now)
        self.sync = None
        self._check_base(part)
        self.sync = Sync(
            part.version, part.base_version, part.sync_id, part.full, part.continues, now
        )
        try:
            return self._join(self.sync, part, now)
        except Exception:
            self.sync = None
            raise

    def seen(self, version: int, identity: str) -> bool:
        """Whether a part with this identity was committed at the version the engine is at."""
        known = not self.uncertain and self.foreign is None
        return known and version == self.version and identity in self._committed

    def check_writable(self, *, full: bool) -> None:
        """Refuse a sync that the weights cannot take as they are now.

        Raises:
            WeightsAsleep: their memory is released.
            EngineUncertain: nobody knows what they are, and the sync is not a ``full`` one.
            BaseMismatch: the engine has loaded others itself, and the sync is not a ``full`` one.
        """
        if self.asleep:
            raise WeightsAsleep("the engine has released its weights; wake it up first")
        if self.uncertain and not full:
            raise EngineUncertain("an earlier write failed half-way; send a full sync")
        if self.foreign is not None and not full:
            raise BaseMismatch(
                f"the weights are of no version that is known here, after {self.foreign}; send a "
                "full sync"
            )

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

    def commit(self, *, uncertain: bool) -> None:
        """Record that the staged sync was written (or, if `uncertain`, that writing it failed)."""
        assert self.sync is not None
        sync, self.sync = self.sync, None
        self.uncertain = uncertain
        self.foreign = None
        if uncertain:
            self._committed.clear()
            self.previous = None
            return
        identities = {slot.identity for slot in sync.slots.values()}
        repeated_version = sync.continues and sync.version == self.version
        if not repeated_version:
            self.previous = (self.version, self._committed)
        self._committed = self._committed | identities if repeated_version else identities
        self.version = sync.version

    def roll_back(self) -> None:
        """Record that the weights are those of the version before the last one again."""
        assert self.previous is not None
        (self.version, self._committed), self.previous = self.previous, None

    def describe(self) -> dict[str, Any] | None:
        """The staged sync as JSON, or None."""
        if self.sync is None:
            return None
        return {
            "version": self.sync.version,
            "base_version": self.sync.base_version,
            "sync_id": self.sync.sync_id,
            "full": self.sync.full,
            "num_parts": self.sync.num_parts,
            "parts": sorted(number for number, slot in self.sync.slots.items() if slot.staged),
        }

    def _stale(self, sync: Sync, part: PartId, now: float) -> bool:
        """Whether this part may push the staged sync out: it is another's, and that one is old.

        A slow sender's own next part still finds its sync, however long it took.
        """
        return not self._is_of(sync, part) and now - sync.last_part_at >= self.stage_timeout

    @staticmethod
    def _is_of(sync: Sync | None, part: PartId) -> bool:
        """Whether a part says that it belongs to the staged sync."""
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
        _check_numbers(sync, part)
        known = sync.slots.get(part.part)
        if known is not None and known.identity != part.identity:
            raise Conflict(f"part {part.part} of this sync arrived before with other bytes")
        sync.last_part_at = now
        sync.num_parts = part.num_parts if part.num_parts is not None else sync.num_parts
        if known is not None:
            return "staged"
        sync.slots[part.part] = _Slot(part.identity)
        return "new"

    def _check_base(self, part: PartId) -> None:
        if part.full:
            return
        if part.continues and part.version == self.version:
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


def _check_numbers(sync: Sync, part: PartId) -> None:
    if None not in (sync.num_parts, part.num_parts) and sync.num_parts != part.num_parts:
        raise MalformedPart(
            f"the parts of this sync disagree about num_parts: {sync.num_parts}, {part.num_parts}"
        )
    highest = max([part.part, *sync.slots])
    num_parts = part.num_parts if part.num_parts is not None else sync.num_parts
    if num_parts is not None and highest >= num_parts:
        raise MalformedPart(f"part {highest} of a sync that has {num_parts} parts")
