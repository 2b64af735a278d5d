"""Commits: pauses, writes that fail, several HTTP processes, and a caller that pauses meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_server import commit as commits_module
from delta_server.commit import EngineCommitter, serialize_with_commits
from delta_server.service import DeltaService
from engine_ext.errors import Conflict
from engine_ext.model import TracingError
from engine_ext.wire.operations import Operation
from tests.support.in_process_engine import (
    COMPLETIONS,
    DELTA,
    OTHER_STEP,
    STEP,
    VERSION,
    Rig,
    after,
    app_of,
    assert_error,
    delta_part,
    fresh_weights,
    full_part,
    same,
)
from tests.unit.server.test_service import assert_already_applied, split_parts

BASE = fresh_weights()
NEXT = after(BASE, STEP)
RESYNCED = after(BASE, OTHER_STEP)
OTHER = {"layer.weight": {2: 0x1234}}
PAUSED = ("pause", "keep", True)
COMMITTED = [("commit",), ("set_weight_version", "8")]


class Process:
    """Another HTTP process of a rig's engine."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.service = DeltaService(rig.engine, rig.settings)
        self.app = app_of(self.service)

    async def sending(self, body: bytes) -> httpx.Response:
        headers = {"Content-Type": "application/octet-stream"}
        return await self._rig.request("POST", DELTA, app=self.app, content=body, headers=headers)

    def send(self, body: bytes) -> httpx.Response:
        return self._rig.run(self.sending(body))

    def complete(self) -> httpx.Response:
        return self._rig.run(self._rig.request("POST", COMPLETIONS, app=self.app))


@pytest.fixture
def other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    monkeypatch.setattr(commits_module, "_STATE_MAX_AGE_S", 0.0)
    rig.engine.shared = True
    process = Process(rig)
    yield process
    process.service.spool.close()


def resume_owed(rig: Rig) -> list[bool]:
    return [receiver._lease.resume_owed for receiver in rig.engine.receivers]


# What one process has left, another sets right -----------------------------------------------


def test_a_failed_commit_is_healed_by_another_process(rig: Rig, other: Process) -> None:
    rig.fail_commit()
    assert rig.engine.paused
    assert resume_owed(rig) == [True, True]
    assert rig.status()["resume_owed"] is True
    assert_error(other.complete(), 503, "EngineUncertain", "uncertain")
    rig.assert_committed(other.send(full_part(RESYNCED, 8)), RESYNCED, 8)
    assert resume_owed(rig) == [False, False]
    assert other.complete().status_code == 200
    assert rig.post(COMPLETIONS).status_code == 200


def test_a_refusal_by_another_process_does_not_end_the_uncertainty(
    rig: Rig, other: Process
) -> None:
    rig.fail_commit()
    assert_error(other.send(delta_part()), 503, "EngineUncertain", "uncertain")
    rig.engine.fails["flush_cache"] = RuntimeError("the cache was not reset")
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
    assert rig.engine.paused
    expected = "committed" if lost == "fails" else "already_applied"
    assert other.send(delta_part()).json()["status"] == expected
    assert same(rig.engine.weights, NEXT)
    assert rig.engine.weight_version == "8"
    assert not rig.engine.paused
    assert rig.post(COMPLETIONS).status_code == 200


def test_generation_is_resumed_by_another_process(rig: Rig, other: Process) -> None:
    rig.engine.fails["resume"] = ConnectionError("lost")
    assert_error(rig.send(delta_part()), 500, "PublishFailed", "committed")
    assert rig.engine.paused
    assert other.send(delta_part()).json()["status"] == "already_applied"
    assert not rig.engine.paused


def test_what_the_caller_had_paused_another_process_leaves_paused(rig: Rig, other: Process) -> None:
    rig.engine.paused = True
    rig.fail_commit()
    assert resume_owed(rig) == [False, False]
    assert other.send(full_part(RESYNCED, 8)).json()["status"] == "committed"
    assert rig.engine.paused
    assert ("resume",) not in rig.engine.events


