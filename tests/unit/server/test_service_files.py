"""Syncs from files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import case
from tests.support.delta_bodies import (
    BASE,
    NEXT,
    OTHER_STEP,
    RESYNCED,
    after,
    bare,
    delta_part,
    full_part,
    same,
)
from tests.support.endpoint_rig import COMPLETIONS, DELTA, FROM_DISK, Rig, assert_error
from tests.unit.server.service_parts import (
    APART,
    SPLIT,
    assert_already_applied,
    split_parts,
    statuses,
)


@pytest.fixture
def write(root: Path) -> Callable[..., None]:
    """Writes parts below the root, by file name."""

    def write(**bodies: bytes) -> None:
        for name, body in bodies.items():
            (root / f"{name}.safetensors").write_bytes(body)

    return write


Write = Callable[..., None]


def test_files_without_numbers_are_one_transaction(disk_rig: Rig, root: Path, write: Write) -> None:
    bodies = {f"f{n}": bare(delta_part(changes)) for n, changes in enumerate(SPLIT)}
    write(**bodies)
    names = [f"{name}.safetensors" for name in reversed(bodies)]
    ways = [(DELTA, names), (FROM_DISK, []), (DELTA, []), (FROM_DISK, names)]
    for number, (path, files) in enumerate(ways, 1):
        with case((path, files)):
            response = disk_rig.disk(root, *files, weight_version="8", path=path)
            disk_rig.assert_committed(response, NEXT, 8)
            assert disk_rig.engine.writes == [number, number]
            answer = response.json()
            assert answer["bytes"] == sum(map(len, bodies.values()))
            assert (answer["nnz"], answer["tensors"]) == (3, 2)
            assert disk_rig.post("/delta_rollback").status_code == 200
            assert same(disk_rig.engine.weights, BASE)


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


def test_the_same_file_twice_under_two_names(disk_rig: Rig, root: Path, write: Write) -> None:
    write(a=delta_part(), b=delta_part())
    disk_rig.assert_committed(disk_rig.disk(root), NEXT, 8)
    assert disk_rig.engine.writes == [1, 1]


def test_several_files_as_bodies(rig: Rig) -> None:
    """As slime's trainer would post them: no numbers, ids or bases."""
    for number, changes in enumerate(APART):
        weights = after(BASE, *APART[: number + 1])
        rig.assert_committed(rig.send(bare(delta_part(changes)), weight_version="8"), weights, 8)
        assert rig.status().version.complete is None
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


def test_a_failed_transaction_leaves_another_sync_alone(
    disk_rig: Rig, root: Path, write: Write
) -> None:
    first, *others = split_parts()
    disk_rig.send(first)
    write(a=bare(delta_part(OTHER_STEP)))
    assert_error(disk_rig.disk(root, weight_version="8"), 409, "SyncInProgress")
    assert statuses([disk_rig.send(body) for body in others]) == ["staged", "committed"]


def test_a_full_sync_from_disk(disk_rig: Rig, root: Path, write: Write) -> None:
    disk_rig.fail_commit()
    names = list(RESYNCED)
    write(a=full_part(RESYNCED, 30, names[:1]), b=full_part(RESYNCED, 30, names[1:]))
    disk_rig.assert_committed(disk_rig.disk(root), RESYNCED, 30)
    assert disk_rig.post(COMPLETIONS).status_code == 200


def test_a_lost_answer_in_a_transaction(disk_rig: Rig, root: Path, write: Write) -> None:
    write(**{f"f{n}": bare(delta_part(changes)) for n, changes in enumerate(SPLIT)})
    disk_rig.engine.loses["prepare"] = ConnectionError("lost")
    assert_error(disk_rig.disk(root, weight_version="8"), 500, "DeltaError")
    response = disk_rig.disk(root, weight_version="8")
    disk_rig.assert_committed(response, NEXT, 8)
