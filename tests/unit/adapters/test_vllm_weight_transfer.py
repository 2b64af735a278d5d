"""vLLM's weight-transfer routes over receivers in this process, and what they must refuse."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import APIRouter, Body, FastAPI, Request

from delta_sender.integrations.transfer_destination import (
    Channel,
    HttpSyncClient,
    TransferDestination,
)
from delta_sender.options import with_defaults
from delta_sender.results import SyncError
from delta_server.transfer import MAX_INLINE_BYTES
from engine_ext.adapters.vllm import features, transfer_frontend
from engine_ext.adapters.vllm.frontend import DeltaEndpoints
from engine_ext.adapters.vllm.transfer_group import TransferGroup
from engine_ext.errors import DeltaError
from engine_ext.settings import API_KEY_ENVIRONMENT
from engine_ext.wire.operations import Operation, decode_answers, encode_request
from engine_ext.wire.signature import HMAC_KEY_ENVIRONMENT
from tests.support.delta_bodies import (
    OTHER_STEP,
    STEP,
    VERSION,
    Changes,
    after,
    delta_part,
    fresh_weights,
    full_part,
    part_of,
    same,
    sparse,
)
from tests.support.endpoint_rig import Rig, assert_error

BASE = fresh_weights()
NEXT = after(BASE, STEP)
SPLIT: list[Changes] = [
    {"embed.weight": {0: 0x1111, 13: 0x7FC1}},
    {"norm.weight": {7: 0x3333}},
]
SAME = {"part": 1, "num_parts": 2, "sync_id": "s"}  # of the sync that `parts` begins
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"


def parts(**metadata: Any) -> list[bytes]:
    return [
        delta_part(changes, part=number, num_parts=len(SPLIT), sync_id="s", **metadata)
        for number, changes in enumerate(SPLIT)
    ]


def inline(body: bytes, **keys: Any) -> dict[str, Any]:
    return {"part": base64.b64encode(body).decode(), **keys}


class Worker:
    """The engine's first worker, of two; the second one receives nothing."""

    shared = False

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.groups = [TransferGroup(torch.device("cpu"), receives=n == 0) for n in range(2)]

    async def call(self, request: Operation[Any], method: str = "delta_updates") -> list[Any]:
        if method == "delta_updates":
            return await self._rig.engine.call(request)
        return decode_answers(
            request, [one.handle(*encode_request(request)) for one in self.groups]
        )


