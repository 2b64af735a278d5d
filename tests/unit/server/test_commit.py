"""Commits: the order of their calls, and a caller that pauses meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_server.board import Item
from delta_server.commit import EngineCommitter, serialize_with_commits
from delta_server.request_options import Flush, Options
from delta_server.service import DeltaService
from engine_ext.errors import CommittedNotResumed, EngineUncertain, SaltUnavailable
from engine_ext.ranks import ENGINE
from engine_ext.ranks.operations import EngineUse, Operation, ReplyT, StoppedCall
from tests.support.delta_bodies import (
    BASE,
    NEXT,
    OTHER_STEP,
    RESYNCED,
    VERSION,
    delta_part,
    full_part,
    same,
)
from tests.support.endpoint_rig import COMPLETIONS, DELTA, Rig, assert_error
from tests.unit.server.other_process import Process, resume_owed
from tests.unit.server.service_parts import PHASES, split_parts

STOPPED = ("stop", True)
COMMITTED = [("commit",), ("publish", "8", True)]


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
        asked = asyncio.ensure_future(commits.run_external_change(change))
        response = await commit
        await asked
        return response

    return rig.run(scenario())


def test_a_pause_during_a_commit_outlives_it(rig: Rig) -> None:
    assert during_a_commit(rig, rig.engine.pause).json()["status"] == "committed"
    assert rig.engine.paused
    assert rig.engine.events[-2:] == [("publish", "8", True), ("pause", "keep")]
    # It is the caller's: the next sync leaves it.
    assert rig.send(delta_part(OTHER_STEP, version=9)).json()["status"] == "committed"
    assert rig.engine.paused
    rig.run(rig.service.committer.run_external_change(rig.engine.resume))
    assert not rig.engine.paused


def test_generation_is_not_resumed_in_the_middle_of_a_commit(rig: Rig) -> None:
    assert during_a_commit(rig, rig.engine.resume).json()["status"] == "committed"
    assert rig.engine.events[-2:] == [("publish", "8", True), ("resume",)]
    assert not rig.engine.paused


def test_a_pause_in_another_process_waits_too(rig: Rig, other: Process) -> None:
    answer = during_a_commit(rig, rig.engine.pause, other.service)
    assert answer.json()["status"] == "committed"
    assert rig.engine.events[-2:] == [("publish", "8", True), ("pause", "keep")]
    assert rig.engine.paused


def test_an_adapters_method_is_heeded(rig: Rig) -> None:
    """As the caller calls it, with its arguments and its name."""
    called: list[Any] = []

    async def held() -> bool:
        item = Item(rig.engine, ENGINE, EngineUse)
        await item.read()
        return item.holder is not None

    async def pause_generation(*, mode: str) -> str:
        """The engine's own."""
        called.append((mode, await held()))
        return "paused"

    pause = serialize_with_commits(rig.service.committer, pause_generation)
    assert rig.run(pause(mode="keep")) == "paused"
    assert called == [("keep", True)]
    assert (pause.__name__, pause.__doc__) == ("pause_generation", "The engine's own.")
    assert not rig.run(held())


def resumes(*_: Any) -> bool:
    return True


@pytest.mark.parametrize("change", ["pause", "resume"])
def test_what_the_caller_does_after_a_failure_is_the_callers(rig: Rig, change: str) -> None:
    """But kept requests must not continue from mixed weights, under the old version."""
    rig.fail_commit()
    commits = rig.service.committer
    if change == "pause":
        rig.run(commits.run_external_change(rig.engine.pause))
    else:
        with pytest.raises(EngineUncertain):
            rig.run(commits.run_external_change(rig.engine.resume, resumes))
    assert rig.engine.paused
    assert resume_owed(rig) == [change == "resume"] * 2
    assert_error(rig.post(COMPLETIONS), 503, "EngineUncertain", "uncertain")
    assert rig.send(full_part(RESYNCED, 8)).json()["status"] == "committed"
    assert rig.engine.paused == (change == "pause")
    rig.run(commits.run_external_change(rig.engine.resume, resumes))
    assert not rig.engine.paused


