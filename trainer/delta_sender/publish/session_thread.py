"""Run one session's share of one sync in a thread."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from threading import Condition, Thread

from delta_sender.encode.acked_state import PostedSync
from delta_sender.encode.sync_round import SyncRound
from delta_sender.publish.fleet import FleetRound
from delta_sender.publish.session import Committed, Session
from delta_sender.results import SyncError, SyncReport


class SessionThread:
    """A thread in which a session sends one round, to be started by the caller.

    It notifies `ended` at its end. If it `is_writer`, engines wait for it before they commit. The
    engines of a `fleet` commit together.
    """

    def __init__(
        self,
        session: Session,
        sync_round: SyncRound,
        ended: Condition,
        *,
        is_writer: bool,
        fleet: FleetRound | None = None,
    ) -> None:
        self.session, self.is_writer, self._fleet = session, is_writer, fleet
        session.state.posted = None
        self.outcome: Committed | BaseException | None = None  # None until it has ended
        self.content = ""  # hex digest of what the round leads to; empty if that is not known
        self.thread = Thread(target=self._run, name="delta-sync", daemon=True)
        self._round, self._ended = sync_round, ended

    @property
    def has_committed(self) -> bool:
        """Whether it has ended with a commit that the snapshot follows."""
        return isinstance(self.outcome, Committed) and not self.is_writer

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has ended, if it was started."""
        if self.thread.ident is not None:
            self.thread.join(seconds)

    def _run(self) -> None:
        outcome: Committed | BaseException
        try:
            outcome = self.session.sync(self._round, self._fleet)
            if self.is_writer:
                self._round.note_written()
        except BaseException as error:
            outcome = error
            if self._fleet is not None:
                self._fleet.note_failed(self.session.destination, error)
            if self.is_writer:
                # The error of the engines' sessions, which do not get the version either.
                not_logged = SyncError(f"not sent, as writing the delta log failed: {error}")
                self._round.fail(error if isinstance(error, SyncError) else not_logged)
        self._round.leave()
        with self._ended:
            self.outcome = outcome
            self._ended.notify_all()


def wait_for(
    threads: Sequence[SessionThread],
    ended: Condition,
    lag_limit: float | None,
    *,
    begins_now: bool = False,
) -> None:
    """Wait until every thread has ended, or `lag_limit` seconds (None: no limit) after a commit.

    The delta log's thread is waited for in any case.

    Args:
        begins_now: The seconds count from now on.
    """
    deadline = time.monotonic() + lag_limit if begins_now and lag_limit is not None else None
    with ended:
        while late := [thread for thread in threads if thread.outcome is None]:
            if deadline is None and any(thread.has_committed for thread in threads):
                deadline = None if lag_limit is None else time.monotonic() + lag_limit
            left = None if deadline is None else deadline - time.monotonic()
            is_writing = any(thread.is_writer for thread in late)
            if left is not None and left <= 0 and not is_writing:
                return
            ended.wait(None if is_writing else left)


def acknowledge_all(
    threads: Mapping[str, SessionThread],
) -> tuple[dict[str, SyncReport], dict[str, SyncError], list[BaseException]]:
    """Move the sessions on whose engines have committed, given threads that have ended, by url.

    Return the reports by url, the failures by url, and the threads' errors that are not a
    `SyncError`. If it raises, as by an interruption, a session is left half-way.
    """
    reports: dict[str, SyncReport] = {}
    failures: dict[str, SyncError] = {}
    others: list[BaseException] = []
    for url, thread in threads.items():
        outcome = thread.outcome
        if isinstance(outcome, Committed):
            try:
                reports[url] = thread.session.acknowledge(outcome)
            except SyncError as failed:
                failures[url] = failed
                thread.content = ""  # it is committed, and something else is there
        elif isinstance(outcome, SyncError):
            failures[url] = outcome
        elif outcome is not None:
            others.append(outcome)
    return reports, failures, others


def logged_by(threads: Iterable[SessionThread]) -> Committed | None:
    """Return what the delta log's thread has ended with, if it has the version."""
    outcome = next((thread.outcome for thread in threads if thread.is_writer), None)
    return outcome if isinstance(outcome, Committed) else None


def latest_sync(sync_round: SyncRound, threads: Iterable[SessionThread]) -> PostedSync:
    """Return the sync, of ended threads, that leads to the snapshot once it has advanced."""
    committed = [
        (thread.outcome.digest, thread.session.state.is_proven)
        for thread in threads
        if isinstance(thread.outcome, Committed)
        and thread.outcome.report.version == sync_round.version
    ]
    digests = {digest for digest, _ in committed}  # several, if engines leave tensors out
    digest = digests.pop() if len(digests) == 1 else None
    is_complete = all(proven for _, proven in committed)
    return PostedSync(sync_round.version, sync_round.sync_ids(), digest, is_complete)
