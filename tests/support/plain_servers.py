"""Servers with the delta endpoints over a plain model, on ports of this host, in this process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from delta_server.routes import attach
from delta_server.service import DeltaService
from engine_ext.ranks import SingleRank
from engine_ext.settings import Settings
from engine_ext.sync import AdapterReceivers
from scripts.bench.pipeline_receiver import PlainEngine, make_receiver
from tests.support.fake_engine import Model
from tests.support.toy_adapters import ToyAdapters


class PlainServer:
    """An engine of one rank that holds some tensors, and a LoRA adapter ``tiny``.

    Attributes:
        url: its root, at 127.0.0.1.
    """

    def __init__(self, tensors: Model, adapter: Model, **settings: Any) -> None:
        given = Settings(**settings)
        adapters = ToyAdapters()
        adapters.load("tiny", adapter)
        receivers: Any = AdapterReceivers(
            make_receiver(tensors, given), adapters, SingleRank(), given
        )
        self._service = DeltaService(PlainEngine(receivers), given)
        app = FastAPI(openapi_url=None, lifespan=self._lifespan)
        attach(app)
        app.state.delta_service = self._service
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        await self._service.start()
        yield

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._listening]))

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._service.intake.close()
        self._listening.close()
