"""The endpoints in SGLang's front end, over a tokenizer manager that is simulated."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response

from engine_ext.adapters.sglang import frontend, http_workers, token_versions
from engine_ext.errors import EngineUncertain
from tests.support.delta_bodies import delta_part
from tests.support.endpoint_rig import DELTA, FROM_DISK, Rig


@pytest.fixture
def manager(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One whose requests are events of the engine."""
    auth = SimpleNamespace(
        AuthLevel=SimpleNamespace(ADMIN_OPTIONAL=0), auth_level=lambda level: lambda endpoint: None
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.utils.auth", auth)
    monkeypatch.setattr(frontend, "SglangEngine", lambda manager: rig.engine)
    monkeypatch.setattr(http_workers, "has_several_workers", lambda manager: False)
    monkeypatch.setattr(token_versions, "install", lambda manager: None)

    def asks(name: str) -> Any:
        async def ask() -> None:
            rig.engine.events.append((name,))

        return ask

    names = ("pause_generation", "continue_generation")
    memory = ("release_memory_occupation", "resume_memory_occupation")
    return SimpleNamespace(**{name: asks(name) for name in (*names, *memory)})


@pytest.mark.parametrize("change", ["release_memory_occupation", "resume_memory_occupation"])
def test_memory_is_not_released_or_resumed_during_a_commit(
    rig: Rig, manager: SimpleNamespace, change: str
) -> None:
    app, events = FastAPI(), rig.engine.events
    app.add_route(FROM_DISK, lambda request: Response(), ["POST"])
    headers = {"Content-Type": "application/octet-stream"}

    async def scenario() -> httpx.Response:
        await frontend.serve(app, manager, rig.settings)
        sent = rig.request("POST", DELTA, app=app, content=delta_part(), headers=headers)
        commit = asyncio.ensure_future(sent)
        while ("commit",) not in events:
            await asyncio.sleep(0)
        asked = asyncio.ensure_future(getattr(manager, change)())
        response = await commit
        await asked
        return response

    assert rig.run(scenario()).json()["status"] == "committed"
    assert events[-2:] == [("publish", "8", True), (change,)]


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ("continue_generation", True),
        ("pause_generation", False),
        ("release_memory_occupation", False),
        ("resume_memory_occupation", False),  # generation stays paused
    ],
)
def test_kept_requests_do_not_go_on_while_uncertain(
    rig: Rig, manager: SimpleNamespace, change: str, is_refused: bool
) -> None:
    app, events = FastAPI(), rig.engine.events
    app.add_route(FROM_DISK, lambda request: Response(), ["POST"])
    rig.run(frontend.serve(app, manager, rig.settings))
    rig.fail_commit()
    events.clear()
    if is_refused:
        with pytest.raises(EngineUncertain):
            rig.run(getattr(manager, change)())
    else:
        rig.run(getattr(manager, change)())
    assert events == [(change,)] * (not is_refused)
