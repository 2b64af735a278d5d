"""Disk requests that name the URL of an object store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_ext.log import Objects, open_log
from engine_ext.version_folders import INDEX
from tests.support.cases import case
from tests.support.delta_bodies import (
    OTHER_STEP,
    STEP,
    VERSION,
    after,
    delta_part,
    fresh_weights,
    same,
)
from tests.support.endpoint_rig import FROM_DISK, Rig, assert_error
from tests.unit.server.service_parts import assert_unchanged

pytestmark = pytest.mark.slow


@pytest.fixture
def store(store_url: str) -> Objects:
    return Objects(store_url)


@pytest.fixture
def rig(make_rig: Callable[..., Rig], store: Objects, tmp_path: Path) -> Rig:
    """A server that takes disk requests below the store's URL."""
    return make_rig(roots=(store.url,), cache_dir=str(tmp_path / "cache"))


def ask(rig: Rig, url: str, **body: Any) -> httpx.Response:
    return rig.post(FROM_DISK, json={"model_path": url, "load_format": "delta", **body})


def test_the_parts_below_a_url_are_applied(rig: Rig, store: Objects, tmp_path: Path) -> None:
    numbers = {"sync_id": "one", "num_parts": 2}
    for k, step in enumerate((STEP, OTHER_STEP)):
        store.put(f"step/{k}.safetensors", delta_part(step, VERSION + 1, part=k, **numbers))
    store.put("step/readme.txt", b"not a part")
    store.put("step/below/2.safetensors", b"not this one")
    answer = ask(rig, f"{store.url}/step")
    rig.assert_committed(answer, after(fresh_weights(), STEP, OTHER_STEP), VERSION + 1)
    assert list((tmp_path / "cache").iterdir()) == []


def test_event_loop_does_not_remove_fetched_files(
    rig: Rig, store: Objects, removes_in_threads: list[str]
) -> None:
    store.put("step/0.safetensors", delta_part(STEP, VERSION + 1))
    answer = ask(rig, f"{store.url}/step")
    rig.assert_committed(answer, after(fresh_weights(), STEP), VERSION + 1)


def test_named_files(rig: Rig, store: Objects) -> None:
    store.put("a.safetensors", delta_part(STEP, VERSION + 1))
    store.put("b.safetensors", b"other")
    answer = ask(rig, store.url, files=["a.safetensors"])
    rig.assert_committed(answer, after(fresh_weights(), STEP), VERSION + 1)


def test_a_version_of_a_log_is_kept_by_its_hash(rig: Rig, store: Objects, tmp_path: Path) -> None:
    draft = open_log(store.url).writer().begin(VERSION + 1)
    draft.add(delta_part(STEP, VERSION + 1))
    draft.finish()
    answer = ask(rig, f"{store.url}/weight_v{VERSION + 1:06d}")
    rig.assert_committed(answer, after(fresh_weights(), STEP), VERSION + 1)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".part"]


def test_what_is_refused(rig: Rig, store: Objects) -> None:
    forbidden, malformed = (403, "PathForbidden"), (400, "MalformedPart")
    for url, files, error in (
        (f"{store.url}/none", None, malformed),
        (store.url, ["none.safetensors"], malformed),
        (store.url, ["../secret"], forbidden),
        (store.url, ["step/a.safetensors"], forbidden),
        (f"{store.url}-of-another", None, forbidden),
        ("s3://test", None, forbidden),
        ("s3://other/x", None, forbidden),
        ("gs://test/x", None, forbidden),
        ("s3://key:secret@test/x", None, malformed),
        ("http://127.0.0.1/x", None, malformed),
        ("file:///etc", None, malformed),
        (f"{store.url}/../x", None, malformed),
    ):
        with case((url, files)):
            assert_error(ask(rig, url, files=files), *error)
            assert_unchanged(rig)


def test_damage_is_refused(rig: Rig, store: Objects) -> None:
    draft = open_log(store.url).writer().begin(VERSION + 1)
    body = delta_part(STEP, VERSION + 1)
    draft.add(body)
    folder = draft.finish().name
    [name] = [one.name for one in store.list(folder) if one.name.endswith(".safetensors")]
    store.put(name, body[:-1] + bytes([body[-1] ^ 1]))
    assert_error(ask(rig, f"{store.url}/{folder}"), 400, "ChecksumMismatch")
    store.put(f"{folder}/DONE", b"{")
    assert_error(ask(rig, f"{store.url}/{folder}"), 400, "MalformedPart")
    store.put("foreign/" + INDEX, b"{")
    assert_error(ask(rig, f"{store.url}/foreign"), 400, "MalformedPart")
    assert same(rig.engine.weights, fresh_weights())


def test_a_store_that_is_away(rig: Rig, store: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert_error(ask(rig, store.url), 502, "PartUnavailable")


def test_folders_are_as_before(make_rig: Callable[..., Rig], root: Path, store: Objects) -> None:
    """Without a URL among the roots, no URL is asked for anything."""
    rig = make_rig(roots=(str(root),))
    assert_error(ask(rig, store.url), 403, "PathForbidden")
    (root / "a.safetensors").write_bytes(delta_part(STEP, VERSION + 1))
    rig.assert_committed(ask(rig, str(root)), after(fresh_weights(), STEP), VERSION + 1)
