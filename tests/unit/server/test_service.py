"""Syncs from their parts to their commit: start-up, order and rivals."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest

from delta_server import service as service_module
from engine_ext.errors import DeltaError
from tests.support.cases import case
from tests.support.delta_bodies import (
    BASE,
    NEXT,
    OTHER_STEP,
    RESYNCED,
    SHAPES,
    STEP,
    after,
    delta_part,
    fresh_weights,
    full_part,
    same,
)
from tests.support.endpoint_rig import Rig, assert_error
from tests.support.present import present
from tests.unit.server.service_parts import split_parts, statuses, together

MakeRig = Callable[..., Rig]


# Start-up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("base_version", [0, 12])
def test_the_base_version_is_published(make_rig: MakeRig, base_version: int) -> None:
    rig = make_rig(base_version=base_version)
    assert rig.engine.weight_version == str(base_version)
    rig.assert_committed(rig.send(delta_part(version=base_version + 1)), NEXT, base_version + 1)


def test_ranks_that_disagree_do_not_start(rig: Rig) -> None:
    rig.engine.receivers[1]._sync_state.version = 9
    with pytest.raises(DeltaError):
        rig.run(rig.service.start())
    assert rig.engine.events == []


def test_start_publishes_once_replicas_agree(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process pauses them, they answer differently whether they are paused."""
    monkeypatch.setattr(service_module, "_START_WAIT_S", 0.01)
    rig.engine.fails["lease"] = RuntimeError("the replicas do not agree")
    rig.engine.weight_version = "another"
    rig.run(rig.service.start())
    assert rig.engine.weight_version == str(rig.status().version.number)


def test_without_receivers_it_does_not_start(rig: Rig) -> None:
    rig.engine.fails["status"] = AttributeError("no attribute 'delta_receiver'")
    with pytest.raises(AttributeError):
        rig.run(rig.service.start())


# Several parts -------------------------------------------------------------------------------


def test_parts_in_any_order(rig: Rig) -> None:
    parts = split_parts(encoding="deltas_zstd")
    for number, order in enumerate(permutations(range(3)), 1):
        with case(order):
            responses = [rig.send(parts[number]) for number in order]
            assert statuses(responses) == ["staged", "staged", "committed"]
            rig.assert_committed(responses[-1], NEXT, 8)
            answer = responses[-1].json()
            assert (answer["nnz"], answer["tensors"], answer["base_version"]) == (3, 2, 7)
            assert rig.engine.writes == [number, number]
            assert rig.post("/delta_rollback").status_code == 200
            assert same(rig.engine.weights, BASE)


def test_nothing_is_written_before_the_last_part(rig: Rig) -> None:
    first, second, _ = split_parts()
    answers = [rig.send(first).json(), rig.send(second).json()]
    assert [(a["status"], a["version"], a["base_version"]) for a in answers] == [
        ("staged", 8, 7),
        ("staged", 8, 7),
    ]
    assert [(a["nnz"], a["tensors"], a["bytes"]) for a in answers] == [
        (1, 1, len(first)),
        (1, 1, len(second)),
    ]
    assert rig.engine.events == []
    assert same(rig.engine.weights, BASE)
    assert rig.spooled() == []


def test_parts_at_once(rig: Rig) -> None:
    responses = together(rig, *split_parts())
    assert sorted(statuses(responses)) == ["committed", "staged", "staged"]
    assert same(rig.engine.weights, NEXT)
    assert rig.engine.writes == [1, 1]


def test_a_full_sync_in_parts_to_any_version(rig: Rig) -> None:
    bodies = [
        full_part(RESYNCED, 3, [name], part=number, num_parts=len(RESYNCED), sync_id="f")
        for number, name in enumerate(RESYNCED)
    ]
    responses = [rig.send(body) for body in bodies]
    assert statuses(responses) == ["staged", "staged", "committed"]
    rig.assert_committed(responses[-1], RESYNCED, 3)
    rig.assert_committed(rig.send(delta_part(version=4)), after(RESYNCED, STEP), 4)


