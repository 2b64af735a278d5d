"""Delta logs with a few versions, and engines that follow them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from engine_ext.log import DeltaLog, open_log
from tests.support.delta_bodies import OTHER_STEP, STEP, VERSION, delta_part
from tests.support.endpoint_rig import STATUS, Rig

CATCH_UP = "/delta_catch_up"
THIRD_STEP = {"norm.weight": {0: 0x7777, 7: 0x8888}}
STEPS = (STEP, OTHER_STEP, THIRD_STEP)
NEWEST = VERSION + len(STEPS)


def write(log: Path | DeltaLog, *bodies: bytes, number: int) -> Path:
    with (log if isinstance(log, DeltaLog) else open_log(log)).writer() as writer:
        draft = writer.begin(number)
        for body in bodies:
            draft.add(body)
        return draft.finish()


def write_steps(log: Path | DeltaLog, count: int = 3, first: int = VERSION) -> list[Path]:
    return [
        write(log, delta_part(step, first + k + 1, base_version=first + k), number=first + k + 1)
        for k, step in enumerate(STEPS[:count])
    ]


def until(rig: Rig, *, app: FastAPI | None = None, **facts: Any) -> dict[str, Any]:
    """Let the engine work until its status has these facts, of ``follow``, ``log`` and others.

    Args:
        app: of the process that is asked, if it is another one.
    """

    async def wait() -> dict[str, Any]:
        while True:
            status = (await rig.request("GET", STATUS, app=app)).json()
            log, state = status["log"], status["health"]["state"]
            found = {"version": status["version"]["number"], "state": state, **log, **log["follow"]}
            if all(found[name] == value for name, value in facts.items()):
                return found
            await asyncio.sleep(0.01)

    return rig.run(wait())


def looked(rig: Rig) -> dict[str, Any]:
    """Let the engine begin and end a look at the log; return its status then."""

    async def next_look(before: float | None) -> float | None:
        while True:
            status = (await rig.request("GET", STATUS)).json()
            ended: float | None = status["log"]["follow"]["looked_at"]
            if ended != before:
                return ended
            await asyncio.sleep(0.01)

    under_way = rig.run(next_look(until(rig)["looked_at"]))
    rig.run(next_look(under_way))
    return until(rig)
