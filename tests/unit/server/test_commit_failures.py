"""Commits whose write fails, or whose outcome is not known."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from delta_server import commit
from delta_server.service import DeltaService
from engine_ext.errors import Conflict
from engine_ext.ranks.operations import Operation
from tests.support.delta_bodies import (
    NEXT,
    OTHER_STEP,
    RESYNCED,
    STEP,
    VERSION,
    after,
    delta_part,
    fresh_weights,
    full_part,
    same,
)
from tests.support.endpoint_rig import COMPLETIONS, Rig, app_of, assert_error
from tests.support.present import present

OTHER = {"layer.weight": {2: 0x1234}}
STOPPED = ("stop", True)


def test_a_failed_write_leaves_the_engine_paused(rig: Rig) -> None:
    error = assert_error(rig.fail_commit(), 500, "CommitFailed", "uncertain", version=7)
    assert "the copy failed" in error["message"]
    assert rig.engine.events == [STOPPED, ("commit",)]
    assert rig.engine.paused
    assert rig.engine.weight_version == "7"
    status = rig.status()
    assert (status.health.state, status.version.number) == ("uncertain", 7)
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
    assert rig.engine.events[0] == STOPPED
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


@pytest.mark.parametrize(("version", "status_between"), [(7, False), (8, True), (3, True)])
def test_a_full_sync_ends_the_uncertainty(rig: Rig, version: int, status_between: bool) -> None:
    rig.fail_commit()
    if status_between:
        rig.status()
    rig.engine.events.clear()
    rig.assert_committed(rig.send(full_part(RESYNCED, version)), RESYNCED, version)
    assert rig.engine.events == [
        STOPPED,
        ("commit",),
        ("publish", str(version), True),
    ]
    assert rig.status().health.state == "certain"
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
    rig.engine.fails["stop"] = RuntimeError("the cache was not reset")
    assert_error(rig.send(full_part(RESYNCED, 8)), 500, "DeltaError")
    assert rig.engine.paused
    assert_error(rig.post(COMPLETIONS), 503, "EngineUncertain", "uncertain")
    rig.assert_committed(rig.send(full_part(RESYNCED, 8)), RESYNCED, 8)


def test_engine_paused_by_caller_stays_paused_after_resync(rig: Rig) -> None:
    rig.engine.paused = True
    rig.fail_commit()
    assert rig.send(full_part(RESYNCED, 8)).json()["status"] == "committed"
    assert rig.engine.paused
    assert rig.engine.events[-1] == ("publish", "8", False)
    assert rig.post(COMPLETIONS).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["fails", "loses"])
@pytest.mark.parametrize(
    ("then", "status_between"), [("repeat", False), ("repeat", True), ("full", False)]
)
def test_an_unknown_commit_is_uncertain(
    rig: Rig, lost: str, status_between: bool, then: str
) -> None:
    getattr(rig.engine, lost)["commit"] = ConnectionError("a rank did not answer")
    error = assert_error(rig.send(delta_part()), 500, "CommitFailed", "uncertain")
    assert "a rank did not answer" in error["message"]
    assert rig.engine.events == [STOPPED, ("commit",)]
    assert rig.engine.paused
    assert_error(rig.post(COMPLETIONS), 503, "EngineUncertain", "uncertain")
    if status_between:
        assert rig.status().version.number == (7 if lost == "fails" else 8)
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
    ids=["whether-it-is-held", "when-staged", "before-write", "after-write"],
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


def test_unpublished_version_is_published_without_a_repeat(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta log has no sender that repeats its sync."""
    monkeypatch.setattr(commit, "REPEAT_S", 0.01)
    rig.engine.fails["publish"] = ConnectionError("lost")
    assert_error(rig.send(delta_part()), 500, "CommittedNotResumed", "committed")
    assert rig.engine.paused
    until_resumed(rig)
    assert rig.engine.weight_version == "8"
    assert rig.status().health.resume_owed is False


def until_resumed(rig: Rig) -> None:
    async def wait() -> None:
        while rig.engine.paused:
            await asyncio.sleep(0.01)

    rig.run(wait())


