"""Pauses of generation: by a commit, and how long each phase takes; by a caller, and since when.

The engine knows whether a caller has paused it, and the ranks keep the rest for all HTTP processes.
A pause that no process has seen begin counts from when it is found.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from engine_ext.ranks.operations import CallerPause
from engine_ext.ranks.status import PauseStatus

logger = logging.getLogger(__name__)

_LONGEST_PERIOD_S: Final = 10.0

# Address of the client whose request is being answered; None if it is not known.
client: Final = contextvars.ContextVar[str | None]("client", default=None)


class PausePhases:
    """The pause of a commit, which begins now.

    Attributes:
        timings: milliseconds of the phases so far, by name and "_ms". No two overlap.
    """

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def end(self, phase: str, **within: float) -> None:
        """End a phase now; `within` are other phases that it has contained, in milliseconds."""
        last, self._last = self._last, time.perf_counter()
        own = (self._last - last) * 1e3 - sum(within.values())
        for name, milliseconds in (*within.items(), (phase, max(0.0, own))):
            self.timings[f"{name}_ms"] = self.timings.get(f"{name}_ms", 0.0) + milliseconds

    def ended(self) -> dict[str, float]:
        """Return the phases, and as ``pause_ms`` all of the pause, which has ended now."""
        return {"pause_ms": (time.perf_counter() - self._start) * 1e3, **self.timings}


def begin() -> CallerPause:
    """Return a pause that begins now, by the client whose request is being answered."""
    return CallerPause(since=round(time.time(), 3), began=time.monotonic(), by=client.get())


def describe(pause: CallerPause | None) -> PauseStatus:
    """Return what is known of a pause that lasts."""
    if pause is None:
        return PauseStatus(since=None, seconds=None, by=None)
    seconds = round(time.monotonic() - pause.began, 3)
    return PauseStatus(since=pause.since, seconds=seconds, by=pause.by)


async def end_long_pauses(end: Callable[[float], Awaitable[None]], most: float) -> None:
    """End pauses that last for longer than `most` seconds, until cancelled.

    Args:
        end: see `delta_server.commit.EngineCommitter.end_long_pause`.
    """
    while True:
        await asyncio.sleep(min(most / 4, _LONGEST_PERIOD_S))
        try:
            await end(most)
        except Exception:
            logger.warning("a long pause could not be looked for or ended", exc_info=True)
