"""The endpoints over an engine in this process, and a client for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from delta_server.routes import attach
from delta_server.service import DeltaService
from delta_server.spool_files import SUFFIX
from engine_ext.format.digest import Digest, tensor_digest
from engine_ext.ranks.status import EngineStatus
from engine_ext.settings import Settings
from tests.support.delta_bodies import (
    OTHER_STEP,
    VERSION,
    Weights,
    after,
    delta_part,
    fresh_weights,
    same,
)
from tests.support.in_process_engine import Engine

DELTA = "/update_weights_delta"
FROM_DISK = "/update_weights_from_disk"
STATUS = "/delta_status"
COMPLETIONS = "/v1/completions"

MAX_BODY_BYTES = 1 << 14


class Rig:
    """An engine's app with the endpoints attached, and a client for it.

    Attributes:
        uses: how often something was asked of the engine, or a test says that something happened.
    """

    uses = 0

    def __init__(self, spool_dir: Path, **settings: Any) -> None:
        spool_dir.mkdir(exist_ok=True)
        self.settings = Settings(
            **{
                "spool_dir": str(spool_dir),
                "base_version": VERSION,
                "max_body_bytes": MAX_BODY_BYTES,
                **settings,
            }
        )
        self._loop, self._running = asyncio.new_event_loop(), threading.Lock()
        self.engine = self.make_engine()
        self.service = DeltaService(self.engine, self.settings)
        self.app = app_of(self.service)
        self.run(self.service.start())
        self.engine.events.clear()

    def make_engine(self) -> Engine:
        return Engine(self.settings)

    def close(self) -> None:
        self.run(end(self.service))
        self.run(self.service.reporter.flush())
        self.service.intake.close()
        self.engine.close()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 30) -> Any:
        """The result of a coroutine, which must not hang; threads of a sender take turns."""
        self.uses += 1
        with self._running:
            return self._loop.run_until_complete(asyncio.wait_for(work, timeout_s))

    async def request(
        self,
        method: str,
        path: str,
        *,
        app: FastAPI | None = None,
        peer: tuple[str, int] | None = ("127.0.0.1", 9),
        **options: Any,
    ) -> httpx.Response:
        self.uses += 1
        transport = httpx.ASGITransport(app or self.app, client=peer)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await client.request(method, path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.run(self.request("GET", path, **options))

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.run(self.request("POST", path, **options))

    async def sending(self, body: Any, /, **query: Any) -> httpx.Response:
        headers = {"Content-Type": "application/octet-stream"}
        return await self.request("POST", DELTA, content=body, headers=headers, params=query)

    def send(self, body: Any, /, **query: Any) -> httpx.Response:
        """A part by HTTP."""
        return self.run(self.sending(body, **query))

    def disk(self, folder: Path | str, *files: str, path: str = DELTA, **keys: Any) -> Any:
        """A disk request for some files of a folder; without any, for all of them."""
        named = {"files": list(files)} if files else {}
        body = {"model_path": str(folder), "load_format": "delta", **named, **keys}
        return self.post(path, json=body)

    def status(self, **query: str) -> EngineStatus:
        response = self.get(STATUS, params=query)
        assert response.status_code == 200
        return msgspec.json.decode(response.content, type=EngineStatus)

    def is_paused(self) -> bool:
        """Return whether the engine's generation is paused."""
        return self.engine.paused

    @staticmethod
    def digest_of(weights: Weights) -> str:
        """The model's digest, in hex."""
        shares = (tensor_digest(name, bits) for name, bits in weights.items())
        return sum(shares, start=Digest.ZERO).hex()

    def spooled(self) -> list[str]:
        """The files in the spool.

        Files next to a removed part are waited for, a while: a rank that still decodes the part
        removes its own files.
        """
        deadline = time.monotonic() + 10
        while True:
            files = sorted(self.service.intake.directory.iterdir())
            beside = [file for file in files if file.stem.endswith(SUFFIX)]
            if all(file.with_suffix("") in files for file in beside) or time.monotonic() > deadline:
                return [file.name for file in files]
            time.sleep(0.01)

    def fail_commit(self, version: int = VERSION + 1) -> httpx.Response:
        """Send a delta whose write fails on rank 1, half-way."""
        self.engine.shards[1].breaks = True
        response = self.send(delta_part(version=version))
        self.engine.shards[1].breaks = False
        return response

    def assert_committed(self, response: httpx.Response, weights: Weights, version: int) -> None:
        """The answer is of a commit, and the engine is where the sync leads to."""
        assert response.status_code == 200, response.text
        assert (response.json()["status"], response.json()["version"]) == ("committed", version)
        assert same(self.engine.weights, weights)
        assert self.engine.weight_version == str(version)
        assert not self.engine.paused
        assert self.spooled() == []

    def assert_untouched(self) -> None:
        """Nothing was written since start-up, and the next correct sync is accepted."""
        assert same(self.engine.weights, fresh_weights())
        assert self.engine.writes == [0, 0]
        assert self.engine.weight_version == str(VERSION)
        assert self.status().version.number == VERSION
        assert not self.engine.paused
        assert self.spooled() == []
        response = self.send(delta_part(OTHER_STEP, sync_id="the next one"))
        self.assert_committed(response, after(fresh_weights(), OTHER_STEP), VERSION + 1)


_SERVED = {COMPLETIONS: "POST", "/generate": "POST", "/v1/models": "GET", "/tokenize": "POST"}


async def end(service: DeltaService) -> None:
    """End what a service does unasked."""
    ending = (service._following, service._ending_pauses)
    for task in (*ending, *service.fleet.watches, service.committer.repeating):
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


@cache
def _attached() -> FastAPI:
    """An engine's app, with routes that generate, and the endpoints attached."""
    app = FastAPI()

    async def served(request: Request) -> JSONResponse:
        return JSONResponse("served")

    for path, method in _SERVED.items():
        app.add_route(path, served, [method])
    attach(app)
    return app


def app_of(service: DeltaService) -> FastAPI:
    """An app with the endpoints of a service.

    All have the same routes: those take longer to make than most requests, and have no state.
    """
    made = _attached()
    app = FastAPI(openapi_url=None, routes=made.routes)
    for one in made.user_middleware:
        options: Any = {**one.kwargs, "state": app.state}
        app.add_middleware(one.cls, *one.args, **options)
    app.state.delta_service = service
    return app


def assert_error(
    response: httpx.Response,
    status: int,
    kind: str,
    engine_state: str = "unchanged",
    **operands: Any,
) -> dict[str, Any]:
    """The answer is this error; returns the error object."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert (error["type"], error["engine_state"]) == (kind, engine_state), error
    assert error["message"]
    assert {key: error.get(key) for key in operands} == operands
    return error