def test_refused_commit_is_resumed_without_a_repeat(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "REPEAT_S", 0.01)
    rig.engine.fails |= {
        "commit": Conflict("not now"),
        "publish": ConnectionError("lost"),
    }
    original = rig.engine.call

    async def call(request: Operation[Any]) -> list[Any]:
        try:
            return await original(request)
        except Conflict as refusal:
            return [refusal] * len(rig.engine.ranks)

    rig.engine.call = call  # type: ignore[method-assign]
    error = assert_error(rig.send(delta_part()), 409, "Conflict")
    assert error["message"] == "not now"
    until_resumed(rig)
    assert rig.engine.weight_version == "7"
    assert rig.status().health.resume_owed is False
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)


@pytest.mark.parametrize(("lost", "version"), [("fails", 7), ("loses", 8)])
def test_unknown_commit_is_resumed_without_a_repeat(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, lost: str, version: int
) -> None:
    """The ranks answer later where they are; a delta log has no sender that repeats its sync."""
    monkeypatch.setattr(commit, "REPEAT_S", 0.01)
    getattr(rig.engine, lost)["commit"] = ConnectionError("a rank did not answer")
    assert_error(rig.send(delta_part()), 500, "CommitFailed", "uncertain")
    until_resumed(rig)
    assert rig.engine.weight_version == str(version)
    assert rig.post(COMPLETIONS, headers={"X-Weight-Version": str(version)}).status_code == 200
    assert rig.status().health.state == "certain"


def test_refusal_publishes_before_it_resumes(rig: Rig) -> None:
    rig.engine.fails["publish"] = ConnectionError("lost")
    assert_error(rig.send(delta_part()), 500, "CommittedNotResumed", "committed")
    rig.engine.events.clear()
    rig.engine.fails["stop"] = ConnectionError("lost")
    assert rig.send(delta_part(OTHER, VERSION + 2)).status_code == 500
    assert rig.engine.events[-1:] == [("publish", "8", True)]
    assert not rig.engine.paused


def test_repeat_publishes_unpublished_version(rig: Rig) -> None:
    rig.engine.fails["publish"] = ConnectionError("lost")
    assert_error(rig.send(delta_part()), 500, "CommittedNotResumed", "committed")
    assert rig.is_paused()  # tokens would get the version of the old weights
    rig.engine.events.clear()
    assert rig.send(delta_part()).json()["status"] == "already_applied"
    assert rig.engine.events == [("publish", "8", True)]
    assert not rig.engine.paused
    assert rig.engine.writes == [1, 1]


def test_unpublished_resync_ends_uncertainty(rig: Rig) -> None:
    """And owes no resume: a pause that a caller begins then is the caller's."""
    rig.fail_commit()
    rig.engine.fails["publish"] = ConnectionError("lost")
    assert_error(rig.send(full_part(RESYNCED, 8)), 500, "CommittedNotResumed", "committed")
    assert rig.is_paused()
    assert rig.send(full_part(RESYNCED, 8)).json()["status"] == "already_applied"
    assert rig.engine.weight_version == "8"
    assert not rig.is_paused()
    assert rig.post(COMPLETIONS).status_code == 200
    rig.engine.paused = True
    assert rig.send(delta_part(version=9)).json()["status"] == "committed"
    assert rig.engine.paused


def test_another_server_of_the_same_engine_sees_it(rig: Rig) -> None:
    rig.fail_commit()
    other = DeltaService(rig.engine, rig.settings)
    app = app_of(other)
    assert rig.run(other.status()).health.state == "uncertain"
    response = rig.run(rig.request("POST", COMPLETIONS, app=app))
    assert_error(response, 503, "EngineUncertain", "uncertain")
    rig.assert_committed(rig.send(full_part(RESYNCED, 8)), RESYNCED, 8)
    assert rig.run(other.status()).health.state == "certain"
    assert rig.run(rig.request("POST", COMPLETIONS, app=app)).status_code == 200
    other.intake.close()


def test_refused_rollback_keeps_staged_parts(rig: Rig) -> None:
    """Those of the full sync that makes an uncertain engine certain again."""
    rig.fail_commit()
    names = list(RESYNCED)
    numbers = {"sync_id": "full", "num_parts": 2}
    rig.send(full_part(RESYNCED, VERSION + 1, names[:1], part=0, **numbers))
    assert_error(rig.post("/delta_rollback"), 503, "EngineUncertain", "uncertain")
    assert present(rig.status().staged).parts == [0]
    final = rig.send(full_part(RESYNCED, VERSION + 1, names[1:], part=1, **numbers))
    rig.assert_committed(final, RESYNCED, VERSION + 1)
