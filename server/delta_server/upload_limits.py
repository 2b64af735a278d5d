"""Limits on uploads: how many at once, and how slowly they may arrive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from starlette.requests import ClientDisconnect

from engine_ext.errors import MalformedPart, TooManyUploads, UploadTooSlow

_RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class MinimumRate:
    """How slowly a body may arrive."""

    stall: float  # seconds that may pass without a byte, and that are allowed on top of the rate
    rate: int  # minimum average in bytes per second


async def receive_body(
    chunks: AsyncIterator[bytes], minimum_rate: MinimumRate
) -> AsyncIterator[bytes]:
    """Yield the chunks of a body while it arrives fast enough.

    Only the time spent waiting for chunks counts, not the time spent on their processing.

    Raises:
        UploadTooSlow: the body stalled, or its average rate is too low.
        MalformedPart: the client has disconnected before the end of the body.
    """
    iterator = chunks.__aiter__()
    waited = received = 0.0
    while True:
        left = minimum_rate.stall + received / minimum_rate.rate - waited
        start = time.monotonic()
        try:
            chunk = await asyncio.wait_for(anext(iterator), min(minimum_rate.stall, left))
        except StopAsyncIteration:
            return
        except ClientDisconnect:
            raise MalformedPart("the connection was closed before the body was complete") from None
        except asyncio.TimeoutError:
            message = f"no byte of the body arrived for {minimum_rate.stall:g} s"
            if left < minimum_rate.stall:
                message = (
                    f"only {received:.0f} bytes of the body arrived in {waited + left:.0f} s; "
                    f"minimum rate is {minimum_rate.rate} bytes/s"
                )
            raise UploadTooSlow(message) from None
        waited += time.monotonic() - start
        received += len(chunk)
        yield chunk


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