def test_resume_in_callers_pause_waits_for_full_sync(rig: Rig) -> None:
    rig.engine.paused = True
    rig.fail_commit()
    commits = rig.service.committer
    with pytest.raises(EngineUncertain):
        rig.run(commits.run_external_change(rig.engine.resume, resumes))
    assert rig.send(full_part(RESYNCED, 8)).json()["status"] == "committed"
    assert rig.engine.paused
    rig.run(commits.run_external_change(rig.engine.resume, resumes))
    assert not rig.engine.paused


def test_other_process_refuses_resume_while_uncertain(rig: Rig, other: Process) -> None:
    rig.fail_commit()
    with pytest.raises(EngineUncertain):
        rig.run(other.service.committer.run_external_change(rig.engine.resume, resumes))
    assert rig.engine.paused


def test_resume_is_refused_where_ranks_are_silent(rig: Rig) -> None:
    rig.engine.fails["commit"] = ConnectionError("a rank did not answer")
    assert_error(rig.send(delta_part()), 500, "CommitFailed", "uncertain")
    rig.engine.fails["lease"] = ConnectionError("lost")
    with pytest.raises(EngineUncertain):
        rig.run(rig.service.committer.run_external_change(rig.engine.resume, resumes))
    assert rig.engine.paused


def test_damage_found_in_callers_pause_forbids_its_end(rig: Rig) -> None:
    """The caller's pause waits for requests, and its resume does not wait for the pause."""
    commits, ended = rig.service.committer, asyncio.Event()

    async def scenario() -> None:
        pause = asyncio.ensure_future(commits.run_external_change(ended.wait))
        await asyncio.sleep(0.05)
        halting = asyncio.ensure_future(commits.halt(Options()))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineUncertain):
            await commits.run_external_change(rig.engine.resume, resumes)
        ended.set()
        await asyncio.gather(pause, halting)

    rig.run(scenario())
    assert rig.engine.events == [("stop", True)]
    assert rig.engine.paused


@pytest.mark.parametrize(
    "path",
    [
        "/resume",
        "/continue_generation",
        "/pause?mode=wait",
        "/pause?wait_for_inflight_requests=true",
    ],
)
def test_routes_that_generate_answer_503_while_uncertain(rig: Rig, path: str) -> None:
    """Before the engine's own route, which would answer 500."""
    assert rig.post(path).status_code == 404
    rig.fail_commit()
    assert_error(rig.post(path), 503, "EngineUncertain", "uncertain")
    assert rig.send(full_part(RESYNCED, 8)).json()["status"] == "committed"
    assert rig.post(path).status_code == 404


def test_pause_that_keeps_requests_is_allowed_while_uncertain(rig: Rig) -> None:
    rig.fail_commit()
    for path in ("/pause", "/pause?mode=keep", "/pause?mode=abort"):
        assert rig.post(path).status_code == 404  # of the engine's own app


@pytest.mark.parametrize("change", ["pause", "resume"])
def test_the_callers_change_publishes_the_version_first(rig: Rig, change: str) -> None:
    """Or tokens of the new weights would get the old version."""
    rig.engine.fails["publish"] = ConnectionError("lost")
    assert_error(rig.send(delta_part()), 500, "CommittedNotResumed", "committed")
    rig.engine.events.clear()
    ask = {
        "pause": rig.engine.pause,
        "resume": rig.engine.resume,
    }
    commits = rig.service.committer
    rig.run(commits.run_external_change(ask[change]))
    published, *_ = rig.engine.events
    assert published == ("publish", "8", False)
    assert rig.engine.paused == (change == "pause")


def test_generation_is_not_resumed_under_the_old_version(rig: Rig) -> None:
    rig.engine.fails["publish"] = ConnectionError("lost")
    assert_error(rig.send(delta_part()), 500, "CommittedNotResumed", "committed")
    rig.engine.fails["publish"] = ConnectionError("lost again")
    commits = rig.service.committer
    with pytest.raises(CommittedNotResumed, match="lost again"):
        rig.run(commits.run_external_change(rig.engine.resume))
    assert rig.engine.paused
    assert resume_owed(rig) == [True, True]
    rig.run(commits.run_external_change(rig.engine.resume))
    assert (rig.engine.paused, rig.engine.weight_version) == (False, "8")


