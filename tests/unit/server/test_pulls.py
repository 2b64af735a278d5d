"""Pull, then commit, as slime's and miles' trainers ask for it; and vime's call of a method."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from delta_server import guards
from delta_server.routes import attach
from engine_ext.ranks.operations import Operation
from tests.support.cases import case
from tests.support.delta_bodies import (
    BASE,
    NEXT,
    OTHER_STEP,
    STEP,
    Changes,
    after,
    bare,
    delta_part,
    forged,
    same,
)
from tests.support.endpoint_rig import FROM_DISK, STATUS, Rig, assert_error
from tests.support.folder_writer import write_version
from tests.support.present import present

CHECKPOINT = "/local/checkpoint"  # never there
LATER = after(BASE, STEP, OTHER_STEP)


@pytest.fixture
def rig(make_rig: Callable[..., Rig], root: Path) -> Rig:
    return make_rig(roots=(str(root),))


def publish(root: Path, version: int, *bodies: bytes) -> None:
    folder = root / f"weight_v{version:06d}"
    folder.mkdir()
    for number, body in enumerate(bodies):
        (folder / f"rank0_flush{number:03d}.safetensors").write_bytes(bare(body))


def pull(rig: Rig, root: Path, target: int, checkpoint: str = CHECKPOINT) -> Any:
    body = {
        "local_checkpoint_dir": checkpoint,
        "source_dir": str(root),
        "target_version": target,
    }
    return rig.post("/pull_weights", json=body)


def load(rig: Rig, version: int) -> Any:
    body = {"model_path": CHECKPOINT, "weight_version": str(version)}
    return rig.post(FROM_DISK, json=body)


def test_a_version_is_staged_then_committed(rig: Rig, root: Path) -> None:
    assert pull(rig, root, 7).json()["success"] is True  # the seed
    publish(root, 8, delta_part())
    answer = pull(rig, root, 8)
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    assert present(rig.status().staged).version == 8
    assert same(rig.engine.weights, BASE)
    committed = load(rig, 8)
    rig.assert_committed(committed, NEXT, 8)
    assert committed.json()["success"] is True
    again = load(rig, 8).json()
    assert (again["status"], again["version"]) == ("already_applied", 8)


def test_a_range_with_steps_without_changes(rig: Rig, root: Path) -> None:
    for version in (8, 10, 12):
        write_version(root, version, {}, {})
    publish(root, 9, delta_part())
    publish(root, 11, delta_part(OTHER_STEP))
    assert pull(rig, root, 12).status_code == 200
    assert present(rig.status().staged).version == 9
    rig.assert_committed(load(rig, 12), LATER, 12)


def test_nothing_but_steps_without_changes(rig: Rig, root: Path) -> None:
    write_version(root, 8, {}, {})
    assert pull(rig, root, 8).status_code == 200
    rig.assert_committed(load(rig, 8), BASE, 8)


def test_a_folder_that_is_not_filled_yet(rig: Rig, root: Path) -> None:
    publish(root, 8)
    assert pull(rig, root, 8).json()["error"]["type"] == "MalformedPart"
    assert load(rig, 8).status_code == 400  # nothing was pulled under this name
    rig.assert_untouched()


def test_a_folder_that_lacks_numbered_parts(rig: Rig, root: Path) -> None:
    folder = root / "weight_v000008"
    folder.mkdir()
    first = delta_part(version=8, part=0, num_parts=2, sync_id="s")
    (folder / "a.safetensors").write_bytes(first)
    assert_error(pull(rig, root, 8), 400, "MalformedPart")
    assert rig.status().staged is None
    rig.assert_untouched()


def test_each_version_of_a_range_is_reported(rig: Rig, root: Path) -> None:
    publish(root, 8, delta_part())
    publish(root, 9, delta_part(OTHER_STEP))
    pull(rig, root, 9)
    rig.assert_committed(load(rig, 9), LATER, 9)
    history = rig.get(f"{STATUS}?history=true").json()["history"]
    committed = [sync["version"] for sync in history if sync["outcome"] == "committed"]
    assert committed == [8, 9]


def test_what_was_staged_may_be_gone(rig: Rig, root: Path) -> None:
    publish(root, 8, delta_part())
    pull(rig, root, 8)
    for receiver in rig.engine.receivers:
        receiver._drop_staged()
    rig.assert_committed(load(rig, 8), NEXT, 8)


# Rewritten folders ---------------------------------------------------------------------------


def rewrite(root: Path, version: int, body: bytes) -> None:
    """Write other bytes into the only file of a version."""
    (root / f"weight_v{version:06d}" / "rank0_flush000.safetensors").write_bytes(bare(body))


@pytest.mark.slow
@pytest.mark.parametrize("settled", [False, True], ids=["just-written", "written-long-ago"])
def test_a_folder_rewritten_after_the_pull_is_refused(rig: Rig, root: Path, settled: bool) -> None:
    publish(root, 8, delta_part())
    if settled:
        time.sleep(0.2)  # from then on, times show a write
    assert pull(rig, root, 8).status_code == 200
    rewrite(root, 8, delta_part(OTHER_STEP))
    error = assert_error(load(rig, 8), 409, "Conflict", version=8)
    assert error["message"].startswith("weight_v000008 holds other bytes than were pulled from it")
    assert rig.status().staged is None
    assert (rig.status().version.number, rig.engine.paused) == (7, False)
    assert same(rig.engine.weights, BASE)
    assert pull(rig, root, 8).status_code == 200
    rig.assert_committed(load(rig, 8), after(BASE, OTHER_STEP), 8)


def test_a_folder_pulled_again_replaces_what_was_staged(rig: Rig, root: Path) -> None:
    publish(root, 8, delta_part())
    assert pull(rig, root, 8).status_code == 200
    rewrite(root, 8, delta_part(OTHER_STEP))
    assert pull(rig, root, 8).status_code == 200
    rig.assert_committed(load(rig, 8), after(BASE, OTHER_STEP), 8)


def test_a_folder_with_one_more_file_is_rewritten(rig: Rig, root: Path) -> None:
    publish(root, 8, delta_part())
    assert pull(rig, root, 8).status_code == 200
    more = root / "weight_v000008" / "rank1_flush000.safetensors"
    more.write_bytes(bare(delta_part(OTHER_STEP)))
    assert_error(load(rig, 8), 409, "Conflict")
    assert same(rig.engine.weights, BASE)


@pytest.mark.parametrize("settled", [False, True], ids=["just-written", "written-long-ago"])
def test_the_same_bytes_written_again_are_taken(rig: Rig, root: Path, settled: bool) -> None:
    """With other times, and next to files that are not the version's."""
    publish(root, 8, delta_part())
    if settled:
        time.sleep(0.2)
    assert pull(rig, root, 8).status_code == 200
    rewrite(root, 8, delta_part())
    (root / "weight_v000008" / "DONE").touch()
    rig.assert_committed(load(rig, 8), NEXT, 8)


