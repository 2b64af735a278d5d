"""The endpoints in vLLM's front end, over a client of vLLM that is simulated."""

from __future__ import annotations

import asyncio
import functools
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from engine_ext import settings
from engine_ext.adapters.vllm.frontend import DeltaEndpoints
from engine_ext.errors import AdapterNotLoaded, DeltaError
from engine_ext.ranks.operations import decode_request, encode_answer
from tests.support.delta_bodies import delta_part
from tests.support.endpoint_rig import DELTA, Rig, app_of, assert_error


def give(answer: Any) -> Any:
    if isinstance(answer, DeltaError):
        raise answer
    return answer


class Client:
    """vLLM's client; the engine core has no memory to release, so that every wake-up resumes."""

    errored = False
    refuses: DeltaError | None = None  # what every worker answers from then on

    def __init__(self, rig: Rig) -> None:
        self._engine = rig.engine
        parallel = SimpleNamespace(_api_process_count=1, nnodes=1, use_ray=False)
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel,
            model_config=SimpleNamespace(model="checkpoint"),
            lora_config=None,
            weight_transfer_config=None,
        )
        self.engine_core = SimpleNamespace(pause_scheduler_async=self.pause_generation)
        self.is_paused = rig.engine.is_paused
        self.resume_generation = rig.engine.resume
        self.update_weight_version = rig.engine.set_weight_version
        self.get_weight_version = rig.engine.get_weight_version

    async def collective_rpc(self, method: str, *, args: Any) -> list[Any]:
        if self.refuses is not None:
            return [encode_answer(functools.partial(give, self.refuses))]
        answers = await self._engine.call(decode_request(*args))
        return [encode_answer(functools.partial(give, one)) for one in answers]

    async def reset_prefix_cache(self, **options: Any) -> bool:
        return True

    async def reset_encoder_cache(self) -> None:
        pass

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._engine.pause(mode, flush_cache=clear_cache)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._engine.events.append(("sleep",))
        self._engine.paused = True
        self._engine.set_asleep(level > 0)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self._engine.events.append(("wake_up",))
        self._engine.set_asleep(False)
        self._engine.paused = False

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
    assert events[-2:] == [("resume",), (change,)]


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
