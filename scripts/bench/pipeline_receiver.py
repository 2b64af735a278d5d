"""A real receiver over a plain PyTorch model, and the endpoints that engines serve in front of it.

Only the engine is missing: nothing generates, so that pausing takes no time.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from torch import nn

from delta_server.intake import VerifiedPart
from delta_server.request_options import parse_query
from delta_server.routes import attach
from delta_server.service import DeltaService
from delta_server.sources.numbering import part_id
from engine_ext.errors import DeltaError
from engine_ext.model import StorageIndex
from engine_ext.placement import TensorSpec, certify_placement, make_plan
from engine_ext.ranks import SingleRank
from engine_ext.ranks.operations import (
    AbortSync,
    BeginPart,
    Operation,
    PollPart,
    ReplyT,
    Stop,
    StoppedCall,
    decode_answers,
    encode_request,
)
from engine_ext.settings import Settings
from engine_ext.startup import LoaderDryRun
from engine_ext.sync import DeltaApplier, Receiver
from scripts.bench.pipeline_link import HOST

_CHUNK = 1 << 16  # as uvicorn hands a body on


class PlainModel(nn.Module):
    """Parameters under the checkpoint's own names, loaded as an engine loads its own."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(_attribute(name), nn.Parameter(tensor.clone(), False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.get_parameter(_attribute(name)).copy_(weight)


def _attribute(name: str) -> str:
    return name.replace(".", "_")


def make_receiver(tensors: dict[str, torch.Tensor], settings: Settings) -> Receiver:
    """Make a model of the tensors; trace, certify and plan as at an engine's start."""
    model = PlainModel(tensors)
    index = StorageIndex(model)
    specs = [TensorSpec(name, tuple(one.shape), one.dtype) for name, one in tensors.items()]
    placement = LoaderDryRun(model, model.load_weights, index).trace(specs)
    certify_placement(placement, tensors.items())
    plan = make_plan(placement, SingleRank())
    applier = DeltaApplier(
        model,
        index,
        plan,
        undo_bytes=settings.undo_bytes,
        threads=torch.get_num_threads(),
    )
    return Receiver(applier, SingleRank(), settings)


class PlainEngine:
    """`delta_server.engine.Engine` around one receiver."""

    name = "a plain model"
    shared = False
    address: str | None = None
    model: str | None = None

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._worker = ThreadPoolExecutor(1)  # takes its calls in order, as a rank does
        self._version = ""

    async def call(self, request: Operation[ReplyT]) -> list[ReplyT | DeltaError]:
        answer = await asyncio.get_running_loop().run_in_executor(
            self._worker, self._receiver.handle, *encode_request(request)
        )
        return decode_answers(request, [answer])

    async def call_stopped(
        self, request: Operation[ReplyT], flush_cache: bool | str
    ) -> StoppedCall[ReplyT]:
        return StoppedCall.of(await self.call(request), [Stop(stop_ms=0.0, caches_ms=0.0)])

    async def end_requests(self, mode: str) -> None:
        pass

    async def is_paused(self) -> bool:
        return False

    async def check_salt(self) -> None:
        pass

    async def publish(self, version: str | None, *, resumes: bool) -> None:
        self._version = version or self._version

    async def get_weight_version(self) -> str:
        return self._version


def serve(
    pipe: Any, tensors: dict[str, torch.Tensor], settings: Settings | None = None, port: int = 0
) -> None:
    """Serve the endpoints on a port, any free one by default, which is sent through `pipe`."""
    settings = settings or Settings()
    service = DeltaService(PlainEngine(make_receiver(tensors, settings)), settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        pipe.send(listener.getsockname()[1])
        yield
        service.intake.close()

    app = FastAPI(lifespan=lifespan)
    attach(app)
    app.state.delta_service = service
    listener = socket.create_server((HOST, port))
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


class Stages:
    """The stages on the receiver's side, each alone and in this process.

    Args:
        tensors: what the receiver holds.
        bodies: all parts of a sync from there.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], bodies: Sequence[bytes]) -> None:
        settings = Settings()
        self._receiver, self._bodies = make_receiver(tensors, settings), bodies
        self._service = DeltaService(PlainEngine(self._receiver), settings)
        self._spooled: list[VerifiedPart] = []

    def close(self) -> None:
        self._service.intake.close()

    def receive(self) -> float:
        """Return the seconds in which all bodies are checked and in the spool."""
        for spooled in self._spooled:
            spooled.remove()
        self._spooled = []
        start = time.perf_counter()
        asyncio.run(self._receive())
        return time.perf_counter() - start

    async def _receive(self) -> None:
        for body in self._bodies:
            rate = self._service.inlet.minimum_rate
            self._spooled.append(await self._service.intake.receive(_pieces(body), len(body), rate))

    def stage(self) -> float:
        """Return the seconds in which all parts are staged, given that `receive` was called."""
        options = parse_query({})
        parts = [
            (part_id(spooled.manifest, spooled.identity, options), spooled.path)
            for spooled in self._spooled
        ]
        start = time.perf_counter()
        for part, path in parts:
            self._receiver.execute(BeginPart(part=part, path=str(path), now=start))
        for part, _ in parts:
            while not self._receiver.execute(PollPart(part=part)).done:
                time.sleep(0.0002)
        seconds = time.perf_counter() - start
        self._receiver.execute(AbortSync())
        return seconds


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _CHUNK):
        yield body[start : start + _CHUNK]