@pytest.mark.slow
def test_an_unchanged_folder_is_not_read_again(
    rig: Rig, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(root, 8, delta_part())
    time.sleep(0.2)
    assert pull(rig, root, 8).status_code == 200
    monkeypatch.setattr(rig.service.intake, "read", None)
    rig.assert_committed(load(rig, 8), NEXT, 8)


def test_what_was_dropped_is_not_replaced_by_other_bytes(rig: Rig, root: Path) -> None:
    publish(root, 8, delta_part())
    assert pull(rig, root, 8).status_code == 200
    for receiver in rig.engine.receivers:
        receiver._drop_staged()
    rewrite(root, 8, delta_part(OTHER_STEP))
    assert_error(load(rig, 8), 409, "Conflict")
    assert same(rig.engine.weights, BASE)


def test_a_folder_rewritten_after_the_commit_is_named(rig: Rig, root: Path) -> None:
    publish(root, 8, delta_part())
    assert pull(rig, root, 8).status_code == 200
    rig.assert_committed(load(rig, 8), NEXT, 8)
    rewrite(root, 8, delta_part(OTHER_STEP))
    for answer in (load(rig, 8), pull(rig, root, 8), load(rig, 8)):
        error = assert_error(answer, 409, "Conflict", version=8)
        assert "holds other bytes than the engine has committed of it" in error["message"]
    shutil.rmtree(root / "weight_v000008")  # a trainer can remove what is committed
    assert load(rig, 8).json()["status"] == "already_applied"
    assert same(rig.engine.weights, NEXT)


def test_a_named_folder_rewritten_after_its_commit(rig: Rig, root: Path) -> None:
    """Not taken for the rest of its version."""
    publish(root, 8, delta_part())
    folder = root / "weight_v000008"
    assert rig.disk(folder, weight_version="8").json()["status"] == "committed"
    rewrite(root, 8, delta_part(OTHER_STEP))
    error = assert_error(rig.disk(folder, weight_version="8"), 409, "VersionConflict")
    assert "committed with other bytes than these" in error["message"]
    assert same(rig.engine.weights, NEXT)


def numbered(root: Path, changes: Changes) -> None:
    """A version in two parts that have numbers, but no id of their sync."""
    folder = root / "weight_v000008"
    folder.mkdir(parents=True)
    for part, (name, change) in enumerate(changes.items()):
        body = delta_part({name: change}, 8, part=part, num_parts=len(changes))
        (folder / f"{part}.safetensors").write_bytes(forged(body, sync_id=None))


def test_numbered_parts_without_an_id(rig: Rig, root: Path) -> None:
    numbered(root, STEP)
    assert pull(rig, root, 8).status_code == 200
    rig.assert_committed(load(rig, 8), NEXT, 8)


def test_without_an_id_what_is_staged_may_be_of_another_pull(rig: Rig, root: Path) -> None:
    numbered(root, STEP)
    numbered(root / "other", dict(reversed([*OTHER_STEP.items()])))
    assert pull(rig, root, 8).status_code == 200
    for receiver in rig.engine.receivers:
        receiver._drop_staged()
    assert pull(rig, root / "other", 8, "/local/other").status_code == 200
    assert_error(load(rig, 8), 409, "Conflict")
    assert same(rig.engine.weights, BASE)
    assert rig.status().version.number == 7


def test_a_version_behind_a_link(rig: Rig, root: Path) -> None:
    publish(root, 8, delta_part())
    (root / "weight_v000008").rename(root / "elsewhere")
    (root / "weight_v000008").symlink_to(root / "elsewhere")
    assert pull(rig, root, 8).json()["success"] is True
    rig.assert_committed(load(rig, 8), NEXT, 8)


def test_a_folder_that_is_no_path(rig: Rig) -> None:
    assert_error(pull(rig, Path("/a\0b"), 8), 400, "MalformedPart")


def test_pulls_that_are_refused(rig: Rig, root: Path, tmp_path: Path) -> None:
    publish(root, 9, delta_part())
    assert pull(rig, root, 9).json()["error"]["type"] == "MalformedPart"  # 8 is missing
    assert pull(rig, root, -1).status_code == 400
    assert_error(pull(rig, root, 6), 409, "VersionConflict", expected=6, actual=7)
    assert_error(pull(rig, tmp_path / "elsewhere", 8), 403, "PathForbidden")
    publish(root, 8, delta_part()[:-1])
    refused = pull(rig, root, 8)
    assert (refused.status_code, refused.json()["success"]) == (400, False)
    assert load(rig, 8).status_code == 400  # nothing was pulled under this name
    rig.assert_untouched()


def test_another_version_than_was_pulled(rig: Rig, root: Path) -> None:
    publish(root, 8, delta_part())
    pull(rig, root, 8)
    assert_error(load(rig, 9), 409, "VersionConflict", expected=9, actual=8)
    rig.assert_committed(load(rig, 8), NEXT, 8)


def test_pulled_versions_are_not_committed_otherwise(rig: Rig, root: Path) -> None:
    """It would be the model that changes, and at once."""
    publish(root, 8, delta_part())
    pull(rig, root, 8)
    others: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"adapter": "style"}, {}),
        ({"base_version": "7"}, {}),
        ({}, {"base_version": "7"}),
        ({"files": ["a.safetensors"]}, {}),
        ({}, {"commit": "hold"}),
        ({"commit": "hold"}, {}),
    ]
    for body, query in others:
        with case((body, query)):
            asked = {"model_path": CHECKPOINT, "weight_version": "8", **body}
            assert_error(rig.post(FROM_DISK, json=asked, params=query), 400, "MalformedPart")
            assert same(rig.engine.weights, BASE)
    rig.assert_committed(load(rig, 8), NEXT, 8)


