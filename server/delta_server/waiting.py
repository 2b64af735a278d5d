"""Wait in the event loop: for an event until cancelled, and for what would keep it busy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import TypeVar

_T = TypeVar("_T")


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


@contextlib.asynccontextmanager
async def held_by_thread(make: Callable[[], AbstractContextManager[_T]]) -> AsyncIterator[_T]:
    """Make, enter and leave a context in threads: its files can be large, and take long to delete.

    The context does not see what is raised within.
    """
    stack = contextlib.ExitStack()
    try:
        yield await asyncio.to_thread(lambda: stack.enter_context(make()))
    finally:
        await asyncio.to_thread(stack.close)
