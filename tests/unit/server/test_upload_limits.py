"""Limits of uploads: a body that is too slow is given up, and so is one too many."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from delta_server import upload_limits
from delta_server.upload_limits import MinimumRate, UploadSlots, receive_body
from engine_ext.errors import TooManyUploads, UploadTooSlow
from tests.support.cases import case
from tests.support.delta_bodies import OTHER_STEP, STEP, after, delta_part, fresh_weights
from tests.support.endpoint_rig import DELTA, FROM_DISK, STATUS, Rig, assert_error
from tests.support.virtual_time import VirtualClock

OCTETS = {"Content-Type": "application/octet-stream"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The clock of the limits."""
    found = VirtualClock()
    monkeypatch.setattr(upload_limits, "time", found)
    return found


async def steady(count: int, size: int, gap: float) -> AsyncIterator[bytes]:
    """So many chunks of so many bytes, so many seconds apart."""
    for _ in range(count):
        await asyncio.sleep(gap)
        yield bytes(size)


def arrive(
    clock: VirtualClock, chunks: AsyncIterator[bytes], pace: MinimumRate, busy: float = 0
) -> int:
    async def take() -> int:
        taken = 0
        async for chunk in receive_body(chunks, pace):
            taken += len(chunk)
            clock.sleep(busy)
        return taken

    return clock.run(take())


def test_a_body_at_its_rate_may_take_as_long_as_it_likes(clock: VirtualClock) -> None:
    assert arrive(clock, steady(100, 100, 0.1), MinimumRate(stall=0.2, rate=1000)) == 10_000
    assert clock.now == pytest.approx(10)


def test_a_python_whose_tasks_do_not_count_cancellations(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.10."""
    current = asyncio.current_task

    def old_task() -> Any:
        task = current()
        assert task is not None
        return types.SimpleNamespace(cancel=task.cancel)

    monkeypatch.setattr(asyncio, "current_task", old_task)
    assert arrive(clock, steady(3, 100, 0), MinimumRate(stall=0.2, rate=1000)) == 300
    with pytest.raises(UploadTooSlow):
        arrive(clock, steady(2, 1, 10), MinimumRate(stall=0.2, rate=1000))


def test_a_body_below_its_rate_is_given_up(clock: VirtualClock) -> None:
    """Though it never stalls: a byte now and then does not keep a place."""
    with pytest.raises(UploadTooSlow, match="minimum rate is 1000 bytes/s") as caught:
        arrive(clock, steady(1000, 1, 0.03), MinimumRate(stall=0.2, rate=1000))
    assert clock.now == pytest.approx(0.2, rel=0.1)
    assert "only" in caught.value.message


def test_a_body_that_stalls_is_given_up(clock: VirtualClock) -> None:
    """Though it was fast before."""

    async def stalling() -> AsyncIterator[bytes]:
        yield bytes(1 << 20)
        await asyncio.sleep(60)

    with pytest.raises(UploadTooSlow, match=r"no byte of the body arrived for 0\.1 s"):
        arrive(clock, stalling(), MinimumRate(stall=0.1, rate=1))
    assert clock.now == pytest.approx(0.1)


def test_what_is_done_with_the_chunks_does_not_count(clock: VirtualClock) -> None:
    assert arrive(clock, steady(5, 1, 0), MinimumRate(stall=0.1, rate=1 << 20), busy=0.05) == 5


def test_a_wait_that_is_cancelled_is_not_a_slow_body(clock: VirtualClock) -> None:
    """Also if both come at once."""

    async def scenario(stall: float) -> None:
        task = asyncio.ensure_future(
            anext(receive_body(steady(1, 1, 60), MinimumRate(stall=stall, rate=1)))
        )
        await asyncio.sleep(0.01)
        if stall < 1:
            clock.sleep(2 * stall)  # its timer rings before the task runs again
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    clock.run(scenario(60))
    clock.run(scenario(0.05))


def test_a_slow_body_leaves_no_request_to_cancel_its_task(clock: VirtualClock) -> None:
    async def scenario() -> None:
        with pytest.raises(UploadTooSlow):
            async for _ in receive_body(steady(1, 1, 60), MinimumRate(stall=0.01, rate=1)):
                pass
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0.02)

    clock.run(scenario())


def test_many_chunks_take_few_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        loop, timers = asyncio.get_running_loop(), list[float]()
        call_later = loop.call_later

        def counted(delay: float, *arguments: Any) -> asyncio.TimerHandle:
            timers.append(delay)
            return call_later(delay, *arguments)

        monkeypatch.setattr(loop, "call_later", counted)

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(1000):
                yield b"x"

        async for _ in receive_body(chunks(), MinimumRate(stall=60, rate=1)):
            await asyncio.sleep(0)
        assert len(timers) == 1

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_slow_body_is_answered(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(stage_timeout=0.5, min_upload_rate=1 << 20)

    async def drip() -> AsyncIterator[bytes]:
        yield delta_part()[:1]
        await asyncio.sleep(60)

    error = assert_error(rig.post(DELTA, content=drip(), headers=OCTETS), 408, "UploadTooSlow")
    assert str(1 << 20) in error["message"]
    rig.assert_untouched()


# Too many ------------------------------------------------------------------------------------


def test_slots() -> None:
    slots = UploadSlots(2)
    with slots.one(), contextlib.suppress(KeyError), slots.one():
        with pytest.raises(TooManyUploads) as caught, slots.one():
            pass
        raise KeyError
    assert caught.value.operands == {"limit": 2, "retry_after": 1}
    with slots.one(), slots.one():
        pass


def test_one_upload_too_many(make_rig: Callable[..., Rig]) -> None:
    """It is refused unread, and the others continue."""
    rig = make_rig(max_uploads=2)
    go_on = asyncio.Event()
    arrived = []

    async def slow(body: bytes) -> AsyncIterator[bytes]:
        arrived.append(body[:40])
        yield body[:40]
        await go_on.wait()
        yield body[40:]

    async def unread() -> AsyncIterator[bytes]:
        yield pytest.fail("the body was read")

    kinds = [(DELTA, "application/octet-stream"), (DELTA, "application/json"),
             (FROM_DISK, "application/octet-stream"), (FROM_DISK, "application/json")]  # fmt: skip

    async def scenario() -> tuple[list[httpx.Response], list[httpx.Response]]:
        first = delta_part(OTHER_STEP, part=0, num_parts=2, sync_id="s", version=8)
        second = delta_part({}, part=1, num_parts=2, sync_id="s", version=8)
        sent = [asyncio.ensure_future(rig.sending(slow(body))) for body in (first, second)]
        while len(arrived) < 2:
            await asyncio.sleep(0.001)
        refused = [
            await rig.request("POST", path, content=unread(), headers={"Content-Type": kind})
            for path, kind in kinds
        ]
        assert (await rig.request("GET", STATUS)).status_code == 200
        go_on.set()
        return refused, await asyncio.gather(*sent)

    refused, taken = rig.run(scenario())
    for kind, response in zip(kinds, refused, strict=True):
        with case(kind):
            assert_error(response, 429, "TooManyUploads", limit=2, retry_after=1)
            assert response.headers["Retry-After"] == "1"
    assert sorted(response.json()["status"] for response in taken) == ["committed", "staged"]
    assert rig.status().version.number == 8
    assert rig.spooled() == []
    rig.assert_committed(
        rig.send(delta_part(version=9)), after(fresh_weights(), OTHER_STEP, STEP), version=9
    )
