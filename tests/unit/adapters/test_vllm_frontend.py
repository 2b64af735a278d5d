"""The endpoints in vLLM's front end, over a client of vLLM that is simulated."""

from __future__ import annotations

import asyncio
import functools
from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from engine_ext import settings
from engine_ext.adapters.vllm.engine_core import CALL_STOPPED, PUBLISH
from engine_ext.adapters.vllm.frontend import DeltaEndpoints
from engine_ext.errors import AdapterNotLoaded, DeltaError, EngineUncertain
from engine_ext.ranks.operations import Stop, decode_request, encode_answer
from tests.support.delta_bodies import RESYNCED, delta_part, full_part
from tests.support.endpoint_rig import DELTA, Rig, app_of, assert_error


def give(answer: Any) -> Any:
    if isinstance(answer, DeltaError):
        raise answer
    return answer


def encoded(answers: Sequence[Any]) -> list[Any]:
    return [encode_answer(functools.partial(give, one)) for one in answers]


class Client:
    """vLLM's client; a wake-up resumes unless memory still sleeps."""

    errored = False
    refuses: DeltaError | None = None  # what every worker answers from then on

    def __init__(self, rig: Rig) -> None:
        self._engine = rig.engine
        self._asleep: set[str] = set()
        parallel = SimpleNamespace(_api_process_count=1, nnodes=1, use_ray=False)
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel,
            model_config=SimpleNamespace(model="checkpoint"),
            lora_config=None,
            weight_transfer_config=None,
        )
        self.engine_core = SimpleNamespace(call_utility_async=self.call_utility)
        self.is_paused = rig.engine.is_paused
        self.resume_generation = rig.engine.resume
        self.get_weight_version = rig.engine.get_weight_version

    async def call_utility(self, method: str, *given: Any) -> Any:
        """Call a method of the engine core."""
        if method == PUBLISH:
            version, resumes = given
            return await self._engine.publish(version, resumes=resumes)
        if method == CALL_STOPPED:
            flush_cache, *request = given
            stopped = await self._engine.call_stopped(decode_request(*request), flush_cache)
            stop = Stop(stop_ms=stopped.stop_ms, caches_ms=stopped.caches_ms)
            return {"stop": msgspec.to_builtins(stop), "answers": encoded(stopped.answers)}
        _, _, request, _ = given
        if self.refuses is not None:
            return encoded([self.refuses])
        return encoded(await self._engine.call(decode_request(*request)))

    async def pause_generation(
        self, *, mode: str, clear_cache: bool = True, wait_for_inflight_requests: bool = False
    ) -> None:
        await self._engine.pause(mode)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._engine.events.append(("sleep",))
        self._engine.paused = True
        if level > 0:
            self._asleep |= {"weights", "kv_cache"}
            self._engine.set_asleep(True)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self._engine.events.append(("wake_up",))
        self._asleep -= {*(tags or self._asleep)}
        self._engine.set_asleep("weights" in self._asleep, other=bool(self._asleep))
        self._engine.paused = bool(self._asleep)

    async def release_kv_cache_memory(self) -> None:
        self._engine.events.append(("release_kv_cache_memory",))


class Server:
    """vLLM's HTTP server, for an engine in this process."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.client = rig, Client(rig)
        state: Any = SimpleNamespace()
        rig.run(DeltaEndpoints().init_state(self.client, state, Namespace()))
        self.service = state.delta_service
        self.app = app_of(self.service)

    async def sending(self, body: bytes) -> httpx.Response:
        headers = {"Content-Type": "application/octet-stream"}
        return await self.rig.request("POST", DELTA, app=self.app, content=body, headers=headers)

    def send(self, body: bytes) -> httpx.Response:
        return self.rig.run(self.sending(body))

    def fail_commit(self) -> None:
        """Leave the engine uncertain, and paused."""
        self.rig.engine.shards[1].breaks = True
        assert_error(self.send(delta_part()), 500, "CommitFailed", "uncertain")
        self.rig.engine.shards[1].breaks = False


@pytest.fixture
def server(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv(settings.ENVIRONMENT, msgspec.json.encode(rig.settings).decode())
    return Server(rig)


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (DeltaError("the ranks are gone"), ["a worker still has style: the ranks are gone"]),
        (AdapterNotLoaded("this engine takes no updates of LoRA adapters", adapter="style"), []),
    ],
)
def test_an_unload_that_a_worker_refuses_is_logged(
    rig: Rig,
    error: DeltaError,
    logged: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM has unloaded the adapter by then."""
    monkeypatch.setenv(settings.ENVIRONMENT, msgspec.json.encode(rig.settings).decode())
    client, models = Client(rig), SimpleNamespace(lora_requests={"style": 1})
    client.vllm_config.lora_config = SimpleNamespace()

    async def unload_lora_adapter(request: Any) -> str:
        models.lora_requests.pop(request.lora_name)
        return "unloaded"

    models.unload_lora_adapter = unload_lora_adapter
    state = SimpleNamespace(openai_serving_models=models)
    rig.run(DeltaEndpoints().init_state(client, state, Namespace()))
    client.refuses = error
    answer = rig.run(models.unload_lora_adapter(SimpleNamespace(lora_name="style")))
    assert answer == "unloaded"
    assert [m.removeprefix("delta updates: ") for m in caplog.messages] == logged


