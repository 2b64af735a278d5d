"""The endpoints: the status, and faults of the program."""

from __future__ import annotations

import time

import pytest

from tests.support.delta_bodies import SHAPES, delta_part
from tests.support.endpoint_rig import STATUS, Rig, assert_error


def test_status(rig: Rig) -> None:
    expected = {
        "engine": "in-memory",
        "ranks": 2,
        "versions": [7, 7],
        "version": 7,
        "weight_version": "7",
        "engine_state": "certain",
        "resume_owed": False,
        "paused": None,
        "asleep": False,
        "foreign": None,
        "run": None,
        "owner": None,
        "loaded": True,
        "mismatched": [],
        "complete": "yes",
        "staged": None,
        "last_sync": None,
        "delta_log": None,
        "scrub": None,
        "apply": "shard",
        "certification": [{"exact": len(SHAPES)}] * 2,
        "uncertified": {},
        "can_roll_back": False,
        "digest": rig.digest_of(rig.engine.weights),
        "digest_algorithm": "multilinear-1",
    }
    assert rig.status() == expected
    rig.send(delta_part(sync_id="s", part=1, num_parts=2))
    staged = {
        "version": 8,
        "base_version": 7,
        "sync_id": "s",
        "full": False,
        "num_parts": 2,
        "parts": [1],
        "run": None,
        "owner": None,
    }
    status = rig.status()
    assert status["staged"].pop("since") == pytest.approx(time.time(), abs=60)
    assert status == expected | {"staged": staged}
    rig.send(delta_part({}, sync_id="s", part=0, num_parts=2))
    status = rig.status()
    last_sync = status.pop("last_sync")
    assert last_sync.pop("commit_ms") >= 0
    assert last_sync == {
        "version": 8,
        "base_version": 7,
        "run": "anonymous-1",
        "base_run": None,
        "sync_id": "s",
        "full": False,
        "apply": "shard",
        "parts": 2,
        "nnz": 3,
        "tensors": 2,
        "elements": 32,
        "skipped": {},
        "rollback": True,
        "digest": rig.engine.shards[0].digest.hex(),
    }
    moved = {"version": 8, "versions": [8, 8], "weight_version": "8", "can_roll_back": True}
    moved |= {"run": "anonymous-1", "loaded": False}
    moved["digest"] = rig.digest_of(rig.engine.weights)
    assert {**status, "last_sync": None} == expected | moved


def test_rank_without_old_values_blocks_rollback(rig: Rig) -> None:
    rig.engine.receivers[1]._undo_bytes = -1
    assert rig.send(delta_part()).json()["rollback"] is False
    assert rig.status()["can_roll_back"] is False
    assert_error(rig.post("/delta_rollback"), 409, "Conflict")


def test_status_of_ranks_that_differ_is_uncertain(rig: Rig) -> None:
    rig.engine.receivers[1]._sync_state.version = 9
    assert (rig.status()["engine_state"], rig.status()["versions"]) == ("uncertain", [7, 9])


def test_status_tells_what_one_rank_alone_is_in(rig: Rig) -> None:
    rig.engine.receivers[1]._sync_state.asleep = True
    rig.engine.receivers[1]._sync_state.changed_externally = "its own update"
    assert (rig.status()["asleep"], rig.status()["foreign"]) == (True, "its own update")


def test_status_when_the_engine_does_not_answer(rig: Rig) -> None:
    rig.engine.fails["status"] = ConnectionError("the engine is gone")
    error = assert_error(rig.get(STATUS), 500, "DeltaError")
    assert "the engine is gone" in error["message"]


@pytest.mark.parametrize("operation", ["begin", "status", None])
def test_a_bug_is_logged_once(
    rig: Rig, operation: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the engine's adapter, a reply without an update, or a rank fails."""
    if operation is None:
        rig.engine.shards[0].refuses["embed.weight"] = KeyError("w")
    else:
        rig.engine.fails[operation] = KeyError("w")
    response = rig.get(STATUS) if operation == "status" else rig.send(delta_part())
    assert_error(response, 500, "DeltaError")
    assert [r.getMessage() for r in caplog.records if r.exc_info] == ["a delta operation failed"]
