"""Which parts belong together, and what can be committed: the receiver's state, without I/O.

Every rank keeps one `SyncState` and gets the same calls in the same order, so that all ranks decide
alike. For the same reason the caller passes the time. Nothing here touches a weight; an error
raised here always leaves the engine unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import msgspec

from engine_ext.errors import (
    BaseMismatch,
    Conflict,
    EngineUncertain,
    MalformedPart,
    NotUpdatable,
    SyncInProgress,
    VersionConflict,
    WeightsAsleep,
)
from engine_ext.format import Origin, PartId, RunSender, Unproven, continues
from engine_ext.ranks.operations import (
    Admission,
    Delivery,
    LogRecords,
    PreparedSync,
    RunOwner,
    StagedSync,
)
from engine_ext.sync.runs import Runs, clock, describe, is_anonymous, is_twin, owner_of

_MOST_WAIT_S: Final = 5.0
_MOST_LOG_RECORDS: Final = 256  # the last versions; a rewritten log shows in any of them


@dataclass(slots=True)
class _Slot:
    identity: str
    file: str | None = None
    nbytes: int = 0
    staged: bool = False


@dataclass(frozen=True, slots=True)
class _Committed:
    """The facts that are known of a committed version."""

    run: str | None = None  # None: loaded with the engine
    identities: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()
    delivery: Delivery = field(default_factory=Delivery)
    # For it and the versions before it in the delta log.
    log_records: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Sync:
    """A sync that has parts, but is not committed."""

    version: int
    base_version: int | None
    sync_id: str | None
    full: bool
    unproven: Unproven | None
    log_records: Mapping[str, str]
    last_part_at: float
    sender: RunSender | None
    origin: Origin
    since: float
    num_parts: int | None = None
    slots: dict[int, _Slot] = field(default_factory=dict)
    prepared: PreparedSync | None = None  # held until its group of engines has decided

    @property
    def complete(self) -> bool:
        """Whether every part has arrived and is staged."""
        return len(self.slots) == self.num_parts and all(s.staged for s in self.slots.values())

    @property
    def continues(self) -> bool:
        """Whether it can be one more transaction at the engine's version."""
        return continues(self.unproven, self.sender, full=self.full)

    @property
    def owner(self) -> RunOwner | None:
        """Who sends it, since its first part; None if its parts name no run."""
        return None if self.sender is None else owner_of(self.sender, self.since)