def test_a_process_that_dies_in_its_commit(
    rig: Rig, other: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the write, and before it lets generation go on."""

    end = asyncio.Event()

    async def never() -> None:
        await end.wait()

    resume = rig.engine.resume
    rig.engine.resume = never  # type: ignore[method-assign]

    async def dies() -> None:
        commit = asyncio.ensure_future(rig.sending(delta_part()))
        while ("set_weight_version", "8") not in rig.engine.events:
            await asyncio.sleep(0.001)
        rig.engine.resume = resume  # type: ignore[method-assign]
        repeat = asyncio.ensure_future(other.sending(delta_part()))
        await asyncio.sleep(0.1)
        assert not repeat.done()  # the first one lives, as far as anybody knows
        assert rig.engine.paused
        dead = rig.service.committer._name
        monkeypatch.setattr(commits_module, "is_alive", lambda name: name != dead)
        assert (await repeat).json()["status"] == "already_applied"
        end.set()
        await commit

    rig.run(dies())
    assert not rig.engine.paused
    assert resume_owed(rig) == [False, False]


# The guard -----------------------------------------------------------------------------------


def test_ranks_that_do_not_answer_leave_the_guard_as_it_is(rig: Rig, other: Process) -> None:
    rig.engine.fails["state"] = ConnectionError("lost")
    assert other.complete().status_code == 200
    rig.fail_commit()
    rig.engine.fails["state"] = ConnectionError("lost")
    assert_error(rig.post(COMPLETIONS), 503, "EngineUncertain", "uncertain")


@pytest.mark.parametrize(("shared", "expected"), [(False, 0), (True, 1)])
def test_the_ranks_are_asked_seldom(rig: Rig, shared: bool, expected: int) -> None:
    """And never where there is but one process."""
    asked = []
    original = rig.engine.call

    async def call(request: Operation[Any]) -> list[Any]:
        asked.append(request.name)
        return await original(request)

    rig.engine.call = call  # type: ignore[method-assign]
    rig.engine.shared = shared
    for _ in range(5):
        assert rig.post(COMPLETIONS).status_code == 200
    assert asked == ["state"] * expected


# One at a time -------------------------------------------------------------------------------


def test_two_processes_do_not_pause_the_engine_at_once(rig: Rig, other: Process) -> None:
    """A sync that follows at once waits until generation has gone on after the first."""
    resume, go_on = rig.engine.resume, asyncio.Event()

    async def late() -> None:
        await go_on.wait()
        await resume()

    rig.engine.resume = late  # type: ignore[method-assign]

    async def both() -> list[httpx.Response]:
        first = asyncio.ensure_future(rig.sending(delta_part()))
        while ("set_weight_version", "8") not in rig.engine.events:
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(other.sending(delta_part(OTHER_STEP, version=9)))
        await asyncio.sleep(0.1)
        assert not second.done()
        assert rig.engine.events[-1] == ("set_weight_version", "8")
        go_on.set()
        return [await first, await second]

    assert [r.json()["status"] for r in rig.run(both())] == ["committed", "committed"]
    pause = ("pause", "keep", True)
    one, two = (
        [pause, ("commit",), ("set_weight_version", version), ("resume",)] for version in "89"
    )
    assert rig.engine.events == one + two
    assert not rig.engine.paused
    assert same(rig.engine.weights, after(NEXT, OTHER_STEP))


def test_a_check_that_changes_the_weights_stops_generation(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the sync was only being staged, and the engine was not paused for it."""

    def damaging(*_: object, **__: object) -> None:
        raise TracingError("tensors moved")

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine.shards[1], "check_sync", damaging)
        assert_error(rig.send(delta_part()), 500, "CommitFailed", "uncertain")
    assert rig.engine.paused
    assert rig.engine.writes == [0, 0]
    generated = rig.run(rig.request("POST", COMPLETIONS))
    assert_error(generated, 503, "EngineUncertain", "uncertain")
    assert_error(rig.send(delta_part()), 503, "EngineUncertain", "uncertain")
    rig.assert_committed(rig.send(full_part(RESYNCED, 8)), RESYNCED, 8)
    assert not rig.engine.paused
    assert rig.run(rig.request("POST", COMPLETIONS)).status_code == 200


