"""A clock that only waiting moves, so that no wait is longer on a busy machine."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualClock:
    """Stands for the module `time`, and runs scenarios of asyncio in its own time.

    Attributes:
        now: seconds since it was made.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        """Run a scenario as `asyncio.run` does; what it waits for comes at once."""
        loop = _Loop(self)
        try:
            asyncio.set_event_loop(loop)
            return loop.run_until_complete(scenario)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            loop.close()


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(_Selector(clock))
        self._clock = clock

    def time(self) -> float:
        return self._clock.now


class _Selector(selectors.SelectSelector):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "the scenario waits for what never comes"
            self._clock.now += timeout
        return ready
