"""Posting one engine's parts in a thread, while the next ones are made."""

from __future__ import annotations

import time
from collections import deque
from threading import Condition, Thread
from typing import Any

from delta_sender.destination import Destination
from delta_sender.sync_round import SyncRound

_POLL_S = 0.05


class PostQueue:
    """Posts the parts of one attempt, in order. While one is posted, none is queued behind it,
    unless the step is in a hurry.

    Args:
        place: where they go.
        step: that they are of; posting ends with it.
        waits: the last part is posted only when all that must be on disk first is there.

    Attributes:
        posting_last: the last part was begun to be posted, so the engine may commit.
        posting_s: seconds of posting, with retries and waits.
        waited_s: seconds that nothing else was done in.
    """

    def __init__(self, place: Destination, step: SyncRound, *, waits: bool) -> None:
        self.posting_last = False
        self.posting_s = self.waited_s = 0.0
        self._place, self._step, self._waits = place, step, waits
        self._queue: deque[tuple[bytes, int, int, bool]] = deque()
        self._news = Condition()
        self._failure: BaseException | None = None
        self._posting = self._closed = False
        self._answer: dict[str, Any] = {}
        self._thread = Thread(target=self._run, name="delta-post", daemon=True)
        self._thread.start()

    def put(self, body: bytes, version: int, number: int, last: bool) -> None:
        """Have a part posted; waits for its turn. Raises what posting has failed with."""
        start = time.perf_counter()
        with self._news:
            while self._busy and self._failure is None and not self._step.hurried:
                self._step.check()
                self._news.wait(_POLL_S)
            self.waited_s += time.perf_counter() - start
            if self._failure is not None:
                raise self._failure
            self._queue.append((body, version, number, last))
            self._news.notify_all()

    def finish(self) -> dict[str, Any]:
        """Wait until all is posted; the last answer. Raises what posting has failed with."""
        start = time.perf_counter()
        self._close()
        self.waited_s += time.perf_counter() - start
        if self._failure is not None:
            raise self._failure
        return self._answer

    def abandon(self) -> None:
        """Post nothing more; waits for the answer to what is being posted."""
        with self._news:
            self._queue.clear()
        self._close()

    @property
    def _busy(self) -> bool:
        return self._posting or bool(self._queue)

    def _close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while (taken := self._next()) is not None:
                body, version, number, last = taken
                if last and self._waits:
                    self._step.wait_until_kept()
                self._step.check()
                self.posting_last = last
                start = time.perf_counter()
                try:
                    self._answer = self._place.deliver(body, version, number, last)
                finally:
                    self.posting_s += time.perf_counter() - start
                with self._news:
                    self._posting = False
                    self._news.notify_all()
        except BaseException as error:
            with self._news:
                self._failure = error
                self._queue.clear()
                self._news.notify_all()

    def _next(self) -> tuple[bytes, int, int, bool] | None:
        with self._news:
            while not self._queue and not self._closed:
                self._news.wait()
            self._posting = bool(self._queue)
            return self._queue.popleft() if self._queue else None