@pytest.mark.parametrize("moment", ["poll", "acquire_lease"])
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
        staged = await rig.sending(parts[0]) if moment == "acquire_lease" else first
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
    assert rig.status()["staged"] is None


def test_a_hold_that_could_not_be_given_back_is_taken_again(rig: Rig) -> None:
    rig.engine.fails["release_lease"] = ConnectionError("lost")
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)
    following = rig.send(delta_part(OTHER_STEP, version=9))
    rig.assert_committed(following, after(NEXT, OTHER_STEP), 9)


def test_ranks_that_give_no_hold_are_not_written(rig: Rig) -> None:
    rig.engine.fails["acquire_lease"] = ConnectionError("lost")
    assert_error(rig.send(delta_part()), 500, "DeltaError")
    assert rig.engine.events == []
    rig.assert_untouched()


# The caller's own pauses ---------------------------------------------------------------------


def during_a_commit(
    rig: Rig, change: Callable[[], Coroutine[Any, Any, None]], asks: DeltaService | None = None
) -> httpx.Response:
    """A commit, and what the caller asks of the engine, by some process, while it is written."""
    commits = (asks or rig.service).committer

    async def scenario() -> httpx.Response:
        commit = asyncio.ensure_future(rig.sending(delta_part()))
        while ("commit",) not in rig.engine.events:
            await asyncio.sleep(0)
        asked = asyncio.ensure_future(commits.by_caller(change))
        response = await commit
        await asked
        return response

    return rig.run(scenario())


def test_a_pause_during_a_commit_outlives_it(rig: Rig) -> None:
    async def pause() -> None:
        await rig.engine.pause("keep", flush_cache=False)

    assert during_a_commit(rig, pause).json()["status"] == "committed"
    assert rig.engine.paused
    assert rig.engine.events[-2:] == [("resume",), ("pause", "keep", False)]
    # It is the caller's: the next sync leaves it.
    assert rig.send(delta_part(OTHER_STEP, version=9)).json()["status"] == "committed"
    assert rig.engine.paused
    rig.run(rig.service.committer.by_caller(rig.engine.resume))
    assert not rig.engine.paused


def test_generation_is_not_resumed_in_the_middle_of_a_commit(rig: Rig) -> None:
    assert during_a_commit(rig, rig.engine.resume).json()["status"] == "committed"
    assert rig.engine.events[-2:] == [("resume",), ("resume",)]
    assert not rig.engine.paused


def test_a_pause_in_another_process_waits_too(rig: Rig, other: Process) -> None:
    async def pause() -> None:
        await rig.engine.pause("keep", flush_cache=False)

    assert during_a_commit(rig, pause, other.service).json()["status"] == "committed"
    assert rig.engine.events[-2:] == [("resume",), ("pause", "keep", False)]
    assert rig.engine.paused


def test_an_adapters_method_is_heeded(rig: Rig) -> None:
    """As the caller calls it, with its arguments and its name."""
    called: list[Any] = []

    async def pause_generation(*, mode: str) -> str:
        """The engine's own."""
        called.append((mode, rig.engine.receivers[0]._lease._held))
        return "paused"

    pause = serialize_with_commits(rig.service.committer, pause_generation)
    assert rig.run(pause(mode="keep")) == "paused"
    assert called == [("keep", True)]
    assert (pause.__name__, pause.__doc__) == ("pause_generation", "The engine's own.")
    assert not rig.engine.receivers[0]._lease._held


@pytest.mark.parametrize("change", ["pause", "resume"])
def test_what_the_caller_does_after_a_failure_is_the_callers(rig: Rig, change: str) -> None:
    rig.fail_commit()
    commits = rig.service.committer
    if change == "pause":
        rig.run(commits.by_caller(lambda: rig.engine.pause("keep", flush_cache=False)))
    else:
        rig.run(commits.by_caller(rig.engine.resume))
    assert resume_owed(rig) == [False, False]
    assert_error(rig.post(COMPLETIONS), 503, "EngineUncertain", "uncertain")
    assert rig.send(full_part(RESYNCED, 8)).json()["status"] == "committed"
    assert rig.engine.paused == (change == "pause")


