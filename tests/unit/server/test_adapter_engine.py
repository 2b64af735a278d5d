"""The endpoints for an adapter's own tensors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from engine_ext.ranks.replies import LoadedAdapter
from tests.support.delta_bodies import VERSION, delta_part
from tests.support.endpoint_rig import DELTA, FROM_DISK, STATUS, Rig
from tests.support.present import present
from tests.support.served_models import delta_between, one_part
from tests.support.toy_adapters import A, ToyAdapters, fresh_adapter, same_adapter, with_adapters

BASE = fresh_adapter()
NEXT = {name: tensor + 1 if name == A else tensor for name, tensor in BASE.items()}
ONE = {"adapter": "one"}


def part(**metadata: Any) -> bytes:
    return one_part([delta_between(A, BASE[A], NEXT[A])], current_version=1, **metadata)


@pytest.fixture
def ranks(rig: Rig) -> list[ToyAdapters]:
    return with_adapters(rig, "one")


def error_of(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["type"]


def test_the_models_version_is_not_published(rig: Rig, ranks: list[ToyAdapters]) -> None:
    assert rig.send(part(), **ONE).status_code == 200
    assert rig.engine.weight_version == str(VERSION)
    assert [event[0] for event in rig.engine.events] == ["stop", "commit", "publish"]
    assert rig.send(part(), **ONE).json()["status"] == "already_applied"
    assert rig.post("/delta_rollback", params=ONE).status_code == 200
    assert rig.engine.weight_version == str(VERSION)


def test_the_cache_is_dropped_unless_asked_not_to(rig: Rig, ranks: list[ToyAdapters]) -> None:
    assert rig.send(part(), **ONE, pause_mode="wait", flush_cache="false").status_code == 200
    assert rig.engine.events[:2] == [("end_requests", "wait"), ("stop", False)]
    rig.engine.events.clear()
    assert rig.post("/delta_rollback", params={**ONE, "flush_cache": "salt"}).status_code == 200
    assert rig.engine.events[0] == ("stop", "salt")


def test_status_history_and_plan_are_the_adapters(rig: Rig, ranks: list[ToyAdapters]) -> None:
    digest = rig.send(part(), **ONE).json()["digest"]
    rig.send(delta_part())
    rig.run(rig.service.reporter.flush())
    status = rig.status(**ONE, plan="true", history="true")
    assert (status.adapter, status.version.number, status.version.digest) == ("one", 1, digest)
    assert {row["name"] for row in present(status.plan)[0]} == BASE.keys()
    assert [(sync.adapter, sync.version) for sync in present(status.history)] == [("one", 1)]
    own = rig.status(history="true")
    assert own.adapters == [LoadedAdapter(name="one", version=1, digest=digest)]
    assert [(sync.adapter, sync.version) for sync in present(own.history)] == [(None, VERSION + 1)]


def test_a_pause_is_the_engines(rig: Rig, ranks: list[ToyAdapters]) -> None:
    rig.run(rig.service.committer.run_external_change(rig.engine.pause))
    assert rig.send(part(), **ONE).json()["status"] == "committed"
    own, whole = (present(rig.status(**which).health.paused) for which in (ONE, {}))
    assert (own.since, own.by) == (whole.since, None)
    assert own.since == pytest.approx(time.time(), abs=60)


def test_the_gauges_are_separate(rig: Rig, ranks: list[ToyAdapters]) -> None:
    before = REGISTRY.get_sample_value("delta_updates_version")
    assert rig.send(part(), **ONE).status_code == 200
    assert REGISTRY.get_sample_value("delta_updates_version") == before
    assert REGISTRY.get_sample_value("delta_updates_adapter_version", ONE) == 1


@pytest.mark.parametrize("where", ["query", "body"])
@pytest.mark.parametrize("path", [DELTA, FROM_DISK])
def test_a_disk_request_for_an_adapter(disk_rig: Rig, root: Path, path: str, where: str) -> None:
    ranks = with_adapters(disk_rig, "one")
    (root / "part.safetensors").write_bytes(part())
    if where == "body":
        response = disk_rig.disk(root, path=path, **ONE)
    else:
        body = {"model_path": str(root), "load_format": "delta"}
        response = disk_rig.post(path, json=body, params=ONE)
    assert response.json().get("status") == "committed", response.text
    assert all(same_adapter(adapters.installed["one"], NEXT) for adapters in ranks)
    assert disk_rig.engine.weight_version == str(VERSION)


def test_two_names_in_one_request(disk_rig: Rig, root: Path) -> None:
    with_adapters(disk_rig, "one", "two")
    (root / "part.safetensors").write_bytes(part())
    body = {"model_path": str(root), "adapter": "two"}
    assert error_of(disk_rig.post(DELTA, json=body, params=ONE)) == (400, "MalformedPart")


def test_no_name(rig: Rig, ranks: list[ToyAdapters]) -> None:
    assert error_of(rig.send(part(), adapter="")) == (400, "MalformedPart")


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/delta_rollback"), ("GET", "/delta_digest"), ("GET", STATUS)]
)
def test_an_adapter_that_is_not_loaded(
    rig: Rig, ranks: list[ToyAdapters], method: str, path: str
) -> None:
    response = rig.run(rig.request(method, path, params={"adapter": "none"}))
    assert error_of(response) == (422, "AdapterNotLoaded")
    assert response.json()["error"]["adapter"] == "none"


def test_a_delta_log_is_the_models(rig: Rig, ranks: list[ToyAdapters]) -> None:
    assert error_of(rig.post("/delta_catch_up", params=ONE)) == (400, "MalformedPart")


def test_a_commit_without_an_answer(rig: Rig, ranks: list[ToyAdapters]) -> None:
    rig.engine.loses["commit"] = ConnectionError("gone")
    assert error_of(rig.send(part(), **ONE)) == (500, "CommitFailed")
    assert rig.is_paused()
    again = rig.send(part(), **ONE)
    assert again.json()["status"] == "already_applied", again.text
    assert not rig.engine.paused
    assert rig.engine.weight_version == str(VERSION)
