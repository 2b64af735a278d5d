"""Repeats of parts and syncs: nothing is applied twice."""

from __future__ import annotations

import asyncio

import pytest

from engine_ext.sync.sync_state import SyncState
from tests.support.cases import case
from tests.support.delta_bodies import (
    BASE,
    NEXT,
    OTHER_STEP,
    RESYNCED,
    VERSION,
    after,
    delta_part,
    full_part,
    same,
)
from tests.support.endpoint_rig import Rig, assert_error
from tests.unit.server.service_parts import assert_already_applied, split_parts, statuses, together


def test_a_repeat_of_a_committed_part(rig: Rig) -> None:
    parts = split_parts()
    for part in parts:
        rig.send(part)
    rig.engine.events.clear()
    for number, part in enumerate(parts):
        with case(number):
            assert_already_applied(rig, rig.send(part))
            assert rig.engine.writes == [1, 1]
            assert same(rig.engine.weights, NEXT)


@pytest.mark.parametrize("behind", range(2))
def test_a_repeat_that_one_rank_has_not_seen_is_no_success(rig: Rig, behind: int) -> None:
    rig.send(delta_part())
    rig.engine.receivers[behind]._sync_state = SyncState(VERSION, 60)
    response = rig.send(delta_part())
    assert response.status_code == 409
    assert rig.engine.writes == [1, 1]
    assert rig.status().health.state == "uncertain"
    rig.assert_committed(rig.send(full_part(RESYNCED, 9)), RESYNCED, 9)
    assert rig.status().health.state == "certain"


def test_a_repeat_on_ranks_that_have_parted_is_no_success(rig: Rig) -> None:
    rig.send(delta_part())
    rig.engine.receivers[1]._sync_state.uncertain = True
    assert_error(rig.send(delta_part()), 503, "EngineUncertain", "uncertain")


def test_a_repeat_while_asleep(rig: Rig) -> None:
    rig.send(delta_part())
    rig.engine.events.clear()
    rig.engine.set_asleep(True)
    assert_already_applied(rig, rig.send(delta_part()))


def test_a_repeat_while_another_sync_is_complete(rig: Rig) -> None:
    rig.send(delta_part())
    rig.engine.fails["stop"] = RuntimeError("not now")
    assert_error(rig.send(delta_part(OTHER_STEP, version=9)), 500, "DeltaError")
    rig.engine.events.clear()
    assert_already_applied(rig, rig.send(delta_part()))
    final = rig.send(delta_part(OTHER_STEP, version=9))
    rig.assert_committed(final, after(NEXT, OTHER_STEP), 9)


@pytest.mark.parametrize("copies", [2, 3])
def test_a_part_that_is_sent_again_before_it_is_answered(rig: Rig, copies: int) -> None:
    responses = together(rig, *[delta_part()] * copies)
    expected = ["already_applied"] * (copies - 1) + ["committed"]
    assert sorted(statuses(responses)) == expected
    assert rig.engine.writes == [1, 1]
    assert [event[0] for event in rig.engine.events].count("stop") == 1
    assert rig.engine.weight_version == "8"
    assert not rig.engine.paused


def test_a_sync_survives_an_answer_that_is_lost(rig: Rig) -> None:
    for operation in ("begin", "poll", "prepare"):
        with case(operation):
            rig.engine.loses[operation] = ConnectionError("lost")
            assert_error(rig.send(delta_part()), 500, "DeltaError")
            assert same(rig.engine.weights, BASE)
            assert rig.spooled() == []
            rig.assert_committed(rig.send(delta_part()), NEXT, 8)
            assert rig.post("/delta_rollback").status_code == 200


@pytest.mark.slow
def test_a_repeat_does_not_take_the_weight_version_back(rig: Rig) -> None:
    rig.send(delta_part())
    original = rig.engine.publish

    async def slow_to_go_back(version: str | None, *, resumes: bool) -> None:
        if version == "8":
            await asyncio.sleep(0.1)
        await original(version, resumes=resumes)

    rig.engine.publish = slow_to_go_back  # type: ignore[method-assign]
    responses = together(rig, delta_part(), delta_part(OTHER_STEP, version=9))
    assert statuses(responses) == ["already_applied", "committed"]
    assert rig.engine.weight_version == "9"
