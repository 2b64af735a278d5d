"""Post the parts for one destination in threads, while the next ones are built and encoded.

A receiver commits when it has staged every part, and only the last part says how many there are.
So the last one leaves alone, after all others were taken: its answer alone says whether the
receiver has committed, whatever becomes of the others.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

from delta_sender.encode.part_builder import EncodedPart
from delta_sender.encode.sync_round import SyncRound
from delta_sender.publish.destination import Destination
from delta_sender.results import SyncError

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error, and the post that it is the end of; no body if the part was not posted."""

    error: BaseException
    part: EncodedPart
    started: float = 0.0
    body: bytes | None = None

    @property
    def kind(self) -> str | None:
        """The type of the receiver's refusal, if it is one."""
        return self.error.error.get("type") if isinstance(self.error, SyncError) else None


class PostQueue:
    """Post the parts of one attempt, several at once, until one fails or their round does.

    There are at most as many parts as are encoded and posted at once, unless the round is hurried:
    then those that are encoded can wait. If the queue `waits`, the last part is posted only after
    `SyncRound.wait_until_written`, else after `SyncRound.wait_to_write`.
    """

    def __init__(self, destination: Destination, sync_round: SyncRound, *, waits: bool) -> None:
        self.posting_last = False  # it is being posted, so the engine can commit
        self.posting_s = 0.0  # seconds in which something was posted, with retries and waits
        self.waited_s = 0.0  # seconds in which the caller waited for posts
        self.wire_bytes = 0  # of the bodies that were taken
        self._destination, self._round, self._waits = destination, sync_round, waits
        self._room = sync_round.encoders + destination.at_once
        self._queue: deque[EncodedPart] = deque()
        self._changed = Condition()
        self._threads: list[Thread] = []
        self._failures: list[_Failure] = []
        self._closed = self._abandoned = False
        # Parts that are not encoded yet, that a thread has taken, and that are being posted; and
        # threads without a part.
        self._unencoded = self._taken = self._posting = self._idle = 0
        self._posting_since = self._last_success = 0.0
        self._answer: dict[str, Any] = {}

    @contextlib.contextmanager
    def encoding(self) -> Iterator[None]:
        """Wait at the end of the block until every part that was put is encoded, or has failed."""
        try:
            yield
        finally:
            with self._changed:
                while self._unencoded:
                    self._changed.wait()

    def put(self, part: EncodedPart) -> None:
        """Queue a part that is being encoded; return when there is room for another one.

        Raises the error that a post has failed with.
        """
        with self._changed:
            self._unencoded += 1
        part.body.add_done_callback(self._note_encoded)
        with self._changed:
            if not self._failures:
                self._queue.append(part)
            is_idle = len(self._queue) <= self._idle
            if not is_idle and len(self._threads) < self._destination.at_once:
                thread = Thread(target=self._run, name="delta-post", daemon=True)
                thread.start()
                self._threads.append(thread)
            self._changed.notify_all()
            while not self._failures and not part.last and self._is_full():
                self._round.check()
                start, is_posting = time.perf_counter(), self._is_busy()
                self._changed.wait(_POLL_S)
                self.waited_s += (time.perf_counter() - start) * is_posting
            if self._failures:
                raise self._failures[0].error

    def finish(self) -> dict[str, Any]:
        """Wait until all is posted, and return the answer to the last part.

        Raises the error that a post has failed with.
        """
        start = time.perf_counter()
        self._close()
        self.waited_s += time.perf_counter() - start
        if self._failures:
            raise self._failures[0].error
        return self._answer

    def abandon(self) -> None:
        """Post nothing more; wait for the answers to what is being posted."""
        with self._changed:
            self._abandoned = True
            self._queue.clear()
        self._close()
        self._drop_late_parts()

    def reason(self, error: BaseException) -> BaseException:
        """Return the error that says why, after `abandon`, given the one that was raised.

        When a receiver refuses a part it can drop the sync, and refuse what arrives at the same
        time because of that.
        """
        if all(failure.error is not error for failure in self._failures):
            return error
        return self._first_cause().error

    def repeat_refused(self) -> None:
        """Post a part again that the receiver cannot take, so that it drops the sync.

        To be called when nobody posts parts of the sync any more, if others post some too.
        """
        if self._failures:
            self._repeat(self._first_cause())

    def _first_cause(self) -> _Failure:
        return min(self._failures, key=lambda failure: failure.kind == "Conflict")

    def _drop_late_parts(self) -> None:
        """Let the receiver drop a part that has reached it after it dropped the sync.

        It begins the sync anew with that part, which would keep the next attempt out. It drops that
        too when the part that it cannot take comes again.
        """
        if not self._failures:
            return
        cause = self._first_cause()
        came_late = cause.body is not None and self._last_success > cause.started
        if came_late:
            self._repeat(cause)

    def _repeat(self, cause: _Failure) -> None:
        _, version, number, last = cause.part
        if cause.kind == "NotUpdatable" and cause.body is not None and not last:
            with contextlib.suppress(SyncError):
                self._destination.deliver(cause.body, version, number, last)

    def _is_full(self) -> bool:
        """Whether there is no room for another part."""
        parts = len(self._queue) + self._taken
        return (self._unencoded if self._round.is_hurried else parts) >= self._room

    def _is_busy(self) -> bool:
        return self._posting >= self._destination.at_once

    def _note_encoded(self, body: Future[bytes]) -> None:
        with self._changed:
            self._unencoded -= 1
            self._changed.notify_all()

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while self._post_next():
            pass

    def _post_next(self) -> bool:
        """Post the next part; return whether there can be more."""
        part = self._next()
        if part is None:
            return False
        started, body = 0.0, None
        try:
            encoded = part.body.result()
            if part.last and self._waits:
                self._round.wait_until_written()
            elif part.last:
                self._round.wait_to_write()
            self._round.check()
            if self._begin(part):
                started, body = time.perf_counter(), encoded
                try:
                    answer = self._destination.deliver(body, *part[1:])
                finally:
                    self._end()
                self._note_taken(len(body), answer)
        except BaseException as error:
            with self._changed:
                self._failures.append(_Failure(error, part, started, body))
                self._queue.clear()
        with self._changed:
            self._taken -= 1
            self._changed.notify_all()
        return True

    def _next(self) -> EncodedPart | None:
        """Wait for a part to post; None if none is left. The last one waits for all others."""
        with self._changed:
            self._idle += 1
            try:
                while not (self._failures or self._abandoned):
                    must_wait = self._taken >= self._destination.at_once
                    if self._queue and not must_wait and not (self._queue[0].last and self._taken):
                        self._taken += 1
                        return self._queue.popleft()
                    if self._closed and not self._queue:
                        return None
                    self._changed.wait()
                return None
            finally:
                self._idle -= 1

    def _begin(self, part: EncodedPart) -> bool:
        """Note that a part is about to be posted; return False if nothing more can be."""
        with self._changed:
            if self._failures or self._abandoned:
                return False
            self.posting_last = part.last
            if not self._posting:
                self._posting_since = time.perf_counter()
            self._posting += 1
            return True

    def _end(self) -> None:
        with self._changed:
            self._posting -= 1
            if not self._posting:
                self.posting_s += time.perf_counter() - self._posting_since

    def _note_taken(self, nbytes: int, answer: dict[str, Any]) -> None:
        with self._changed:
            self.wire_bytes += nbytes
            self._last_success = time.perf_counter()
            self._answer = answer  # in the end that to the last part, which is taken last