class SyncState:
    """Versions and their runs, staged parts and committed parts, on one rank.

    Args:
        version: the version of the freshly loaded weights.
        stage_timeout: seconds after its last part for which a sync keeps others out.

    Attributes:
        uncertain: a write failed half-way; some weights might be new and some old.
        asleep: the engine has released the weights' memory.
        released: that, or other memory that it needs to generate.
        changed_externally: what changed the weights outside of delta sync since the last sync, or
            None.
        lost: why tensors that no sync writes are lost; None: they are not.
        mismatched: names of tensors that this rank knows to hold other bits than the syncs have
            written, found since the last ``full`` sync. When it refuses a part, all get to know.
        previous: the version before the last one, and what is known of it; None if there is no way
            back.
        loaded: nothing was written since the engine has started.
        runs: who owns the weights, and the numbers of each run.
        writes: how often the version, or what is known of it, has changed. After an error on one
            rank alone, ranks can differ: the first rank's counts.
    """

    def __init__(self, version: int, stage_timeout: float) -> None:
        self.version = version
        self.stage_timeout = stage_timeout
        self.uncertain = False
        self.asleep = self.released = False
        self.changed_externally: str | None = None
        self.lost: str | None = None
        self.mismatched: frozenset[str] = frozenset()
        self.sync: Sync | None = None
        self.previous: tuple[int, _Committed] | None = None
        self.loaded = True
        self.runs = Runs()
        self.writes = 0
        self._committed = _Committed()

    @property
    def run(self) -> str | None:
        """The run that the version is of; after a failed write, that of the write."""
        return self._committed.run

    @property
    def engine_state(self) -> Literal["certain", "mismatched", "uncertain"]:
        """Whether the weights are known to be of one version."""
        if self.uncertain:
            return "uncertain"
        return "mismatched" if self.mismatched else "certain"

    @property
    def doubts(self) -> list[Any]:
        """Facts that this rank might know alone: that it is uncertain, and what is mismatched."""
        return [self.uncertain, sorted(self.mismatched)]

    def share(self, doubts: Iterable[list[Any]]) -> None:
        """Take the doubts of all ranks, so that all of them admit a part or none does."""
        for uncertain, mismatched in doubts:
            self.uncertain |= uncertain
            self.mismatched |= set(mismatched)

    @property
    def delivery(self) -> Delivery:
        """Whether all of the version has arrived."""
        return self._committed.delivery

    @property
    def log_records(self) -> LogRecords:
        """Records of the last versions in the delta log that have led to this one."""
        return LogRecords(version=self.version, records=dict(self._committed.log_records))

    def put_log_records(self, records: Mapping[str, str], *, expected: int) -> bool:
        """Replace them unless they, or the version, have changed; return whether they are put.

        Args:
            expected: `writes` when the records were read.
        """
        if expected != self.writes:
            return False
        self._committed = replace(self._committed, log_records=_last_records({}, records))
        self.writes += 1
        return True

    def admit(self, part: PartId, now: float, at: float = 0.0, nbytes: int = 0) -> Admission:
        """Decide what to do with a part that has arrived at `now`, in seconds.

        The sender of a part that is staged, and that names a run, owns the weights from then on,
        unless it has released them: a part that comes late does not take them again.
        Nobody is asked for the parts of a delta log: its writers fence each other.

        Args:
            at: `now` as Unix time.
            nbytes: of the part as it was sent.

        Returns:
            ``new``: stage it, then call `settle`. ``staged``: it is staged or being staged
            already. ``already_applied``: it belongs to the committed sync; nothing to do. A part of
            the staged sync is never ``already_applied``, even if it has the bytes of a committed
            one: another ``full`` sync can lead to the same version.

        Raises:
            DeltaError: the part is refused; the state is unchanged, except that a stale sync might
                have been dropped.
        """
        if part.origin == "sender":
            self.runs.check(part.sender)
        admission = self._admit(part, now, at)
        if admission == "new":
            assert self.sync is not None
            self.sync.slots[part.part].nbytes = nbytes
        owns = part.sender is not None and part.origin == "sender"
        if owns and admission != "already_applied":
            assert part.sender is not None
            self._own(part.sender, at)
        return admission

    def _admit(self, part: PartId, now: float, at: float) -> Admission:
        run = None if part.sender is None else part.sender.run
        if self.seen(part.version, part.identity, run) and not self._is_of(self.sync, part):
            return "already_applied"
        if part.origin == "sender" and part.sender is not None:
            self.runs.check_not_released(part.sender)
        self.check_writable(full=part.full)
        if self.sync is not None and not self._gives_way(self.sync, part, now):
            return self._join(self.sync, part, now, at)
        self.sync = None
        self._check_base(part)
        new = Sync(
            *(part.version, part.base_version, part.sync_id, part.full, part.unproven),
            *(part.log_records, now),
            sender=part.sender,
            origin=part.origin,
            since=at,
        )
        admission = self._join(new, part, now, at)
        self.sync = new
        return admission

    def claim(self, sender: RunSender, *, takeover: bool, now: float, at: float) -> RunOwner:
        """Make a sender the owner of the weights; what others have staged is dropped.

        Args:
            takeover: also if another run owns them, which is fenced.
            now, at: as for `admit`.

        Raises:
            RunConflict: another run owns them, or has taken over from this one (`RunFenced`).
            SyncInProgress: a sender that names no run has staged parts, and `takeover` is False;
                or a group of engines has yet to decide on the sync of another process.
        """
        self.runs.check(sender, takeover=takeover)
        sync = self.sync
        if sync is not None and sync.prepared and not _is_by(sync, sender):
            raise self._in_progress(sync, now, at)
        if sync is not None and sync.sender is None and sync.origin == "sender":
            if not takeover and now - sync.last_part_at < self.stage_timeout:
                raise self._in_progress(sync, now, at)
            self.sync = None
        self._own(sender, at)
        assert self.runs.owner is not None
        return self.runs.owner

    def release(self, sender: RunSender) -> bool:
        """Leave the weights without an owner, if this process owns them; return whether it did.

        All that it has staged is dropped, but for a sync that a group of engines decides on.
        """
        released = self.runs.release(sender)
        sync = self.sync
        if released and sync is not None and sync.sender is not None and not sync.prepared:
            self.sync = sync if sync.origin == "log" else None
        return released

    def _own(self, sender: RunSender, at: float) -> None:
        self.runs.own(sender, at)
        sync = self.sync
        if sync is None or sync.sender is None or sync.origin != "sender":
            return
        if not _is_by(sync, sender):
            self.sync = None

    def hold(self, prepared: PreparedSync) -> None:
        """Keep the staged sync until `commit` or `drop`, whoever else sends parts."""
        assert self.sync is not None
        self.sync.prepared = prepared

    def is_held_from(self, group: str | None) -> bool:
        """Return whether another group of engines than this one decides on the staged sync."""
        prepared = None if self.sync is None else self.sync.prepared
        return prepared is not None and prepared.group != group

    def check_not_held(self, group: str | None = None) -> None:
        """Raise `SyncInProgress` if another group of engines decides on the staged sync."""
        if self.is_held_from(group):
            assert self.sync is not None
            assert self.sync.prepared is not None
            raise self._in_progress(self.sync, self.sync.prepared.ends, self.sync.prepared.until)

    def seen(self, version: int, identity: str, run: str | None = None) -> bool:
        """Return whether a part was committed at `version`, and the engine is at that version.

        Args:
            run: that the part names.
        """
        known = self.engine_state == "certain" and self.changed_externally is None
        if not known or version != self.version or identity not in self._committed.identities:
            return False
        return is_anonymous(self.run) if run is None else run == self.run

    def holds(self, part: PartId) -> bool:
        """Return whether this part, not another one of its number, is in the staged sync."""
        slot = None if self.sync is None else self.sync.slots.get(part.part)
        return slot is not None and slot.identity == part.identity and self._is_of(self.sync, part)

    def check_writable(self, *, full: bool) -> None:
        """Refuse a sync that cannot be written into the weights as they are now.

        Raises:
            WeightsAsleep: the weights' memory is released.
            NotUpdatable: tensors that no sync writes were lost with discarded weights.
            EngineUncertain: an earlier write failed half-way, and the sync is not ``full``.
            BaseMismatch: something else has changed the weights, or they were found to hold other
                bits, and the sync is not ``full``.
        """
        if self.asleep:
            raise WeightsAsleep("the engine has released its weights; wake it up first")
        if self.lost is not None:
            raise NotUpdatable(
                "tensors that no sync writes were lost when the weights were discarded "
                f"({self.lost}); restart the engine"
            )
        if self.uncertain and not full:
            raise EngineUncertain("an earlier write failed half-way; send a full sync")
        if self.changed_externally is not None and not full:
            raise BaseMismatch(
                f"{self.changed_externally} changed the weights outside of delta sync; "
                "send a full sync"
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
        """Record that some weights might be new and some old; forget the staged sync."""
        run = self.run if self.sync is None else self._run_of(self.sync)
        self.sync = self.previous = self.changed_externally = None
        self.uncertain, self.loaded = True, False
        self.mismatched = frozenset()
        self._committed = _Committed(run)
        self.writes += 1

    def check_apart(self, tensors: Iterable[str]) -> None:
        """Check that a continuation which must be apart sends none of the tensors sent before.

        Two trainers that both lead to this version would mix otherwise.

        Raises:
            VersionConflict: it does.
        """
        sync = self.sync
        if sync is None or sync.unproven is None or not sync.unproven.apart:
            return
        if sync.version != self.version:
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
        self.uncertain, self.changed_externally, self.loaded = False, None, False
        run = self._run_of(sync)
        self.runs.use(run, sync.version)
        if sync.full:
            self.mismatched = frozenset()
        slots = sync.slots.values()
        files = [slot.file for slot in slots if slot.file is not None]
        known_folder = None if sync.unproven is None else sync.unproven.folder
        folder = known_folder if len(files) == len(slots) else None
        identities = frozenset(slot.identity for slot in slots)
        complete = sync.full or sync.unproven is None or proven
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
        before = {} if sync.full else self._committed.log_records
        records = _last_records(before, sync.log_records)
        self._committed = _Committed(run, identities, frozenset(tensors), delivery, records)
        self.writes += 1

    def roll_back(self) -> None:
        """Record that the version before the last one was restored."""
        assert self.previous is not None
        (self.version, self._committed), self.previous = self.previous, None
        self.writes += 1

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
            bytes=sum(slot.nbytes for slot in self.sync.slots.values()),
            run=None if self.sync.sender is None else self.sync.sender.run,
            owner=self.sync.owner,
            since=self.sync.since,
            prepared=self.sync.prepared,
        )

    def _run_of(self, sync: Sync) -> str:
        """Return the run that a sync leads to a version of."""
        run = self._named_run(sync)
        continued = sync.continues and sync.version == self.version
        begins_anew = is_anonymous(run) and self.runs.is_used(run, sync.version)
        return self.runs.new_anonymous() if run is None or (begins_anew and not continued) else run

    def _named_run(self, one: Sync | PartId) -> str | None:
        """Return the run of a sync or part, as far as it is known before its number is."""
        if one.sender is not None:
            return one.sender.run
        owner = self.runs.owner
        stays = one.origin == "engine" and owner is not None and owner.run == self.run
        return self.run if stays or is_anonymous(self.run) else None

    def _gives_way(self, sync: Sync, part: PartId, now: float) -> bool:
        """Return whether a part of another sync can replace the staged one.

        It can if that is old, or an earlier attempt of the same run.
        """
        if self._is_of(sync, part) or sync.prepared is not None:
            return False
        if now - sync.last_part_at >= self.stage_timeout:
            return True
        ours, theirs = part.sender, sync.sender
        if ours is None or theirs is None or ours.run != theirs.run:
            return False
        later = (ours.epoch, part.version) >= (theirs.epoch, sync.version)
        return later and part.origin == sync.origin == "sender"

    @staticmethod
    def _is_of(sync: Sync | None, part: PartId) -> bool:
        """Return whether a part belongs to the staged sync."""
        if sync is None or (part.version, part.sync_id) != (sync.version, sync.sync_id):
            return False
        return _process(part.sender) == _process(sync.sender)

    def _in_progress(self, sync: Sync, now: float, at: float) -> SyncInProgress:
        left = self.stage_timeout - (now - sync.last_part_at)
        if sync.prepared is not None:
            left = min(sync.prepared.ends - now, _MOST_WAIT_S)  # it can be decided before
        wait, until, owner = max(1, math.ceil(left)), at + max(0.0, left), sync.owner
        who = "a sender that names no run" if owner is None else describe(owner)
        message = (
            f"{who} has staged parts of version {sync.version} since {clock(sync.since)}, which "
            f"keep other syncs out until {clock(until)}; retry in {wait} s"
        )
        if sync.prepared is not None:
            message = (
                f"version {sync.version} of {who} is prepared since {clock(sync.since)}, and its "
                f"group of engines has yet to decide on it; retry in {wait} s"
            )
        return SyncInProgress(
            message,
            staged_version=sync.version,
            staged_sync_id=sync.sync_id,
            staged_run=None if owner is None else owner.run,
            staged_since=sync.since,
            owner=None if owner is None else msgspec.to_builtins(owner),
            until=until,
            retry_after=wait,
        )

    def _join(self, sync: Sync, part: PartId, now: float, at: float) -> Admission:
        if not self._is_of(sync, part):
            raise self._in_progress(sync, now, at)
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
        file = None if part.unproven is None else part.unproven.file
        sync.slots[part.part] = _Slot(part.identity, file)
        sync.unproven = _joined(sync.unproven, part.unproven)
        return "new"

    def _check_base(self, part: PartId) -> None:
        apart = part.unproven is not None and part.unproven.apart
        rest = part.continues and not (apart and self.delivery.complete)
        anonymous = rest and part.version == self.version and not self._is_named(part)
        if anonymous and not self._is_rewritten(part):
            return
        if part.full:
            self._check_unused(part)
            return
        if part.base_version is None or part.base_version < 0:
            raise MalformedPart("version 0 has no base version; only a full sync can lead to it")
        if part.base_version != self.version:
            other = part.version == self.version and self._committed.identities
            raise VersionConflict(
                f"the delta starts from version {part.base_version}, the engine is at "
                f"{self.version}{', committed with other bytes than these' if other else ''}; "
                "send a delta from there, or a full sync",
                **self._versions(part),
            )
        if self._is_of_others(part):
            raise VersionConflict(
                f"the engine's version {self.version} is of run {self.run}, not of the one that "
                "the delta starts from; claim the weights first, or send a full sync",
                **self._versions(part),
            )
        if part.version <= part.base_version:
            raise MalformedPart(
                f"a delta must lead to a later version: {part.base_version} to {part.version}"
            )
        self._check_unused(part)

    def _is_of_others(self, part: PartId) -> bool:
        """Return whether the version is another run's, and the sender did not claim it.

        The engine was restarted, and others have come before it: their numbers mean nothing to it.
        """
        sender, owner = part.sender, self.runs.owner
        if sender is None or part.origin != "sender" or self.run in (None, sender.run):
            return False
        return owner is None or owner.run != sender.run

    def _is_rewritten(self, part: PartId) -> bool:
        """Return whether other bytes of this file were committed at the engine's version."""
        known, own = self.delivery, part.unproven
        if own is None or own.file is None:
            return False
        return own.folder == known.folder and own.file in known.files

    def _is_named(self, part: PartId) -> bool:
        """Return whether a part, or the engine's version, is of a run that a sender has named."""
        return part.sender is not None or not (self.run is None or is_anonymous(self.run))

    def _check_unused(self, part: PartId) -> None:
        """Check that a run gives a number only once. One without a name begins anew instead."""
        run = self._named_run(part)
        if part.origin == "log" or is_anonymous(run) or not self.runs.is_used(run, part.version):
            return
        raise VersionConflict(
            f"run {run} has had version {self.runs.highest(run)}, so that {part.version} would be "
            "the number of other weights; send a later version",
            **self._versions(part),
        )

    def _versions(self, part: PartId) -> dict[str, int | None]:
        """Return what a `VersionConflict` says about the versions of a part's run."""
        known = {"expected": part.base_version, "actual": self.version}
        highest = None if part.sender is None else self.runs.highest(part.sender.run)
        return known if highest is None else {**known, "highest": highest}


def _last_records(known: Mapping[str, str], seen: Mapping[str, str]) -> dict[str, str]:
    return dict([*{**known, **seen}.items()][-_MOST_LOG_RECORDS:])


def _joined(sync: Unproven | None, part: Unproven | None) -> Unproven | None:
    """Return what is not proven of a sync that one more part has joined."""
    if sync is None or part is None:
        one = sync or part
        return one and Unproven(apart=one.apart)
    return sync if sync.folder == part.folder else Unproven(apart=sync.apart)


def _is_by(sync: Sync, sender: RunSender) -> bool:
    """Return whether a process of a run has sent a sync."""
    theirs = sync.sender
    return (
        theirs is not None and _process(theirs) == _process(sender) and not is_twin(sender, theirs)
    )


def _process(sender: RunSender | None) -> tuple[str, int] | None:
    """Return the run and the epoch of a sender."""
    return None if sender is None else (sender.run, sender.epoch)
