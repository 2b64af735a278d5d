"""Stage parts on every rank: read, verify and locate them there. Nothing is written yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from delta_server.commit import call
from delta_server.engine import Engine
from delta_server.request_record import RequestRecord
from delta_server.spool import Spooled
from engine_ext.errors import DeltaError, NotUpdatable
from engine_ext.wire import PartId
from engine_ext.wire.operations import BeginPart, DropSync, PollPart, PrepareSync, SettlePart

# Each poll costs the engine one message between two steps, so the interval grows.
_MIN_POLL_S = 0.001
_MAX_POLL_S = 0.05
_POLL_SHARE = 0.25  # of the time so far, so at most this share of it is spent waiting too long


class Staging:
    """Stages parts on every rank of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def stage(
        self, pairs: Sequence[tuple[PartId, Spooled]], record: RequestRecord, *, whole: bool
    ) -> bool:
        """Stage some parts of one sync, `whole` if they are all of it.

        Return whether their sync is complete.

        Raises:
            DeltaError: a rank refused a part; nothing was written.
        """
        start = time.perf_counter()
        record.phase = "stage"
        complete = False
        for part, spooled in pairs:
            try:
                admission, complete = await self._stage_one(part, spooled, record)
            except DeltaError:
                # No one else sends the rest; what is staged would only keep other syncs out.
                if whole and record.admissions - {"already_applied"}:
                    await self.drop(part)
                raise
            record.admissions.add(admission)
            record.staged += 1
        record.timings["stage_ms"] = (time.perf_counter() - start) * 1e3
        return complete

    async def drop(self, part: PartId) -> None:
        """Drop the staged sync if this part belongs to it."""
        await call(self._engine, DropSync(version=part.version, sync_id=part.sync_id))

    async def _stage_one(
        self, part: PartId, spooled: Spooled, record: RequestRecord
    ) -> tuple[str, bool]:
        """Stage one part on every rank; return its admission and whether its sync is complete."""
        request = BeginPart(part=part, path=str(spooled.path), now=time.monotonic())
        admissions = await self._begin(request)
        if admissions == {"already_applied"}:
            return "already_applied", False
        # A part that is "staged" is polled too: the request that sent it may have died.
        try:
            await self._wait_until_staged(part)
        except NotUpdatable:
            await self.drop(part)
            raise
        except DeltaError:
            await call(self._engine, SettlePart(part=part, staged=False))
            raise
        try:
            settled = await call(self._engine, SettlePart(part=part, staged=True))
            if settled[0].complete and not all(reply.prepared for reply in settled):
                await self._prepare(part, record)
        except DeltaError:
            await self.drop(part)
            raise
        return "new" if "new" in admissions else "staged", settled[0].complete

    async def _begin(self, request: BeginPart) -> set[str]:
        """Begin to stage a part, on every rank or on none; return the ranks' admissions."""
        answers = await self._engine.call(request)
        refusals = [answer for answer in answers if isinstance(answer, DeltaError)]
        if refusals:
            if len(refusals) < len(answers):  # replicas may be in different states
                await call(self._engine, SettlePart(part=request.part, staged=False))
            raise refusals[0]
        return {answer.admission for answer in answers if not isinstance(answer, DeltaError)}

    async def _prepare(self, part: PartId, record: RequestRecord) -> None:
        """Prepare the commit on all ranks in step; the engine serves between two calls."""
        start = time.perf_counter()
        done = False
        while not done:
            replies = await call(self._engine, PrepareSync(part=part))
            done = all(reply.done for reply in replies)
            record.rebuilt = max(reply.rebuilt for reply in replies)
        record.timings["rebuild_ms"] = (time.perf_counter() - start) * 1e3

    async def _wait_until_staged(self, part: PartId) -> None:
        start = time.perf_counter()
        while not all(reply.done for reply in await call(self._engine, PollPart(part=part))):
            wait = (time.perf_counter() - start) * _POLL_SHARE
            await asyncio.sleep(min(max(wait, _MIN_POLL_S), _MAX_POLL_S))
