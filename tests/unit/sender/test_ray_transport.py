"""The transport inside a Ray cluster, with a stand-in for Ray; ``tests/verl`` has Ray itself."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

NAME = "delta_sender.integrations.ray_transport"


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module, imported together with the stand-ins: a call is done at once."""
    ray, strategies = ModuleType("ray"), ModuleType("ray.util.scheduling_strategies")
    ray.get = lambda call, timeout: call  # type: ignore[attr-defined]
    strategies.NodeAffinitySchedulingStrategy = object  # type: ignore[attr-defined]
    for module in (ray, ModuleType("ray.util"), strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)
    monkeypatch.delitem(sys.modules, NAME)
    return module


@pytest.fixture
def server() -> Iterator[str]:
    """The root of a server that answers with the path and query that it was asked for."""

    class Request(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    running = ThreadingHTTPServer(("127.0.0.1", 0), Request)
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def test_relay_asks_below_its_own_root(transport: Any, server: str) -> None:
    for named, reached in product(
        ["", "/", "/engine-a", "/engine-a/"], ["", "/", "/engine-a", "/on/its/node/"]
    ):
        relay = transport.EngineRelay(server + reached)
        actor = SimpleNamespace(request=SimpleNamespace(remote=relay.request))
        root = "http://engine:8000" + named
        with httpx.Client(transport=transport.RayTransport({root: actor})) as client:
            answer = client.get(f"{root.rstrip('/')}/delta_status", params={"plan": "true"})
        assert answer.text == f"{reached.rstrip('/')}/delta_status?plan=true", named
