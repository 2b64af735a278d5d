"""Syncs from their parts to their commit: order, repeats, rivals and files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_server.commit import total_digest
from engine_ext.errors import DeltaError
from engine_ext.receiver.sync_state import SyncState
from engine_ext.wire.operations import GetStatus
from tests.support.delta_bodies import (
    OTHER_STEP,
    SHAPES,
    STEP,
    VERSION,
    Changes,
    after,
    bare,
    delta_part,
    forged,
    fresh_weights,
    full_part,
    part_of,
    same,
    sparse,
)
from tests.support.endpoint_rig import COMPLETIONS, DELTA, FROM_DISK, Rig, assert_error

BASE = fresh_weights()
NEXT = after(BASE, STEP)
RESYNCED = after(BASE, OTHER_STEP)

# Three parts of one sync; embed.weight is in two of them.
SPLIT: list[Changes] = [
    {"embed.weight": {0: 0x1111}},
    {"embed.weight": {13: 0x7FC1}},
    {"norm.weight": {7: 0x3333}},
]

# The same of different tensors.
APART: list[Changes] = [{name: elements} for name, elements in STEP.items()]

MakeRig = Callable[..., Rig]


def split_parts(**metadata: Any) -> list[bytes]:
    return [
        delta_part(changes, **{"part": number, "num_parts": len(SPLIT), "sync_id": "s", **metadata})
        for number, changes in enumerate(SPLIT)
    ]


def statuses(responses: Sequence[httpx.Response]) -> list[str]:
    assert all(response.status_code == 200 for response in responses), [r.text for r in responses]
    return [response.json()["status"] for response in responses]


def together(rig: Rig, *bodies: bytes) -> list[httpx.Response]:
    """The answers to several bodies that are sent at once."""

    async def send() -> list[httpx.Response]:
        return list(await asyncio.gather(*map(rig.sending, bodies)))

    return list(rig.run(send()))


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


def test_without_receivers_it_does_not_start(rig: Rig) -> None:
    rig.engine.fails["status"] = AttributeError("no attribute 'delta_receiver'")
    with pytest.raises(AttributeError):
        rig.run(rig.service.start())


# Several parts -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_parts_in_any_order(rig: Rig, order: tuple[int, ...]) -> None:
    parts = split_parts(encoding="deltas_zstd")
    responses = [rig.send(parts[number]) for number in order]
    assert statuses(responses) == ["staged", "staged", "committed"]
    rig.assert_committed(responses[-1], NEXT, 8)
    answer = responses[-1].json()
    assert (answer["nnz"], answer["tensors"], answer["base_version"]) == (3, 2, 7)
    assert rig.engine.writes == [1, 1]


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


def test_the_number_of_parts_may_come_with_the_last(rig: Rig) -> None:
    parts = split_parts()
    unknown = [forged(part, num_parts=None) for part in parts[:2]]
    responses = [rig.send(part) for part in (*unknown, parts[2])]
    assert statuses(responses) == ["staged", "staged", "committed"]
    rig.assert_committed(responses[-1], NEXT, 8)


def test_a_full_sync_in_parts_to_any_version(rig: Rig) -> None:
    bodies = [
        full_part(RESYNCED, 3, [name], part=number, num_parts=len(RESYNCED), sync_id="f")
        for number, name in enumerate(RESYNCED)
    ]
    responses = [rig.send(body) for body in bodies]
    assert statuses(responses) == ["staged", "staged", "committed"]
    rig.assert_committed(responses[-1], RESYNCED, 3)
    rig.assert_committed(rig.send(delta_part(version=4)), after(RESYNCED, STEP), 4)


def test_another_full_sync_to_the_same_version_is_not_half_applied(rig: Rig) -> None:
    """Its last part is that of the one before; the first is not, and no digest tells."""
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
    assert rig.status()["staged"]["parts"] == [0]
    assert statuses([rig.send(third), rig.send(second)]) == ["staged", "committed"]
    assert same(rig.engine.weights, NEXT)


def test_a_part_that_can_never_be_applied_drops_its_sync(rig: Rig) -> None:
    first, second, _ = split_parts()
    assert statuses([rig.send(first), rig.send(second)]) == ["staged", "staged"]
    third = delta_part({"absent": {0: 1}}, part=2, num_parts=3, sync_id="s")
    assert_error(rig.send(third), 422, "NotUpdatable", tensor="absent")
    assert rig.status()["staged"] is None
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


# Repeats -------------------------------------------------------------------------------------


def assert_already_applied(rig: Rig, response: httpx.Response, version: int = 8) -> None:
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["status"], answer["version"]) == ("already_applied", version)
    statuses = rig.run(rig.engine.call(GetStatus()))
    assert answer["digest"] == total_digest(status.digest for status in statuses)
    assert not {event[0] for event in rig.engine.events} - {"set_weight_version"}
    assert rig.engine.weight_version == str(version)
    assert rig.spooled() == []


@pytest.mark.parametrize("number", range(3))
def test_a_repeat_of_a_committed_part(rig: Rig, number: int) -> None:
    parts = split_parts()
    for part in parts:
        rig.send(part)
    rig.engine.events.clear()
    assert_already_applied(rig, rig.send(parts[number]))
    assert rig.engine.writes == [1, 1]
    assert same(rig.engine.weights, NEXT)


def test_a_repeat_under_another_sync_id(rig: Rig) -> None:
    rig.send(delta_part(sync_id="one"))
    rig.engine.events.clear()
    assert_already_applied(rig, rig.send(delta_part(sync_id="two", encoding="indices")))


def test_a_repeat_of_a_full_sync(rig: Rig) -> None:
    rig.send(full_part(RESYNCED, 8))
    rig.engine.events.clear()
    assert_already_applied(rig, rig.send(full_part(RESYNCED, 8)))
    assert rig.engine.writes == [1, 1]


@pytest.mark.parametrize("behind", range(2))
def test_a_repeat_that_one_rank_has_not_seen_is_no_success(rig: Rig, behind: int) -> None:
    rig.send(delta_part())
    rig.engine.receivers[behind]._sync_state = SyncState(VERSION, 60)
    response = rig.send(delta_part())
    assert response.status_code == 409
    assert rig.engine.writes == [1, 1]
    assert rig.status()["engine_state"] == "uncertain"
    rig.assert_committed(rig.send(full_part(RESYNCED, 9)), RESYNCED, 9)
    assert rig.status()["engine_state"] == "certain"


def test_a_repeat_on_ranks_that_have_parted_is_no_success(rig: Rig) -> None:
    rig.send(delta_part())
    rig.engine.receivers[1]._sync_state.uncertain = True
    assert_error(rig.send(delta_part()), 503, "EngineUncertain", "uncertain")


def test_a_repeat_while_asleep(rig: Rig) -> None:
    rig.send(delta_part())
    rig.engine.events.clear()
    rig.engine.set_asleep(True)
    assert_already_applied(rig, rig.send(delta_part()))


def test_a_repeat_while_another_sync_is_staged(rig: Rig) -> None:
    rig.send(delta_part())
    rig.send(delta_part({}, version=9, part=0, num_parts=2))
    rig.engine.events.clear()
    assert_already_applied(rig, rig.send(delta_part()))
    assert rig.status()["staged"]["parts"] == [0]


def test_a_repeat_while_another_sync_is_complete(rig: Rig) -> None:
    rig.send(delta_part())
    rig.engine.fails["pause"] = RuntimeError("not now")
    assert_error(rig.send(delta_part(OTHER_STEP, version=9)), 500, "DeltaError")
    rig.engine.events.clear()
    assert_already_applied(rig, rig.send(delta_part()))
    final = rig.send(delta_part(OTHER_STEP, version=9))
    rig.assert_committed(final, after(NEXT, OTHER_STEP), 9)


def test_the_sync_before_is_no_repeat(rig: Rig) -> None:
    rig.send(delta_part())
    rig.send(delta_part({}, version=9))
    assert_error(rig.send(delta_part()), 409, "VersionConflict", expected=7, actual=9)


def test_a_repeat_of_a_staged_part(rig: Rig) -> None:
    first, second, third = split_parts()
    responses = [rig.send(body) for body in (first, first, second, first, third)]
    assert statuses(responses) == ["staged"] * 4 + ["committed"]
    assert same(rig.engine.weights, NEXT)


@pytest.mark.parametrize("copies", [2, 3])
def test_a_part_that_is_sent_again_before_it_is_answered(rig: Rig, copies: int) -> None:
    responses = together(rig, *[delta_part()] * copies)
    expected = ["already_applied"] * (copies - 1) + ["committed"]
    assert sorted(statuses(responses)) == expected
    assert rig.engine.writes == [1, 1]
    assert [event[0] for event in rig.engine.events].count("pause") == 1
    assert rig.engine.weight_version == "8"
    assert not rig.engine.paused


@pytest.mark.parametrize("operation", ["begin", "poll", "settle"])
def test_a_sync_survives_an_answer_that_is_lost(rig: Rig, operation: str) -> None:
    rig.engine.loses[operation] = ConnectionError("lost")
    assert_error(rig.send(delta_part()), 500, "DeltaError")
    assert same(rig.engine.weights, BASE)
    assert rig.spooled() == []
    rig.assert_committed(rig.send(delta_part()), NEXT, 8)


def test_a_repeat_does_not_take_the_weight_version_back(rig: Rig) -> None:
    rig.send(delta_part())
    original = rig.engine.set_weight_version

    async def slow_to_go_back(version: str) -> None:
        if version == "8":
            await asyncio.sleep(0.1)
        await original(version)

    rig.engine.set_weight_version = slow_to_go_back  # type: ignore[method-assign]
    responses = together(rig, delta_part(), delta_part(OTHER_STEP, version=9))
    assert statuses(responses) == ["already_applied", "committed"]
    assert rig.engine.weight_version == "9"


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


@pytest.mark.parametrize("scan", ["false", "true"])
def test_digest(rig: Rig, scan: str) -> None:
    answer = rig.get("/delta_digest", params={"scan": scan}).json()
    assert answer["digest"] == rig.digest_of(fresh_weights())
    assert answer["digest_algorithm"] == "multilinear-1"
    assert answer["tensors"].keys() == SHAPES.keys()
    assert answer.get("corrupted", []) == []
    assert_error(rig.get("/delta_digest", params={"scan": "perhaps"}), 400, "MalformedPart")


# Disk ----------------------------------------------------------------------------------------


@pytest.fixture
def write(root: Path) -> Callable[..., None]:
    """Writes parts below the root, by file name."""

    def write(**bodies: bytes) -> None:
        for name, body in bodies.items():
            (root / f"{name}.safetensors").write_bytes(body)

    return write


Write = Callable[..., None]


@pytest.mark.parametrize("path", [DELTA, FROM_DISK])
@pytest.mark.parametrize("named", [False, True])
def test_files_without_numbers_are_one_transaction(
    disk_rig: Rig, root: Path, write: Write, path: str, named: bool
) -> None:
    bodies = {f"f{n}": bare(delta_part(changes)) for n, changes in enumerate(SPLIT)}
    write(**bodies)
    files = [f"{name}.safetensors" for name in reversed(bodies)] if named else []
    response = disk_rig.disk(root, *files, weight_version="8", path=path)
    disk_rig.assert_committed(response, NEXT, 8)
    assert disk_rig.engine.writes == [1, 1]
    answer = response.json()
    assert answer["bytes"] == sum(map(len, bodies.values()))
    assert (answer["nnz"], answer["tensors"]) == (3, 2)


def test_files_with_numbers_are_parts(disk_rig: Rig, root: Path, write: Write) -> None:
    write(**{f"f{n}": body for n, body in enumerate(split_parts())})
    first = disk_rig.disk(root, "f2.safetensors")
    assert (first.json()["status"], first.json()["base_version"]) == ("staged", 7)
    rest = disk_rig.disk(root, "f0.safetensors", "f1.safetensors")
    disk_rig.assert_committed(rest, NEXT, 8)


def test_a_body_and_files_of_one_sync(disk_rig: Rig, root: Path, write: Write) -> None:
    first, second, third = split_parts()
    write(second=second, third=third)
    assert disk_rig.send(first).json()["status"] == "staged"
    disk_rig.assert_committed(disk_rig.disk(root), NEXT, 8)


def test_one_version_in_several_requests(disk_rig: Rig, root: Path, write: Write) -> None:
    write(**{f"f{n}": bare(delta_part(changes)) for n, changes in enumerate(SPLIT)})
    bases = []
    for n in range(3):
        response = disk_rig.disk(root, f"f{n}.safetensors", weight_version="8", path=FROM_DISK)
        disk_rig.assert_committed(response, after(BASE, *SPLIT[: n + 1]), 8)
        bases.append(response.json()["base_version"])
    assert bases == [7, 8, 8]
    assert disk_rig.engine.writes == [3, 3]
    for n in range(3):
        disk_rig.engine.events.clear()
        response = disk_rig.disk(root, f"f{n}.safetensors", weight_version="8", path=FROM_DISK)
        assert_already_applied(disk_rig, response)
        assert response.json()["message"] == "already_applied version 8"
    assert disk_rig.engine.writes == [3, 3]
    assert same(disk_rig.engine.weights, NEXT)


def test_a_continuation_skips_what_it_has_seen(disk_rig: Rig, root: Path, write: Write) -> None:
    write(**{f"f{n}": bare(delta_part(changes)) for n, changes in enumerate(SPLIT)})
    disk_rig.disk(root, "f1.safetensors", weight_version="8")
    response = disk_rig.disk(root, weight_version="8")
    disk_rig.assert_committed(response, NEXT, 8)
    assert response.json()["nnz"] == 2
    disk_rig.engine.events.clear()
    assert_already_applied(disk_rig, disk_rig.disk(root, weight_version="8"))
    assert disk_rig.engine.writes == [2, 2]


def test_the_same_file_twice_under_two_names(disk_rig: Rig, root: Path, write: Write) -> None:
    write(a=delta_part(), b=delta_part())
    disk_rig.assert_committed(disk_rig.disk(root), NEXT, 8)
    assert disk_rig.engine.writes == [1, 1]


def test_several_files_as_bodies(rig: Rig) -> None:
    """As slime's trainer would post them: no numbers, ids or bases."""
    for number, changes in enumerate(APART):
        weights = after(BASE, *APART[: number + 1])
        rig.assert_committed(rig.send(bare(delta_part(changes)), weight_version="8"), weights, 8)
        assert rig.status()["complete"] == "unknown"
    for changes in APART:
        rig.engine.events.clear()
        assert_already_applied(rig, rig.send(bare(delta_part(changes)), weight_version="8"))