def test_a_resume_ends_a_pause_that_waits(rig: Rig) -> None:
    commits, ended = rig.service.committer, asyncio.Event()

    async def resume() -> None:
        ended.set()

    async def scenario() -> None:
        pause = asyncio.ensure_future(commits.by_caller(ended.wait))
        await asyncio.sleep(0.05)
        assert not pause.done()
        await commits.by_caller(resume)
        await pause

    rig.run(scenario())


def test_a_caller_that_hangs_up_keeps_nobody_out(rig: Rig, other: Process) -> None:
    go_on = asyncio.Event()

    async def pause() -> None:
        await go_on.wait()
        await rig.engine.pause("wait", flush_cache=False)

    async def scenario() -> None:
        asked = asyncio.ensure_future(rig.service.committer.by_caller(pause))
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        go_on.set()

    rig.run(scenario())
    assert other.send(delta_part()).json()["status"] == "committed"
    assert rig.engine.events[0] == ("pause", "wait", False)
    assert rig.engine.paused


def test_a_caller_is_heard_where_the_ranks_are_not(rig: Rig) -> None:
    rig.engine.fails["acquire_lease"] = ConnectionError("lost")
    rig.run(rig.service.committer.by_caller(lambda: rig.engine.pause("keep", flush_cache=False)))
    assert rig.engine.paused


def test_what_the_engine_answers_the_caller_is_passed_on(rig: Rig) -> None:
    async def answers() -> int:
        return 3

    async def fails() -> None:
        raise RuntimeError("the engine's own")

    commits: EngineCommitter = rig.service.committer
    assert rig.run(commits.by_caller(answers)) == 3
    with pytest.raises(RuntimeError, match="own"):
        rig.run(commits.by_caller(fails))
    rig.assert_untouched()


# Pauses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, "keep", "wait", "abort"])
@pytest.mark.parametrize("flush", [None, "true", "false"])
@pytest.mark.parametrize("from_disk", [False, True])
def test_the_order_of_a_commit(
    disk_rig: Rig, root: Path, mode: str | None, flush: str | None, from_disk: bool
) -> None:
    given = {"pause_mode": mode, "flush_cache": flush}
    query = {key: value for key, value in given.items() if value is not None}
    if from_disk:
        (root / "a.safetensors").write_bytes(delta_part())
        body = {"model_path": str(root)}
        response = disk_rig.post(DELTA, json=body, params=query)
    else:
        response = disk_rig.send(delta_part(), **query)
    disk_rig.assert_committed(response, NEXT, 8)
    pause = ("pause", mode or "keep", flush != "false")
    assert disk_rig.engine.events == [pause, *COMMITTED, ("resume",)]


def test_the_options_of_the_body_of_a_disk_request(disk_rig: Rig, root: Path) -> None:
    (root / "a.safetensors").write_bytes(delta_part())
    disk_rig.disk(root, pause_mode="abort", flush_cache=False)
    assert disk_rig.engine.events == [("pause", "abort", False), *COMMITTED, ("resume",)]


@pytest.mark.parametrize("flush", [True, False])
def test_an_engine_that_the_caller_paused_stays_paused(rig: Rig, flush: bool) -> None:
    rig.engine.paused = True
    response = rig.send(delta_part(), flush_cache=str(flush).lower(), pause_mode="abort")
    assert response.json()["status"] == "committed"
    assert rig.engine.events == [("flush_cache",)] * flush + COMMITTED
    assert rig.engine.paused
    assert same(rig.engine.weights, NEXT)


def test_a_cache_that_is_not_reset_is_an_error(rig: Rig) -> None:
    rig.engine.fails["pause"] = RuntimeError("the cache was not reset")
    error = assert_error(rig.send(delta_part()), 500, "DeltaError")
    assert "the cache was not reset" in error["message"]
    assert rig.engine.events == [PAUSED, ("resume",)]
    assert same(rig.engine.weights, BASE)
    assert rig.engine.weight_version == str(VERSION)
    assert rig.post(COMPLETIONS).status_code == 200
    # Nothing stays staged that would keep another sender out.
    assert [receiver._sync_state.sync for receiver in rig.engine.receivers] == [None, None]
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)


