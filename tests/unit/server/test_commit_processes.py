"""Commits through several HTTP processes: what one has left another sets right, one at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from delta_server import board, recent
from delta_server.board import SERVED, Item
from delta_server.request_options import Flush
from engine_ext.errors import Conflict
from engine_ext.model import TracingError
from engine_ext.ranks import ENGINE
from engine_ext.ranks.operations import EngineUse, GetItem, LeaseItem, Operation, StoppedCall
from tests.support.delta_bodies import (
    BASE,
    NEXT,
    OTHER_STEP,
    RESYNCED,
    STEP,
    after,
    delta_part,
    full_part,
    same,
)
from tests.support.endpoint_rig import COMPLETIONS, Rig, assert_error
from tests.unit.server.other_process import Process, resume_owed

OTHER = {"layer.weight": {2: 0x1234}}


# What one process has left, another sets right -----------------------------------------------


def test_a_failed_commit_is_healed_by_another_process(rig: Rig, other: Process) -> None:
    rig.fail_commit()
    assert rig.engine.paused
    assert resume_owed(rig) == [True, True]
    assert rig.status().health.resume_owed is True
    assert_error(other.complete(), 503, "EngineUncertain", "uncertain")
    rig.assert_committed(other.send(full_part(RESYNCED, 8)), RESYNCED, 8)
    assert resume_owed(rig) == [False, False]
    assert other.complete().status_code == 200
    assert rig.post(COMPLETIONS).status_code == 200


def test_refusal_by_another_process_keeps_uncertainty(rig: Rig, other: Process) -> None:
    rig.fail_commit()
    assert_error(other.send(delta_part()), 503, "EngineUncertain", "uncertain")
    rig.engine.fails["stop"] = RuntimeError("the cache was not reset")
    assert_error(other.send(full_part(RESYNCED, 8)), 500, "DeltaError")
    assert rig.engine.paused
    assert resume_owed(rig) == [True, True]
    assert_error(other.complete(), 503, "EngineUncertain", "uncertain")
    rig.assert_committed(rig.send(full_part(RESYNCED, 8)), RESYNCED, 8)
    assert other.complete().status_code == 200


@pytest.mark.parametrize("lost", ["fails", "loses"])
def test_an_unknown_commit_is_repeated_by_another_process(
    rig: Rig, other: Process, lost: str
) -> None:
    getattr(rig.engine, lost)["commit"] = ConnectionError("a rank did not answer")
    assert_error(rig.send(delta_part()), 500, "CommitFailed", "uncertain")
    assert rig.is_paused()
    expected = "committed" if lost == "fails" else "already_applied"
    assert other.send(delta_part()).json()["status"] == expected
    assert same(rig.engine.weights, NEXT)
    assert rig.engine.weight_version == "8"
    assert not rig.engine.paused
    assert rig.post(COMPLETIONS).status_code == 200


def test_generation_is_resumed_by_another_process(rig: Rig, other: Process) -> None:
    rig.engine.fails["publish"] = ConnectionError("lost")
    assert_error(rig.send(delta_part()), 500, "CommittedNotResumed", "committed")
    assert rig.engine.paused
    assert other.send(delta_part()).json()["status"] == "already_applied"
    assert not rig.engine.paused


def test_another_process_leaves_engine_paused_by_caller(rig: Rig, other: Process) -> None:
    rig.engine.paused = True
    rig.fail_commit()
    assert resume_owed(rig) == [False, False]
    assert other.send(full_part(RESYNCED, 8)).json()["status"] == "committed"
    assert rig.engine.paused
    assert rig.engine.events[-1] == ("publish", "8", False)


@pytest.mark.slow
def test_a_process_that_dies_in_its_commit(
    rig: Rig, other: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the write, and before it resumes generation."""

    end = asyncio.Event()

    async def never(version: str | None, *, resumes: bool) -> None:
        await end.wait()

    publish = rig.engine.publish
    rig.engine.publish = never  # type: ignore[method-assign]

    async def dies() -> None:
        commit = asyncio.ensure_future(rig.sending(delta_part()))
        while rig.engine.writes != [1, 1]:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        rig.engine.publish = publish  # type: ignore[method-assign]
        repeat = asyncio.ensure_future(other.sending(delta_part()))
        await asyncio.sleep(0.1)
        assert not repeat.done()  # the first one lives, as far as anybody knows
        assert rig.engine.paused
        dead = rig.service.committer._use.name
        monkeypatch.setattr(board, "is_alive", lambda name: name != dead)
        assert (await repeat).json()["status"] == "already_applied"
        end.set()
        await commit

    rig.run(dies())
    assert not rig.engine.paused
    assert resume_owed(rig) == [False, False]


# Start-up ------------------------------------------------------------------------------------

DEAD = "999999999:1:gone"  # the name of a process that does not run