@pytest.mark.parametrize("ends", ["caller", "max-pause"])
def test_pause_of_caller_ends_under_committed_version(rig: Rig, ends: str) -> None:
    """The commit owes no resume then, and its repeat can come too late."""
    rig.engine.paused = True
    commits = rig.service.committer
    end = {
        "caller": lambda: commits.run_external_change(rig.engine.resume, resumes),
        "max-pause": lambda: commits.end_long_pause(0),
    }
    rig.engine.fails["publish"] = ConnectionError("lost")
    assert_error(rig.send(delta_part()), 500, "CommittedNotResumed", "committed")
    rig.engine.fails["publish"] = ConnectionError("lost again")
    with pytest.raises((CommittedNotResumed, ConnectionError), match="lost again"):
        rig.run(end[ends]())
    assert rig.engine.paused
    rig.run(end[ends]())
    assert (rig.engine.paused, rig.engine.weight_version) == (False, "8")
    published = [event for event in rig.engine.events if event[0] == "publish"]
    rig.run(commits.run_external_change(rig.engine.resume, resumes))
    assert [event for event in rig.engine.events if event[0] == "publish"] == published


@pytest.mark.parametrize("process", ["same", "other"])
def test_unknown_commit_in_callers_pause_is_published(
    rig: Rig, other: Process, process: str
) -> None:
    rig.engine.paused = True
    rig.engine.loses["commit"] = ConnectionError("a rank did not answer")
    assert_error(rig.send(delta_part()), 500, "CommitFailed", "uncertain")
    service = rig.service if process == "same" else other.service
    rig.run(service.committer.run_external_change(rig.engine.resume, resumes))
    assert (rig.engine.paused, rig.engine.weight_version) == (False, "8")


def test_refused_commit_in_callers_pause_publishes_nothing(rig: Rig) -> None:
    rig.engine.paused = True
    assert_error(rig.send(delta_part(version=9, base_version=8)), 409, "VersionConflict")
    for shard in rig.engine.shards:
        shard.breaks = shard.undoes = True
    assert_error(rig.send(delta_part()), 500, "WriteUndone")
    rig.run(rig.service.committer.run_external_change(rig.engine.resume, resumes))
    assert [event[0] for event in rig.engine.events] == ["stop", "commit", "resume"]


def test_a_resume_ends_a_pause_that_waits(rig: Rig) -> None:
    commits, ended = rig.service.committer, asyncio.Event()

    async def resume() -> None:
        ended.set()

    async def scenario() -> None:
        pause = asyncio.ensure_future(commits.run_external_change(ended.wait))
        await asyncio.sleep(0.05)
        assert not pause.done()
        await commits.run_external_change(resume)
        await pause

    rig.run(scenario())


def test_a_caller_that_hangs_up_keeps_nobody_out(rig: Rig, other: Process) -> None:
    go_on = asyncio.Event()

    async def pause() -> None:
        await go_on.wait()
        await rig.engine.pause("wait")

    async def scenario() -> None:
        asked = asyncio.ensure_future(rig.service.committer.run_external_change(pause))
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        go_on.set()

    rig.run(scenario())
    assert other.send(delta_part()).json()["status"] == "committed"
    assert rig.engine.events[0] == ("pause", "wait")
    assert rig.engine.paused


def test_a_caller_is_heard_where_the_ranks_are_not(rig: Rig) -> None:
    rig.engine.fails["lease"] = ConnectionError("lost")
    rig.run(rig.service.committer.run_external_change(rig.engine.pause))
    assert rig.engine.paused


def test_what_the_engine_answers_the_caller_is_passed_on(rig: Rig) -> None:
    async def answers() -> int:
        return 3

    async def fails() -> None:
        raise RuntimeError("the engine's own")

    commits: EngineCommitter = rig.service.committer
    assert rig.run(commits.run_external_change(answers)) == 3
    with pytest.raises(RuntimeError, match="own"):
        rig.run(commits.run_external_change(fails))
    rig.assert_untouched()


# Pauses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "flush"),
    [(None, None), ("keep", "true"), ("wait", "false"), ("abort", None), (None, "false")],
)
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
    ends = [("end_requests", mode)] if mode in ("wait", "abort") else []
    assert disk_rig.engine.events == [*ends, ("stop", flush != "false"), *COMMITTED]


