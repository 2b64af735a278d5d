"""A server with the delta endpoints over an engine that accepts every part and does nothing.

python -m scripts.bench.scaling.stub_server PORT
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI

from delta_server.routes import attach
from delta_server.service import DeltaService
from engine_ext.errors import DeltaError
from engine_ext.ranks import operations as ops
from engine_ext.settings import Settings

HOST = "127.0.0.1"


class NoEngine:
    """An `Engine` of one rank; a part is staged as soon as it is begun."""

    name = "none"
    shared = False
    address: str | None = None

    async def call(self, request: ops.Operation[ops.ReplyT]) -> list[ops.ReplyT | DeltaError]:
        answers: dict[type, Any] = {
            ops.GetState: ops.RankState(version=0, engine_state="certain", resume_owed=False),
            ops.BeginPart: ops.PartBegun(admission="new"),
            ops.PollPart: ops.PartProgress(done=True),
            ops.SettlePart: ops.PartSettled(complete=False, prepared=False),
        }
        if isinstance(request, ops.FindUnseen):
            answers[ops.FindUnseen] = ops.Unseen(unseen=request.identities)
        if isinstance(request, ops.RecordSync):
            answers[ops.RecordSync] = request.record
        answer = answers.get(type(request), DeltaError(f"no engine carries out {request.name}"))
        return [answer]

    async def is_paused(self) -> bool:
        return False

    async def pause(self, mode: str, *, flush_cache: bool) -> None:
        return None

    async def flush_cache(self) -> None:
        return None

    async def resume(self) -> None:
        return None

    async def set_weight_version(self, version: str) -> None:
        return None

    async def get_weight_version(self) -> str:
        return "0"


def main() -> None:
    """Serve until the process is ended."""
    app = FastAPI()
    attach(app)
    app.state.delta_service = DeltaService(NoEngine(), Settings())
    app.add_api_route("/health", lambda: {}, methods=["GET"])
    uvicorn.run(app, host=HOST, port=int(sys.argv[1]), log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
