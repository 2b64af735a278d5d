"""One engine's share of one sync, in a thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import Condition, Thread

from delta_sender.acked_state import PostedSync
from delta_sender.results import SyncError, SyncReport
from delta_sender.session import Committed, Session
from delta_sender.sync_round import SyncRound


class SessionThread:
    """A link that brings its engine one step.

    Args:
        link: the link.
        step: the step.
        news: notified when it has ended.
        is_log: the link is the delta log's; engines wait for it.

    Attributes:
        thread: to be started.
        outcome: how it ended; None as long as it has not.
        content: the digest of what the step leads to, in hex, where that is remembered.
    """

    def __init__(self, link: Session, step: SyncRound, news: Condition, *, is_log: bool) -> None:
        self.link = link
        link.begins()
        self.outcome: Committed | BaseException | None = None
        self.content = ""
        self.thread = Thread(target=self._run, name="delta-bring", daemon=True)
        self._step, self._news, self._is_log = step, news, is_log

    @property
    def has_committed(self) -> bool:
        """Whether it ended, and is an engine that has committed."""
        return isinstance(self.outcome, Committed) and not self._is_log

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has ended, if it was started."""
        if self.thread.ident is not None:
            self.thread.join(seconds)

    def _run(self) -> None:
        outcome: Committed | BaseException
        try:
            outcome = self.link.bring(self._step)
            if self._is_log:
                self._step.note_kept()
        except BaseException as error:
            outcome = error
            if self._is_log:
                self._step.fail(_not_logged(error))
        with self._news:
            self.outcome = outcome
            self._news.notify_all()


def outcomes(
    runs: Mapping[str, SessionThread],
) -> tuple[dict[str, SyncReport], dict[str, SyncError], list[BaseException]]:
    """Let links move on whose engines have committed.

    Args:
        runs: that have ended, by url.

    Returns:
        The reports, the failures, and what is none of a sync's.
    """
    reports: dict[str, SyncReport] = {}
    failures: dict[str, SyncError] = {}
    others: list[BaseException] = []
    for url, run in runs.items():
        try:
            if isinstance(run.outcome, Committed):
                reports[url] = run.outcome.acknowledge()
            elif run.outcome is not None:
                raise run.outcome
        except SyncError as failed:
            failures[url] = failed
        except BaseException as error:
            others.append(error)
    return reports, failures, others


def latest(step: SyncRound, runs: Iterable[SessionThread]) -> PostedSync:
    """What leads to where a step does.

    Args:
        step: that some engine has committed.
        runs: of it, that have ended.
    """
    committed = [
        (run.outcome.digest, run.link.is_proven)
        for run in runs
        if isinstance(run.outcome, Committed) and run.outcome.report.version == step.version
    ]
    digests = {digest for digest, _ in committed}  # several, where engines leave tensors out
    digest = digests.pop() if len(digests) == 1 else None
    return PostedSync(step.version, step.sync_ids(), digest, all(proven for _, proven in committed))


def _not_logged(error: BaseException) -> BaseException:
    """What the engines' links fail with when the delta log has not got a version."""
    if isinstance(error, SyncError):
        return error
    return SyncError(f"not sent, as it could not be written to the delta log: {error}")