class Api:
    """The routes as vLLM has them, for an engine in this process."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.worker = rig, Worker(rig)
        client = self.client = SimpleNamespace()
        router = APIRouter()

        @router.post("/init_weight_transfer_engine")
        async def init(init_info: dict[str, Any] = Body(embed=True)) -> None:
            await client.init_weight_transfer_engine(SimpleNamespace(init_info=init_info))

        @router.post(START)
        async def start() -> None:
            await client.start_weight_update()

        @router.post("/start_draft_weight_update")
        async def start_draft() -> None:
            await client.start_draft_weight_update()

        @router.post(UPDATE)
        async def update(update_info: Any = Body(embed=True)) -> None:
            await client.update_weights(request=SimpleNamespace(update_info=update_info))

        @router.post(FINISH)
        async def finish(request: Request) -> None:
            body = await request.json() if await request.body() else {}
            await client.finish_weight_update(body.get("weight_version"))

        self.app = FastAPI()
        self.app.include_router(router)
        DeltaEndpoints().attach_router(self.app)
        self.app.state.delta_service = rig.service
        self.app.state.delta_transfer = transfer_frontend.install(
            client,
            rig.service,
            self.worker,  # type: ignore[arg-type]
        )

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return self.rig.run(self.rig.request("POST", path, app=self.app, json=json, **options))

    def update(self, info: Any) -> httpx.Response:
        return self.post(UPDATE, {"update_info": info})

    # The protocol of vLLM's clients.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.post("/init_weight_transfer_engine", {"init_info": init_info}).raise_for_status()

    def start_weight_update(self) -> None:
        self.post(START).raise_for_status()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.update(update_info).raise_for_status()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.post(FINISH, {"weight_version": weight_version}).raise_for_status()


@pytest.fixture
def api(disk_rig: Rig) -> Iterator[Api]:
    api = Api(disk_rig)
    yield api
    for group in api.worker.groups:
        group.close()


def assert_ended(api: Api) -> None:
    """The update has ended with an error, and nothing of it is left."""
    assert_error(api.post(FINISH), 409, "Conflict")
    assert api.rig.status()["staged"] is None
    api.rig.assert_untouched()


def test_parts_are_staged_and_the_end_commits(api: Api) -> None:
    rig = api.rig
    assert api.post(START).status_code == 200
    for body in parts():
        assert api.update(inline(body)).status_code == 200
        assert same(rig.engine.weights, BASE)
    assert rig.engine.events == []
    assert api.post(FINISH, {"weight_version": "8"}).status_code == 200
    assert same(rig.engine.weights, NEXT)
    assert rig.engine.events == [
        ("pause", "keep", True), ("commit",), ("set_weight_version", "8"), ("resume",),
    ]  # fmt: skip


def test_the_records_are_those_of_posted_parts(make_rig: Callable[..., Rig]) -> None:
    """Status, history, digest and weight version are the same, whichever way parts came."""

    def facts(rig: Rig) -> tuple[Any, ...]:
        rig.run(rig.service.reporter.flush())
        [record] = rig.get("/delta_status", params={"history": "true"}).json()["history"]
        for varying in ("at", "timings_ms"):
            del record[varying]
        status = rig.status()
        status["last_sync"].pop("commit_ms")
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
    assert api.rig.engine.events[0] == ("pause", "wait", False)


@pytest.mark.parametrize(
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
def test_a_refused_part_ends_the_update(api: Api, info: Any, status: int, kind: str) -> None:
    api.post(START)
    assert api.update(inline(parts()[0])).status_code == 200
    assert_error(api.update(info), status, kind)
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
    """What the first try staged keeps nobody out."""
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
    assert_error(elsewhere, 403, "LoopbackOnly")
    monkeypatch.setenv(API_KEY_ENVIRONMENT, "secret")
    for path in transfer_frontend.PATHS:
        assert_error(api.post(path), 401, "Unauthorized")
    headers = {"Authorization": "Bearer secret"}
    assert api.post(START, headers=headers, peer=("10.0.0.9", 1)).status_code == 200


def test_bodies_are_bounded_before_they_are_read(api: Api) -> None:
    async def chunks() -> Any:
        raise AssertionError("read")
        yield b""

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


# The trainer's half --------------------------------------------------------------------------


def destination(api: Api, channel: Channel, **options: Any) -> TransferDestination:
    def answer(request: httpx.Request) -> httpx.Response:
        answer = api.rig.get(request.url.path, params=dict(request.url.params))
        return httpx.Response(answer.status_code, content=answer.content)

    client = httpx.Client(transport=httpx.MockTransport(answer))
    return TransferDestination(
        "http://engine", with_defaults({"client": client, **options}), api, channel
    )


CHANNELS: Sequence[dict[str, Any]] = [
    {"kind": "inline"},
    {"kind": "disk", "inline_bytes": 0},
    {"kind": "collective", "inline_bytes": 0, "timeout": 60.0},
]


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel["kind"])
@pytest.mark.parametrize("key", [None, "key"])
def test_every_channel(
    api: Api, root: Path, channel: dict[str, Any], key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if key is not None:
        monkeypatch.setenv(HMAC_KEY_ENVIRONMENT, key)
    sender = destination(api, Channel(folder=root, **channel), hmac_key=key)
    first, second = parts()
    assert sender.deliver(first, 8, 0, False)["status"] == "staged"
    assert same(api.rig.engine.weights, BASE)
    answer = sender.deliver(second, 8, 1, True)
    assert (answer["status"], answer["digest"]) == ("committed", api.rig.digest_of(NEXT))
    assert same(api.rig.engine.weights, NEXT)
    assert list(root.iterdir()) == []
    assert api.rig.spooled() == []
    # A refusal does not keep the next sync out.
    with pytest.raises(SyncError) as refused:
        sender.deliver(delta_part(version=20), 20, 0, True)
    assert (refused.value.status, refused.value.is_refusal) == (409, True)
    body = delta_part(OTHER_STEP, 9)
    assert sender.deliver(body, 9, 0, True)["status"] == "committed"
    assert same(api.rig.engine.weights, after(NEXT, OTHER_STEP))
    sender.close()


def test_a_broadcast_that_the_engine_does_not_take(api: Api) -> None:
    """The trainer is told at once, and the next broadcast arrives."""
    sender = destination(api, Channel(kind="collective", inline_bytes=0, timeout=60.0))
    with pytest.raises(SyncError) as refused:
        sender.deliver(bytes(1 << 15), 8, 0, True)
    assert refused.value.error["type"] == "TooLarge"
    assert sender.deliver(delta_part(), 8, 0, True)["status"] == "committed"
    sender.close()


def test_a_trainer_that_leaves_in_mid_broadcast(api: Api) -> None:
    sender = destination(api, Channel(kind="collective", inline_bytes=0, timeout=60.0))
    sender._group = sender._join()
    api.post(START)
    sender._group = None
    assert_error(api.update({"broadcast_bytes": 1 << 10}), 408, "UploadTooSlow")
    assert_ended(api)
    sender.close()


class NoWorker:
    """A client of an engine none of whose workers comes; the first call is that without a group."""

    def __init__(self, error: Exception | None) -> None:
        self._error, self._calls = error, 0

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        self._calls += 1
        if self._calls > 1 and self._error is not None:
            raise self._error

    def start_weight_update(self) -> None:
        pass


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("error", "match"), [(ConnectionError("gone"), "gone"), (None, "none of its workers")]
)
def test_a_worker_that_never_comes_is_not_waited_for(error: Exception | None, match: str) -> None:
    channel = Channel(kind="collective", inline_bytes=0, timeout=3600.0)
    sender = TransferDestination("http://engine", with_defaults({}), NoWorker(error), channel)  # type: ignore[arg-type]
    with pytest.raises((SyncError, RuntimeError), match=match):
        sender.deliver(bytes(1 << 10), 8, 0, True)
    sender.close()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_worker_that_waits_for_its_trainer_may_exit() -> None:
    code = """
