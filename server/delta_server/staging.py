"""Parts on their way into every rank: read, verified and located there; nothing is written yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from delta_server.commit import call
from delta_server.engine import Engine
from delta_server.request_record import RequestRecord
from delta_server.spool import Spooled
from engine_ext.errors import DeltaError, NotUpdatable
from engine_ext.wire.identity import PartId

# Polling costs the engine one message between two steps: short at first, then seldom.
_POLL_FIRST_S = 0.001
_POLL_MOST_S = 0.05
_POLL_SHARE = 0.25  # of the time so far, which is the most that a wait is too long by


class Staging:
    """Stages parts on every rank of one engine.

    Args:
        engine: the engine's adapter.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def stage(
        self, pairs: Sequence[tuple[PartId, Spooled]], outcome: RequestRecord, *, whole: bool
    ) -> bool:
        """Stage some parts.

        Args:
            pairs: what each part is, and where it lies.
            outcome: of the request; it learns how far this came.
            whole: the parts are all of their sync.

        Returns:
            Whether their sync is complete.

        Raises:
            DeltaError: a rank refused a part; nothing was written.
        """
        start = time.perf_counter()
        outcome.phase = "stage"
        complete = False
        for part, spooled in pairs:
            try:
                admission, complete = await self._one(part, spooled)
            except DeltaError:
                # Nobody else sends the rest; what is staged would only keep other syncs out.
                if whole and outcome.admissions - {"already_applied"}:
                    await self.drop(part)
                raise
            outcome.admissions.add(admission)
            outcome.staged += 1
        outcome.timings["stage_ms"] = (time.perf_counter() - start) * 1e3
        return complete

    async def _one(self, part: PartId, spooled: Spooled) -> tuple[str, bool]:
        """Stage one part on every rank; returns its admission and whether the sync is complete."""
        answers = await self._call(
            "begin",
            part=msgspec.to_builtins(part),
            path=str(spooled.path),
            now=time.monotonic(),
        )
        admissions = {str(answer["admission"]) for answer in answers}
        if admissions == {"already_applied"}:
            return "already_applied", False
        # A part that is "staged" goes the same way: the request that brought it may have died.
        try:
            await self._staged_everywhere(part.part)
        except NotUpdatable:
            await self.drop(part)
            raise
        except DeltaError:
            await self._call("settle", part=part.part, staged=False)
            raise
        try:
            answers = await self._call("settle", part=part.part, staged=True)
        except DeltaError:
            await self.drop(part)
            raise
        return "new" if "new" in admissions else "staged", bool(answers[0]["complete"])

    async def _staged_everywhere(self, part: int) -> None:
        start = time.perf_counter()
        while not all(answer["done"] for answer in await self._call("poll", part=part)):
            wait = (time.perf_counter() - start) * _POLL_SHARE
            await asyncio.sleep(min(max(wait, _POLL_FIRST_S), _POLL_MOST_S))

    async def drop(self, part: PartId) -> None:
        """Have the ranks forget the sync of a part, if it is the one that is staged."""
        await self._call("drop", version=part.version, sync_id=part.sync_id)

    async def _call(self, operation: str, **arguments: Any) -> list[dict[str, Any]]:
        return await call(self._engine, operation, arguments)
