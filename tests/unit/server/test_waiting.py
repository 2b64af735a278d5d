"""Loops that wait end when they are cancelled, whatever happens in that moment."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from delta_server.waiting import held_by_thread, wait_for_event


def test_a_cancellation_beside_the_event_is_not_lost() -> None:
    async def cancelled() -> None:
        event = asyncio.Event()
        waiting = asyncio.ensure_future(wait_for_event(event, 60.0))
        await asyncio.sleep(0.01)
        event.set()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(cancelled())


@pytest.mark.parametrize("is_set", [False, True])
def test_it_returns_at_the_event_or_in_time(is_set: bool) -> None:
    async def returned() -> None:
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01 if is_set else 60.0, event.set)
        await wait_for_event(event, 60.0 if is_set else 0.01)
        assert event.is_set() is is_set

    asyncio.run(asyncio.wait_for(returned(), 10.0))


@pytest.mark.parametrize("fails", [False, True])
def test_context_is_entered_and_left_in_threads(fails: bool) -> None:
    seen: list[tuple[str, bool]] = []

    def note(what: str) -> None:
        seen.append((what, threading.current_thread() is threading.main_thread()))

    @contextlib.contextmanager
    def noted() -> Iterator[int]:
        note("enters")
        try:
            yield 3
        finally:
            note("leaves")

    async def hold() -> None:
        async with held_by_thread(noted) as value:
            assert value == 3
            if fails:
                raise ValueError("within")

    with pytest.raises(ValueError, match="within") if fails else contextlib.nullcontext():
        asyncio.run(hold())
    assert seen == [("enters", False), ("leaves", False)]
