"""Limits on uploads: how many at once, and how slowly they can arrive."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass

from starlette.requests import ClientDisconnect

from engine_ext.errors import MalformedPart, TooManyUploads, UploadTooSlow

_RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class MinimumRate:
    """How slowly a body can arrive."""

    stall: float  # seconds that can pass without a byte, and that are allowed on top of the rate
    rate: int  # minimum average in bytes per second


async def receive_body(
    chunks: AsyncIterator[bytes], minimum_rate: MinimumRate
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of a body while it arrives fast enough.

    Only the time spent waiting for chunks counts, not the time spent on their processing.

    Raises:
        UploadTooSlow: the body stalled, or its average rate is too low.
        MalformedPart: the client has disconnected before the end of the body.
    """
    iterator = chunks.__aiter__()
    stall, rate = minimum_rate.stall, minimum_rate.rate
    waited = received = 0.0
    deadline = _Deadline()
    try:
        while True:
            left = stall + received / rate - waited
            start = time.monotonic()
            deadline.begin(start + (left if left < stall else stall))
            try:
                chunk = await anext(iterator)
            except StopAsyncIteration:
                return
            except ClientDisconnect:
                message = "the connection was closed before the body was complete"
                raise MalformedPart(message) from None
            except asyncio.CancelledError:
                if not deadline.has_cancelled():
                    raise
                message = f"no byte of the body arrived for {stall:g} s"
                if left < stall:
                    message = (
                        f"only {received:.0f} bytes of the body arrived in {waited + left:.0f} s; "
                        f"minimum rate is {rate} bytes/s"
                    )
                raise UploadTooSlow(message) from None
            finally:
                deadline.end()
            waited += time.monotonic() - start
            received += len(chunk)
            yield chunk
    finally:
        deadline.close()


class _Deadline:
    """Cancels what a task awaits if that takes too long; for many short waits, one at a time.

    Setting a timer for each wait would cost more than most waits. A timer that rings during a later
    wait is set again, to the end of that.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        # Requests to cancel the task that are not from here; Python 3.10 does not count them.
        self._others = task.cancelling() if hasattr(task, "cancelling") else None
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf
        self._due = math.inf  # end of the wait in progress
        self._cancels = False

    def begin(self, due: float) -> None:
        """Begin a wait that can last until `due`, of `time.monotonic`."""
        self._due = due
        if due < self._rings_at:
            self._set()

    def end(self) -> None:
        """End the wait."""
        self._due = math.inf

    def has_cancelled(self) -> bool:
        """Return whether the task was cancelled by this deadline alone; takes that back."""
        if not self._cancels:
            return False
        self._cancels = False
        return self._others is None or self._task.uncancel() <= self._others

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _set(self) -> None:
        self.close()
        self._rings_at = self._due
        self._timer = self._loop.call_later(max(self._due - time.monotonic(), 0.0), self._ring)

    def _ring(self) -> None:
        self._timer, self._rings_at = None, math.inf
        if self._due == math.inf:
            return
        if time.monotonic() < self._due:
            self._set()
        else:
            self._cancels = True
            self._task.cancel()


class UploadSlots:
    """Bounds the updates that this process takes at once, and so the spool's size."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Hold one slot.

        Raises:
            TooManyUploads: no slot is free.
        """
        if self._taken >= self._limit:
            message = f"{self._limit} updates are in progress already; retry in {_RETRY_AFTER_S} s"
            raise TooManyUploads(message, limit=self._limit, retry_after=_RETRY_AFTER_S)
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
