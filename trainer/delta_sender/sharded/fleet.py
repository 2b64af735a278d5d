"""Let all ranks send one sync to several engines, which commit it as one: `ShardedFleet`.

Each engine has a session on every rank, in a thread, and a group of ranks of its own, in which
these sessions agree. The leader decides, by the protocol of `delta_sender.publish.fleet`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from threading import Condition, Thread
from typing import Any

from delta_sender.diff.snapshot import Snapshot
from delta_sender.encode.sync_round import SyncRound
from delta_sender.options import SenderOptions
from delta_sender.publish.fleet import ABORTED, FleetRound, check_outcomes
from delta_sender.publish.session import Committed
from delta_sender.publish.session_thread import SessionThread, acknowledge_all
from delta_sender.results import FleetOutcome, RankError, ShardedReport, SyncError
from delta_sender.sharded.ranks import Ranks, described, error_of
from delta_sender.sharded.session import ShardedSession


class ShardedFleet:
    """The engines that all ranks send to, which commit as one.

    Args:
        sessions: By url, in the same order on every rank.
        ranks: For what is of no engine.
        snapshot: What this rank owns, which all sessions start from.

    Attributes:
        outcomes: What has become of each engine in the last sync, by url; the same on all ranks.
    """

    def __init__(
        self,
        sessions: Mapping[str, ShardedSession],
        ranks: Ranks,
        snapshot: Snapshot,
        options: SenderOptions,
    ) -> None:
        self._sessions, self._ranks = sessions, ranks
        self._snapshot, self._options = snapshot, options
        self.outcomes: dict[str, FleetOutcome] = {}

    def meet(self) -> None:
        """Claim the engines that are not met yet, and find out what they hold.

        One that does not answer is left to the sync, which fails with it.

        Raises:
            SyncError: An engine knows none of the tensors; on all ranks.
            RankError: A rank has died, or does not answer.
        """
        failures: dict[str, BaseException] = {}

        def meet(url: str, session: ShardedSession) -> None:
            try:
                if session.ask_early():
                    session.meet()
            except BaseException as failed:
                failures[url] = failed
                if not isinstance(failed, SyncError):  # on this rank alone
                    session.ranks.leave("a rank has failed")

        unmet = [(url, one) for url, one in self._sessions.items() if not one.is_met]
        if not unmet:  # on no rank
            return
        threads = [Thread(target=meet, args=one, name="delta-meet", daemon=True) for one in unmet]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._check_ranks([*failures.values()])
        for url in self._sessions:
            if url in failures:
                raise failures[url]

    def sync(self, sync_round: SyncRound) -> dict[str, ShardedReport]:
        """Send a round that is read; return the reports of all engines that have committed, by url.

        The snapshot advances if one has.

        Raises:
            GroupAborted, PartialSyncError: See `check_outcomes`; on all ranks.
            RankError: A rank has failed, or `evict` has on the leader; on all ranks.
        """
        fleet, ended = self._round(sync_round.version), Condition()
        threads = {
            url: SessionThread(session, sync_round, ended, is_writer=False, fleet=fleet)
            for url, session in self._sessions.items()
        }
        failure: SyncError | None = None
        try:
            for thread in threads.values():
                thread.thread.start()
            self._conduct(fleet)
        except SyncError as error:
            failure = error
        except BaseException as error:  # the sessions end without this thread
            if fleet is not None:
                fleet.decide(commits=False)
            sync_round.fail(error)
            raise
        self._end_late(sync_round, fleet)
        for thread in threads.values():
            thread.join()
        for session in self._sessions.values():
            session.destination.client.gives_up = False
        self._check_ranks([thread.outcome for thread in threads.values()], failure)
        return self._finish(sync_round, threads, fleet, failure)

    def _round(self, version: int) -> FleetRound | None:
        """Return what decides; on the leader."""
        if not self._ranks.is_leader:
            return None
        engines = {url: session.destination for url, session in self._sessions.items()}
        return FleetRound(version, engines, {}, self._options)

    def _conduct(self, fleet: FleetRound | None) -> None:
        """Let the leader decide.

        Raises:
            RankError: `evict` has failed, so that no engine commits; or a rank has died.
        """

        def conduct() -> bool:
            assert fleet is not None
            try:
                return fleet.conduct()
            except BaseException:
                fleet.decide(commits=False)
                raise

        self._ranks.from_leader(conduct)

    def _end_late(self, sync_round: SyncRound, fleet: FleetRound | None) -> None:
        """Let sessions end that have not prepared: nothing is posted again, or begun.

        The others have posted all, and the leader alone has more to ask of their engines.
        """
        sync_round.fail(SyncError("the others have ended this sync", 409, dict(ABORTED)))
        for session in self._sessions.values():
            has_prepared = fleet is not None and fleet.has_prepared(session.destination)
            session.destination.client.gives_up = not has_prepared

    def _check_ranks(self, outcomes: list[Any], failure: SyncError | None = None) -> None:
        """Check that all ranks are still in step, whatever has become of the engines.

        Raises:
            RankError: They are not; engines might have committed. The ranks have left.
        """
        expected = (Committed, SyncError, type(None))
        is_apart = any(session.ranks.has_left for session in self._sessions.values())
        unknown = [one for one in outcomes if not isinstance(one, expected)]
        said: list[Any] = [is_apart or bool(unknown)]
        with contextlib.suppress(RankError):
            said = self._ranks.exchange(said[0])
        if not any(said) and not self._ranks.has_left:
            return
        lost = [*unknown, *(one for one in outcomes if isinstance(one, RankError))]
        why = lost[0] if lost else failure
        text = "the ranks are not in step any more; make a new sender" if why is None else str(why)
        self.leave(f"a rank has failed: {text}")
        raise RankError(f"engines might have committed, all or none; {text}", []) from why

    def _finish(
        self,
        sync_round: SyncRound,
        threads: Mapping[str, SessionThread],
        fleet: FleetRound | None,
        failure: SyncError | None,
    ) -> dict[str, ShardedReport]:
        """Let the snapshot and the sessions advance, as far as the engines have."""
        failed = [one.session.state for one in threads.values() if not one.has_committed]
        for state in failed:
            state.note_failed(sync_round.changes)
        if len(failed) < len(threads):
            for state in failed:
                state.note_missed(sync_round.changes)
            self._snapshot.advance(sync_round.changes)
        for url, thread in threads.items():
            if not thread.has_committed:
                self._sessions[url].state.agree_on_missed(self._ranks)
        reports, failures, _ = acknowledge_all(threads)
        is_committed = self._share_outcomes(fleet)
        if failure is not None:
            raise failure
        evict = self._options.evict if self._ranks.is_leader else None
        check_outcomes(self.outcomes, failures, reports, is_committed=is_committed, evict=evict)
        return {url: one for url, one in reports.items() if isinstance(one, ShardedReport)}

    def _share_outcomes(self, fleet: FleetRound | None) -> bool:
        """Set `outcomes` to the leader's; return whether the engines commit."""

        def told() -> list[Any]:
            assert fleet is not None
            outcomes = {
                url: [one.state, None if one.error is None else described(one.error)]
                for url, one in fleet.outcomes().items()
            }
            return [bool(fleet.is_committed), outcomes]

        is_committed, outcomes = self._ranks.from_leader(told)
        self.outcomes = {
            url: FleetOutcome(state, None if said is None else error_of(said))
            for url, (state, said) in outcomes.items()
        }
        return bool(is_committed)

    def leave(self, why: str) -> None:
        """Close the connections to the other ranks; the sender cannot be used any more."""
        for session in self._sessions.values():
            session.ranks.leave(why)
        self._ranks.leave(why)