def test_the_options_of_the_body_of_a_disk_request(disk_rig: Rig, root: Path) -> None:
    (root / "a.safetensors").write_bytes(delta_part())
    disk_rig.disk(root, pause_mode="abort", flush_cache=False)
    assert disk_rig.engine.events == [("end_requests", "abort"), ("stop", False), *COMMITTED]


@pytest.mark.parametrize("flush", [True, False])
def test_an_engine_that_the_caller_paused_stays_paused(rig: Rig, flush: bool) -> None:
    rig.engine.paused = True
    response = rig.send(delta_part(), flush_cache=str(flush).lower(), pause_mode="abort")
    assert response.json()["status"] == "committed"
    assert rig.engine.events == [("stop", flush), ("commit",), ("publish", "8", False)]
    assert rig.engine.paused
    assert response.json()["timings_ms"].keys() == {*PHASES, "total_ms"}
    assert same(rig.engine.weights, NEXT)


@pytest.mark.parametrize("paused", [False, True])
def test_salted_kv_stays_with_the_requests_in_flight(rig: Rig, paused: bool) -> None:
    rig.engine.paused = paused
    response = rig.send(delta_part(), flush_cache="salt")
    assert response.json()["status"] == "committed"
    assert rig.engine.events == [("stop", "salt"), ("commit",), ("publish", "8", not paused)]
    assert rig.engine.paused == paused


def test_an_engine_that_salts_nothing_refuses(rig: Rig) -> None:
    rig.engine.fails["salt"] = SaltUnavailable("not as it was started")
    assert_error(rig.send(delta_part(), flush_cache="salt"), 422, "SaltUnavailable")
    assert rig.engine.events == []
    assert same(rig.engine.weights, BASE)
    del rig.engine.fails["salt"]
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)


def test_a_cache_that_is_not_reset_is_an_error(rig: Rig) -> None:
    rig.engine.fails["stop"] = RuntimeError("the cache was not reset")
    error = assert_error(rig.send(delta_part()), 500, "DeltaError")
    assert "the cache was not reset" in error["message"]
    assert rig.engine.events == [STOPPED, ("commit",), ("publish", None, True)]
    assert same(rig.engine.weights, BASE)
    assert rig.engine.weight_version == str(VERSION)
    assert rig.post(COMPLETIONS).status_code == 200
    # Nothing stays staged that would keep another sender out.
    assert [receiver._sync_state.sync for receiver in rig.engine.receivers] == [None, None]
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)


def test_a_cache_that_is_not_reset_while_paused_is_an_error(rig: Rig) -> None:
    rig.engine.paused = True
    rig.engine.fails["stop"] = RuntimeError("the cache was not reset")
    assert_error(rig.send(delta_part()), 500, "DeltaError")
    assert rig.engine.events == [STOPPED, ("commit",)]
    assert rig.engine.paused
    assert same(rig.engine.weights, BASE)


def test_weights_that_fall_asleep_before_the_commit(rig: Rig) -> None:
    original = rig.engine.call_stopped

    async def call_stopped(request: Operation[ReplyT], flush_cache: Flush) -> StoppedCall[ReplyT]:
        rig.engine.set_asleep(True)
        return await original(request, flush_cache)

    rig.engine.call_stopped = call_stopped  # type: ignore[method-assign]
    assert_error(rig.send(delta_part()), 409, "WeightsAsleep")
    assert rig.engine.events == [STOPPED, ("commit",), ("publish", None, True)]
    assert rig.engine.writes == [0, 0]
    rig.engine.call_stopped = original  # type: ignore[method-assign]
    rig.engine.set_asleep(False)
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)


def test_ranks_that_have_not_staged_alike_do_not_begin(rig: Rig) -> None:
    rig.send(split_parts()[0])
    original = rig.engine.call_stopped

    async def call_stopped(request: Operation[ReplyT], flush_cache: Flush) -> StoppedCall[ReplyT]:
        rig.engine.receivers[1]._sync_state.drop()
        return await original(request, flush_cache)

    rig.engine.call_stopped = call_stopped  # type: ignore[method-assign]
    rig.send(split_parts()[1])
    assert_error(rig.send(split_parts()[2]), 409, "Conflict")
    assert rig.engine.events == [STOPPED, ("commit",), ("publish", None, True)]
    assert rig.engine.writes == [0, 0]
