"""Wait in loops that run until they are cancelled."""

from __future__ import annotations

import asyncio


async def wait_for_event(event: asyncio.Event, seconds: float) -> None:
    """Wait until an event is set, at most for some seconds.

    `asyncio.wait_for` loses a cancellation that comes in the moment in which the event is set
    (before Python 3.12, https://github.com/python/cpython/issues/86296). This does not.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()
