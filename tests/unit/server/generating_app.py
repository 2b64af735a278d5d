"""An app that generates over a rig's engine: each token is the version that has computed it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from delta_server.engine import rank_states
from tests.support.endpoint_rig import Rig

WHOLE, STREAM, LINES, WAITS = "/v1/whole", "/v1/stream", "/v1/lines", "/v1/waits"


class Generator:
    """Generates while the engine is not paused.

    Attributes:
        tokens: of each request.
        gone: requests whose client was gone before their end, by path.
    """

    def __init__(self, rig: Rig, app: FastAPI) -> None:
        self._rig = rig
        self.tokens = 5
        self.gone: list[str] = []
        self.running = 0
        for path, answer in {
            WHOLE: self._whole, STREAM: self._stream, LINES: self._lines, WAITS: self._waits,
        }.items():  # fmt: skip
            app.add_route(path, answer, ["POST"])

    async def until_running(self, count: int = 1) -> None:
        while self.running < count:
            await asyncio.sleep(0.001)

    async def _token(self) -> int:
        while self._rig.engine.paused:
            await asyncio.sleep(0.001)
        [state, *_] = await rank_states(self._rig.engine)
        return state.version

    async def _all(self, request: Request) -> AsyncIterator[int]:
        self.running += 1
        try:
            for _ in range(self.tokens):
                yield await self._token()
                await asyncio.sleep(0.002)
        finally:
            self.running -= 1

    async def _whole(self, request: Request) -> Response:
        """As SGLang does: ask now and then whether the client is gone."""
        await request.body()
        found = []
        async for token in self._all(request):
            if await request.is_disconnected():
                self.gone.append(WHOLE)
                return JSONResponse("the client is gone", 500)
            found.append(token)
        return JSONResponse(found)

    async def _waits(self, request: Request) -> Response:
        """As vLLM does: wait for the end of the client next to the answer."""
        await request.body()

        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        async def generate() -> list[int]:
            return [token async for token in self._all(request)]

        work, end = asyncio.ensure_future(generate()), asyncio.ensure_future(gone())
        await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        if not work.done():
            work.cancel()
            self.gone.append(WAITS)
            return JSONResponse(None)
        return JSONResponse(work.result())

    async def _stream(self, request: Request) -> Response:
        return StreamingResponse(
            self._sent(request, "data: {}\n\n"), media_type="text/event-stream"
        )

    async def _lines(self, request: Request) -> Response:
        return StreamingResponse(self._sent(request, "{}\n"), media_type="application/x-ndjson")

    async def _sent(self, request: Request, form: str) -> AsyncIterator[str]:
        whole = False
        try:
            async for token in self._all(request):
                yield form.format(token)
            whole = True
        finally:
            if not whole:
                self.gone.append(request.url.path)


def tokens_of(path: str, text: str) -> tuple[list[int], dict[str, Any] | None]:
    """Return the tokens of an answer, and the error that has ended it, if one has."""
    if path in (WHOLE, WAITS):
        found = json.loads(text)
        return (found, None) if isinstance(found, list) else ([], found["error"])
    if text.startswith('{"error"'):
        return [], json.loads(text)["error"]
    sent = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line]
    ended = sent[-1]["error"] if sent and isinstance(sent[-1], dict) else None
    return [one for one in sent if isinstance(one, int)], ended
