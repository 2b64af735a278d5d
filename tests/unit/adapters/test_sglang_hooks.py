"""SGLang's hooks and its channel, as far as they need no SGLang."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from engine_ext import settings
from engine_ext.adapters.sglang import frontend, hooks, rpc
from engine_ext.adapters.sglang.frontend import DiskUpdates
from engine_ext.ranks import operations as ops
from tests.support.cases import in_one_test


@pytest.fixture(autouse=True)
def nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.ENVIRONMENT, raising=False)


def test_nothing_happens_where_nobody_asks() -> None:
    assert hooks.read_arguments(argparse.Namespace(load_format="auto")) is False
    assert settings.from_environment() is None
    app, runner = SimpleNamespace(), SimpleNamespace(is_draft_worker=False)
    asyncio.run(hooks.attach(app, None))
    loaded: list[str] = []
    hooks.load_model(runner, lambda: loaded.append("model"))
    assert (vars(app), vars(runner)) == ({}, {"is_draft_worker": False})
    assert loaded == ["model"]


def test_load_format_delta_is_one_choice() -> None:
    parser = argparse.ArgumentParser()
    choices = ["auto", "pt"]
    parser.add_argument("--load-format", choices=choices)
    hooks.add_arguments(parser)
    assert choices == ["auto", "pt", "delta"]
    other = argparse.ArgumentParser()
    other.add_argument("--load-format", choices=choices)
    hooks.add_arguments(other)
    assert choices == ["auto", "pt", "delta"]


def test_a_draft_model_without_its_target_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.ENVIRONMENT, "{}")
    loaded: list[str] = []
    runner = SimpleNamespace(is_draft_worker=True, load_model=lambda: loaded.append("draft"))
    with pytest.raises(RuntimeError, match="would stay as they are"):
        hooks.load_model(runner)
    assert loaded == []


def test_a_call_and_its_reply() -> None:
    call = rpc.Call(call="c", operation="status", arguments={"now": 1.5})
    assert rpc.Call.from_manifest(msgspec.to_builtins(call)) == call
    text = call.reply([{"ok": {"version": 3}}], 0).removeprefix("delta-updates:")
    reply = msgspec.json.decode(text, type=rpc.CallReply)
    assert (reply.call, reply.answers, reply.failure) == ("c", [{"ok": {"version": 3}}], None)


@pytest.mark.parametrize("ended", [False, True])
def test_the_server_ends_with_a_replicas_scheduler(
    monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """SGLang watches their controller alone."""
    sent: list[int] = []
    stand_in = SimpleNamespace(getpid=os.getpid, kill=lambda pid, number: sent.append(number))
    monkeypatch.setattr(rpc, "os", stand_in)
    controller = subprocess.Popen(
        [sys.executable, "-c", "import os, time; os.fork(); time.sleep(600)"]
    )
    try:
        watchdog = SimpleNamespace(
            _processes=[SimpleNamespace(pid=controller.pid, is_alive=lambda: True)]
        )
        manager = SimpleNamespace(_subprocess_watchdog=watchdog, gracefully_exit=False)
        while not (schedulers := rpc._schedulers_of_replicas(manager)):
            time.sleep(0.01)
        channel = object.__new__(rpc.Channel)
        channel._manager, channel._schedulers = manager, schedulers
        if ended:
            schedulers[0].kill()
            while rpc._is_running(schedulers[0]):
                time.sleep(0.01)
            with pytest.raises(RuntimeError, match="the engine died"):
                channel._require_alive()
        else:
            channel._require_alive()
        assert sent == [signal.SIGQUIT] * ended
    finally:
        for process in [*psutil.Process(controller.pid).children(), controller]:
            process.kill()
        controller.wait()


class Output(SimpleNamespace):
    """SGLang's answer to a disk update."""