@pytest.mark.parametrize("first", [{"sync_id": "s"}, {"part": 0, "num_parts": 1}, {}])
def test_a_body_is_no_rest_of_what_is_complete(rig: Rig, first: dict[str, Any]) -> None:
    """Nor one that sends a tensor again: it is another trainer's."""
    rig.send(delta_part(**first))
    response = rig.send(delta_part({"layer.weight": {1: 1}} if first else OTHER_STEP, version=8))
    assert_error(response, 409, "VersionConflict", expected=7, actual=8)
    assert same(rig.engine.weights, NEXT)


def test_a_body_that_names_its_base_is_no_rest(rig: Rig) -> None:
    rig.send(delta_part(APART[0]))
    response = rig.send(delta_part(APART[1], base_version=7))
    assert_error(response, 409, "VersionConflict", expected=7, actual=8)


def test_a_transaction_is_all_or_nothing(disk_rig: Rig, root: Path, write: Write) -> None:
    good, bad = bare(delta_part(SPLIT[0])), bare(delta_part(SPLIT[1]))
    write(a=good, b=bad[:-1] + b"\xff")
    assert_error(disk_rig.disk(root, weight_version="8"), 400, "ChecksumMismatch")
    assert disk_rig.status()["staged"] is None
    disk_rig.assert_untouched()


