"""The guard of generation while the engine is uncertain."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from delta_server.generation_guard import GenerationGuard
from tests.support.cases import case
from tests.support.delta_bodies import delta_part
from tests.support.endpoint_rig import COMPLETIONS, STATUS, Rig, assert_error


@pytest.fixture
def uncertain(rig: Rig) -> Rig:
    """A server whose last write failed half-way."""
    assert_error(rig.fail_commit(), 500, "CommitFailed", "uncertain")
    return rig


GENERATION = [
    COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v2/rerank",
    "/generate", "/inference/v1/generate", "/pooling", "/score", "/rerank", "/classify",
    "/invocations", "/api/chat", "/api/generate", "/vertex_generate", "/generative_scoring",
]  # fmt: skip


def test_generation_alone_is_unavailable_while_uncertain(uncertain: Rig) -> None:
    for method, path in itertools.product(("POST", "PUT"), GENERATION):
        with case(f"{method} {path}"):
            answer = uncertain.run(uncertain.request(method, path))
            assert_error(answer, 503, "EngineUncertain", "uncertain")
    assert uncertain.get("/v1/models").status_code == 200
    assert uncertain.post("/tokenize").status_code == 200


def test_paths_that_others_choose_are_unavailable_too(uncertain: Rig) -> None:
    async def served(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("generated")(scope, receive, send)

    guarded = GenerationGuard(served, uncertain.app.state, ["/predict"])

    async def post(path: str) -> int:
        transport = httpx.ASGITransport(guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return (await client.post(path)).status_code

    assert [uncertain.run(post(path)) for path in ("/predict", "/other")] == [503, 200]


def test_a_websocket_is_unavailable_while_uncertain(uncertain: Rig) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/v1/realtime", "root_path": "", "headers": []}
    uncertain.run(uncertain.app(scope, receive, send))
    assert sent[0]["type"] == "websocket.http.response.start"
    assert sent[0]["status"] == 503


def test_the_guard_behind_a_root_path(uncertain: Rig) -> None:
    async def post(root_path: str, path: str) -> int:
        transport = httpx.ASGITransport(uncertain.app, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return (await client.post(root_path + path)).status_code

    paths = (COMPLETIONS, "/generate", "/tokenize")
    for root_path in ("/api", "/v1/tenant"):
        found = [uncertain.run(post(root_path, path)) for path in paths]
        assert found == [503, 503, 200], root_path


def test_generation_is_served_otherwise(rig: Rig) -> None:
    for answer in (rig.send(delta_part({})), rig.send(b""), rig.get(STATUS)):
        assert answer.status_code in (200, 400)
        assert rig.post(COMPLETIONS).status_code == 200
        assert rig.post("/generate").status_code == 200


def test_lifespan_and_errors_pass_the_guard(rig: Rig) -> None:
    async def startup() -> list[str]:
        sent: list[str] = []

        async def receive() -> dict[str, str]:
            return {"type": "lifespan.shutdown" if sent else "lifespan.startup"}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        served: Awaitable[None] = rig.app({"type": "lifespan", "state": {}}, receive, send)
        await served
        return sent

    assert rig.run(startup()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert rig.post("/absent").status_code == 404
    assert json.loads(rig.get("/absent").content) == {"detail": "Not Found"}
