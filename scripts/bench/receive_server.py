"""Serve the delta endpoints over an engine that does nothing, for scripts/bench/receive.py.

Every answer of ``/bench`` begins a new measurement.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import uvicorn
import uvloop
from fastapi import FastAPI, Request

from delta_server.engine import Engine
from delta_server.routes import attach
from delta_server.service import DeltaService
from engine_ext.ranks import operations as ops
from engine_ext.settings import Settings
from scripts.bench.pipeline_link import HOST

_BEAT_S = 0.001


class IdleEngine:
    """An engine of one rank, which stages every part at once and never has a whole sync."""

    name = "idle"
    shared = False
    address = None

    async def call(self, request: Any) -> list[Any]:
        """Answer the operations of a part's staging, and the report of it."""
        if isinstance(request, ops.BeginPart):
            return [ops.PartBegun(admission="new")]
        if isinstance(request, ops.PollPart):
            return [ops.PartProgress(done=True)]
        if isinstance(request, ops.PrepareSync):
            return [ops.SyncPrepared(complete=False, done=False)]
        if isinstance(request, ops.PutItem):
            return [ops.BoardItem(value=request.value, written=True)]
        raise NotImplementedError(request.name)


class Heart:
    """Beats in the event loop, and notes how late each beat is, in seconds."""

    def __init__(self) -> None:
        self.late: list[float] = []

    async def beat(self) -> None:
        """Beat until it is cancelled."""
        while True:
            # The clock of uvloop counts whole milliseconds.
            due = time.perf_counter() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            self.late.append(time.perf_counter() - due)


def serve(pipe: Any, http: Any) -> None:
    """Serve until the process is stopped, on a port that is sent through `pipe`."""
    uvloop.run(_serve(pipe, http))


async def _serve(pipe: Any, http: Any) -> None:
    service, heart = DeltaService(cast(Engine, IdleEngine()), Settings()), Heart()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        beating = asyncio.create_task(heart.beat())
        pipe.send(listening.getsockname()[1])
        yield
        beating.cancel()
        service.intake.close()

    app = FastAPI(lifespan=lifespan)
    attach(app)
    app.state.delta_service = service

    async def bench() -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        late, heart.late = sorted(heart.late), []
        return {"user": used.ru_utime, "system": used.ru_stime, "late": late}

    async def discard(request: Request) -> dict[str, Any]:
        return {"bytes": sum([len(chunk) async for chunk in request.stream()])}

    app.add_api_route("/bench", bench)
    app.add_api_route("/discard", discard, methods=["POST"])
    listening = socket.create_server((HOST, 0))
    server = uvicorn.Server(uvicorn.Config(app, http=http, log_level="error", access_log=False))
    await server.serve([listening])
