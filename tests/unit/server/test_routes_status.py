"""The endpoints: the status, and faults of the program."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_ext.ranks.operations import ScrubState
from engine_ext.ranks.status import EngineStatus, ServerStatus
from tests.support.cases import case
from tests.support.delta_bodies import SHAPES, delta_part
from tests.support.endpoint_rig import STATUS, Rig, assert_error
from tests.support.toy_adapters import with_adapters
from tests.unit.server.test_scrubbing import scrubber


def answer(rig: Rig, **query: str) -> dict[str, Any]:
    """The answer, which has the keys that `EngineStatus` defines: all of them and no other.

    Without `server`, which is of this process and of now.
    """
    response = rig.get(STATUS, params=query)
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    assert msgspec.to_builtins(msgspec.convert(found, EngineStatus)) == found
    assert found.pop("server").keys() == set(ServerStatus.__struct_fields__)
    return found


def test_status(rig: Rig) -> None:
    version = {
        "number": 7,
        "published": "7",
        "run": None,
        "by_rank": [7, 7],
        "digest": rig.digest_of(rig.engine.weights),
        "digest_algorithm": "multilinear-1",
        "complete": True,
        "loaded": True,
        "can_roll_back": False,
    }
    health = {
        "state": "certain",
        "mismatched": [],
        "asleep": False,
        "changed_externally": None,
        "paused": None,
        "resume_owed": False,
        "awaits_full_sync": False,
        "certification": [{"exact": len(SHAPES)}] * 2,
        "uncertified": {},
    }
    expected = {
        "engine": "in-memory",
        "adapter": None,
        "ranks": 2,
        "apply": "shard",
        "version": version,
        "health": health,
        "owner": None,
        "staged": None,
        "last_sync": None,
        "scrub": None,
        "log": None,
        "audit": None,
        "adapters": None,
    }
    assert answer(rig) == expected
    first = delta_part(sync_id="s", part=1, num_parts=2)
    rig.send(first)
    staged = {
        "version": 8,
        "base_version": 7,
        "sync_id": "s",
        "full": False,
        "num_parts": 2,
        "parts": [1],
        "bytes": len(first),
        "run": None,
        "owner": None,
        "prepared": None,
    }
    status = answer(rig)
    assert status["staged"].pop("since") == pytest.approx(time.time(), abs=60)
    assert status == expected | {"staged": staged}
    rig.send(delta_part({}, sync_id="s", part=0, num_parts=2))
    status = answer(rig)
    last_sync = status.pop("last_sync")
    assert min(last_sync.pop("vote_ms"), last_sync.pop("commit_ms")) >= 0
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
    version |= {"number": 8, "published": "8", "by_rank": [8, 8], "can_roll_back": True}
    version |= {"run": "anonymous-1", "loaded": False}
    version["digest"] = rig.digest_of(rig.engine.weights)
    assert {**status, "last_sync": None} == expected


def test_status_with_plan_and_history(rig: Rig) -> None:
    rig.send(delta_part())
    rig.run(rig.service.reporter.flush())
    found = answer(rig, plan="true", history="true")
    assert {row["name"] for row in found["plan"][0]} == SHAPES.keys()
    assert [sync["outcome"] for sync in found["history"]] == ["committed"]
    assert {"plan", "history"}.isdisjoint(answer(rig))


def test_status_of_an_uncertain_engine(rig: Rig) -> None:
    rig.fail_commit()
    health = answer(rig)["health"]
    assert (health["state"], health["resume_owed"]) == ("uncertain", True)


def test_status_of_mismatched_weights_while_scrubbing(rig: Rig) -> None:
    scrub: dict[str, Any] = {
        "passes": 2,
        "passed_at": 4.5,
        "mismatched": ["norm.weight"],
        "error": None,
    }
    for receiver in rig.engine.receivers:
        receiver._scrubber = scrubber(ScrubState(**scrub), "norm.weight")
    found = answer(rig)
    assert (found["health"]["state"], found["scrub"]) == ("mismatched", scrub)
    assert found["health"]["mismatched"] == ["norm.weight"]


def test_status_of_an_adapter(rig: Rig) -> None:
    with_adapters(rig, "one")
    found = answer(rig, adapter="one")
    assert (found["adapter"], found["log"], found["adapters"]) == ("one", None, None)
    assert (found["version"]["number"], found["version"]["published"]) == (0, "7")
    [one] = answer(rig)["adapters"]
    assert (one["name"], one["version"]) == ("one", 0)


def test_status_of_a_paused_engine(rig: Rig) -> None:
    rig.engine.paused = True
    assert answer(rig)["health"]["paused"] == {"since": None, "seconds": None, "by": None}


def test_status_with_a_log(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    """Read once, or followed."""
    log = tmp_path / "log"
    log.mkdir()
    held = {"folder": str(log), "newest": None, "problem": None, "from_peers": 0, "follow": None}
    assert answer(make_rig(log=str(log)))["log"] == held
    follower = make_rig(log=str(log), follow=True, follow_hold=1)
    assert answer(follower)["log"]["follow"]["looked_at"] is None
    assert follower.post("/delta_catch_up").status_code == 200
    follow = answer(follower)["log"]["follow"]
    assert follow["looked_at"] == pytest.approx(time.time(), abs=60)
    assert (follow["hold"], follow["pinned"], follow["error"]) == (1, None, None)


def test_rank_without_old_values_blocks_rollback(rig: Rig) -> None:
    rig.engine.receivers[1]._undo_bytes = -1
    assert rig.send(delta_part()).json()["rollback"] is False
    assert rig.status().version.can_roll_back is False
    assert_error(rig.post("/delta_rollback"), 409, "Conflict")


def test_status_of_ranks_that_differ_is_uncertain(rig: Rig) -> None:
    rig.engine.receivers[1]._sync_state.version = 9
    assert (rig.status().health.state, rig.status().version.by_rank) == ("uncertain", [7, 9])


def test_status_tells_what_one_rank_alone_is_in(rig: Rig) -> None:
    rig.engine.receivers[1]._sync_state.asleep = True
    rig.engine.receivers[1]._sync_state.changed_externally = "its own update"
    assert (rig.status().health.asleep, rig.status().health.changed_externally) == (
        True,
        "its own update",
    )


def test_status_when_the_engine_does_not_answer(rig: Rig) -> None:
    rig.engine.fails["status"] = ConnectionError("the engine is gone")
    error = assert_error(rig.get(STATUS), 500, "DeltaError")
    assert "the engine is gone" in error["message"]


def test_a_bug_is_logged_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Whether the engine's adapter, a reply without an update, or a rank fails."""
    for operation in ("begin", "status", None):
        with case(operation):
            caplog.clear()
            if operation is None:
                rig.engine.shards[0].refuses["embed.weight"] = KeyError("w")
            else:
                rig.engine.fails[operation] = KeyError("w")
            response = rig.get(STATUS) if operation == "status" else rig.send(delta_part())
            assert_error(response, 500, "DeltaError")
            logged = [record.getMessage() for record in caplog.records if record.exc_info]
            assert logged == ["a delta operation failed"]
