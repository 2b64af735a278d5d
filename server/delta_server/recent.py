"""The last answer to a question that is asked at most once a second, whoever wants to know."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

logger = logging.getLogger(__name__)

_ASKED_EVERY_S: Final = 1.0
_LONGEST_VALID_S: Final = 30.0

_T = TypeVar("_T")


class Recent(Generic[_T]):
    """The last answer of the ranks to one question, as one HTTP process knows it.

    Args:
        ask: asks them.
    """

    def __init__(self, ask: Callable[[], Awaitable[_T]]) -> None:
        self._ask = ask
        self._answer: _T | None = None
        self._asking: asyncio.Future[None] | None = None
        self._asked_at = self._answered_at = -math.inf

    @property
    def is_due(self) -> bool:
        """Whether `get` asks."""
        is_asking = self._asking is not None and not self._asking.done()
        return not is_asking and time.monotonic() - self._asked_at >= _ASKED_EVERY_S

    def note(self, answer: _T) -> None:
        """Take in an answer that something else has got."""
        self._answer = answer
        self._asked_at = self._answered_at = time.monotonic()

    async def get(self, longest: float | None = None) -> _T | None:
        """Return the last answer; None if the last time none came, or if it is old.

        Args:
            longest: seconds to wait for a new one; None: until it comes.
        """
        if self.is_due:
            self._asked_at = time.monotonic()
            self._asking = asyncio.ensure_future(self._ask_anew())
        if self._asking is not None and not self._asking.done():
            await asyncio.wait({self._asking}, timeout=longest)
        is_valid = time.monotonic() - self._answered_at <= _LONGEST_VALID_S
        return self._answer if is_valid else None

    async def _ask_anew(self) -> None:
        at = time.monotonic()
        try:
            self._answer, self._answered_at = await self._ask(), at
        except Exception as error:
            logger.warning("the ranks did not answer: %s: %s", type(error).__name__, error)
            self._answer = None
