"""Versions that other trainers publish in an object store: pulled, and named by disk requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_ext.log import Objects
from engine_ext.version_folders import INDEX
from tests.support.delta_bodies import (
    BASE,
    NEXT,
    OTHER_STEP,
    STEP,
    VERSION,
    Changes,
    after,
    bare,
    delta_part,
    same,
)
from tests.support.endpoint_rig import FROM_DISK, Rig, assert_error
from tests.support.folder_writer import write_version
from tests.support.present import present
from tests.support.store_folders import upload
from tests.unit.server.test_pulls import load

pytestmark = pytest.mark.slow

LATER = after(BASE, STEP, OTHER_STEP)
CHECKPOINT = "/local/checkpoint"
FIRST = "rank0_flush000.safetensors"


@pytest.fixture
def store(store_url: str) -> Objects:
    return Objects(store_url)


@pytest.fixture
def rig(make_rig: Callable[..., Rig], store: Objects, tmp_path: Path) -> Rig:
    """A server that takes URLs below the store's."""
    return make_rig(roots=(store.url,), cache_dir=str(tmp_path / "cache"))


def publish(store: Objects, version: int, *bodies: bytes) -> str:
    """Put a version in the format of slime up to v0.3.0; return its URL."""
    for number, body in enumerate(bodies):
        store.put(f"weight_v{version:06d}/rank0_flush{number:03d}.safetensors", bare(body))
    return f"{store.url}/weight_v{version:06d}"


def publish_nothing(store: Objects, folder: Path, version: int) -> None:
    """Put a version that holds nothing."""
    upload(store, write_version(folder, version, {}, {}))


def pull(rig: Rig, source: str, target: int) -> httpx.Response:
    body = {"local_checkpoint_dir": CHECKPOINT, "source_dir": source, "target_version": target}
    return rig.post("/pull_weights", json=body)


def ask(rig: Rig, url: str, *files: str) -> httpx.Response:
    version = str(int(url[-6:]))
    return rig.disk(url, *files, weight_version=version, path=FROM_DISK)


# Pulls ---------------------------------------------------------------------------------------


def test_a_version_is_staged_then_committed(rig: Rig, store: Objects, tmp_path: Path) -> None:
    publish(store, 8, delta_part())
    answer = pull(rig, store.url + "/", 8)
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    assert present(rig.status().staged).version == 8
    assert same(rig.engine.weights, BASE)
    rig.assert_committed(load(rig, 8), NEXT, 8)
    assert load(rig, 8).json()["status"] == "already_applied"
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_object_rewritten_after_the_pull_is_refused(rig: Rig, store: Objects) -> None:
    publish(store, 8, delta_part())
    assert pull(rig, store.url, 8).status_code == 200
    publish(store, 8, delta_part(OTHER_STEP))
    assert_error(load(rig, 8), 409, "Conflict", version=8)
    assert rig.status().staged is None
    assert same(rig.engine.weights, BASE)
    assert pull(rig, store.url, 8).status_code == 200
    rig.assert_committed(load(rig, 8), after(BASE, OTHER_STEP), 8)
    publish(store, 8, delta_part())
    assert_error(load(rig, 8), 409, "Conflict", version=8)


def test_pulls_that_are_refused(rig: Rig, store: Objects, tmp_path: Path) -> None:
    publish(store, 9, delta_part())
    refused = pull(rig, store.url, 9)  # 8 is missing
    assert (refused.status_code, refused.json()["success"]) == (400, False)
    assert "weight_v000008" in assert_error(refused, 400, "MalformedPart")["message"]
    assert_error(pull(rig, store.url, 6), 409, "VersionConflict", expected=6, actual=7)
    for target in (7, 8):
        assert_error(pull(rig, store.url + "-of-another", target), 403, "PathForbidden")
        assert_error(pull(rig, "gs://test/x", target), 403, "PathForbidden")
        secret = pull(rig, "s3://key:secret@test/x", target)
        assert "credentials" in assert_error(secret, 400, "MalformedPart")["message"]
        assert_error(pull(rig, "http://127.0.0.1/x", target), 400, "MalformedPart")
        assert_error(pull(rig, str(tmp_path), target), 403, "PathForbidden")
    publish(store, 8, delta_part()[:-1])
    assert pull(rig, store.url, 8).status_code == 400
    assert load(rig, 8).status_code == 400  # nothing was pulled under this name
    rig.assert_untouched()


