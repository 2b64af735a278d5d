"""One of several HTTP processes of SGLang, without SGLang."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext.adapters.sglang import engine
from engine_ext.adapters.sglang.http_workers import SglangHttpWorker
from engine_ext.errors import DeltaError
from engine_ext.ranks.operations import GetStatus, RankReport, RankState, Serving

STATE = RankState(version=7, engine_state="certain", resume_owed=False)
SERVING = Serving(idle=True, weight_version="7")


class Ranks:
    """Stands for the channel: answers what the ranks serve, when it is let."""

    def __init__(self, answer: Serving | DeltaError) -> None:
        self.answer = answer
        self.let = asyncio.Event()

    async def call(self, request: Any) -> list[Any]:
        assert request == GetStatus(details=False)
        await self.let.wait()
        if isinstance(self.answer, DeltaError):
            return [self.answer] * 2
        return [RankReport(state=STATE, serving=self.answer)] * 2


def process(
    answer: Serving | DeltaError, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Ranks, list[str]]:
    """A process's manager, its ranks, and what happens in the manager."""
    happened: list[str] = []
    ranks = Ranks(answer)

    async def apply(broadcast: Any) -> None:
        happened.append("pause" if broadcast.is_pause else "continue")
        manager.is_pause = broadcast.is_pause

    manager = SimpleNamespace(
        server_args=SimpleNamespace(nnodes=1),
        pause_generation=None,
        continue_generation=None,
        _apply_pause_continue_broadcast=apply,
        _update_weight_version_if_provided=happened.append,
    )
    monkeypatch.setattr(engine, "Channel", lambda manager: ranks)
    manager.engine = SglangHttpWorker(manager)
    return manager, ranks, happened


@pytest.mark.parametrize("fails", [False, True])
def test_the_weight_version_is_learnt_before_requests_go_on(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the broadcasts, and also where the ranks do not answer."""

    async def scenario() -> tuple[list[str], list[str]]:
        answer = DeltaError("no") if fails else SERVING
        manager, ranks, happened = process(answer, monkeypatch)
        broadcasts = [SimpleNamespace(is_pause=pause) for pause in (True, False, True)]
        tasks = [
            asyncio.create_task(manager._apply_pause_continue_broadcast(broadcast))
            for broadcast in broadcasts
        ]
        await asyncio.sleep(0.01)
        before = list(happened)
        ranks.let.set()
        await asyncio.gather(*tasks)
        return before, happened

    before, happened = asyncio.run(scenario())
    assert before == ["pause"]
    assert happened == ["pause", *([] if fails else ["7"]), "continue", "pause"]


def test_a_process_that_has_yet_to_learn_of_the_end_of_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not take another process's pause for the caller's."""

    async def scenario() -> tuple[bool, bool]:
        manager, ranks, _ = process(SERVING, monkeypatch)
        manager.is_pause = True
        before = await manager.engine.is_paused()
        notified = asyncio.create_task(
            manager._apply_pause_continue_broadcast(SimpleNamespace(is_pause=False))
        )
        await asyncio.sleep(0)
        asking = asyncio.create_task(manager.engine.is_paused())
        await asyncio.sleep(0.01)
        ranks.let.set()
        await notified
        return before, await asking

    assert asyncio.run(scenario()) == (True, False)