def test_a_cache_that_is_not_reset_while_paused_is_an_error(rig: Rig) -> None:
    rig.engine.paused = True
    rig.engine.fails["flush_cache"] = RuntimeError("the cache was not reset")
    assert_error(rig.send(delta_part()), 500, "DeltaError")
    assert rig.engine.events == [("flush_cache",)]
    assert rig.engine.paused
    assert same(rig.engine.weights, BASE)


def test_weights_that_fall_asleep_before_the_commit(rig: Rig) -> None:
    original = rig.engine.pause

    async def pause(mode: str, *, flush_cache: bool) -> None:
        await original(mode, flush_cache=flush_cache)
        rig.engine.set_asleep(True)

    rig.engine.pause = pause  # type: ignore[method-assign]
    assert_error(rig.send(delta_part()), 409, "WeightsAsleep")
    assert rig.engine.events == [PAUSED, ("commit",), ("resume",)]
    assert rig.engine.writes == [0, 0]
    rig.engine.pause = original  # type: ignore[method-assign]
    rig.engine.set_asleep(False)
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)


def test_ranks_that_have_not_staged_alike_do_not_begin(rig: Rig) -> None:
    rig.send(split_parts()[0])
    original = rig.engine.pause

    async def pause(mode: str, *, flush_cache: bool) -> None:
        await original(mode, flush_cache=flush_cache)
        rig.engine.receivers[1]._sync_state.drop()

    rig.engine.pause = pause  # type: ignore[method-assign]
    rig.send(split_parts()[1])
    assert_error(rig.send(split_parts()[2]), 409, "Conflict")
    assert rig.engine.events == [PAUSED, ("commit",), ("resume",)]
    assert rig.engine.writes == [0, 0]


# Failures of the write -----------------------------------------------------------------------


def test_a_failed_write_leaves_the_engine_paused(rig: Rig) -> None:
    error = assert_error(rig.fail_commit(), 500, "CommitFailed", "uncertain", version=7)
    assert "the copy failed" in error["message"]
    assert rig.engine.events == [PAUSED, ("commit",)]
    assert rig.engine.paused
    assert rig.engine.weight_version == "7"
    status = rig.status()
    assert (status["engine_state"], status["version"]) == ("uncertain", 7)
    assert_error(rig.post(COMPLETIONS), 503, "EngineUncertain", "uncertain")
    assert rig.spooled() == []


def test_a_failed_write_that_is_undone_changes_nothing(rig: Rig) -> None:
    for shard in rig.engine.shards:
        shard.undoes = True
    error = assert_error(rig.fail_commit(), 500, "WriteUndone", "unchanged")
    assert "the copy failed" in error["message"]
    assert same(rig.engine.weights, fresh_weights())
    assert rig.engine.weight_version == "7"
    assert not rig.engine.paused
    assert rig.send(delta_part()).json()["status"] == "committed"


def test_rollback(rig: Rig) -> None:
    assert_error(rig.post("/delta_rollback"), 409, "Conflict")
    assert rig.send(delta_part()).json()["status"] == "committed"
    rig.engine.events.clear()
    answer = rig.post("/delta_rollback").json()
    assert (answer["status"], answer["version"], answer["rolled_back"]) == ("rolled_back", 7, 8)
    assert same(rig.engine.weights, fresh_weights())
    assert rig.engine.weight_version == "7"
    assert not rig.engine.paused
    assert rig.engine.events[0] == PAUSED
    assert_error(rig.post("/delta_rollback"), 409, "Conflict")
    assert rig.send(delta_part()).json()["status"] == "committed"


def test_deltas_are_refused_while_uncertain(rig: Rig) -> None:
    rig.fail_commit()
    rig.engine.events.clear()
    for body in (delta_part(), delta_part(OTHER_STEP), delta_part({}, version=9, base_version=8)):
        assert_error(rig.send(body), 503, "EngineUncertain", "uncertain")
    assert_error(rig.send(delta_part()[:-1]), 400, "MalformedPart")
    assert rig.engine.events == []
    assert rig.engine.writes == [1, 1]