def test_starting_process_publishes_what_ranks_hold(rig: Rig, other: Process) -> None:
    """Another process can commit after the new one has read the version."""
    rig.run(rig.service.start())
    call, committed = rig.engine.call, list[httpx.Response]()

    async def late(request: Operation[Any]) -> list[Any]:
        if isinstance(request, GetItem) and request.key == SERVED and not committed:
            rig.engine.call = call  # type: ignore[method-assign]
            committed.append(await rig.sending(delta_part()))
        return await call(request)

    rig.engine.call = late  # type: ignore[method-assign]
    rig.run(other.service.start())
    [answer] = committed
    rig.assert_committed(answer, NEXT, 8)
    assert rig.status().version.published == "8"


def test_starting_process_ends_pause_of_dead_one(rig: Rig, other: Process) -> None:
    item = Item(rig.engine, ENGINE, EngineUse)
    item.name = DEAD
    for _ in range(2):  # a value is put by who has the lease already
        rig.run(item.try_lease(EngineUse(resume_owed=True)))
    assert resume_owed(rig) == [True, True]
    rig.engine.paused = True
    rig.run(other.service.start())
    assert not rig.engine.paused
    assert resume_owed(rig) == [False, False]


def test_process_starts_while_weights_are_uncertain(rig: Rig, other: Process) -> None:
    rig.fail_commit()
    rig.run(other.service.start())
    assert rig.engine.paused
    assert rig.engine.weight_version == "7"
    assert_error(other.complete(), 503, "EngineUncertain", "uncertain")
    rig.assert_committed(other.send(full_part(RESYNCED, 8)), RESYNCED, 8)


# The guard -----------------------------------------------------------------------------------


def test_ranks_that_do_not_answer_leave_the_guard_as_it_is(rig: Rig, other: Process) -> None:
    rig.engine.fails["status"] = ConnectionError("lost")
    assert other.complete().status_code == 200
    rig.fail_commit()
    rig.engine.fails["status"] = ConnectionError("lost")
    assert_error(rig.post(COMPLETIONS), 503, "EngineUncertain", "uncertain")


@pytest.mark.parametrize(("shared", "expected"), [(False, 0), (True, 1)])
def test_the_ranks_are_asked_seldom(
    rig: Rig, other: Process, monkeypatch: pytest.MonkeyPatch, shared: bool, expected: int
) -> None:
    """And never where there is but one process; `other` has not asked yet, as a start does."""
    monkeypatch.setattr(recent, "_ASKED_EVERY_S", 60.0)
    asked = []
    original = rig.engine.call

    async def call(request: Operation[Any]) -> list[Any]:
        asked.append(request.name)
        return await original(request)

    rig.engine.call = call  # type: ignore[method-assign]
    rig.engine.shared = shared
    for _ in range(5):
        assert other.complete().status_code == 200
    assert asked == ["status"] * expected


# One at a time -------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_do_not_pause_the_engine_at_once(rig: Rig, other: Process) -> None:
    """A sync that follows at once waits until generation has gone on after the first."""
    publish, go_on = rig.engine.publish, asyncio.Event()

    async def late(version: str | None, *, resumes: bool) -> None:
        await go_on.wait()
        await publish(version, resumes=resumes)

    rig.engine.publish = late  # type: ignore[method-assign]

    async def both() -> list[httpx.Response]:
        first = asyncio.ensure_future(rig.sending(delta_part()))
        while rig.engine.writes != [1, 1]:
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(other.sending(delta_part(OTHER_STEP, version=9)))
        await asyncio.sleep(0.1)
        assert not second.done()
        assert rig.engine.events[-1] == ("commit",)
        go_on.set()
        return [await first, await second]

    assert [r.json()["status"] for r in rig.run(both())] == ["committed", "committed"]
    one, two = ([("stop", True), ("commit",), ("publish", version, True)] for version in "89")
    assert rig.engine.events == one + two
    assert not rig.engine.paused
    assert same(rig.engine.weights, after(NEXT, OTHER_STEP))


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_check_that_changes_the_weights_stops_generation(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Though the sync was only being staged, and the engine was not paused for it.

    No request is waited for: it would end on the damaged weights.
    """

    def damaging(*_: object, **__: object) -> None:
        raise TracingError("tensors moved")

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine.shards[1], "check_sync", damaging)
        answer = rig.send(delta_part(), pause_mode=mode)
        assert_error(answer, 500, "CommitFailed", "uncertain")
    ends = [("end_requests", "abort")] if mode == "abort" else []
    assert rig.engine.events == [*ends, ("stop", True)]
    assert rig.is_paused()
    assert rig.engine.writes == [0, 0]
    generated = rig.run(rig.request("POST", COMPLETIONS))
    assert_error(generated, 503, "EngineUncertain", "uncertain")
    assert_error(rig.send(delta_part()), 503, "EngineUncertain", "uncertain")
    rig.assert_committed(rig.send(full_part(RESYNCED, 8)), RESYNCED, 8)
    assert not rig.engine.paused
    assert rig.run(rig.request("POST", COMPLETIONS)).status_code == 200


def test_full_sync_of_running_damaged_engine_stops_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that could not be paused when the damage was found."""

    def damaging(*_: object, **__: object) -> None:
        raise TracingError("tensors moved")

    async def fails(request: Operation[Any], flush_cache: Flush) -> StoppedCall[Any]:
        raise ConnectionError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine.shards[1], "check_sync", damaging)
        patch.setattr(rig.engine, "call_stopped", fails)
        assert_error(rig.send(delta_part()), 500, "CommitFailed", "uncertain")
    assert not rig.is_paused()
    rig.engine.fails["stop"] = RuntimeError("the cache was not reset")
    assert_error(rig.send(full_part(RESYNCED, 8), pause_mode="wait"), 500, "DeltaError")
    assert rig.engine.events == [("stop", True), ("commit",)]
    assert rig.is_paused()
    rig.assert_committed(rig.send(full_part(RESYNCED, 8)), RESYNCED, 8)


