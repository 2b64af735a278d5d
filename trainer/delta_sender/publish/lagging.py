"""Keep the destinations that are still being sent a sync which has returned without them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from threading import Condition

from delta_sender.publish.session import Session
from delta_sender.publish.session_thread import SessionThread
from delta_sender.results import SyncError, SyncReport

logger = logging.getLogger(__name__)


class Lagging:
    """The sessions that lag, and how those that did have ended.

    Args:
        ended: Notified by each thread at its end.

    Attributes:
        threads: Those of the sessions that lag, until `end` was called.
        outcomes: How sessions have ended that lagged, by url.
    """

    def __init__(self, ended: Condition) -> None:
        self._ended = ended
        self.threads: dict[Session, SessionThread] = {}
        self.outcomes: dict[str, SyncReport | Exception] = {}

    def __contains__(self, session: object) -> bool:
        return session in self.threads

    @property
    def urls(self) -> list[str]:
        """Urls of those that have not ended."""
        return [s.url for s, thread in self.threads.items() if thread.outcome is None]

    def add(self, thread: SessionThread) -> None:
        """Wait for the end of a thread no longer."""
        self.threads[thread.session] = thread
        logger.warning("%s lags behind; the others continue", thread.session.url)

    def drop(self, session: Session) -> None:
        """Forget a session whose end is noted elsewhere."""
        self.threads.pop(session, None)

    def forget(self, urls: Iterable[str]) -> None:
        """Drop how those have ended whose later sync has ended."""
        for url in urls:
            self.outcomes.pop(url, None)

    def ended(self, *, most: int | None) -> list[Session]:
        """Return the sessions that have ended; while `most` have not, wait for one."""
        with self._ended:
            while most is not None and len(self.urls) >= most:
                self._ended.wait()
            return [s for s, thread in self.threads.items() if thread.outcome is not None]

    def end(self, session: Session) -> SessionThread:
        """Let a session that has ended move on, and return its thread.

        An interruption in here leaves it unknown what the destination lacks.

        Raises:
            BaseException: Neither a refusal nor the thread's own error; the same is unknown.
        """
        thread, url = self.threads.pop(session), session.url
        assert thread.outcome is not None
        try:
            self.outcomes[url] = session.end_lagging(thread.outcome)
            logger.info("%s has committed version %d", url, session.state.version)
        except Exception as failed:
            if failed is not thread.outcome and not isinstance(failed, SyncError):
                raise
            self.outcomes[url] = failed
            logger.warning("%s: the sync that it lagged with has failed: %s", url, failed)
            thread.content = ""  # if it is committed nevertheless, something else is there
        return thread
