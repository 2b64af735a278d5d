"""Post the parts for one destination in a thread, while the next ones are built."""

from __future__ import annotations

import time
from collections import deque
from threading import Condition, Thread
from typing import Any

from delta_sender.destination import Destination, Part
from delta_sender.sync_round import SyncRound

_POLL_S = 0.05


class PostQueue:
    """Post the parts of one attempt, in order, until their round fails.

    While one is posted, none is queued behind it, unless the round is hurried. If the queue
    `waits`, the last part is posted only after `SyncRound.wait_until_written`.
    """

    def __init__(self, destination: Destination, sync_round: SyncRound, *, waits: bool) -> None:
        self.posting_last = False  # it is being posted, so the engine may commit
        self.posting_s = 0.0  # seconds, with retries and waits
        self.waited_s = 0.0  # seconds in which the caller waited for posts
        self._destination, self._round, self._waits = destination, sync_round, waits
        self._queue: deque[Part] = deque()
        self._changed = Condition()
        self._failure: BaseException | None = None
        self._posting = self._closed = False
        self._answer: dict[str, Any] = {}
        self._thread = Thread(target=self._run, name="delta-post", daemon=True)
        self._thread.start()

    def put(self, part: Part) -> None:
        """Queue a part; wait for its turn. Raises the error that posting has failed with."""
        start = time.perf_counter()
        with self._changed:
            while (self._posting or self._queue) and not (self._failure or self._round.is_hurried):
                self._round.check()
                self._changed.wait(_POLL_S)
            self.waited_s += time.perf_counter() - start
            if self._failure is not None:
                raise self._failure
            self._queue.append(part)
            self._changed.notify_all()

    def finish(self) -> dict[str, Any]:
        """Wait until all is posted, and return the last answer.

        Raises the error that posting has failed with.
        """
        start = time.perf_counter()
        self._close()
        self.waited_s += time.perf_counter() - start
        if self._failure is not None:
            raise self._failure
        return self._answer

    def abandon(self) -> None:
        """Post nothing more; wait for the answer to the part that is being posted."""
        with self._changed:
            self._queue.clear()
        self._close()

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while (part := self._next()) is not None:
                if part.last and self._waits:
                    self._round.wait_until_written()
                self._round.check()
                self.posting_last = part.last
                start = time.perf_counter()
                try:
                    self._answer = self._destination.deliver(*part)
                finally:
                    self.posting_s += time.perf_counter() - start
                with self._changed:
                    self._posting = False
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._queue.clear()
                self._changed.notify_all()

    def _next(self) -> Part | None:
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            self._posting = bool(self._queue)
            return self._queue.popleft() if self._queue else None
