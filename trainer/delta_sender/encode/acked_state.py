"""Track what one destination is known to hold, relative to the shared snapshot."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from delta_sender.diff.change import Bits
from delta_sender.diff.snapshot import Changes, Snapshot
from delta_sender.results import SyncError
from engine_ext.answers import prefix_hint, some_of
from engine_ext.format import Digest, tensor_digest
from engine_ext.ranks.status import EngineStatus
from engine_ext.resources import usable_cores

logger = logging.getLogger(__name__)

_MISSED: Final = "behind: it missed more than half of the model"


class TensorNames(Protocol):
    """The names of a sender's tensors; `Snapshot` has them.

    Attributes:
        tied: Keys of tied tensors by their further names.
    """

    tied: dict[str, str]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys."""

    def __contains__(self, name: object) -> bool:
        """Whether it is a key."""

    def key(self, name: str) -> str:
        """Return the key of the tensor that is sent under `name`."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The part of an engine's plan that the sender needs."""

    names: tuple[str, ...] = ()  # all that a full sync sends; empty until a plan was asked for
    digested: frozenset[str] = frozenset()  # names that the engine's digest covers
    ignored: frozenset[str] = frozenset()  # tensors of the snapshot that the engine does not hold
    is_known: bool = False  # the engine had a plan

    @classmethod
    def read(
        cls, answer: Any, tensors: TensorNames, refused: frozenset[str] = frozenset()
    ) -> EnginePlan:
        """Match the answer of `Destination.plan` with the sender's tensors.

        A tensor of the sender that the plan does not name is sent nevertheless, so that the
        engine refuses it by name, unless it is tied to one that the plan names. So is one that the
        engine ties to another, for it to compare the two.

        Args:
            refused: what an engine without a plan has said that it ignores.

        Raises:
            SyncError: The plan names none of the sender's tensors: whatever it sent, or did not,
                would say nothing of them. Nothing was sent.
        """
        rows = [row for rank in answer or [] for row in rank]
        held = {row["name"] for row in rows if row["status"] != "ignored"}
        known = {tensors.key(row["name"]) for row in rows if not row.get("tied_to")}
        if rows and known.isdisjoint(tensors):
            hint = prefix_hint(next(iter(tensors), ""), known, whose="it")
            raise SyncError(
                "none of the tensors of the base has a name that the engine knows: the base has "
                f"{next(iter(tensors), None)}, ...; the engine {rows[0]['name']}, ...; give the "
                "names of the checkpoint that the engine was started with (named_tensors has "
                f"them){hint}"
            )
        every = [n for n in (*tensors, *tensors.tied) if answer is not None or n not in refused]
        names = tuple(n for n in every if n in held or (n in tensors and n not in known))
        digested = frozenset(row["name"] for row in rows if row["digested"])
        ignored = frozenset(tensors).difference(map(tensors.key, names))
        return cls(names, digested, ignored, answer is not None)

    @property
    def missing(self) -> list[str]:
        """Names that the engine's digest covers and the snapshot does not hold."""
        return sorted(self.digested.difference(self.names))

    def counts(self, name: str) -> bool:
        """Return whether a tensor counts in a part's digest; without a plan, every tensor does."""
        return not self.is_known or name in self.digested


def _differences(answer: Any, tensors: TensorNames, snapshot: Snapshot) -> Iterator[str]:
    """Yield what the sender's tensors and those in the answer of `Destination.plan` differ in.

    Dtypes and shapes are compared if the snapshot holds all of the tensors, whole.
    """
    rows = {row["name"]: row for rank in answer or [] for row in rank}
    if not rows:
        return
    known = {tensors.key(name) for name in rows}
    if unknown := [name for name in tensors if name not in known]:
        yield f"the engine has no {some_of(unknown)}{prefix_hint(unknown[0], rows, whose='it')}"
    held = {name: row for name, row in rows.items() if row["status"] != "ignored"}
    own = [name for name, row in held.items() if not row.get("tied_to")]
    if lacking := [name for name in own if tensors.key(name) not in tensors]:
        yield f"the base has no {some_of(lacking)}"
    if tensors is not snapshot:
        return
    images = {n: snapshot.image(tensors.key(n)) for n in held if tensors.key(n) in tensors}
    dtypes = {n: (image.dtype, held[n].get("dtype")) for n, image in images.items()}
    shapes = {n: ([*image.shape], held[n].get("shape")) for n, image in images.items()}
    for what, pairs in (("dtype", dtypes), ("shape", shapes)):
        if other := {n: pair for n, pair in pairs.items() if pair[1] not in (None, pair[0])}:
            ours, theirs = other[min(other)]
            yield f"the {what} is {ours} in the base and {theirs} in the engine: {some_of(other)}"


