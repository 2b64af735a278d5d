"""How bodies may arrive: not too many at once, and not too slowly."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from engine_ext.errors import TooManyUploads, UploadTooSlow

_RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class MinimumRate:
    """How slowly a body may come.

    Attributes:
        stall: seconds that may pass without a byte, and that a body has beyond its rate.
        rate: bytes per second that a body must come with, on the whole.
    """

    stall: float
    rate: int


async def arriving(chunks: AsyncIterator[bytes], pace: MinimumRate) -> AsyncIterator[bytes]:
    """The chunks of a body, as long as it keeps its pace.

    Only waiting counts, not what is done with the chunks.

    Raises:
        UploadTooSlow: it did not.
    """
    iterator = chunks.__aiter__()
    waited = received = 0.0
    while True:
        left = pace.stall + received / pace.rate - waited
        start = time.monotonic()
        try:
            chunk = await asyncio.wait_for(anext(iterator), min(pace.stall, left))
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError:
            if left < pace.stall:
                slow = f"in {waited + left:.0f} s only {received:.0f} bytes of the body came"
                raise UploadTooSlow(f"{slow}; at least {pace.rate} a second must") from None
            raise UploadTooSlow(f"no byte of the body came for {pace.stall:g} s") from None
        waited += time.monotonic() - start
        received += len(chunk)
        yield chunk


class UploadSlots:
    """Bounds the updates that this process takes at once, and so the room that they fill.

    Args:
        most: how many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Hold one.

        Raises:
            TooManyUploads: all are held.
        """
        if self._taken >= self._most:
            raise TooManyUploads(
                f"{self._most} updates are being taken already; retry in {_RETRY_AFTER_S} s",
                limit=self._most,
                retry_after=_RETRY_AFTER_S,
            )
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