@pytest.mark.parametrize("version", [7, 8, 3])
@pytest.mark.parametrize("status_between", [False, True])
def test_a_full_sync_ends_the_uncertainty(rig: Rig, version: int, status_between: bool) -> None:
    rig.fail_commit()
    if status_between:
        rig.status()
    rig.engine.events.clear()
    rig.assert_committed(rig.send(full_part(RESYNCED, version)), RESYNCED, version)
    assert rig.engine.events == [
        ("flush_cache",),
        ("commit",),
        ("set_weight_version", str(version)),
        ("resume",),
    ]
    assert rig.status()["engine_state"] == "certain"
    assert rig.post(COMPLETIONS).status_code == 200
    following = rig.send(delta_part(version=version + 1))
    rig.assert_committed(following, after(RESYNCED, STEP), version + 1)


def test_an_incomplete_full_sync_does_not_end_it(rig: Rig) -> None:
    rig.fail_commit()
    body = full_part(RESYNCED, 8, ["norm.weight"])
    assert_error(rig.send(body), 422, "NotUpdatable")
    assert rig.engine.paused
    assert_error(rig.post(COMPLETIONS), 503, "EngineUncertain", "uncertain")


def test_a_full_sync_that_fails_too(rig: Rig) -> None:
    rig.fail_commit()
    rig.engine.shards[0].breaks = True
    assert_error(rig.send(full_part(RESYNCED, 8)), 500, "CommitFailed", "uncertain")
    rig.engine.shards[0].breaks = False
    assert rig.engine.paused
    assert_error(rig.post(COMPLETIONS), 503, "EngineUncertain", "uncertain")
    rig.assert_committed(rig.send(full_part(RESYNCED, 8)), RESYNCED, 8)


def test_a_cache_that_is_not_reset_keeps_it_uncertain(rig: Rig) -> None:
    rig.fail_commit()
    rig.engine.fails["flush_cache"] = RuntimeError("the cache was not reset")
    assert_error(rig.send(full_part(RESYNCED, 8)), 500, "DeltaError")
    assert rig.engine.paused
    assert_error(rig.post(COMPLETIONS), 503, "EngineUncertain", "uncertain")
    rig.assert_committed(rig.send(full_part(RESYNCED, 8)), RESYNCED, 8)


def test_an_engine_that_the_caller_paused_stays_so_after_the_resync(rig: Rig) -> None:
    rig.engine.paused = True
    rig.fail_commit()
    assert rig.send(full_part(RESYNCED, 8)).json()["status"] == "committed"
    assert rig.engine.paused
    assert ("resume",) not in rig.engine.events
    assert rig.post(COMPLETIONS).status_code == 200


@pytest.mark.parametrize("lost", ["fails", "loses"])
@pytest.mark.parametrize("status_between", [False, True])
@pytest.mark.parametrize("then", ["repeat", "full"])
def test_an_unknown_commit_is_uncertain(
    rig: Rig, lost: str, status_between: bool, then: str
) -> None:
    getattr(rig.engine, lost)["commit"] = ConnectionError("a rank did not answer")
    error = assert_error(rig.send(delta_part()), 500, "CommitFailed", "uncertain")
    assert "a rank did not answer" in error["message"]
    assert rig.engine.events == [PAUSED, ("commit",)]
    assert rig.engine.paused
    assert_error(rig.post(COMPLETIONS), 503, "EngineUncertain", "uncertain")
    if status_between:
        assert rig.status()["version"] == (7 if lost == "fails" else 8)
    if then == "full":
        rig.assert_committed(rig.send(full_part(RESYNCED, 9)), RESYNCED, 9)
    else:
        expected = "committed" if lost == "fails" else "already_applied"
        assert rig.send(delta_part()).json()["status"] == expected
        assert same(rig.engine.weights, NEXT)
        assert rig.engine.weight_version == "8"
        assert not rig.engine.paused
    assert sum(rig.engine.writes) == 2 * (1 + (lost == "loses" and then == "full"))
    assert rig.post(COMPLETIONS).status_code == 200


