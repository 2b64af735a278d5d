"""SGLang's front end: the endpoints in its own FastAPI app, and the engine as they see it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from engine_ext.adapters.sglang import token_versions
from engine_ext.adapters.sglang.engine import SglangEngine
from engine_ext.adapters.sglang.names import LOAD_FORMAT
from engine_ext.settings import Settings

# What a caller can ask the manager for, but not during a commit, and whether requests in flight
# generate from then on. A paused engine stays so when its memory is back.
_EXCLUDED_BY_COMMITS = {
    "pause_generation": False,
    "continue_generation": True,
    "release_memory_occupation": False,
    "resume_memory_occupation": False,
}
_DISK_PATH = "/update_weights_from_disk"
_MAX_BODY_BYTES = 16 << 20
_MAX_BODY_S = 60.0
# Environment variables that set further paths of SGLang where it generates.
_OLLAMA_ROUTES = ("SGLANG_OLLAMA_CHAT_ROUTE", "SGLANG_OLLAMA_GENERATE_ROUTE")
_GENERATION_ROUTES = (*_OLLAMA_ROUTES, "AIP_PREDICT_ROUTE")


async def serve(app: Any, manager: Any, chosen: Settings) -> None:
    """Add the endpoints to an app that is about to serve, and connect them with the engine.

    Raises:
        DeltaError: some rank has no receiver, or the ranks are at different versions. The server
            does not start.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    from delta_server import DeltaService, attach, find_pulled, serialize_with_commits
    from engine_ext.adapters.sglang.http_workers import SglangHttpWorker, has_several_workers

    engine_type = SglangHttpWorker if has_several_workers(manager) else SglangEngine
    service = DeltaService(engine_type(manager), chosen)
    await service.start()
    for name, resumes in _EXCLUDED_BY_COMMITS.items():
        original, asked = getattr(manager, name), _always if resumes else None
        setattr(manager, name, serialize_with_commits(service.committer, original, asked))
    token_versions.install(manager)
    app.state.delta_service = service
    theirs = list(app.router.routes)
    attach(app, [os.environ[name] for name in _GENERATION_ROUTES if name in os.environ])
    ours = [route for route in app.router.routes if route not in theirs]
    for route in ours:
        # Like SGLang's own updates, these need the admin's key if one is set.
        auth_level(AuthLevel.ADMIN_OPTIONAL)(route.endpoint)
    _choose_by_format(ours, theirs, lambda path: find_pulled(service.inlet, path))
    app.router.routes[:] = [*ours, *theirs]


def _always(*_: Any, **__: Any) -> bool:
    return True


def _choose_by_format(
    ours: list[Any], theirs: list[Any], pulled: Callable[[Any], Awaitable[object]]
) -> None:
    """Route disk updates of other formats to SGLang's own endpoint of that path."""
    [delta] = [route for route in ours if route.path == _DISK_PATH]
    [other] = [route for route in theirs if getattr(route, "path", None) == _DISK_PATH]
    delta.app = DiskUpdates(delta.app, other.app, pulled)


class DiskUpdates:
    """ASGI app: passes disk updates of the format ``delta`` to one app, and others to another.

    The other app must never see a ``delta``, because our token does not guard it. So the body is
    read with the same parser. A body that is too large or too slow to be read here goes to the
    first app, which refuses it. A request without a format for a checkpoint whose versions were
    pulled goes there, too, and commits them.
    """

    def __init__(self, delta: Any, other: Any, pulled: Callable[[Any], Awaitable[object]]) -> None:
        self._delta = delta
        self._other = other
        self._pulled = pulled

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        messages = []
        body = bytearray()
        more = True
        now = asyncio.get_running_loop().time
        deadline = now() + _MAX_BODY_S
        while more and len(body) <= _MAX_BODY_BYTES:
            try:
                message = await asyncio.wait_for(receive(), deadline - now())
            except asyncio.TimeoutError:
                break
            messages.append(message)
            more = message["type"] == "http.request" and message.get("more_body", False)
            body += message.get("body", b"")

        async def replay() -> Any:
            return messages.pop(0) if messages else await receive()

        app = self._delta if more or await self._is_ours(body, scope) else self._other
        await app(scope, replay, send)

    async def _is_ours(self, body: bytearray, scope: Any) -> bool:
        from delta_server import PULLED

        # As Starlette parses it, so that both always find the same format.
        with contextlib.suppress(ValueError, RecursionError):
            request = json.loads(body)
            if isinstance(request, dict):
                form = request.get("load_format")
                if form is not None:
                    return bool(form == LOAD_FORMAT)
                with contextlib.suppress(Exception):  # ranks that have died answer nothing
                    scope[PULLED] = await self._pulled(request.get("model_path")) or None
                    return scope[PULLED] is not None
        return False