def test_second_full_sync_to_same_version_is_fully_applied(rig: Rig) -> None:
    """Its last part is that of the sync before; its first is not, and no digest shows that."""
    for weights, sync_id in ((NEXT, "f"), (after(NEXT, {"embed.weight": {0: 0x7777}}), "g")):
        bodies = [
            full_part(weights, 8, [name], part=number, num_parts=len(weights), sync_id=sync_id)
            for number, name in enumerate(weights)
        ]
        responses = [rig.send(body) for body in bodies]
        assert statuses(responses) == ["staged", "staged", "committed"]
        rig.assert_committed(responses[-1], weights, 8)


def test_a_refused_part_may_be_sent_again(rig: Rig) -> None:
    first, second, third = split_parts()
    rig.send(first)
    assert_error(rig.send(second[:-1] + b"\xff"), 400, "ChecksumMismatch")
    assert present(rig.status().staged).parts == [0]
    assert statuses([rig.send(third), rig.send(second)]) == ["staged", "committed"]
    assert same(rig.engine.weights, NEXT)


def test_a_part_that_can_never_be_applied_drops_its_sync(rig: Rig) -> None:
    first, second, _ = split_parts()
    assert statuses([rig.send(first), rig.send(second)]) == ["staged", "staged"]
    third = delta_part({"absent": {0: 1}}, part=2, num_parts=3, sync_id="s")
    assert_error(rig.send(third), 422, "NotUpdatable", tensor="absent")
    assert rig.status().staged is None
    rig.assert_untouched()


def test_what_only_the_whole_sync_tells_drops_it(rig: Rig) -> None:
    names = ["embed.weight", "norm.weight"]
    bodies = [
        full_part(BASE, 9, [name], part=number, num_parts=2, sync_id="f")
        for number, name in enumerate(names)
    ]
    assert rig.send(bodies[0]).json()["status"] == "staged"
    assert_error(rig.send(bodies[1]), 422, "NotUpdatable", tensors=["layer.weight"])
    rig.assert_untouched()


def test_a_refusal_by_one_rank_is_forgotten_by_all(rig: Rig) -> None:
    rig.engine.shards[0].refuses["norm.weight"] = ZeroDivisionError("out of luck")
    parts = split_parts()
    assert statuses([rig.send(parts[0]), rig.send(parts[1])]) == ["staged", "staged"]
    assert_error(rig.send(parts[2]), 500, "DeltaError")
    rig.engine.shards[0].refuses.clear()
    rig.assert_committed(rig.send(parts[2]), NEXT, 8)


# Rivals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [(None, None), ("a", "b")])
def test_of_two_senders_exactly_one_wins(rig: Rig, ids: tuple[str | None, ...]) -> None:
    bodies = [delta_part(STEP, sync_id=ids[0]), delta_part(OTHER_STEP, sync_id=ids[1])]
    responses = together(rig, *bodies)
    assert sorted(response.status_code for response in responses) == [200, 409]
    won = [response.status_code for response in responses].index(200)
    expected = after(BASE, (STEP, OTHER_STEP)[won])
    rig.assert_committed(responses[won], expected, 8)
    error = responses[1 - won].json()["error"]
    assert error["type"] in ("SyncInProgress", "VersionConflict", "Conflict")
    assert error["engine_state"] == "unchanged"
    assert rig.engine.writes == [1, 1]


def test_of_two_senders_with_parts_one_wins(rig: Rig) -> None:
    ours = split_parts(sync_id="ours")
    theirs = split_parts(sync_id="theirs")
    responses = together(rig, *(body for pair in zip(ours, theirs, strict=True) for body in pair))
    for parts in (responses[::2], responses[1::2]):
        codes = {response.status_code for response in parts}
        assert codes <= {200, 409}
    committed = [r for r in responses if r.json().get("status") == "committed"]
    assert len(committed) == 1
    assert rig.engine.writes == [1, 1]
    assert same(rig.engine.weights, NEXT)


def test_digest(rig: Rig) -> None:
    for scan in ("false", "true"):
        answer = rig.get("/delta_digest", params={"scan": scan}).json()
        assert answer["digest"] == rig.digest_of(fresh_weights())
        assert answer["digest_algorithm"] == "multilinear-1"
        assert answer["tensors"].keys() == SHAPES.keys()
        assert answer.get("corrupted", []) == []
    assert_error(rig.get("/delta_digest", params={"scan": "perhaps"}), 400, "MalformedPart")