def test_a_version_that_is_being_written(rig: Rig, store: Objects, tmp_path: Path) -> None:
    """Its index comes last; numbered parts without the others are not taken either."""
    (folder := tmp_path / "drafts" / "weight_v000008").mkdir(parents=True)
    (folder / "model-00001-of-00002.safetensors").write_bytes(bare(delta_part())[:-8])
    (folder / INDEX).write_text('{"metadata": {}, "weight_map": {}}')
    upload(store, folder, index=False)
    assert pull(rig, store.url, 8).status_code == 400
    store.delete(one.name for one in store.list())
    first = delta_part(version=8, part=0, num_parts=2, sync_id="s")
    store.put("weight_v000008/a.safetensors", first)
    assert_error(pull(rig, store.url, 8), 400, "MalformedPart")
    assert rig.status().staged is None
    rig.assert_untouched()


def test_a_store_that_is_away(rig: Rig, store: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, 8, delta_part())
    with monkeypatch.context() as patched:
        patched.setattr("tenacity.nap.time.sleep", lambda seconds: None)
        patched.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        assert_error(pull(rig, store.url, 8), 502, "PartUnavailable")
        rig.service.inlet.store_files._stores.clear()
    assert pull(rig, store.url, 8).status_code == 200
    rig.assert_committed(load(rig, 8), NEXT, 8)


# Disk requests -------------------------------------------------------------------------------


def test_a_gap_of_versions_that_hold_nothing(rig: Rig, store: Objects, tmp_path: Path) -> None:
    for version in (8, 9):
        publish_nothing(store, tmp_path / "drafts", version)
    rig.assert_committed(ask(rig, publish(store, 10, delta_part())), NEXT, 10)


def test_a_gap_that_holds_something(rig: Rig, store: Objects, tmp_path: Path) -> None:
    publish_nothing(store, tmp_path / "drafts", 8)
    store.put("weight_v000008/other.safetensors", b"x")
    url = publish(store, 9, delta_part())
    assert_error(ask(rig, url), 409, "VersionConflict", expected=8, actual=7)
    store.delete([f"weight_v000008/{name}" for name in ("other.safetensors", INDEX)])
    assert_error(ask(rig, url), 409, "VersionConflict", expected=8, actual=7)
    rig.assert_untouched()


def test_beside_a_root_nothing_is_read(
    make_rig: Callable[..., Rig], store: Objects, tmp_path: Path
) -> None:
    publish_nothing(store, tmp_path / "drafts", 8)
    url = publish(store, 9, delta_part())
    rig = make_rig(roots=(url,), cache_dir=str(tmp_path / "cache"))
    assert_error(ask(rig, url), 409, "VersionConflict")


def parts_of(*changes: Changes) -> list[bytes]:
    """The parts of one step, without numbers: one for each tensor."""
    return [delta_part({name: elements}) for step in changes for name, elements in step.items()]


def test_the_rest_of_a_version_comes_later(rig: Rig, store: Objects) -> None:
    """The files that have arrived belong to one folder; the next version waits for the rest."""
    url = publish(store, 8, *parts_of(STEP))
    assert ask(rig, url, FIRST).json()["status"] == "committed"
    assert rig.status().version.complete is None  # the store is not asked for a status
    later = publish(store, 9, delta_part(OTHER_STEP))
    refused = assert_error(ask(rig, later), 409, "Conflict")
    assert refused["files"] == ["rank0_flush001.safetensors"]
    assert ask(rig, url, "rank0_flush001.safetensors").json()["status"] == "committed"
    assert same(rig.engine.weights, NEXT)
    rig.assert_committed(ask(rig, later), LATER, 9)


def test_a_base_in_a_store_that_is_away(
    rig: Rig, store: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is complete cannot be seen, so nothing is written over it."""
    url = publish(store, 8, *parts_of(STEP))
    assert ask(rig, url, FIRST).json()["status"] == "committed"
    weights = rig.engine.weights
    with monkeypatch.context() as patched:
        patched.setattr(Objects, "list", _refused)
        answer = rig.send(delta_part(OTHER_STEP, version=9))
        assert_error(answer, 502, "PartUnavailable")
    assert same(rig.engine.weights, weights)


def _refused(store: Objects, prefix: str = "") -> Any:
    raise OSError(5, "the store does not answer", prefix)


def test_an_object_that_is_replaced_while_it_is_read(
    rig: Rig, store: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = publish(store, 8, delta_part())
    fetch = Objects.fetch

    def replaced(self: Objects, name: str, *arguments: Any) -> None:
        fetch(self, name, *arguments)
        self.put(name, bare(delta_part(OTHER_STEP)))

    with monkeypatch.context() as patched:
        patched.setattr(Objects, "fetch", replaced)
        refused = assert_error(ask(rig, url), 502, "PartUnavailable", file=FIRST)
    assert "replaced" in refused["message"]
    assert same(rig.engine.weights, BASE)
    rig.assert_committed(ask(rig, url), after(BASE, OTHER_STEP), VERSION + 1)
