"""Several engines in this process that commit as one, and can die, be cut off and settle."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec

from delta_server.fleet import PeerAnswer
from engine_ext.ranks.operations import PreparedSync
from engine_ext.ranks.status import EngineStatus
from tests.support.endpoint_rig import DELTA, Rig

COMMIT = "/delta_commit"
LONG = 3600.0  # seconds; a lease that does not end while a test runs


class FleetRig:
    """Engines, each with its own endpoints, that reach each other at `urls`.

    Attributes:
        rigs: the engines that live, by url.
        incarnations: how often each was started, by url.
        cut: urls of engines that nobody reaches.
        served: urls by the roots at which they are served.
    """

    def __init__(self, folder: Path, count: int, **settings: Any) -> None:
        self.urls = [f"http://engine-{number}:8000" for number in range(count)]
        self.rigs: dict[str, Rig] = {}
        self.incarnations = dict.fromkeys(self.urls, 0)
        self.cut: set[str] = set()
        self.served: dict[str, str] = {}
        self._folder, self._settings = folder, settings
        self._locks = {url: threading.RLock() for url in self.urls}
        for url in self.urls:
            self.start(url)

    def start(self, url: str) -> None:
        """Start an engine from its checkpoint; the one that was there is dead."""
        with self._locks[url]:
            if url in self.rigs:
                self.rigs.pop(url).close()
            self.incarnations[url] += 1
            number = self.urls.index(url)
            spool = self._folder / f"spool-{number}-{self.incarnations[url]}"
            rig = Rig(spool, **self._settings)
            rig.service.fleet.ask = self._ask
            self.rigs[url] = rig

    def close(self) -> None:
        for url, rig in self.rigs.items():
            with self._locks[url]:  # a sender that was closed might still release it
                rig.close()

    async def _ask(self, root: str, group: str, adapter: str | None) -> PeerAnswer:
        root = self.served.get(root, root)
        if root in self.cut:
            raise OSError("cut off")
        body = {"action": "ask", "group": group}
        query = {} if adapter is None else {"adapter": adapter}
        answer = await self.rigs[root].request("POST", COMMIT, json=body, params=query)
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=PeerAnswer)

    def settle(self, url: str) -> bool:
        """Let an engine do what it does when the lease of what it holds has ended."""
        rig = self.rigs[url]
        settled: bool = rig.run(rig.service.fleet.settle())
        return settled

    def status(self, url: str) -> EngineStatus:
        return self.rigs[url].status()

    def prepared(self, url: str) -> PreparedSync | None:
        """What an engine holds for a group."""
        staged = self.status(url).staged
        return None if staged is None else staged.prepared

    def step(
        self, url: str, action: str, group: str, flush_cache: Any = "true", **fields: Any
    ) -> httpx.Response:
        """Take one step with an engine."""
        body, query = {"action": action, "group": group, **fields}, {"flush_cache": flush_cache}
        return self.rigs[url].post(COMMIT, json=body, params=query)

    def hold(self, url: str, body: bytes) -> httpx.Response:
        """Post the only part of a sync, which is not committed."""
        return self.rigs[url].send(body, commit="hold")

    def client(self) -> httpx.Client:
        """A client that reaches the engines at their urls, from any thread."""
        return httpx.Client(transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Pass a request on to the engine that it is for."""
        root = f"http://{request.url.host}:{request.url.port}"
        body, url = request.read(), request.url
        headers = {k: v for k, v in request.headers.items() if k in ("content-type", "accept")}
        with self._locks[root]:
            if root in self.cut:
                raise httpx.ConnectError("cut off", request=request)
            rig = self.rigs[root]
            given = rig.run(
                rig.request(request.method, str(url), content=body or None, headers=headers)
            )
        return httpx.Response(given.status_code, content=given.content, headers=given.headers)


def posts(request: httpx.Request) -> bool:
    """Whether a request is a part or a step."""
    return request.url.path in (DELTA, COMMIT)
