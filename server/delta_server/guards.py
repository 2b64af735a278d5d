"""ASGI apps in front of the engine's own: what they let through, and to whom."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any, Final

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from delta_server.auth import check_access
from engine_ext.errors import DeltaError, TooLarge

MAX_JSON_BYTES: Final = 1 << 20
_MOST_BODY_S: Final = 60.0
_APPLY_FROM_DISK: Final = "apply_delta_from_disk"


def error_response(error: DeltaError, **keys: Any) -> JSONResponse:
    """Return the answer to a refused request; `keys` are further keys next to ``error``."""
    headers = {}
    if "retry_after" in error.operands:
        headers["Retry-After"] = str(error.operands["retry_after"])
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({**keys, "error": error.to_wire()}, error.status, headers)


class TransferGuard:
    """ASGI middleware: an API's paths need what the delta endpoints need, and bodies are bounded.

    Args:
        state: of the app; its `delta_transfer` is the `WeightTransfer`. Without one, or with None,
            the paths are the engine's own affair.
        paths: of the API.
        max_bytes: of a body.
    """

    def __init__(self, app: ASGIApp, state: Any, paths: tuple[str, ...], max_bytes: int) -> None:
        self._app, self._state, self._paths, self._max_bytes = app, state, paths, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transfer = getattr(self._state, "delta_transfer", None)
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if transfer is None or scope["type"] != "http" or path not in self._paths:
            await self._app(scope, receive, send)
            return
        try:
            request = Request(scope)
            check_access(request, self._state.delta_service.settings.allow_from)
            length = request.headers.get("content-length", "0")
            has_length = "transfer-encoding" not in request.headers and length.isdecimal()
            if not has_length or int(length) > self._max_bytes:
                raise TooLarge(
                    f"the body needs a Content-Length of {self._max_bytes} bytes at most; send "
                    "larger parts by path, or broadcast them",
                    limit=self._max_bytes,
                )
        except DeltaError as error:
            self._state.delta_service.reporter.report_denied(error)
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class ApplyFromDisk:
    """ASGI app: passes calls of `apply_delta_from_disk` to one app, and others to the engine's own.

    The body is read to its end first, as the engine's own app does. Without that app, who has no
    access is refused before; one that is too slow to be read here goes to ours, which refuses it.
    """

    def __init__(self, ours: Any, theirs: Sequence[Any]) -> None:
        self._ours = ours
        self._theirs = theirs[0].app if theirs else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._theirs is None and not _has_access(scope):
            await self._ours(scope, receive, send)
            return
        messages, body, more, in_time = [], bytearray(), True, True
        now = asyncio.get_running_loop().time
        deadline = now() + _MOST_BODY_S
        while more and len(body) <= MAX_JSON_BYTES:
            try:
                message = await asyncio.wait_for(receive(), deadline - now())
            except asyncio.TimeoutError:
                in_time = False
                break
            messages.append(message)
            more = message["type"] == "http.request" and message.get("more_body", False)
            body += message.get("body", b"")

        async def replay() -> Any:
            return messages.pop(0) if messages else await receive()

        app = self._theirs
        whole = not more and len(body) <= MAX_JSON_BYTES
        if not in_time or (whole and _method(body) == _APPLY_FROM_DISK):
            app = self._ours
        if app is None:
            app = JSONResponse({"detail": "Not Found"}, 404)
        await app(scope, replay, send)


def _has_access(scope: Scope) -> bool:
    request = Request(scope)
    try:
        check_access(request, request.app.state.delta_service.settings.allow_from)
    except DeltaError:
        return False
    return True


def _method(body: bytearray) -> Any:
    # As Starlette parses it, so that both always find the same method.
    with contextlib.suppress(ValueError, RecursionError):
        request = json.loads(body)
        return request.get("method") if isinstance(request, dict) else None
    return None
