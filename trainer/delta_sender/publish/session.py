"""Talk to one destination: read its plan, post the parts of a sync, take in the answer.

`part_builder` makes the parts, `post_queue` posts them, `recovery` decides what follows a refusal,
and `acked_state` remembers what the destination holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from delta_sender.diff.snapshot import Snapshot
from delta_sender.encode.acked_state import AckedState, PostedSync
from delta_sender.encode.encoding_policy import AUTO, EncodingPolicy
from delta_sender.encode.part_builder import ChangedTensors, PartBuilder
from delta_sender.encode.sync_round import Attempt, SyncRound
from delta_sender.options import SenderOptions
from delta_sender.publish.destination import Destination
from delta_sender.publish.fleet import FleetRound, Unsettled
from delta_sender.publish.full_sync import FullSyncGuard
from delta_sender.publish.post_queue import PostQueue
from delta_sender.publish.recovery import Recovery
from delta_sender.results import SyncError, SyncReport
from delta_sender.run import Run
from engine_ext.answers import some_of
from engine_ext.format import Digest
from engine_ext.ranks.status import EngineStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Contact:
    """Answers of a destination before the first sync."""

    claimed: dict[str, Any]
    status: EngineStatus | None
    plan: Any


@dataclass(frozen=True)
class Committed:
    """A destination has committed a round, and nothing on this side has moved on yet."""

    report: SyncReport
    digest: Digest | None  # of what the destination should hold; None if no digest is kept
    policy: EncodingPolicy  # of later rounds


class Session:
    """The syncs of one destination.

    `url` is what reports call the destination. If it `is_log`, it is a delta log, which gets values
    only, but with ``log_differences``. If it `has_log`, what it lacks might be in a delta log.
    `state` is what it holds, if that is more than the snapshot.
    """

    def __init__(
        self,
        destination: Destination,
        snapshot: Snapshot,
        options: SenderOptions,
        version: int,
        run: Run,
        *,
        url: str = "",
        is_log: bool = False,
        has_log: bool = False,
        state: AckedState | None = None,
    ) -> None:
        self.destination = destination
        self.state = AckedState(snapshot, version) if state is None else state
        self.run, self.url = run, url
        self.is_log = is_log
        self._options, self._has_log = options, has_log
        self._guard: FullSyncGuard | None = None
        if not is_log:
            allow = options.full == "allow"
            self._guard = FullSyncGuard(destination, self.state, run, allow=allow)
        self._unserved: set[str] = set()  # changed tensors that it ignores, as was said
        self._fleet: FleetRound | None = None  # of the round that is being sent
        self._unsettled: Unsettled | None = None
        self._asking = Lock()
        self._contact: _Contact | None = None
        self._tries = 0  # of asking that have failed
        self._failed: BaseException | None = None  # that the last try has met, for `sync` to raise
        self.is_claimed = False  # the destination is, or can be, the run's
        self.is_met = is_log  # nothing is left to be found out before the first sync
        # Without differences once they were refused.
        self._policy = EncodingPolicy(options.encoding)
        if is_log and self._policy.may_send_differences and not options.log_differences:
            self._policy = self._policy.values_only()

    def ask(self) -> None:
        """Claim the destination for the run, and ask what it holds; once.

        If another thread is asking, its outcome counts.

        Raises:
            SyncError: It belongs to another run, refused, or could not be reached.
        """
        tries = self._tries
        with self._asking:
            if self.is_met or self._contact is not None:
                return
            if self._failed is not None and self._tries != tries:
                raise self._failed
            self._failed = None
            try:
                self._contact = self._ask()
            except BaseException as error:
                self._tries, self._failed = self._tries + 1, error
                raise

    def _ask(self) -> _Contact:
        destination, self.is_claimed = self.destination, True
        try:
            claimed = destination.claim(self.run, takeover=self._options.takeover)
        except SyncError as failed:
            self.is_claimed = not failed.error  # without the engine's own answer it might be
            raise
        status = destination.status()
        return _Contact(claimed, status, None if status is None else destination.plan())

    def ask_early(self) -> bool:
        """Call `ask`, and let `sync` raise what it raises; return whether there is an answer."""
        try:
            self.ask()
        except BaseException:
            return False
        return True

    def meet(self) -> None:
        """Find out by its digest whether the destination holds the base; once, after `ask`.

        The snapshot must not move on meanwhile.

        Raises:
            SyncError: See `ask`.
        """
        if self.is_met:
            return
        self.ask()
        contact, self._contact = self._contact, None
        if contact is not None and contact.status is not None:
            state = self.state
            state.read_plan(contact.plan, keep_digest=self._options.digest, full=False)
            state.find_base(contact.status, self.run.name)
            # Numbers of a run are not used twice, and the engine's does not go back.
            numbers = (contact.claimed.get("highest"), contact.status.version.number)
            state.highest_used = max([n for n in numbers if isinstance(n, int)], default=0)
        self.is_met = True  # unless it was interrupted

    def highest_version(self, *, full: bool) -> int:
        """Return the highest version that the destination can be at, or has been at in this run.

        Args:
            full: All that was posted counts, whatever a digest proves.
        """
        state, destination = self.state, self.destination
        highest = state.highest_version
        if full or state.needs_full or not state.is_proven:
            highest = max(highest, destination.highest_posted)
        return max(highest, destination.last_number) if self.is_log else highest

    def sync(self, sync_round: SyncRound, fleet: FleetRound | None = None) -> Committed:
        """Send one round, in as many attempts as `Recovery` knows.

        The session stays as before the round until `acknowledge` is called.

        Args:
            fleet: The destinations that commit together with this one; None: it commits alone.

        Raises:
            FullSyncRefused: Only a full sync would help, and it would replace others' weights.
            SyncError: The destination refused or could not be reached.
        """
        self._fleet = fleet
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        self._settle()
        if not self.is_met:
            self.ask()
            with sync_round.reading():
                self.meet()
        recovery = Recovery(
            self.state, self.destination, sync_round, self._guard, has_log=self._has_log
        )
        attempt = recovery.first(self._policy)
        while True:
            try:
                return self._send(sync_round, attempt)
            except SyncError as error:
                if self._has_prepared():
                    raise
                if (following := recovery.after(attempt, error)) is None:
                    raise
                attempt = following

    def acknowledge(self, committed: Committed) -> SyncReport:
        """Move on with the destination; the snapshot has advanced.

        Raises:
            SyncError: The destination's digest differs; it has committed, and the next sync is a
                full one.
        """
        state, report = self.state, committed.report
        state.missed, state.digest, self._policy = {}, committed.digest, committed.policy
        state.version, state.unproven = report.version, frozenset()
        state.is_known = state.was_sent = True
        state.found_other = state.full_reason = None
        found, digest = report.engine.get("digest"), committed.digest
        if digest is not None and found not in (None, digest.hex()):
            state.full_reason = "changed: after the last sync the engine's digest was another one"
            raise SyncError(
                f"version {report.version} is committed, but the engine does not hold the sender's "
                f"weights: its digest is {found}, not {digest}; the next sync will be full",
                200,
            )
        return report

    def end_lagging(self, outcome: Committed | BaseException) -> SyncReport:
        """Take in how a round has ended that nobody waited for; once for each.

        Raises:
            RuntimeError: No round is left whose end was not taken in; nothing has changed.
            BaseException: The round's error.
        """
        if self.state.unknown_outcome is None:  # what the destination lacks is noted nowhere else
            raise RuntimeError(f"{self.destination.name}: no sync lags")
        try:
            if not isinstance(outcome, Committed):
                raise outcome
            return self.acknowledge(outcome)
        finally:
            self.state.end_lagging(committed=isinstance(outcome, Committed))

    def _settle(self) -> None:
        """Take the last step of an earlier round again if it has no answer.

        Raises:
            SyncError: No answer came.
        """
        if self._unsettled is not None:
            self._unsettled.settle(self.destination)
            self._unsettled = None

    def _has_prepared(self) -> bool:
        """Return whether the destination holds the round, so that nothing else can be sent."""
        return self._fleet is not None and self._fleet.has_prepared(self.destination)

    def _check_version(self, sync_round: SyncRound, attempt: Attempt) -> None:
        """Check that the destination can be at the version that the others are to reach."""
        if attempt.version == sync_round.version:
            return
        self.state.highest_used = max(self.state.highest_used, attempt.version - 1)
        raise SyncError(
            f"{self.destination.name} can not be at version {sync_round.version}, which the others "
            f"are to reach: the next one that it can have is {attempt.version}; sync again"
        )

    def _send(self, sync_round: SyncRound, attempt: Attempt) -> Committed:
        """Build part by part, and have them posted."""
        state, destination, fleet = self.state, self.destination, self._fleet
        if fleet is not None:
            self._check_version(sync_round, attempt)
        # Before a full sync again: the engine might be another one, or our digest wrong. Without a
        # plan too: an engine that was started without a checkpoint has one after its first sync.
        reads_plan = attempt.full or not state.plan_is_current
        plan = destination.plan() if reads_plan else None
        destination.announce(attempt.reason)
        queue = PostQueue(destination, sync_round, waits=not self.is_log)
        try:
            with sync_round.reading(), queue.encoding():
                if reads_plan:
                    state.read_plan(plan, keep_digest=self._options.digest, full=attempt.full)
                parts, digest = self._post(sync_round, attempt, queue)
            answer = queue.finish()
            if fleet is not None:
                self._check_applied(answer)
                answer = self._commit_in_fleet(answer, sync_round.sync_id(attempt))
        except BaseException as raised:
            queue.abandon()
            error = queue.reason(raised)
            if attempt.full:  # the digest of what is held was not computed
                state.plan_is_current = False
            if not queue.posting_last or (isinstance(error, SyncError) and error.is_refusal):
                state.posted = None
            elif state.posted is not None:  # the delta log can lead there too, by values
                state.posted = replace(state.posted, sync_ids=sync_round.sync_ids())
            if error is not raised:
                raise error from raised
            raise
        self._check_applied(answer)
        self._warn_of_lost_changes(self._lost_changes(sync_round))
        report = SyncReport(
            **parts,
            base_version=base_version(answer, attempt, state),
            wire_bytes=queue.wire_bytes,
            encode_ms=(time.perf_counter() - sync_round.started - queue.waited_s) * 1e3,
            post_ms=queue.posting_s * 1e3,
            status=answer["status"],
            engine=answer,
            link_bytes_per_s=destination.speed.measured,
            **sync_round.observed.in_report(),
        )
        if attempt.policy.encoding == AUTO and report.picked:
            choices = ", ".join(f"{how}: {count}" for how, count in sorted(report.picked.items()))
            rate = destination.speed.bytes_per_s / 1e6
            message = "version %d: link speed %.0f MB/s, params sent as %s"
            logger.info(message, attempt.version, rate, choices)
        return Committed(report, digest, attempt.next_policy)

    def _commit_in_fleet(self, answer: dict[str, Any], sync_id: str) -> dict[str, Any]:
        """Commit what was posted together with the other engines, given the last part's answer."""
        assert self._fleet is not None
        if answer["status"] == "staged":
            return self._fleet.commit(self.destination, sync_id, self._note)
        self._fleet.note_committed(self.destination)
        return answer

    def _note(self, unsettled: Unsettled | None) -> None:
        self._unsettled = unsettled

    def _post(
        self, sync_round: SyncRound, attempt: Attempt, queue: PostQueue
    ) -> tuple[Mapping[str, Any], Digest | None]:
        """Queue every part; return what a report says of them, and the digest they lead to."""
        source = ChangedTensors(sync_round, attempt, self.state, self.destination.speed)
        builder = PartBuilder(
            sync_round,
            attempt,
            source,
            base_version=self.state.version,
            bucket_bytes=self._options.bucket_bytes,
        )
        for part in builder:
            sync_round.check()
            if part.last and not self.is_log:
                self.state.posted = PostedSync(
                    attempt.version, sync_round.sync_ids(), source.digest, self.state.is_proven
                )
            queue.put(part)
        return source.report(), source.digest

    def _lost_changes(self, sync_round: SyncRound) -> list[str]:
        """Return tensors that have changed, which the destination ignores and no warning named."""
        return sorted(self.state.plan.ignored.intersection(sync_round.changes) - self._unserved)

    def _warn_of_lost_changes(self, names: Collection[str], *, logs: bool = True) -> None:
        """Name tensors that the trainer has changed and the destination does not hold, once."""
        self._unserved.update(names)
        if names and logs:
            message = "%s ignores tensors that have changed, as a fresh load of them would: %s"
            logger.warning(message, self.destination.name, some_of(names))

    def _check_applied(self, answer: Mapping[str, Any]) -> None:
        """Check that a sync which the engine has had already is the one that was posted.

        It knows parts by their params. Another sync might have the same ones and more, and a part
        without any is that of every empty sync and the last one of every sharded sync.

        Raises:
            SyncError: It might be another sync that led to this version.
        """
        posted = self.state.posted
        if answer["status"] != "already_applied" or posted is None:
            return
        digest = posted.digest if posted.is_complete else None
        if digest is not None and answer.get("digest") == digest.hex():
            return
        if not posted.is_held_by(self.destination.status()):
            self.state.posted = None
            raise SyncError(
                f"the engine is at version {posted.version} by another sync",
                409,
                {
                    "type": "VersionConflict",
                    "engine_state": "unchanged",
                    "actual": posted.version,
                },
            )


def base_version(answer: Mapping[str, Any], attempt: Attempt, state: AckedState) -> int:
    """Return the version that a destination was at before it committed an attempt."""
    said = (answer.get("base_version"), attempt.replaced)
    return next((version for version in said if isinstance(version, int)), state.version)
