"""SGLang's engine as one HTTP process stops and resumes it, without SGLang."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext.adapters.sglang import engine
from engine_ext.adapters.sglang.http_workers import SglangHttpWorker
from engine_ext.adapters.sglang.rpc import HowToStop, Publish
from engine_ext.errors import DeltaError
from engine_ext.ranks.operations import Reply, RollBack, StoppedCall

STOPPED: StoppedCall[Any] = StoppedCall([], None, 1.0, 2.0)


class Scene:
    """A tokenizer manager, the ranks that its process calls, and what happens, in order.

    A router stands behind the manager of one of several processes: it answers a pause or its end
    with a broadcast.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, several: bool) -> None:
        self.happened: list[Any] = []
        self.refuses: DeltaError | None = None
        structs = SimpleNamespace(
            PauseGenerationReqInput=lambda mode: SimpleNamespace(pauses=True, mode=mode),
            ContinueGenerationReqInput=lambda torch_empty_cache: SimpleNamespace(pauses=False),
        )
        monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", structs)
        monkeypatch.setattr(engine, "Channel", lambda manager: self)
        self.manager = SimpleNamespace(
            server_args=SimpleNamespace(nnodes=1),
            is_pause=False,
            is_pause_cond=asyncio.Condition(),
            pause_generation=self._asks_router,
            continue_generation=self._asks_router,
            _apply_pause_continue_broadcast=self._apply,
            _dispatch_to_scheduler=self._to_router,
            _update_weight_version_if_provided=lambda version: self.note("version", version),
        )
        self.engine = (SglangHttpWorker if several else engine.SglangEngine)(self.manager)

    def note(self, *happened: Any) -> None:
        self.happened.append((*happened, self.manager.is_pause))

    def _to_router(self, request: Any) -> None:
        self.broadcasting = asyncio.ensure_future(self._asks_router(request))

    async def _asks_router(self, request: Any) -> None:
        await self._apply(SimpleNamespace(is_pause=request.pauses))

    async def _apply(self, broadcast: Any) -> None:
        self.manager.is_pause = broadcast.is_pause
        asked = vars(self.manager).pop("_pause_continue_future", None)
        if asked is not None:
            asked.set_result(True)

    async def call(self, request: Any) -> list[Any]:
        self.note(request)
        return [self.refuses or Reply()] * 2

    async def call_stopped(self, request: Any, stop: Any) -> StoppedCall[Any]:
        self.note(request, stop)
        return STOPPED


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("flushes", [True, False])
def test_requests_are_held_back_while_ranks_are_stopped(
    several: bool, flushes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the weight version is known before a token of the new weights can be answered.

    With several processes, the ranks resume by what the router forwards after its broadcast.
    """
    publish = Publish(version="8", resumes=not several)

    async def scenario() -> Scene:
        scene = Scene(monkeypatch, several=several)
        assert await scene.engine.call_stopped(RollBack(), flushes) == STOPPED
        await scene.engine.publish("8", resumes=True)
        return scene

    scene = asyncio.run(scenario())
    stop = HowToStop(flushes=flushes)
    assert scene.happened == [(RollBack(), stop, True), ("version", "8", True), (publish, True)]
    assert not scene.manager.is_pause


def test_a_salt_is_new_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> list[str | None]:
        scene = Scene(monkeypatch, several=False)
        for _ in range(2):
            await scene.engine.call_stopped(RollBack(), "salt")
        return [stop.salt for _, stop, _ in scene.happened]

    one, two = asyncio.run(scenario())
    assert one != two
    assert None not in (one, two)


@pytest.mark.parametrize("refuses", [False, True])
def test_requests_wait_until_the_ranks_have_resumed(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> bool:
        scene = Scene(monkeypatch, several=False)
        await scene.engine.call_stopped(RollBack(), False)
        scene.refuses = DeltaError("no") if refuses else None
        if refuses:
            with pytest.raises(DeltaError, match="no"):
                await scene.engine.publish("8", resumes=True)
        else:
            await scene.engine.publish("8", resumes=False)  # the caller has paused
        return bool(scene.manager.is_pause)

    assert asyncio.run(scenario())