@pytest.mark.parametrize("change", ["sleep", "wake_up", "release_kv_cache_memory"])
def test_memory_is_not_released_or_woken_during_a_commit(server: Server, change: str) -> None:
    """A wake-up resumes an engine that has never slept, and its requests would mix weights."""
    events = server.rig.engine.events

    async def scenario() -> httpx.Response:
        commit = asyncio.ensure_future(server.sending(delta_part()))
        while ("commit",) not in events:
            await asyncio.sleep(0)
        asked = asyncio.ensure_future(getattr(server.client, change)())
        response = await commit
        await asked
        return response

    assert server.rig.run(scenario()).json()["status"] == "committed"
    assert events[-2:] == [("publish", "8", True), (change,)]


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ("resume_generation", {}),
        ("wake_up", {}),
        ("wake_up", {"tags": ["scheduling"]}),
        ("wake_up", {"tags": ["weights"]}),  # they do not sleep: vLLM would resume
        ("pause_generation", {"mode": "wait", "clear_cache": False}),
        ("pause_generation", {"mode": "keep", "wait_for_inflight_requests": True}),
        ("sleep", {"level": 0, "mode": "wait"}),
    ],
)
def test_kept_requests_do_not_go_on_while_uncertain(
    server: Server, change: str, options: dict[str, Any]
) -> None:
    """A pause that waits lets the requests in flight continue to their ends."""
    server.fail_commit()
    server.rig.engine.events.clear()
    with pytest.raises(EngineUncertain):
        server.rig.run(getattr(server.client, change)(**options))
    assert (server.rig.engine.events, server.rig.engine.paused) == ([], True)
    assert server.send(full_part(RESYNCED, 8)).json()["status"] == "committed"
    assert not server.rig.engine.paused
    server.rig.run(getattr(server.client, change)(**options))


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ("pause_generation", {"mode": "abort", "clear_cache": False}),
        ("sleep", {}),
        ("release_kv_cache_memory", {}),
    ],
)
def test_engine_can_be_stopped_while_uncertain(
    server: Server, change: str, options: dict[str, Any]
) -> None:
    server.fail_commit()
    server.rig.run(getattr(server.client, change)(**options))
    assert server.rig.engine.paused


def test_sleeping_weights_are_woken_for_the_full_sync(server: Server) -> None:
    """vLLM resumes once all memory is back, so the weights must come alone."""
    client = server.client
    server.fail_commit()
    server.rig.run(client.sleep())
    assert_error(server.send(full_part(RESYNCED, 8)), 409, "WeightsAsleep")
    for tags in (None, ["kv_cache"], ["weights", "kv_cache"]):
        with pytest.raises(EngineUncertain):
            server.rig.run(client.wake_up(tags))
    server.rig.run(client.wake_up(["weights"]))
    assert server.send(full_part(RESYNCED, 8)).json()["status"] == "committed"
    assert server.rig.engine.paused
    server.rig.run(client.wake_up(["kv_cache"]))
    assert not server.rig.engine.paused


def test_vllms_own_routes_of_the_same_name_are_replaced(rig: Rig) -> None:
    """vLLM 0.31 asks its own first; a label that it sets would name other weights."""
    app = FastAPI()

    @app.post("/update_weight_version")
    async def label() -> str:
        return "vLLM's"

    @app.api_route("/delta_status", methods=["GET", "PUT"])
    async def status() -> str:
        return "vLLM's"

    DeltaEndpoints().attach_router(app)
    app.state.delta_service = rig.service

    def ask(method: str, path: str) -> httpx.Response:
        return rig.run(rig.request(method, path, app=app))

    assert_error(ask("POST", "/update_weight_version"), 400, "MalformedPart")
    assert ask("GET", "/delta_status").json() != "vLLM's"
    assert ask("PUT", "/delta_status").json() == "vLLM's"
    routes: list[Any] = app.routes
    operations = [(route.path, method) for route in routes for method in route.methods]
    assert operations.count(("/update_weight_version", "POST")) == 1
