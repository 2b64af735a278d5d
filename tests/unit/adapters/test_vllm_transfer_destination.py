"""A trainer that sends through vLLM's weight-transfer routes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from delta_sender.integrations.transfer_destination import (
    Channel,
    HttpSyncClient,
    TransferDestination,
)
from delta_sender.options import SenderOptions
from delta_sender.results import EngineBusy, SyncError
from engine_ext.adapters.vllm import transfer_frontend
from engine_ext.errors import DeltaError
from engine_ext.settings import API_KEY_ENVIRONMENT, HMAC_KEY_ENVIRONMENT
from tests.support.delta_bodies import BASE, NEXT, OTHER_STEP, after, delta_part, same
from tests.support.endpoint_rig import assert_error
from tests.unit.adapters.transfer_api import START, Api, assert_ended, inline, parts

pytestmark = pytest.mark.slow


def destination(
    api: Api, channel: Channel, sync_client: Any = None, **options: Any
) -> TransferDestination:
    def answer(request: httpx.Request) -> httpx.Response:
        answer = api.rig.get(request.url.path, params=dict(request.url.params))
        return httpx.Response(answer.status_code, content=answer.content)

    client = httpx.Client(transport=httpx.MockTransport(answer))
    return TransferDestination(
        "http://engine",
        SenderOptions(client=client, **options),
        api if sync_client is None else sync_client,
        channel,
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


@pytest.mark.parametrize("mask", [0o022, 0o077], ids=oct)
def test_an_engine_of_another_user_can_read_the_file(
    api: Api, root: Path, mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: set[int] = set()

    class Looks:
        def __getattr__(self, name: str) -> Any:
            modes.update(path.stat().st_mode & 0o777 for path in root.rglob("*"))
            return getattr(api, name)

    monkeypatch.setenv(HMAC_KEY_ENVIRONMENT, "key")
    channel = Channel(kind="disk", inline_bytes=0, folder=root)
    before = os.umask(mask)
    try:
        with closing(destination(api, channel, Looks(), hmac_key="key")) as sender:
            assert sender.deliver(delta_part(), 8, 0, True)["status"] == "committed"
    finally:
        os.umask(before)
    assert modes == {0o755, 0o644}


def test_engines_that_commit_as_one_are_refused(api: Api) -> None:
    """Its calls commit a sync at once, whatever the others do."""
    with pytest.raises(ValueError, match=r"commit='each'"):
        destination(api, Channel(), commit="all_or_none")


def test_a_broadcast_that_the_engine_does_not_take(api: Api) -> None:
    """The trainer gets the error at once, and the next broadcast arrives."""
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
    sender = TransferDestination("http://engine", SenderOptions(), NoWorker(error), channel)  # type: ignore[arg-type]
    with pytest.raises((SyncError, RuntimeError), match=match):
        sender.deliver(bytes(1 << 10), 8, 0, True)
    sender.close()


class Hangs:
    """A client of an engine that takes calls and does not answer those that it `hangs` in."""

    def __init__(self, api: Api, hangs: str) -> None:
        self._api, self._hangs = api, hangs
        self.released = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return self._wait if name == self._hangs else getattr(self._api, name)

    def _wait(self, *arguments: Any) -> None:
        self.released.wait(60.0)
        raise ConnectionError("released")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hangs", ["start_weight_update", "update_weights", "finish_weight_update"])
@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel["kind"])
def test_an_engine_that_hangs_holds_a_sync_for_the_timeout(
    api: Api, root: Path, channel: dict[str, Any], hangs: str
) -> None:
    client = Hangs(api, hangs)
    timeout = 2.0 if channel["kind"] == "collective" else 0.5  # the worker joins within it
    sender = destination(api, Channel(**{"folder": root, **channel, "timeout": timeout}), client)
    began = time.monotonic()
    with pytest.raises(SyncError, match=r"has not answered") as lost:
        sender.deliver(delta_part(), 8, 0, True)
    assert time.monotonic() - began < 5.0
    assert (lost.value.status, lost.value.is_refusal) == (None, False)
    client.released.set()
    began = time.monotonic()
    sender.close()
    assert time.monotonic() - began < 2.0


class OldTimeout(Exception):
    """What a future raises in Python 3.10, where it is not the builtin `TimeoutError`."""


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["inline", "collective"])
def test_sender_knows_the_timeout_of_python_3_10(
    api: Api, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Hangs(api, "update_weights")
    sender = destination(api, Channel(kind=kind, inline_bytes=0, timeout=1.0), client)
    for module in ("concurrent.futures", "concurrent.futures._base"):
        monkeypatch.setattr(f"{module}.TimeoutError", OldTimeout)
    with pytest.raises(SyncError, match=r"the engine has not answered"):
        sender.deliver(delta_part(), 8, 0, True)
    client.released.set()
    sender.close()


@pytest.mark.timeout(60)
def test_a_worker_that_waits_for_its_trainer_may_exit() -> None:
    code = """
import torch
from engine_ext.adapters.vllm.transfer_group import JoinGroup, Transfer, TransferGroup
from engine_ext.ranks.operations import encode_request

group = TransferGroup(torch.device("cpu"), receives=True)
join = JoinGroup(master_address="127.0.0.1", master_port=1, backend="gloo", timeout=3600.0)
group.handle(*encode_request(Transfer(step=join)))
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
        TransferDestination("http://engine", SenderOptions(), Gone(), Channel())  # type: ignore[arg-type]
    assert (lost.value.status, lost.value.is_refusal) == (None, False)


def test_an_update_begins_again_when_another_sync_has_ended() -> None:
    calls: list[str] = []
    sent = httpx.Request("POST", "http://engine/update_weights")
    said = {"error": {"type": "SyncInProgress", "message": "another sync has parts staged"}}
    answer = httpx.Response(409, json=said, headers={"Retry-After": "0"}, request=sent)

    class Busy:
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            pass

        def start_weight_update(self) -> None:
            calls.append("start")

        def update_weights(self, update_info: dict[str, Any]) -> None:
            calls.append("update")
            if calls.count("update") != 2:
                answer.raise_for_status()

    sender = TransferDestination("http://engine", SenderOptions(), Busy(), Channel())  # type: ignore[arg-type]
    assert sender.deliver(b"first", 1, 0, last=False)["status"] == "staged"
    assert calls == ["start", "update"] * 2
    with pytest.raises(EngineBusy, match="another sync has parts staged") as refused:
        sender.deliver(b"second", 1, 1, last=False)
    assert (calls, refused.value.status) == (["start", "update"] * 2 + ["update"], 409)
    sender.close()


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

    async def completed() -> None:
        await transfer_frontend._completing(broken)()

    with pytest.raises(DeltaError, match="KeyError"):
        asyncio.run(completed())
