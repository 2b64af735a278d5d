"""Chromium, and a server with the real routes whose status a test decides.

They run in .venv-trainers only, which has the browser's driver.
"""

from __future__ import annotations

import copy
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, Page, sync_playwright

from delta_server.routes import attach
from engine_ext.settings import API_KEY_ENVIRONMENT
from tests.live.conftest import checkpoint, start
from tests.support.delta_bodies import OTHER_STEP, VERSION, delta_part, fresh_weights, full_part
from tests.support.endpoint_rig import STATUS, Rig

__all__ = ["checkpoint", "start"]

# As root there is no sandbox; the rest keeps it from calling its maker's hosts.
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]


class Served:
    """A server on the loopback interface; what its service answers can be changed.

    Attributes:
        status: the JSON of ``GET /delta_status`` without the history.
        history: that of the syncs.
        fails: what a request for the status raises.
        asked: how often the status was asked for.
        denied: errors of requests that were refused and reported.
    """

    def __init__(self, status: dict[str, Any]) -> None:
        self.status = status
        self.history: list[dict[str, Any]] = self.status.pop("history")
        self.fails: Exception | None = None
        self.asked = 0
        self.denied: list[Exception] = []
        app = FastAPI(openapi_url=None)
        attach(app)
        app.state.delta_service = SimpleNamespace(
            settings=SimpleNamespace(allow_from=()),
            status=self._status,
            adapter=None,
            reporter=SimpleNamespace(report_denied=self.denied.append),
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._app = app
        self.begin()

    def begin(self) -> None:
        options = uvicorn.Config(self._app, "127.0.0.1", self.port, log_level="critical")
        self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def end(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    async def _status(self, *, plan: bool, history: bool) -> dict[str, Any]:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        assert history
        return {**self.status, "history": self.history}


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_ENVIRONMENT, raising=False)


@pytest.fixture(scope="session")
def real_status(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An engine's answers after two syncs, a refusal, a rollback and a full sync."""

    def ask() -> dict[str, Any]:
        rig = Rig(tmp_path_factory.mktemp("spool"))
        rig.send(delta_part())
        rig.send(delta_part())
        rig.send(delta_part(OTHER_STEP, version=VERSION + 2, base_version=VERSION + 1))
        rig.post("/delta_rollback")
        rig.send(full_part(fresh_weights(), VERSION + 5))
        status: dict[str, Any] = rig.get(STATUS, params={"history": "true"}).json()
        rig.close()
        return status

    # In a thread of its own: the browser's driver has an event loop in this one.
    with ThreadPoolExecutor(1) as worker:
        return worker.submit(ask).result()


@pytest.fixture
def served(real_status: dict[str, Any]) -> Iterator[Served]:
    server = Served(copy.deepcopy(real_status))
    yield server
    server.end()


@pytest.fixture(scope="session")
def browser(real_status: dict[str, Any]) -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path is not None
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=_FLAGS)
        yield chromium
        chromium.close()


class Opened:
    """A page that was opened, and what went wrong in it.

    Attributes:
        errors: exceptions of scripts, and messages of violated policies.
        requests: addresses of everything that the page has asked for.
        status: HTTP status with which the page came.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.status = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", self._note)
        page.on("dialog", lambda dialog: self.errors.append(f"a dialog: {dialog.message}"))

    def _note(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Opened]]:
    """Open the page of a server; the options are those of a browser's context."""
    opened: list[Opened] = []

    def go(url: str, **options: Any) -> Opened:
        one = Opened(browser.new_context(**options).new_page())
        opened.append(one)
        answer = one.page.goto(f"{url}/delta_dashboard")
        assert answer is not None
        one.status = answer.status
        return one

    yield go
    for one in opened:
        one.page.context.close()
        assert one.errors == []