@pytest.mark.parametrize("is_alive", [False, True])
def test_server_that_drains_answers_a_call_in_flight(
    monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    """After SIGTERM, SGLang serves until no request is left, and ends its ranks then."""
    structs = SimpleNamespace(
        UpdateWeightFromDiskReqOutput=Output, UpdateWeightFromDiskReqInput=SimpleNamespace
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", structs)
    answers: dict[type, Any] = {Output: None}

    def dispatch(sent: Any) -> None:
        call = rpc.Call.from_manifest(sent.manifest)
        message = call.reply([ops.encode_answer(ops.Reply)], 0)
        output = Output(success=True, message=message)
        asyncio.get_running_loop().call_later(1.0, lambda: answers[Output](output))

    rank = SimpleNamespace(is_alive=lambda: is_alive)
    manager = SimpleNamespace(
        gracefully_exit=True,
        auto_create_handle_loop=lambda: None,
        _dispatch_to_scheduler=dispatch,
        _result_dispatcher=SimpleNamespace(_mapping=answers),
        _subprocess_watchdog=SimpleNamespace(_processes=[rank]),
    )
    channel = rpc.Channel(manager)
    if is_alive:
        assert asyncio.run(channel.call(ops.AbortSync())) == [ops.Reply()]
    else:
        with pytest.raises(RuntimeError, match="the engine died"):
            asyncio.run(channel.call(ops.AbortSync()))


@in_one_test("manifest", [None, {}, {"call": 1}, {"w": {"dtype": "bf16"}}])
def test_a_manifest_of_another_kind_is_no_call(manifest: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        rpc.Call.from_manifest(manifest)


@in_one_test(
    ("body", "taken_by"),
    [
        (b'{"load_format": "delta", "model_path": "m"}', "delta"),
        (b'{"load_format": "auto", "model_path": "m"}', "other"),
        (b'{"model_path": "m"}', "other"),
        (b'{"model_path": "pulled"}', "delta"),
        (b'{"model_path": "pulled", "load_format": "auto"}', "other"),
        (b'{"load_format": "delt', "other"),
        # Bodies that SGLang's own parser takes, too.
        (b'{"load_format": "delta", "token_step": NaN}', "delta"),
        (b'{"load_format": "auto", "load_format": "delta"}', "delta"),
        (b'{"load_format": "delta", "load_format": "auto"}', "other"),
        (rb'{"load\u005fformat": "d\u0065lta"}', "delta"),
        ('{"load_format": "delta"}'.encode("utf-16"), "delta"),
        ('\ufeff{"load_format": "delta"}'.encode("utf-16-le"), "delta"),
        (b"[" * 100_000, "other"),
        (b"[1]", "other"),
        (b"", "other"),
    ],
)
@in_one_test("cut", [0, 20])
def test_disk_updates_go_by_their_format(body: bytes, taken_by: str, cut: int) -> None:
    """However the body arrives, the app that takes it gets all of it."""
    seen: dict[str, bytes] = {}

    def app(name: str) -> Any:
        async def take(scope: Any, receive: Any, send: Any) -> None:
            more = True
            while more:
                message = await receive()
                seen[name] = seen.get(name, b"") + message["body"]
                more = message["more_body"]

        return take

    chunks = [
        {"type": "http.request", "body": body[:cut], "more_body": True},
        {"type": "http.request", "body": body[cut:], "more_body": False},
    ]

    async def receive() -> Any:
        return chunks.pop(0)

    asyncio.run(DiskUpdates(app("delta"), app("other"), is_pulled)({}, receive, None))
    assert seen == {taken_by: body}


async def is_pulled(path: Any) -> bool:
    return bool(path == "pulled")


@pytest.mark.parametrize("why", ["large", "slow"])
def test_a_disk_update_that_is_not_read_whole_is_not_sglangs(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delta endpoint refuses it: unread, it might be a delta that has no token."""
    monkeypatch.setattr(frontend, "_MAX_BODY_BYTES", 100)
    monkeypatch.setattr(frontend, "_MAX_BODY_S", 0.05)
    chunk = {"type": "http.request", "body": b" " * 60, "more_body": True}
    received, seen = [0], []

    async def receive() -> Any:
        if why == "slow" and received[0]:
            await asyncio.sleep(60)
        received[0] += 1
        return chunk

    async def delta(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(received[0]):
            seen.append(await receive())

    async def other(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("SGLang's own route got it")

    asyncio.run(DiskUpdates(delta, other, is_pulled)({}, receive, None))
    assert seen == [chunk] * (2 if why == "large" else 1)


def test_what_sglang_derives_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MiMo and Step switch several draft models on, which no command line shows."""
    spec = SimpleNamespace(enable_multi_layer_eagle=True, other=1)
    inner = SimpleNamespace(offload_group_size=-1)
    context = SimpleNamespace(
        get_spec=lambda: spec, get_exec=lambda: SimpleNamespace(_subs={"offload": inner})
    )
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt", SimpleNamespace(runtime_context=context))
    monkeypatch.setenv(settings.ENVIRONMENT, "{}")
    found = vars(hooks.resolved_settings())
    assert found == {"enable_multi_layer_eagle": True, "offload_group_size": -1}
    loaded: list[str] = []
    runner = SimpleNamespace(is_draft_worker=False, load_model=lambda: loaded.append("model"))
    with pytest.raises(ValueError, match="it loads several draft models"):
        hooks.load_model(runner)
    assert loaded == []
