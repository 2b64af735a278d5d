"""Folders of published versions: empty ones between two syncs, and files that did not arrive."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delta_server.sources.disk_files import list_names
from delta_server.sources.folders import beside, gap_is_empty, is_complete, version_of
from delta_server.staging import not_applied
from engine_ext.ranks.operations import Delivery
from tests.support.cases import case
from tests.support.delta_bodies import (
    BASE,
    NEXT,
    OTHER_STEP,
    STEP,
    after,
    bare,
    delta_part,
    full_part,
    same,
)
from tests.support.endpoint_rig import FROM_DISK, Rig, assert_error
from tests.support.folder_writer import write_version
from tests.unit.server.service_parts import assert_unchanged

LATER = after(BASE, STEP, OTHER_STEP)
INDEX = "model.safetensors.index.json"
FILES = [{name: elements} for name, elements in STEP.items()]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def rig(make_rig: Callable[..., Rig], root: Path) -> Rig:
    return make_rig(roots=(str(root),))


def publish(root: Path, version: int, *bodies: bytes) -> Path:
    folder = root / f"weight_v{version:06d}"
    folder.mkdir()
    for number, body in enumerate(bodies):
        (folder / f"rank0_flush{number:03d}.safetensors").write_bytes(bare(body))
    return folder


def index(folder: Path, version: int, base: int, **weight_map: str) -> None:
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{base:06d}",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    text = json.dumps({"metadata": metadata, "weight_map": weight_map})
    (folder / INDEX).write_text(text)


def disk(rig: Rig, folder: Path, *files: str) -> Any:
    version = str(version_of(folder))
    return rig.disk(folder, *files, weight_version=version, path=FROM_DISK)


def test_folders_of_versions(root: Path) -> None:
    folder = root / "weight_v000012"
    assert (version_of(folder), version_of(root / "weight_vx")) == (12, None)
    assert beside(folder, 9) == root / "weight_v000009"
    assert beside(folder, 1234567) == root / "weight_v1234567"


def test_a_gap_of_versions_that_hold_nothing(rig: Rig, root: Path) -> None:
    for version in (8, 9):
        write_version(root, version, {}, {})
    response = disk(rig, publish(root, 10, delta_part()))
    rig.assert_committed(response, NEXT, 10)
    assert response.json()["base_version"] == 7


def test_an_index_without_a_signature_shows_nothing(
    rig: Rig, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_version(root, 8, {}, {})
    assert gap_is_empty(folder, [8], [str(root)])
    monkeypatch.setenv("DELTA_HMAC_KEY", "a key of more than thirty-two bytes")
    assert not gap_is_empty(folder, [8], [str(root)])


def test_a_gap_that_may_hold_something(rig: Rig, root: Path) -> None:
    """A folder without files might have been emptied, or is not filled yet."""
    following = publish(root, 9, delta_part())
    folder = root / "weight_v000008"
    fills: dict[str, Callable[[], object]] = {
        "no file": lambda: None,
        "DONE": (folder / "DONE").touch,
        "a file": (folder / "a.safetensors").touch,
        "half written": (folder / "a.safetensors.tmp").touch,
        "index of a tensor": lambda: index(folder, 8, 7, a="model-00000-of-00001.safetensors"),
        "other": lambda: index(folder, 9, 8),
    }
    for kind, fill in {"absent": None, **fills}.items():
        with case(kind):
            if fill is not None:
                publish(root, 8)
                fill()
            response = disk(rig, following)
            assert_error(response, 409, "VersionConflict", expected=8, actual=7)
            assert_unchanged(rig)
            shutil.rmtree(folder, ignore_errors=True)
    rig.assert_untouched()


def test_a_version_whose_folder_holds_more_is_no_base(rig: Rig, root: Path) -> None:
    folder = publish(root, 8, *map(delta_part, FILES))
    names = sorted(path.name for path in folder.iterdir())
    assert disk(rig, folder, names[0]).status_code == 200
    assert rig.status().version.complete is False
    following = publish(root, 9, delta_part(OTHER_STEP))
    for response in (
        disk(rig, following),
        rig.send(delta_part(OTHER_STEP, version=9)),
        rig.post("/update_weight_version", json={"new_version": "9"}),
    ):
        assert_error(response, 409, "Conflict", files=names[1:])
    assert rig.status().staged is None
    rig.assert_committed(disk(rig, folder, *names[1:]), NEXT, 8)
    assert rig.status().version.complete is None  # nothing says that there are no more
    (folder / "DONE").touch()
    assert rig.status().version.complete is True
    rig.assert_committed(disk(rig, following), LATER, 9)


def test_a_full_sync_needs_no_base(rig: Rig, root: Path) -> None:
    folder = publish(root, 8, *map(delta_part, FILES))
    disk(rig, folder, "rank0_flush000.safetensors")
    rig.assert_committed(rig.send(full_part(LATER, 9)), LATER, 9)
    assert rig.status().version.complete is True


def test_what_nothing_can_show(rig: Rig, root: Path) -> None:
    assert rig.status().version.complete is True
    folder = publish(root, 8, *map(delta_part, FILES))
    disk(rig, folder, "rank0_flush000.safetensors")
    shutil.rmtree(folder)
    assert rig.status().version.complete is None
    assert disk(rig, publish(root, 9, delta_part(OTHER_STEP))).status_code == 200


def test_parts_that_count_are_complete(rig: Rig, root: Path) -> None:
    rig.send(delta_part(sync_id="s", part=0, num_parts=1))
    assert rig.status().version.complete is True
    rig.post("/delta_rollback")
    folder = root / "weight_v000008"
    delivery = Delivery(complete=False, folder=str(folder))
    assert not_applied(delivery, lambda name: list_names(Path(name), [str(root)])) == []
    assert is_complete(Delivery(complete=False), [str(root)]) is None


# A step without changes --------------------------------------------------------------------


def advance(rig: Rig, version: Any, **keys: Any) -> Any:
    return rig.post("/update_weight_version", json={"new_version": version, **keys})


def test_a_version_without_changes(rig: Rig) -> None:
    response = advance(rig, "20")
    rig.assert_committed(response, BASE, 20)
    answer = response.json()
    assert (answer["success"], answer["new_version"], answer["base_version"]) == (True, "20", 7)
    assert "flush" not in str(rig.engine.events)
    again = advance(rig, 20).json()
    assert (again["status"], again["version"]) == ("already_applied", 20)
    rig.assert_committed(rig.send(delta_part(version=21)), NEXT, 21)


def test_a_version_that_is_none(rig: Rig) -> None:
    versions: list[Any] = ["", "x", "-1", "1.5", "6", None, []]
    for version in versions:
        with case(version):
            response = advance(rig, version)
            assert response.status_code == (409 if version == "6" else 400)
            assert response.json()["success"] is False
            assert_unchanged(rig)
    rig.assert_untouched()


def test_while_another_sync_is_staged(rig: Rig) -> None:
    rig.send(delta_part(sync_id="s", part=0, num_parts=2))
    assert_error(advance(rig, "9"), 409, "SyncInProgress")


def test_what_is_of_no_version_keeps_the_engines_own_name(rig: Rig) -> None:
    for receiver in rig.engine.receivers:
        receiver._sync_state.changed_externally = "the engine's own update"
    assert advance(rig, "step-9").json()["success"] is True
    assert rig.engine.weight_version == "step-9"
    assert rig.status().version.number == 7
    assert same(rig.engine.weights, BASE)


@pytest.mark.parametrize("case", ["same version", "of no version", "paused by the caller"])
def test_requests_end_also_where_nothing_is_committed(rig: Rig, case: str) -> None:
    version = "7"
    if case == "of no version":
        version = "step-9"
        for receiver in rig.engine.receivers:
            receiver.weights_replaced("the engine's own update")
    rig.engine.paused = case == "paused by the caller"  # then they stay, as for a commit
    assert advance(rig, version, abort_all_requests=True).json()["success"] is True
    ends = [("end_requests", "abort"), ("publish", None, True)]
    named = ("publish", version, False)
    assert rig.engine.events == ([named] if rig.engine.paused else [*ends, named])
    assert rig.engine.paused == (case == "paused by the caller")


def test_requests_that_cannot_be_ended_go_on(rig: Rig) -> None:
    rig.engine.fails["end_requests"] = ConnectionError("lost")
    assert_error(advance(rig, "7", abort_all_requests=True), 500, "DeltaError")
    assert not rig.engine.paused
    rig.assert_untouched()


def test_an_uncertain_engine(rig: Rig) -> None:
    rig.fail_commit()
    assert_error(advance(rig, "9"), 503, "EngineUncertain", engine_state="uncertain")
