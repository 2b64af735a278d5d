"""Another HTTP process of the engine that a test's server has."""

from __future__ import annotations

import httpx

from delta_server.service import DeltaService
from tests.support.endpoint_rig import COMPLETIONS, DELTA, Rig, app_of, end


class Process:
    """Another HTTP process of a rig's engine."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.service = DeltaService(rig.engine, rig.settings)
        self.app = app_of(self.service)

    def close(self) -> None:
        self._rig.run(end(self.service))
        self.service.intake.close()

    async def sending(self, body: bytes) -> httpx.Response:
        headers = {"Content-Type": "application/octet-stream"}
        return await self._rig.request("POST", DELTA, app=self.app, content=body, headers=headers)

    def send(self, body: bytes) -> httpx.Response:
        return self._rig.run(self.sending(body))

    def complete(self) -> httpx.Response:
        return self._rig.run(self._rig.request("POST", COMPLETIONS, app=self.app))


def resume_owed(rig: Rig) -> list[bool]:
    """What each rank answers."""
    return [state.resume_owed for state in rig.run(rig.service.committer.states())]