def test_a_failed_transaction_leaves_another_sync_alone(
    disk_rig: Rig, root: Path, write: Write
) -> None:
    first, *others = split_parts()
    disk_rig.send(first)
    write(a=bare(delta_part(OTHER_STEP)))
    assert_error(disk_rig.disk(root, weight_version="8"), 409, "SyncInProgress")
    assert statuses([disk_rig.send(body) for body in others]) == ["staged", "committed"]


def test_files_of_several_versions(disk_rig: Rig, root: Path, write: Write) -> None:
    write(step8=delta_part(), step9=delta_part(OTHER_STEP, version=9))
    assert_error(disk_rig.disk(root), 400, "MalformedPart")
    disk_rig.assert_untouched()


def test_a_full_sync_from_disk(disk_rig: Rig, root: Path, write: Write) -> None:
    disk_rig.fail_commit()
    names = list(RESYNCED)
    write(a=full_part(RESYNCED, 30, names[:1]), b=full_part(RESYNCED, 30, names[1:]))
    disk_rig.assert_committed(disk_rig.disk(root), RESYNCED, 30)
    assert disk_rig.post(COMPLETIONS).status_code == 200


def test_a_full_sync_from_disk_that_lacks_a_tensor(disk_rig: Rig, root: Path, write: Write) -> None:
    write(a=full_part(RESYNCED, 30, ["norm.weight"]), b=full_part(RESYNCED, 30, ["embed.weight"]))
    error = assert_error(disk_rig.disk(root), 422, "NotUpdatable")
    assert error["tensors"] == ["layer.weight"]
    disk_rig.assert_untouched()


def test_a_tensor_that_is_unknown_in_one_file(disk_rig: Rig, root: Path, write: Write) -> None:
    write(a=delta_part(), b=part_of(sparse("absent", {0: 1})))
    assert_error(disk_rig.disk(root), 422, "NotUpdatable", tensor="absent")
    disk_rig.assert_untouched()


def test_a_lost_answer_in_a_transaction(disk_rig: Rig, root: Path, write: Write) -> None:
    write(**{f"f{n}": bare(delta_part(changes)) for n, changes in enumerate(SPLIT)})
    disk_rig.engine.loses["settle"] = ConnectionError("lost")
    assert_error(disk_rig.disk(root, weight_version="8"), 500, "DeltaError")
    response = disk_rig.disk(root, weight_version="8")
    disk_rig.assert_committed(response, NEXT, 8)
