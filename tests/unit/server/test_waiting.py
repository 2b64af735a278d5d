"""Loops that wait end when they are cancelled, whatever happens in that moment."""

from __future__ import annotations

import asyncio

import pytest

from delta_server.waiting import wait_for_event


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