import torch
from engine_ext.adapters.vllm.transfer_group import JoinGroup, TransferGroup
from engine_ext.wire.operations import encode_request

group = TransferGroup(torch.device("cpu"), receives=True)
join = JoinGroup(master_address="127.0.0.1", master_port=1, backend="gloo", timeout=3600.0)
group.handle(*encode_request(join))
group.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert done.returncode == 0


def test_a_lost_answer_is_no_refusal() -> None:
    class Gone:
        def init_weight_transfer_engine(self, init_info: Any) -> None:
            raise ConnectionError("gone")

    with pytest.raises(SyncError, match="gone") as lost:
        TransferDestination("http://engine", with_defaults({}), Gone(), Channel())  # type: ignore[arg-type]
    assert (lost.value.status, lost.value.is_refusal) == (None, False)


def test_a_client_with_a_token(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_ENVIRONMENT, "secret")

    def answer(request: httpx.Request) -> httpx.Response:
        options = {"content": request.read(), "headers": dict(request.headers)}
        answer = api.post(request.url.path, **options)
        return httpx.Response(answer.status_code, content=answer.content)

    def client(**options: Any) -> HttpSyncClient:
        made = HttpSyncClient("http://engine/", **options)
        made._client._transport = httpx.MockTransport(answer)
        return made

    with pytest.raises(httpx.HTTPStatusError, match="401"):
        client(api_key="wrong").start_weight_update()
    right = client()  # by the environment
    right.init_weight_transfer_engine({})
    right.start_weight_update()
    right.update_weights(inline(delta_part()))
    right.finish_weight_update("8")
    right.close()
    assert same(api.rig.engine.weights, NEXT)


def test_errors_that_are_bugs_are_answered_like_errors(api: Api) -> None:
    async def broken() -> None:
        raise KeyError("bug")

    with pytest.raises(DeltaError, match="KeyError"):
        asyncio.run(transfer_frontend._completing(broken)())