@dataclass(frozen=True, slots=True)
class PostedSync:
    """A sync whose last part was posted."""

    version: int
    sync_ids: frozenset[str]  # that its parts can carry
    digest: Digest | None  # of the weights after it; None if no digest is kept
    is_complete: bool  # the digest covers every tensor

    def is_held_by(self, status: EngineStatus | None) -> bool:
        """Return whether an engine with this ``/delta_status`` has committed the sync."""
        if status is None or status.version.number != self.version:
            return False
        if status.health.state != "certain":  # half-written, or other bits
            return False
        if status.health.changed_externally is not None:
            return False
        if (last := status.last_sync) is not None:
            return last.version == self.version and last.sync_id in self.sync_ids
        digest = self.digest if self.is_complete else None
        return digest is not None and status.version.digest == digest.hex()


@dataclass(frozen=True, slots=True)
class UnknownOutcome:
    """A sync that the destination might have committed, though no answer came.

    `missed` are the changes from the snapshot to what the destination holds if it has committed,
    without old bits; None if they became too large to keep.
    """

    missed: Changes | None
    posted: PostedSync | None  # that sync; None while it is still being posted


class AckedState:
    """The weights of one destination: the snapshot with `missed` applied, at `version`.

    `missed` are the changes that turn the snapshot into what the destination holds, that is, the
    syncs that it missed, reversed; without old bits. The snapshot, which all destinations share, is
    not changed here.

    Args:
        names: Names of all tensors that the destination gets, if the snapshot holds only some.
    """

    resends_unproven = True  # tensors that no digest covers can be sent whole with a delta

    def __init__(self, snapshot: Snapshot, version: int, names: TensorNames | None = None) -> None:
        self.version = version  # that the destination acknowledged last
        self.missed: Changes = {}
        self.unknown_outcome: UnknownOutcome | None = None
        # Why it can hold other bytes, so that the next sync is a full one; None if it does not.
        self.full_reason: str | None = None
        self.highest_used = 0  # the highest number that the run had committed before
        self.is_known = False  # it held the base, by its digest, or something that was sent
        self.was_sent = False  # it has taken something of this run
        self.base_digest: str | None = None  # of what was proven to be the base last
        self.found_other: EngineStatus | None = None  # its status, if it did not hold the base
        self.unproven: frozenset[str] = (
            frozenset()
        )  # names that no digest has shown to be the base's
        self.latest: PostedSync | None = None  # led to the snapshot; None if that is not known
        self.plan = EnginePlan()  # as it was last read
        self.plan_is_current = False  # it can be used without reading it again
        self.unlike = ""  # how the base is of another checkpoint than the destination's, by plan
        self.digest: Digest | None = None  # of what is held; None if no digest is kept
        self.proves_parts = False  # a part's digest can prove what it changes, also without that
        self.posted: PostedSync | None = None  # the destination might be committing it
        self.snapshot = snapshot
        self._names: TensorNames = snapshot if names is None else names
        self._ignored: frozenset[str] = frozenset()

    @property
    def needs_full(self) -> bool:
        """Whether it can hold other bytes; the next sync is a full one."""
        return self.full_reason is not None

    @property
    def is_proven(self) -> bool:
        """Whether a digest that leaves no tensor out proves every sync."""
        return self.digest is not None and self.plan.digested == {*self.plan.names}

    @property
    def highest_version(self) -> int:
        """The highest version that the destination can be at, or has been at in this run."""
        unknown = None if self.unknown_outcome is None else self.unknown_outcome.posted
        posted = [one.version for one in (unknown, self.posted) if one is not None]
        return max([self.version, self.highest_used, *posted])

    def read_plan(self, answer: Any, *, keep_digest: bool, full: bool) -> None:
        """Take in the answer of `Destination.plan`, and compute the digest of what it holds.

        Before a full sync the digest is zero, as it replaces every tensor.
        """
        first_time = not self.plan.names
        self.plan_is_current, self.digest = False, None
        self.plan = plan = EnginePlan.read(answer, self._names, self._ignored)
        self.unlike = "; ".join(_differences(answer, self._names, self.snapshot))
        self.proves_parts = plan.is_known and keep_digest
        if self.proves_parts and not plan.missing:
            self.digest = Digest.ZERO if full else self._held_digest()
        self.plan_is_current = plan.is_known  # unless it was interrupted
        if first_time and plan.ignored:
            logger.warning("left out, as the engine ignores them: %s", some_of(plan.ignored))
        if first_time and plan.missing:
            logger.warning(
                "digests prove the changed values alone: the engine's digest covers %d tensors "
                "that are not in the base: %s",
                len(plan.missing),
                some_of(plan.missing),
            )

    def find_base(self, status: EngineStatus | None, run: str) -> bool:
        """Return whether, by its status, the destination holds what it should, and note it if so.

        Its digest counts and not its version, whose number another sender can have chosen. Tensors
        that the digest does not cover are only taken to be the base's if the destination has been
        started with them and was sent nothing since, or is at the very version of this run and
        nothing says that it can hold other bytes.

        Args:
            run: The name of the sender's run.
        """
        if status is None or self.digest is None or not self.plan.digested:
            return False
        if status.health.changed_externally is not None or status.health.state == "uncertain":
            return False
        held = status.version
        self.found_other = None if held.digest == self.digest.hex() else status
        if self.found_other is not None:
            return False
        is_own = not self.needs_full and (held.run, held.number) == (run, self.version)
        if not ((held.loaded and not self.was_sent) or is_own):
            unproven = frozenset(self.plan.names).difference(self.plan.digested)
            if unproven and not self.resends_unproven:
                self.found_other = status
                return False
            self.unproven = unproven
        self.version, self.base_digest = held.number, held.digest
        self.is_known, self.full_reason = True, None
        return True

    def find_target(self, status: EngineStatus | None, run: str, changes: Changes) -> bool:
        """Return whether, by its status, the destination holds all of a sync, and note it if so.

        An earlier sender has led it there. Tensors that no digest covers are not known to be there.

        Args:
            run: The name of the sender's run.
            changes: Of the whole sync, from the snapshot.
        """
        if self.digest is None:
            return False
        known, digest = self.missed, self.digest
        self.missed = self.snapshot.without_old(changes)
        self.digest = self._held_digest()
        if self.find_base(status, run):
            return True
        self.missed, self.digest, self.found_other = known, digest, None
        return False

    def _held_digest(self) -> Digest:
        """Return the digest of what the destination holds, as far as its own covers that."""
        snapshot = self.snapshot
        keys = ((name, snapshot.key(name)) for name in self.plan.digested)
        return digest_of(
            (name, snapshot.image(key, self.missed.get(key)).values) for name, key in keys
        )

    def note_ignored(self, names: Iterable[str]) -> bool:
        """Leave out what an engine without a plan ignores; return whether that is news."""
        before, self._ignored = self._ignored, self._ignored.union(names)
        new = sorted(self._ignored - before)
        if new:
            logger.warning("left out, as the engine ignores them: %s", new)
        return bool(new) and not self.plan.is_known

    def forget_ignored(self) -> None:
        """Send everything again to an engine without a plan: it might have restarted otherwise."""
        self._ignored = frozenset()

    def note_missed(self, changes: Changes) -> None:
        """Note that the snapshot is about to advance by changes that this destination lacks.

        Missed changes of more than half of the model are not kept; the next sync is a full one.
        """
        changes = self.snapshot.without_old(changes)
        self._take_missed(self._rebased(changes, self.missed))
        unknown = self.unknown_outcome
        if unknown is not None and unknown.missed is not None:
            rebased = self._rebased(changes, unknown.missed)
            self.unknown_outcome = replace(unknown, missed=rebased)

    def note_failed(self, changes: Changes) -> bool:
        """Note that a sync has failed; the snapshot has not advanced by its changes.

        Return whether the destination can have committed it all the same: it got the last part and
        did not refuse.
        """
        if self.posted is not None:
            self.unknown_outcome = UnknownOutcome(self.snapshot.without_old(changes), self.posted)
        elif self.unknown_outcome is not None and self.unknown_outcome.posted is None:
            self.unknown_outcome = None
        return self.posted is not None

    def note_lagging(self, changes: Changes) -> None:
        """Note that a sync is still being sent, and that nobody waits for its end.

        If an earlier outcome is still unknown, nothing of the sync will be sent.
        """
        if self.unknown_outcome is None:
            self.unknown_outcome = UnknownOutcome(self.snapshot.without_old(changes), None)

    def end_lagging(self, *, committed: bool) -> None:
        """Note how a sync that nobody waited for has ended; see `note_lagging`."""
        unknown = self.unknown_outcome
        assert unknown is not None
        if committed:
            self._take_missed(unknown.missed)
            self.unknown_outcome = None
        elif unknown.posted is None:
            posted = self.posted
            self.unknown_outcome = None if posted is None else replace(unknown, posted=posted)

    def lose_track(self, *, lags: bool = False) -> None:
        """Note that its difference from the snapshot is no longer known; the next sync is full.

        Args:
            lags: A sync is still being sent whose end nobody has noted.
        """
        self.missed, self.latest = {}, None
        self.full_reason = "lost_track: an earlier sync was interrupted while it was noted"
        unknown = self.unknown_outcome
        if unknown is not None:
            has_ended = unknown.posted is None and not lags  # noting that was interrupted
            self.unknown_outcome = None if has_ended else replace(unknown, missed=None)

    def resolve(self, status: EngineStatus | None) -> None:
        """Find out by the destination's status whether it has committed the unknown sync."""
        unknown, self.unknown_outcome = self.unknown_outcome, None
        if unknown is None or unknown.posted is None or not unknown.posted.is_held_by(status):
            return
        self.version, self.digest = unknown.posted.version, unknown.posted.digest
        self.was_sent = True
        self._take_missed(unknown.missed)

    def resolve_latest(self, status: EngineStatus | None) -> bool:
        """Return whether, by its status, the destination holds the snapshot, and note it if so.

        A delta log might have led it there.
        """
        if self.latest is None or not self.latest.is_held_by(status):
            return False
        self.version, self.digest, self.missed = self.latest.version, self.latest.digest, {}
        return True

    def _take_missed(self, missed: Changes | None) -> None:
        """Take over what it misses; None if that was too much to keep."""
        self.missed = missed or {}
        if missed is None:
            self.full_reason = self.full_reason or _MISSED

    def _rebased(self, changes: Changes, missed: Changes) -> Changes | None:
        """Return `missed` relative to the advanced snapshot; None if that is too much to keep."""
        rebased: Changes = {}
        left = self.snapshot.nbytes // 2
        for key in {**changes, **missed}:
            change = self.snapshot.change_between(key, changes.get(key), missed.get(key))
            if change is not None:
                rebased[key] = change.without_old()
                left -= rebased[key].nbytes
            if left < 0:
                return None
        return rebased


def digest_of(tensors: Iterable[tuple[str, Bits]]) -> Digest:
    """Return the digest of whole tensors, given as (name, bits [numel])."""
    threads = usable_cores()
    digests = (tensor_digest(name, values, threads=threads) for name, values in tensors)
    return Digest.total(digests)
