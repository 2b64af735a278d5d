"""Publish versions of one trainer's weights to some destinations: the class `Publisher`.

All senders that compare whole tensors are one: `DeltaSender` with one engine, `MultiSender` with
several and maybe a delta log, `LogSender` with a log that engines follow.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Condition
from typing import Final

from delta_sender.arguments import Base, Tensors, named_pairs, tensors_of
from delta_sender.diff.observations import Watch
from delta_sender.diff.quantize import Quantizer
from delta_sender.diff.snapshot import Changes, Snapshot
from delta_sender.encode.encoding_policy import EncodingPolicy, sparse_encoding
from delta_sender.encode.sync_round import SyncRound
from delta_sender.encode.warm_up import warm_up
from delta_sender.locations import log_of
from delta_sender.options import SenderOptions
from delta_sender.publish.contact import meet_all, release_all, release_at_exit
from delta_sender.publish.destination import Destination
from delta_sender.publish.fleet import ABORTED, FleetRound, check_outcomes
from delta_sender.publish.lagging import Lagging
from delta_sender.publish.log_destination import LogDestination
from delta_sender.publish.notify import Notifier
from delta_sender.publish.session import Committed, Session
from delta_sender.publish.session_thread import (
    SessionThread,
    acknowledge_all,
    latest_sync,
    logged_by,
    wait_for,
)
from delta_sender.publish.state_file import Known, StateFile, StateTracker
from delta_sender.results import (
    PartialSyncError,
    SyncError,
    SyncReport,
    raising_as_one,
)
from delta_sender.run import Run
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.log import open_log
from engine_ext.resources import no_full_collections

logger = logging.getLogger(__name__)

Connect = Callable[[str, SenderOptions], Destination]
_STAYS: Final = "version %d stays in the delta log, though no engine has committed it: %s"
_LEFT_OUT_S: Final = 1.0  # for engines that are left out, when the others have committed


class Publisher:
    """Bring destinations to the versions of one trainer. Not thread-safe.

    The weights are read and compared once; each destination has a session, which gets the parts in
    a thread of its own. The snapshot advances once one destination has committed.

    Args:
        urls: Names of the destinations in reports, each once.
        base: What every destination holds now, as (name, tensor), or the folder of a checkpoint;
            copied.
        connect: Makes the destination of a url; called once the base is read.
        is_log: The destination is a delta log that engines follow.
        snapshot_type: Makes the snapshot.
        continues: `run` and `epoch` of an earlier sender, which must be closed, to open its run
            again; not with the option `state`, which has them.
        notifier: Asks engines to look at the log after each version; closed with the publisher.

    Attributes:
        snapshot: The weights that destinations hold, but for what some of them have missed.
        sessions: One for each url.
        run: The run that is open.
        lagging: Destinations that are still being sent a sync that has returned without them.
        fleet: The last sync, if engines commit together; None before the first.
        options: Read at every sync.

    Raises:
        ValueError: No url is given or one twice, there are fewer than `quorum`, the state file is
            not one, or `delta_log` names no log.
        BlockingIOError: Another sender writes into the log, or uses the state file.
    """

    def __init__(
        self,
        urls: Sequence[str],
        base: Base,
        options: SenderOptions,
        *,
        connect: Connect,
        is_log: bool = False,
        snapshot_type: type[Snapshot] = Snapshot,
        continues: tuple[str, int] | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        self.options, self.notifier, self._is_log = options, notifier, is_log
        if options.adapter is not None and options.delta_log is not None:
            raise ValueError("a delta log has versions of the model's weights, not of adapters")
        options.check_engines(urls)
        log = None if options.delta_log is None else open_log(log_of(options.delta_log))
        sends_differences = EncodingPolicy(options.encoding).may_send_differences
        self._digests = options.digest or sends_differences or options.state is not None
        self._watch = Watch(
            refuses_nonfinite=options.refuse_nonfinite, warns_after=options.unchanged_warning
        )
        self._quantizer: Quantizer | None = None
        self._log: Session | None = None
        with contextlib.ExitStack() as opened:
            file = None
            if options.state is not None:
                file = StateFile(Path(options.state))
                opened.callback(file.close)
            self.snapshot = snapshot_type(
                tensors_of(base), sparse_encoding(options.encoding), options.snapshot_on
            )
            dtypes = self.snapshot.dtypes
            if options.quantize is not None:
                stored = {name: TORCH_DTYPE[dtype] for name, dtype in dtypes.items()}
                self._quantizer = Quantizer(options.quantize, stored)
            warm_up(dtypes.values(), options.encoding)
            self._tracker = StateTracker(file, self.snapshot, options.adapter)
            self.run = Run.opened(*(continues or ())) if file is None else file.open_run()
            self.sessions: list[Session] = []
            for url in urls:
                destination = connect(url, options)
                opened.callback(destination.close)
                session = self._session(destination, url, is_log=is_log, has_log=log is not None)
                self.sessions.append(session)
            if log is not None:
                engines = [session.destination for session in self.sessions]
                self._log_destination = LogDestination(log, engines, options.hmac_key, settles=True)
                opened.callback(self._log_destination.close)
                self._log_destination.take_turn()
                self._log = self._session(self._log_destination, None, is_log=True)
                run = self.run.name if self._tracker.knows_base else None
                self._log_destination.note_base(self._log.state, run)
            opened.pop_all()
        self._unfinished: tuple[SyncRound, list[SessionThread]] | None = None
        # Set while the snapshot and the sessions advance; still set if that was interrupted.
        self._is_inconsistent = False
        self._is_released = False
        self.fleet: FleetRound | None = None
        self._ended = Condition()
        self.lagging = Lagging(self._ended)
        release_at_exit(self)

    def _session(
        self,
        destination: Destination,
        url: str | None,
        *,
        is_log: bool = False,
        has_log: bool = False,
    ) -> Session:
        version, needs_full = self._tracker.version_of(url, self.options.base_version)
        session = Session(
            *(destination, self.snapshot, self.options, version, self.run),
            url=url or "",
            is_log=is_log,
            has_log=has_log,
        )
        if needs_full:
            session.state.full_reason = "restarted: the base is not what the engine took last"
        session.state.is_known = session.state.was_sent = self._tracker.had_sent_to(url)
        return session

    def open_run(self, name: str, epoch: int) -> None:
        """Open the run of a log's newest version again, after `epoch` earlier openings of it.

        To be called before the first sync, for a log alone: engines are claimed for a run.
        """
        assert not any(session.is_claimed for session in self.sessions)
        self.run = Run.opened(name, epoch)

    def close(self) -> None:
        """Release the destinations, and close their connections, the log and the state file.

        Those that lag are waited for, `lag_limit` seconds each at most.
        """
        for thread in self.lagging.threads.values():
            thread.join(self.options.lag_limit)
        for thread in self._unfinished[1] if self._unfinished is not None else ():
            destination = thread.session.destination
            if isinstance(destination, LogDestination):  # what it is writing is dropped below
                destination.stop()
                thread.join()
        self.release()
        with contextlib.ExitStack() as closing:
            closing.callback(self._tracker.close)
            for session in self._all:
                closing.callback(session.destination.close)
            if self.notifier is not None:
                closing.callback(self.notifier.close)
            self._end_lagging(wait=False)
            self._write_state([])
            self.snapshot.close()

    def release(self) -> None:
        """Stop sending, drop what is staged, and let other runs claim the destinations.

        Takes a few seconds at most, and raises nothing; part of `close`, and done for senders that
        are still open when the interpreter ends. No sync is possible afterwards.
        """
        if self._is_released:
            return
        for session in self._all:
            session.destination.stop()
        threads = [] if self._unfinished is None else [*self._unfinished[1]]
        release_all(
            [session.destination for session in self.sessions if session.is_claimed],
            self.run,
            [thread.thread for thread in (*threads, *self.lagging.threads.values())],
        )
        self._is_released = True

    @property
    def _all(self) -> list[Session]:
        return self.sessions if self._log is None else [*self.sessions, self._log]

    @no_full_collections()
    def sync(self, tensors: Tensors, *, full: bool) -> dict[str, SyncReport]:
        """Bring every destination to the weights' next version; return the reports by url.

        Those that lag have no report.

        Raises:
            PartialSyncError: Some did not commit. Those in its `reports` did.
            ValueError: Names, shapes or dtypes are not the base's. Nothing is committed.
            OSError: A log cannot be written.
        """
        self._end_unfinished()
        started = time.perf_counter()
        self._end_lagging()
        sessions = [session for session in self._all if session not in self.lagging]
        meet_all([s for s in sessions if s is not self._log], self.options.lag_limit)
        if self._log is not None:
            self._log_destination.find_base(self._log.state, self.sessions)
        version, count = self._next_version(full=full), len(sessions)
        writers = (self._log is not None) + (self._tracker.file is not None)
        pairs = named_pairs(tensors)
        if self._quantizer is not None:
            pairs = self._quantizer(pairs)
        sync_round = SyncRound(
            version,
            self.run,
            full=full,
            destinations=count,
            posts_in_flight=self.options.posts_in_flight,
            started=started,
            writers=writers,
        )
        fleet = self.fleet = self._fleet_round(version, sessions)
        sync_round.writes_last = fleet is not None and self._log is not None
        threads = [
            SessionThread(
                session,
                sync_round,
                self._ended,
                is_writer=session is self._log,
                fleet=None if session is self._log else fleet,
            )
            for session in sessions
        ]
        self._unfinished = sync_round, threads
        try:
            for thread in threads:
                thread.thread.start()
            found = self.snapshot.read(
                pairs,
                digests=self._digests,
                changes_in_memory=self.options.changes_in_memory,
            )
            self._watch.read(sync_round, found)
            self._tracker.begin(sync_round)
            if fleet is None:
                wait_for(threads, self._ended, self.options.lag_limit)
            else:
                window = self.options.commit_window
                if fleet.conduct(sync_round.let_write if sync_round.writes_last else None):
                    others = [t for t in threads if not fleet.is_left_out(t.session.destination)]
                    wait_for(others, self._ended, window, begins_now=True)
                    window = min(window, _LEFT_OUT_S)
                else:
                    sync_round.fail(SyncError("none commits this sync", 409, dict(ABORTED)))
                wait_for(threads, self._ended, window, begins_now=True)
            sync_round.release()
        except BaseException as error:
            if fleet is not None:
                fleet.decide(commits=False)
            sync_round.fail(error)
            self.snapshot.let_go()
            if isinstance(error, Exception):  # an interruption does not wait for answers
                self._end_unfinished()
            raise
        return self._finish(sync_round, threads)

    def _fleet_round(self, version: int, sessions: Sequence[Session]) -> FleetRound | None:
        """Return what lets the engines commit together; None if each commits alone."""
        if self.options.commit == "each":
            return None
        busy = SyncError("it is still busy with an earlier sync")
        engines = {s.url: s.destination for s in sessions if s is not self._log}
        absent = {s.url: busy for s in self.sessions if s not in sessions}
        return FleetRound(version, engines, absent, self.options)

    def sync_one(self, tensors: Tensors, *, full: bool) -> SyncReport:
        """Bring the only destination to the next version; raises its error in place of several."""
        with raising_as_one(1):
            [report] = self.sync(tensors, full=full).values()
        return report

    def _end_unfinished(self) -> None:
        """Take in what came of a sync that was interrupted; wait for its last answers."""
        if self._unfinished is not None:
            sync_round, threads = self._unfinished
            with contextlib.ExitStack() as interrupted:
                for thread in threads:
                    if isinstance(thread.session.destination, LogDestination):
                        interrupted.enter_context(thread.session.destination.interrupted())
                for thread in threads:
                    thread.join()
                    self.lagging.drop(thread.session)
            # If the snapshot might have moved on, the changes are no longer relative to it.
            changes = {} if self._is_inconsistent else sync_round.changes
            unknown = [self._note_failed(t.session, sync_round.version, changes) for t in threads]
            logged = logged_by(threads)
            if logged is not None and not self._is_inconsistent:
                self._drop_from_log(logged, sync_round, is_unknown=any(unknown))
            self._unfinished = None
            self.snapshot.let_go()
        if self._is_inconsistent:
            # The missed changes of an engine are relative to a snapshot that did not come.
            for session in self._all:
                session.state.lose_track(lags=session in self.lagging)
            self._tracker.recompute_digest()
            self._is_inconsistent = False

    def _next_version(self, *, full: bool) -> int:
        """Return a version above all that some engine can be at: a number has one content.

        If no digest proves what a sync led to, it is above all that were posted.
        """
        # An engine of those that commit together might hold what was posted.
        full = full or self.options.commit != "each"
        highest = [session.highest_version(full=full) for session in self._all]
        if self._tracker.file is not None:
            highest.append(self._tracker.file.state.highest)
        return max(highest) + 1

    def _end_lagging(self, *, wait: bool = True) -> None:
        """Take in how lagging engines have ended; if all engines lag, wait for one."""
        threads = []
        for session in self.lagging.ended(most=len(self.sessions) if wait else None):
            self._is_inconsistent = True  # an interruption makes the next sync full
            threads.append(self.lagging.end(session))
            self._is_inconsistent = False
        if threads:
            self._write_state(threads)

    def _finish(
        self, sync_round: SyncRound, threads: Sequence[SessionThread]
    ) -> dict[str, SyncReport]:
        """Let the snapshot and the sessions advance, as far as the engines have."""
        digest = self._tracker.digest_after(sync_round)
        for thread in threads:
            thread.content = digest.hex()
        late = [thread for thread in threads if thread.outcome is None]
        done = [thread for thread in threads if thread not in late]
        advances = any(thread.has_committed for thread in done)
        # An interruption in here makes the next sync full. No session gets ahead of its engine.
        self._is_inconsistent = advances
        for thread in late:
            thread.session.state.note_lagging(sync_round.changes)
            self.lagging.add(thread)
        failed = [thread for thread in done if not isinstance(thread.outcome, Committed)]
        version, changes = sync_round.version, sync_round.changes
        unknown = [self._note_failed(t.session, version, changes) for t in failed]
        logged = logged_by(done)
        if advances:
            for session in set(self._all) - {t.session for t in done if t not in failed}:
                session.state.note_missed(sync_round.changes)
            self.snapshot.advance(sync_round.changes)
            self._tracker.digest = digest
            for session in self.sessions:
                session.state.latest = latest_sync(sync_round, done)
            if self._log is not None and logged is not None:
                self._log.acknowledge(logged)
        elif logged is not None:
            self._drop_from_log(logged, sync_round, is_unknown=bool(late) or any(unknown))
        self.snapshot.let_go()
        engines = {thread.session.url: thread for thread in done if not thread.is_writer}
        self.lagging.forget(engines)
        reports, failures, others = acknowledge_all(engines)
        self._unfinished = None
        self._is_inconsistent = False
        self._write_state(done)
        if others:
            raise others[0]
        if self.fleet is not None:
            check_outcomes(
                self.fleet.outcomes(),
                failures,
                reports,
                is_committed=bool(self.fleet.is_committed),
                evict=self.options.evict,
            )
        elif failures:
            raise PartialSyncError(failures, reports)
        if self.notifier is not None:
            self.notifier.poke(max(report.version for report in reports.values()))
        return reports

    def _note_failed(self, session: Session, version: int, changes: Changes) -> bool:
        """Note that a round has failed; return whether an engine can have committed it."""
        if not self._is_log:
            return session.state.note_failed(changes)
        can_be_there = True
        with contextlib.suppress(OSError):
            can_be_there = session.destination.may_hold(version)
        if can_be_there:  # and the snapshot has not advanced
            session.state.lose_track()
        return False

    def _drop_from_log(self, logged: Committed, sync_round: SyncRound, *, is_unknown: bool) -> None:
        """Take back a version of the log that no engine has acknowledged, if none can have it."""
        assert self._log is not None
        if is_unknown:  # an engine that has it must find it there when it restarts
            self._is_inconsistent = True  # until both are noted
            self._unfinished = None
            self._log.acknowledge(logged)
            self._log.state.missed = self.snapshot.without_old(sync_round.changes)
            self._is_inconsistent = False
        else:  # after an interruption once more
            try:
                self._log_destination.writer.refuse(sync_round.version)
            except OSError as error:  # the engines' own error says more
                logger.warning(_STAYS, sync_round.version, error)
                self._log.state.lose_track()
            self._unfinished = None

    def _write_state(self, threads: Sequence[SessionThread]) -> None:
        for thread in threads:
            if thread.has_committed:
                known = Known(thread.session.state.version, thread.content)
                self._tracker.note(thread.session.url, known)
        unknown = any(session.state.unknown_outcome for session in self.sessions)
        self._tracker.write(is_unknown=self._unfinished is not None or unknown)