def test_without_a_root(make_rig: Callable[..., Rig], root: Path) -> None:
    assert_error(pull(make_rig(), root, 7), 403, "PathForbidden")


# collective_rpc ----------------------------------------------------------------------------


def test_the_method_of_vime(rig: Rig, root: Path) -> None:
    publish(root, 8, delta_part())
    files = ["rank0_flush000.safetensors"]
    kwargs = {"model_path": str(root / "weight_v000008"), "files": files, "weight_version": "8"}
    body = {"method": "apply_delta_from_disk", "kwargs": kwargs}
    answer = rig.post("/collective_rpc", json=body)
    assert answer.status_code == 200
    assert [one["status"] for one in answer.json()["results"]] == ["committed"] * 2
    assert same(rig.engine.weights, NEXT)


def test_a_commit_is_answered_by_silent_ranks(rig: Rig, root: Path) -> None:
    """Once they have committed, an error would deny it."""
    publish(root, 8, delta_part())
    call = rig.engine.call

    async def silent(request: Operation[Any]) -> list[Any]:
        if request.name == "status" and ("commit",) in rig.engine.events:
            raise ConnectionError("lost")
        return await call(request)

    rig.engine.call = silent  # type: ignore[method-assign]
    kwargs = {"model_path": str(root / "weight_v000008"), "weight_version": "8"}
    answer = rig.post("/collective_rpc", json={"method": "apply_delta_from_disk", "kwargs": kwargs})
    assert [one["status"] for one in answer.json()["results"]] == ["committed"] * 2


async def slowly() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.sleep(60)


def test_other_methods_are_the_engines(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.post("/collective_rpc", json={"method": "other"}).status_code == 404
    app = FastAPI()

    async def theirs(request: Request) -> JSONResponse:
        return JSONResponse(await request.json())

    app.add_api_route("/collective_rpc", theirs, methods=["POST"])
    attach(app)
    # As vLLM does: a plugin's route takes the place of its own.
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "endpoint", 0) is not theirs]
    app.state.delta_service = rig.service
    body = {"method": "other", "kwargs": {"a": 1}}
    assert rig.run(rig.request("POST", "/collective_rpc", app=app, json=body)).json() == body
    # Who is too slow does not keep the engine waiting, and gets no method past the checks.
    monkeypatch.setattr(guards, "_MOST_BODY_S", 0.05)
    slow = rig.request("POST", "/collective_rpc", app=app, content=slowly(), peer=("192.0.2.7", 1))
    assert_error(rig.run(slow), 403, "AccessDenied")
