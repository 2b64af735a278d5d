"""The ASGI app in front of the engine's own: which requests generate, and from which weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Receive, Scope, Send

from delta_server import pauses
from delta_server.auth import check_access
from delta_server.guards import error_response
from delta_server.service import DeltaService
from delta_server.version_requests import HEADER
from engine_ext.errors import DeltaError, EngineUncertain
from engine_ext.format import optional_version

READY_PATH = "/delta_ready"
# Prefixes of the paths where engines generate; they answer 503 while the weights are uncertain.
GENERATION = (
    "/v1", "/v2", "/inference", "/cohere", "/generate", "/generative_scoring", "/invocations",
    "/pooling", "/score", "/rerank", "/classify", "/encode", "/api", "/vertex_generate",
)  # fmt: skip
# Where engines resume generation. The committer refuses that, too; vLLM would answer 500 then.
_RESUMES = ("/resume", "/continue_generation")
_PAUSE = "/pause"
_READS = ("GET", "HEAD", "OPTIONS")


class GenerationGuard:
    """ASGI middleware: generation, and resuming it, answer 503 while the weights are uncertain.

    Requests that ask for a version are answered by that alone, see `delta_server.version_requests`.
    Whether the engine is ready is answered here, before the engine asks for its own token: a probe
    of Kubernetes has none.
    """

    def __init__(self, app: ASGIApp, state: Any, generation: Sequence[str] = ()) -> None:
        self._app = app
        self._state = state
        self._generation = (*GENERATION, *generation)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pauses.client.set(scope["client"][0] if scope.get("client") else None)
        app = self._app
        if scope["type"] == "websocket" or scope.get("method", "GET") not in _READS:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            generates = path.startswith(self._generation)
            if generates or path in _RESUMES or (path == _PAUSE and _waits(scope)):
                service = self._state.delta_service
                if await service.committer.is_uncertain():
                    error = EngineUncertain("a weight update failed half-way; send a full sync")
                    await error_response(error)(scope, receive, send)
                    return
                for name, _ in scope["headers"] if generates else ():
                    if name == HEADER:
                        problem = await service.readiness.problem_of_weights()
                        await service.versions.serve(app, problem, scope, receive, send)
                        return
        elif scope.get("path", "").removeprefix(scope.get("root_path", "")) == READY_PATH:
            response = await ready(Request(scope), self._state.delta_service)
            await response(scope, receive, send)
            return
        await app(scope, receive, send)


def _waits(scope: Scope) -> bool:
    """Return whether a pause lets the requests in flight end."""
    given = QueryParams(scope.get("query_string", b""))
    waits = given.get("wait_for_inflight_requests", "").lower() in ("1", "true", "yes", "on")
    return waits or given.get("mode") == "wait"


async def ready(request: Request, service: DeltaService) -> JSONResponse:
    """Answer whether the engine is ready; who has no access to the endpoints gets no details."""
    try:
        least = optional_version(request.query_params, "min_version")
    except DeltaError as error:
        return error_response(error)
    found = await service.readiness.check(least)
    answer = msgspec.to_builtins(found)
    try:
        check_access(request, service.settings.allow_from)
    except DeltaError:
        answer = {"ready": found.ready}
    return JSONResponse(answer, 200 if found.ready else 503)
