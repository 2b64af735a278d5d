"""vLLM's weight-transfer routes as vLLM has them, over receivers in this process."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import httpx
import torch
from fastapi import APIRouter, Body, FastAPI, Request

from engine_ext.adapters.vllm import transfer_frontend
from engine_ext.adapters.vllm.frontend import DeltaEndpoints
from engine_ext.adapters.vllm.transfer_group import TransferGroup
from engine_ext.ranks.operations import Operation, decode_answers, encode_request
from tests.support.delta_bodies import Changes, delta_part
from tests.support.endpoint_rig import Rig, assert_error

SPLIT: list[Changes] = [
    {"embed.weight": {0: 0x1111, 13: 0x7FC1}},
    {"norm.weight": {7: 0x3333}},
]
# Of the sync that `parts` begins.
SAME: dict[str, Any] = {"part": 1, "num_parts": 2, "sync_id": "s"}
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


def assert_ended(api: Api) -> None:
    """The update has ended with an error, and nothing of it is left."""
    assert_error(api.post(FINISH), 409, "Conflict")
    assert api.rig.status().staged is None
    api.rig.assert_untouched()