@pytest.mark.parametrize("moment", ["poll", "lease"])
def test_a_repeat_that_another_process_gets_meanwhile(
    rig: Rig, other: Process, moment: str
) -> None:
    """It is answered as such, and what is staged since then stays."""
    parts = [
        delta_part({name: {0: 9}}, version=9, sync_id="next", part=number, num_parts=2)
        for number, name in enumerate(BASE)
        if number < 2
    ]
    original = rig.engine.call
    waits, go_on = asyncio.Event(), asyncio.Event()

    async def late(request: Operation[Any]) -> list[Any]:
        if request.name == moment and not waits.is_set():
            waits.set()
            await go_on.wait()
        return await original(request)

    async def scenario() -> list[httpx.Response]:
        assert (await rig.sending(delta_part(STEP, part=0, sync_id="s"))).status_code == 200
        last = delta_part(OTHER, part=1, num_parts=2, sync_id="s")
        rig.engine.call = late  # type: ignore[method-assign]
        repeat = asyncio.ensure_future(other.sending(last))
        await waits.wait()
        first = await rig.sending(last)
        staged = await rig.sending(parts[0]) if moment == "lease" else first
        go_on.set()
        return [first, await repeat, staged]

    first, repeat, staged = rig.run(scenario())
    assert first.json()["status"] == "committed"
    assert repeat.json()["status"] == "already_applied"
    if moment == "poll":
        assert rig.send(parts[0]).json()["status"] == "staged"
    else:
        assert staged.json()["status"] == "staged"
    assert rig.send(parts[1]).json()["status"] == "committed"
    steps = [{name: {0: 9}} for name in list(BASE)[:2]]
    assert same(rig.engine.weights, after(NEXT, OTHER, *steps))


@pytest.mark.parametrize("is_full", [False, True])
def test_a_conflict_is_no_repeat(rig: Rig, other: Process, is_full: bool) -> None:
    """Also where the last part of a full sync is that of another to the same version."""
    names = list(BASE)

    def parts(weights: dict[str, Any], sync_id: str) -> list[bytes]:
        return [
            full_part(weights, 8, [name], part=i, num_parts=len(names), sync_id=sync_id)
            for i, name in enumerate(names)
        ]

    if is_full:
        for body in parts(RESYNCED, "one"):
            rig.send(body)
        *firsts, last = parts(after(RESYNCED, {names[0]: {5: 0x55}}), "two")
    else:
        firsts, last = [], delta_part()
    before = rig.engine.weights
    for body in firsts:
        assert rig.send(body).json()["status"] == "staged"
    original = rig.engine.call

    async def refuses(request: Operation[Any]) -> list[Any]:
        if request.name == "commit":
            return [Conflict("not now")] * len(rig.engine.ranks)
        return await original(request)

    rig.engine.call = refuses  # type: ignore[method-assign]
    assert_error(rig.send(last), 409, "Conflict")
    assert same(rig.engine.weights, before)
    assert rig.status().staged is None


def test_a_hold_that_could_not_be_given_back_is_taken_again(rig: Rig) -> None:
    original = rig.engine.call

    async def loses(request: Operation[Any]) -> list[Any]:
        if isinstance(request, LeaseItem) and request.release:
            raise ConnectionError("lost")
        return await original(request)

    rig.engine.call = loses  # type: ignore[method-assign]
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)
    rig.engine.call = original  # type: ignore[method-assign]
    following = rig.send(delta_part(OTHER_STEP, version=9))
    rig.assert_committed(following, after(NEXT, OTHER_STEP), 9)


def test_ranks_that_give_no_hold_are_not_written(rig: Rig) -> None:
    rig.engine.fails["lease"] = ConnectionError("lost")
    assert_error(rig.send(delta_part()), 500, "DeltaError")
    assert rig.engine.events == []
    rig.assert_untouched()
