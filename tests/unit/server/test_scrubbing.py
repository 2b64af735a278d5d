"""What scrubbing finds, in the status and in the metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from delta_server import metrics, scrubbing
from delta_server.service import DeltaService
from engine_ext.ranks.operations import ScrubState
from tests.support.delta_bodies import (
    BASE,
    OTHER_STEP,
    RESYNCED,
    after,
    delta_part,
    full_part,
    same,
)
from tests.support.endpoint_rig import COMPLETIONS, Rig, assert_error
from tests.support.in_process_engine import RANKS


def state(**facts: Any) -> ScrubState:
    return ScrubState(**{"passes": 1, "passed_at": 5.0, "mismatched": [], "error": None, **facts})


def scrubber(one: ScrubState | None = None, *found: str) -> Any:
    """Stands for a rank's scrubber, which has found some tensors just now."""
    left = [set(found)]

    def take_found() -> set[str]:
        return left.pop() if left else set()

    one_rank = SimpleNamespace(state=one, findings=len(found), take_found=take_found, writes=0)

    @contextlib.contextmanager
    def interrupted() -> Iterator[None]:
        one_rank.writes += 1
        yield

    one_rank.interrupted = interrupted
    return one_rank


def put(rig: Rig, *scrubbers: Any) -> None:
    """Let these be the scrubbers of the ranks."""
    for receiver, one in zip(rig.engine.receivers, scrubbers, strict=True):
        receiver._scrubber = one


def test_a_mismatch_on_one_rank_is_the_engines_state(rig: Rig) -> None:
    """Every HTTP process sees it; whatever is no full sync is refused, and a full one ends it."""
    rig.send(delta_part())
    weights = rig.engine.weights
    put(rig, scrubber(), scrubber(None, "w"))
    assert (rig.status().health.state, rig.status().health.mismatched) == ("mismatched", ["w"])
    other = DeltaService(rig.engine, rig.settings)
    assert rig.run(other.status()).health.state == "mismatched"
    other.intake.close()
    assert rig.post(COMPLETIONS).status_code == 200  # it serves what it has, and says so
    for version in ("8", "9"):
        response = rig.post("/update_weight_version", json={"new_version": version})
        assert_error(response, 409, "BaseMismatch")
    for answer in (rig.send(delta_part(OTHER_STEP, version=9)), rig.post("/delta_rollback")):
        assert_error(answer, 409, "BaseMismatch")
        assert "hold other bits than the syncs have written" in answer.json()["error"]["message"]
    assert same(rig.engine.weights, weights)
    assert rig.status().staged is None
    rig.assert_committed(rig.send(full_part(RESYNCED, 9)), RESYNCED, 9)
    assert (rig.status().health.state, rig.status().health.mismatched) == ("certain", [])


def test_the_status_is_of_all_ranks(rig: Rig) -> None:
    assert rig.status().scrub is None
    states = [state(passes=3, mismatched=["b"]), state(passed_at=4.0, mismatched=["a", "b"])]
    put(rig, *map(scrubber, states))
    found = ScrubState(passes=1, passed_at=4.0, mismatched=["a", "b"], error=None)
    assert rig.status().scrub == found


def test_a_rank_that_has_not_passed_or_fails_shows(rig: Rig) -> None:
    states = [state(), state(passes=0, passed_at=None, error="OSError: no")]
    put(rig, *map(scrubber, states))
    found = ScrubState(passes=0, passed_at=None, mismatched=[], error="OSError: no")
    assert rig.status().scrub == found


def test_findings_are_counted_and_a_failure_ends_nothing(rig: Rig) -> None:
    put(rig, scrubber(), scrubber())
    before = metrics.SCRUB_MISMATCHES._value.get()

    def counted() -> float:
        return float(metrics.SCRUB_MISMATCHES._value.get() - before)

    async def until(number: int) -> None:
        while counted() < number:
            await asyncio.sleep(0.001)

    async def asked() -> None:
        while rig.engine.fails:
            await asyncio.sleep(0.001)

    async def scenario() -> None:
        processes = [
            asyncio.ensure_future(scrubbing.count_findings(rig.engine, 1e-4)) for _ in range(2)
        ]
        for found, total in (((1, 2), 3), ((1, 3), 4)):
            put(rig, *(scrubber(None, *map(str, range(findings))) for findings in found))
            await until(total)
            rig.engine.fails["status"] = RuntimeError("the engine is gone")
            await asked()
            await asyncio.sleep(0.02)  # the other process does not count them too
            assert counted() == total
        for process in processes:
            process.cancel()

    rig.run(scenario())


@pytest.mark.parametrize("knows", range(RANKS))
def test_what_one_rank_knows_all_ranks_refuse(rig: Rig, knows: int) -> None:
    """The full sync that is sent again heals then, although the others hold its version."""
    weights = after(BASE, OTHER_STEP)
    rig.assert_committed(rig.send(full_part(weights, 8)), weights, 8)
    put(rig, *(scrubber(None, *["norm.weight"] * (rank == knows)) for rank in range(RANKS)))
    assert rig.status().health.state == "mismatched"
    put(rig, *(scrubber() for _ in range(RANKS)))
    refused = rig.send(delta_part(OTHER_STEP, 9, base_version=8))
    assert_error(refused, 409, "BaseMismatch")
    rig.assert_committed(rig.send(full_part(weights, 8)), weights, 8)
    assert rig.status().health.state == "certain"


def test_a_part_that_is_kept_does_not_disturb_scrubbing(rig: Rig) -> None:
    scrubbers = scrubber(), scrubber()
    put(rig, *scrubbers)
    part: dict[str, Any] = {"sync_id": "a", "num_parts": 2}
    assert rig.send(delta_part(part=0, **part)).json()["status"] == "staged"
    assert [one.writes for one in scrubbers] == [0, 0]
    rig.send(delta_part(OTHER_STEP, part=1, **part))
    assert all(one.writes for one in scrubbers)
