"""The path ``/collective_rpc``, which the engine's own route of this name shares with ours."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any, Final

from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

MAX_JSON_BYTES: Final = 1 << 20
_APPLY_FROM_DISK: Final = "apply_delta_from_disk"


class ApplyFromDisk:
    """ASGI app: passes calls of `apply_delta_from_disk` to one app, and others to the engine's own.

    The body is read to its end first, as the engine's own app does.
    """

    def __init__(self, ours: Any, theirs: Sequence[Any]) -> None:
        self._ours = ours
        self._theirs = theirs[0].app if theirs else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages, body, more = [], bytearray(), True
        while more and len(body) <= MAX_JSON_BYTES:
            message = await receive()
            messages.append(message)
            more = message["type"] == "http.request" and message.get("more_body", False)
            body += message.get("body", b"")

        async def replay() -> Any:
            return messages.pop(0) if messages else await receive()

        app = self._theirs
        if not more and len(body) <= MAX_JSON_BYTES and _method(body) == _APPLY_FROM_DISK:
            app = self._ours
        if app is None:
            app = JSONResponse({"detail": "Not Found"}, 404)
        await app(scope, replay, send)


def _method(body: bytearray) -> Any:
    # As Starlette parses it, so that both always find the same method.
    with contextlib.suppress(ValueError, RecursionError):
        request = json.loads(body)
        return request.get("method") if isinstance(request, dict) else None
    return None
