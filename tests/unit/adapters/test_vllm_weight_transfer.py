"""vLLM's weight-transfer routes over receivers in this process, and what they must refuse."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI

from delta_server.sources.transfer import MAX_INLINE_BYTES
from engine_ext.adapters.vllm import features, transfer_frontend
from engine_ext.adapters.vllm.frontend import DeltaEndpoints
from engine_ext.settings import API_KEY_ENVIRONMENT, HMAC_KEY_ENVIRONMENT
from tests.support.cases import in_one_test
from tests.support.delta_bodies import (
    BASE,
    NEXT,
    OTHER_STEP,
    VERSION,
    after,
    delta_part,
    full_part,
    part_of,
    same,
    sparse,
)
from tests.support.endpoint_rig import Rig, assert_error
from tests.support.present import present
from tests.unit.adapters.transfer_api import (
    FINISH,
    SAME,
    START,
    UPDATE,
    Api,
    assert_ended,
    inline,
    parts,
)


def test_parts_are_staged_and_the_end_commits(api: Api) -> None:
    rig = api.rig
    assert api.post(START).status_code == 200
    for body in parts():
        assert api.update(inline(body)).status_code == 200
        assert same(rig.engine.weights, BASE)
    assert rig.engine.events == []
    assert api.post(FINISH, {"weight_version": "8"}).status_code == 200
    assert same(rig.engine.weights, NEXT)
    assert rig.engine.events == [("stop", True), ("commit",), ("publish", "8", True)]


def test_the_records_are_those_of_posted_parts(make_rig: Callable[..., Rig]) -> None:
    """Status, history, digest and weight version are the same, whichever way parts came."""

    def facts(rig: Rig) -> tuple[Any, ...]:
        rig.run(rig.service.reporter.flush())
        [record] = rig.get("/delta_status", params={"history": "true"}).json()["history"]
        for varying in ("at", "timings_ms"):
            del record[varying]
        status = rig.status()
        last_sync = present(status.last_sync)
        last_sync = msgspec.structs.replace(last_sync, vote_ms=0.0, commit_ms=0.0)
        server = msgspec.structs.replace(present(status.server), since=0.0, seconds=0.0)
        status = msgspec.structs.replace(status, last_sync=last_sync, server=server)
        return record, status, rig.engine.weight_version, rig.engine.events

    posted, sent = make_rig(), make_rig()
    for body in parts():
        posted.send(body)
    api = Api(sent)
    api.post(START)
    for body in parts():
        api.update(inline(body))
    api.post(FINISH)
    assert facts(sent) == facts(posted)


def test_files_below_a_root(api: Api, root: Path) -> None:
    (root / "v8").mkdir()
    for number, body in enumerate(parts()):
        (root / "v8" / f"{number}.safetensors").write_bytes(body)
    api.post(START)
    assert api.update({"model_path": str(root / "v8")}).status_code == 200
    assert same(api.rig.engine.weights, BASE)
    assert api.post(FINISH).status_code == 200
    assert same(api.rig.engine.weights, NEXT)


def test_the_options_of_the_update_count(api: Api) -> None:
    api.post(START)
    body = delta_part(version=None)
    assert api.update(inline(body)).status_code == 400
    api.post(START)
    keys = {"weight_version": "8", "base_version": 7, "pause_mode": "wait", "flush_cache": False}
    assert api.update(inline(body, **keys)).status_code == 200
    assert api.post(FINISH).status_code == 200
    assert api.rig.engine.events[:2] == [("end_requests", "wait"), ("stop", False)]


@in_one_test(
    ("info", "status", "kind"),
    [
        ({}, 400, "MalformedPart"),
        ([{}], 400, "MalformedPart"),
        ("x", 400, "MalformedPart"),
        ({"names": ["a"], "shapes": [[1]]}, 400, "MalformedPart"),
        ({"part": 1}, 400, "MalformedPart"),
        ({"part": "*"}, 400, "MalformedPart"),
        ({"part": ""}, 400, "MalformedPart"),
        ({**inline(delta_part()), "model_path": "/"}, 400, "MalformedPart"),
        (inline(delta_part()[:-1]), 400, "MalformedPart"),
        (inline(delta_part(**SAME)[:-1] + b"x"), 400, "ChecksumMismatch"),
        (inline(part_of(sparse("unknown", {0: 1}), **SAME)), 422, "NotUpdatable"),
        (inline(delta_part(), weight_version="9"), 400, "MalformedPart"),
        (inline(delta_part(), pause_mode="later"), 400, "MalformedPart"),
        (inline(b"x" * (1 << 15)), 413, "TooLarge"),
        ({"model_path": "/etc"}, 403, "PathForbidden"),
        ({"broadcast_bytes": 0}, 400, "MalformedPart"),
        ({"broadcast_bytes": 1 << 15}, 413, "TooLarge"),
        ({"broadcast_bytes": 10}, 409, "Conflict"),
    ],
)  # fmt: skip
def refuse_a_part(api: Api, info: Any, status: int, kind: str) -> None:
    api.post(START)
    assert api.update(inline(parts()[0])).status_code == 200
    assert_error(api.update(info), status, kind)
    assert_error(api.post(FINISH), 409, "Conflict")
    assert api.rig.status().staged is None
    assert not api.rig.engine.paused
    assert api.rig.spooled() == []


def test_a_refused_part_ends_the_update(api: Api) -> None:
    refuse_a_part(api=api)
    assert_ended(api)


def test_another_base_version(api: Api) -> None:
    api.post(START)
    answer = api.update(inline(delta_part(base_version=3)))
    assert_error(answer, 409, "VersionConflict", expected=3, actual=VERSION)
    assert_ended(api)


def test_calls_out_of_order(api: Api) -> None:
    assert_error(api.update(inline(delta_part())), 409, "Conflict")
    assert_error(api.post(FINISH), 409, "Conflict")
    assert_error(api.post("/start_draft_weight_update"), 422, "NotUpdatable")
    api.rig.assert_untouched()


def test_a_sync_that_lacks_parts_is_not_committed(api: Api) -> None:
    api.post(START)
    api.update(inline(parts()[0]))
    assert_error(api.post(FINISH), 409, "Conflict")
    assert_ended(api)


def test_a_trainer_that_starts_again(api: Api) -> None:
    """Parts that the first try staged keep nobody out."""
    api.post(START)
    api.update(inline(parts()[0]))
    api.post(START)
    assert api.update(inline(delta_part(OTHER_STEP))).status_code == 200
    assert api.post(FINISH).status_code == 200
    assert same(api.rig.engine.weights, after(BASE, OTHER_STEP))


@pytest.mark.parametrize("version", ["9", "step-8", ""])
def test_another_weight_version_than_the_parts(api: Api, version: str) -> None:
    api.post(START)
    api.update(inline(delta_part()))
    error = assert_error(api.post(FINISH, {"weight_version": version}), 409, "Conflict")
    assert error["expected"] == "8"
    assert_ended(api)


def test_an_update_without_parts(api: Api) -> None:
    api.post(START)
    assert api.post(FINISH, {"weight_version": str(VERSION)}).status_code == 200
    api.post(START)
    assert_error(api.post(FINISH, {"weight_version": "8"}), 409, "Conflict")
    assert_ended(api)


def test_a_repeat_of_what_is_committed(api: Api) -> None:
    for _ in range(2):
        api.post(START)
        for body in parts():
            assert api.update(inline(body)).status_code == 200
        assert api.post(FINISH, {"weight_version": "8"}).status_code == 200
    assert same(api.rig.engine.weights, NEXT)
    assert api.rig.engine.writes == [1, 1]


def test_a_write_that_fails_half_way_and_the_full_sync_after_it(api: Api) -> None:
    api.post(START)
    api.update(inline(delta_part()))
    api.rig.engine.shards[1].breaks = True
    assert_error(api.post(FINISH), 500, "CommitFailed", "uncertain", version=7)
    api.rig.engine.shards[1].breaks = False
    api.post(START)
    assert api.update(inline(full_part(NEXT, 9))).status_code == 200
    assert api.post(FINISH, {"weight_version": "9"}).status_code == 200
    api.rig.assert_committed(api.rig.send(delta_part(OTHER_STEP, 10)), after(NEXT, OTHER_STEP), 10)


def test_access_is_that_of_the_delta_endpoints(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = api.post(START, peer=("10.0.0.9", 1))
    assert_error(elsewhere, 403, "AccessDenied")
    monkeypatch.setenv(API_KEY_ENVIRONMENT, "secret")
    for path in transfer_frontend.PATHS:
        assert_error(api.post(path), 401, "Unauthorized")
    headers = {"Authorization": "Bearer secret"}
    assert api.post(START, headers=headers, peer=("10.0.0.9", 1)).status_code == 200


def test_bodies_are_bounded_before_they_are_read(api: Api) -> None:
    async def chunks() -> Any:
        yield pytest.fail("read")

    headers = {"content-length": str(2 * MAX_INLINE_BYTES)}
    assert_error(api.post(UPDATE, content=chunks(), headers=headers), 413, "TooLarge")
    assert_error(api.post(UPDATE, content=chunks()), 413, "TooLarge")


def test_signatures(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HMAC_KEY_ENVIRONMENT, "key")
    body = delta_part()
    api.post(START)
    assert_error(api.update(inline(body)), 401, "Unauthorized")
    api.post(START)
    signature = hmac.new(b"key", body, hashlib.sha256).hexdigest()
    assert api.update(inline(body, signature=signature)).status_code == 200
    assert api.post(FINISH).status_code == 200
    assert same(api.rig.engine.weights, NEXT)


def test_another_backend_is_vllms_own_affair(rig: Rig) -> None:
    """Without our backend, the guard lets everything through."""
    app = FastAPI()

    @app.post(UPDATE)
    async def update() -> str:
        return "vLLM's"

    DeltaEndpoints().attach_router(app)
    app.state.delta_service = rig.service
    answer = rig.run(rig.request("POST", UPDATE, app=app, peer=("10.0.0.9", 1)))
    assert answer.json() == "vLLM's"
    assert not transfer_frontend.is_chosen(None)
    assert not transfer_frontend.is_chosen(SimpleNamespace(backend="nccl"))
    assert transfer_frontend.is_chosen(SimpleNamespace(backend="delta_updates"))


def test_several_http_processes_do_not_start(rig: Rig) -> None:
    engine: Any = SimpleNamespace(shared=True)
    with pytest.raises(RuntimeError, match="--api-server-count 1"):
        transfer_frontend.install(SimpleNamespace(), rig.service, engine)


def test_our_own_backend_is_no_foreign_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_ext.adapters.versions.Feature.offered", lambda feature: False)
    others = {"update_weights", "finish_weight_update"}
    assert others < set(features.weight_changes())
    assert not others & set(features.weight_changes(own_transfer=True))
    assert "reload_weights" in features.weight_changes(own_transfer=True)