@pytest.mark.parametrize(
    ("vote", "kind", "engine_state"),
    [
        (1, "DeltaError", "unchanged"),
        (2, "DeltaError", "unchanged"),
        (3, "DeltaError", "unchanged"),
        (4, "CommitFailed", "uncertain"),
    ],
    ids=["whether-it-is-held", "when-staged", "before-the-write", "after-the-write"],
)
def test_ranks_that_do_not_hear_each_other(
    rig: Rig, vote: int, kind: str, engine_state: str
) -> None:
    rig.engine.breaks_vote(vote)
    assert_error(rig.send(delta_part()), 500, kind, engine_state)
    assert rig.engine.paused == (engine_state == "uncertain")
    assert rig.engine.writes == [int(vote == 4)] * 2
    assert rig.engine.weight_version == "7"


@pytest.mark.parametrize("refuses", range(2))
def test_ranks_whose_answers_differ_are_uncertain(rig: Rig, refuses: int) -> None:
    original = rig.engine.call

    async def call(request: Operation[Any]) -> list[Any]:
        answers = await original(request)
        if request.name == "commit":
            answers[refuses] = Conflict("not here")
        return answers

    rig.engine.call = call  # type: ignore[method-assign]
    error = assert_error(rig.send(delta_part()), 500, "CommitFailed", "uncertain")
    assert "not here" in error["message"]
    assert rig.engine.paused
    assert rig.engine.weight_version == "7"


def test_a_version_that_is_not_published_is_published_by_the_repeat(rig: Rig) -> None:
    rig.engine.fails["set_weight_version"] = ConnectionError("lost")
    assert_error(rig.send(delta_part()), 500, "PublishFailed", "committed")
    rig.engine.events.clear()
    assert_already_applied(rig, rig.send(delta_part()))
    assert not rig.engine.paused


def test_generation_that_is_not_resumed_is_resumed_by_the_repeat(rig: Rig) -> None:
    rig.engine.fails["resume"] = ConnectionError("lost")
    assert_error(rig.send(delta_part()), 500, "PublishFailed", "committed")
    assert rig.engine.paused
    assert rig.send(delta_part()).json()["status"] == "already_applied"
    assert not rig.engine.paused
    assert rig.engine.writes == [1, 1]


def test_a_caller_that_pauses_after_a_failure_is_heeded(rig: Rig) -> None:
    rig.fail_commit()
    rig.engine.fails["set_weight_version"] = ConnectionError("lost")
    assert_error(rig.send(full_part(RESYNCED, 8)), 500, "PublishFailed", "committed")
    assert not rig.engine.paused
    rig.engine.paused = True
    assert rig.send(delta_part(version=9)).json()["status"] == "committed"
    assert rig.engine.paused


def test_a_resync_whose_version_is_not_published_ends_the_uncertainty(rig: Rig) -> None:
    rig.fail_commit()
    rig.engine.fails["set_weight_version"] = ConnectionError("lost")
    assert_error(rig.send(full_part(RESYNCED, 8)), 500, "PublishFailed", "committed")
    assert rig.send(full_part(RESYNCED, 8)).json()["status"] == "already_applied"
    assert rig.engine.weight_version == "8"
    assert not rig.engine.paused
    assert rig.post(COMPLETIONS).status_code == 200


def test_another_server_of_the_same_engine_sees_it(rig: Rig) -> None:
    rig.fail_commit()
    other = DeltaService(rig.engine, rig.settings)
    app = app_of(other)
    assert rig.run(other.status())["engine_state"] == "uncertain"
    response = rig.run(rig.request("POST", COMPLETIONS, app=app))
    assert_error(response, 503, "EngineUncertain", "uncertain")
    rig.assert_committed(rig.send(full_part(RESYNCED, 8)), RESYNCED, 8)
    assert rig.run(other.status())["engine_state"] == "certain"
    assert rig.run(rig.request("POST", COMPLETIONS, app=app)).status_code == 200
    other.spool.close()
