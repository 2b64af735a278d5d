"""Stage parts on every rank: map, expand and locate them there. Nothing is written yet."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from delta_server.engine import Engine, call_all_ranks
from delta_server.intake import VerifiedPart
from delta_server.part_server import PartServer
from delta_server.request_record import RequestRecord
from delta_server.waiting import held_by_thread, wait_for_event
from engine_ext.errors import Conflict, DeltaError, NotUpdatable, PartUnavailable
from engine_ext.format import PartId
from engine_ext.ranks.operations import (
    AbortSync,
    Admission,
    BeginPart,
    Delivery,
    PartBegun,
    PollPart,
    PrepareSync,
)

# A part with what it is of its sync.
NumberedPart = tuple[PartId, VerifiedPart]

_SUFFIX: Final = ".safetensors"
# While ranks stage, they are asked this often whether they still live.
_ALIVE_S = 0.25
# A part that another request has begun has no pipe here. Each poll costs the engine one message
# between two steps, so the interval grows.
_MIN_POLL_S = 0.001
_MAX_POLL_S = 0.05
_POLL_SHARE = 0.25  # of the time so far, so at most this share of it is spent waiting too long


class StagingPipe(contextlib.AbstractContextManager["StagingPipe"]):
    """Shows without asking when the ranks have ended staging a part: a named pipe.

    It is to be made before the ranks begin the part. Every rank opens it for writing when it begins
    to stage the part, and closes it when it has ended; the system closes it for a rank that dies. A
    pipe without a writer wakes the reader up.

    Without pipes in the file system, or if a rank does not open it, `wait` returns at once.

    Attributes:
        path: the name of a part's file is never used again, so that of its pipe is not, either.
    """

    def __init__(self, part: Path) -> None:
        self.path = part.with_name(f"{part.name}.staging")
        self._reader: int | None = None
        self._writer: int | None = None
        with contextlib.suppress(OSError):
            os.mkfifo(self.path, 0o600)
            self._reader = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            # Keeps it open, as some ranks might have ended before others begin.
            self._writer = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the pipe; calling this again does nothing."""
        self.path.unlink(missing_ok=True)
        self._close_writer()
        if self._reader is not None:
            os.close(self._reader)
            self._reader = None

    async def wait(self, seconds: float) -> bool:
        """Wait until no rank that has begun the part is staging it, at most for some seconds.

        Call it when every rank has begun the part. Return whether that is so.
        """
        self._close_writer()
        if self._reader is None:
            return True
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._reader, ended.set)
        try:
            await wait_for_event(ended, seconds)
        finally:
            loop.remove_reader(self._reader)
        return ended.is_set()

    def _close_writer(self) -> None:
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None


@dataclass(slots=True)
class _Begun:
    """A part that the ranks are staging."""

    part: PartId
    admissions: set[Admission]  # the ranks' admissions
    pipe: StagingPipe

    @property
    def admission(self) -> str:
        if self.admissions == {"already_applied"}:
            return "already_applied"
        return "new" if "new" in self.admissions else "staged"


def _admits(answer: PartBegun | DeltaError) -> bool:
    """Return whether a rank stages a part, or has staged it."""
    return not isinstance(answer, DeltaError) and answer.admission != "already_applied"


class Staging:
    """Stages parts on every rank of one engine.

    Args:
        at_once: how many parts of one request the ranks stage side by side.
        list_folder: returns the names in the folder of an earlier version.
        part_server: serves parts to other hosts; None if the engine has one host.
    """

    def __init__(
        self,
        engine: Engine,
        at_once: int,
        list_folder: Callable[[str], Collection[str]],
        part_server: PartServer | None = None,
    ) -> None:
        self._engine, self._at_once, self._list_folder = engine, at_once, list_folder
        self._part_server = part_server

    async def stage(self, parts: Sequence[NumberedPart], record: RequestRecord) -> bool:
        """Stage some parts of one sync, or all; return whether the sync is complete.

        Raises:
            DeltaError: a rank refused a part; nothing was written. The other parts that were begun
                are forgotten; of parts without numbers of their own also those that are staged.
        """
        start = time.perf_counter()
        unnumbered = all(verified.manifest.part is None for _, verified in parts)
        record.phase = "stage"
        complete = False
        begun, todo = deque[_Begun](), deque(parts)
        async with contextlib.AsyncExitStack() as pipes:
            try:
                while begun or todo:
                    # Not all at once: each keeps other syncs out for one stage timeout.
                    while todo and len(begun) < self._at_once:
                        begun.append(await self._begin(*todo.popleft(), pipes, record))
                    complete = await self._finish(begun, record)
            except DeltaError:
                admissions = record.admissions.union(*(one.admissions for one in begun))
                if unnumbered and admissions - {"already_applied"}:
                    # No one else sends the rest; what is staged would only keep other syncs out.
                    await self.drop(parts[0][0])
                else:
                    await self._forget(begun)
                raise
        record.timings["stage_ms"] = (time.perf_counter() - start) * 1e3
        return complete

    async def drop(self, part: PartId, group: str | None = None) -> None:
        """Drop the staged sync if this part belongs to it, and no other group decides on it."""
        request = AbortSync(version=part.version, sync_id=part.sync_id, group=group)
        await call_all_ranks(self._engine, request)

    async def _begin(
        self,
        part: PartId,
        verified: VerifiedPart,
        pipes: contextlib.AsyncExitStack,
        record: RequestRecord,
    ) -> _Begun:
        """Begin to stage a part, on every rank or on none."""
        source = None
        if self._part_server is not None:
            offer = held_by_thread(partial(self._part_server.offer, verified.path))
            source = await pipes.enter_async_context(offer)
        pipe = pipes.enter_context(StagingPipe(verified.path))
        request = BeginPart(
            part=part,
            path=str(verified.path),
            stamp=verified.stamp,
            pipe=str(pipe.path),
            source=source,
            nbytes=verified.wire_bytes,
            now=time.monotonic(),
            at=time.time(),
        )
        answers = await self._engine.call(request)
        if len({_admits(answer) for answer in answers}) > 1:
            # One rank can have doubts alone. Ranks do not share them for each part: they would wait
            # for a replica that hangs, and generate nothing.
            await call_all_ranks(self._engine, AbortSync(part=part))
            answers = await self._engine.call(replace(request, shares_doubts=True))
        refusals = [answer for answer in answers if isinstance(answer, DeltaError)]
        if refusals:
            if len(refusals) < len(answers):  # replicas might be in different states
                await call_all_ranks(self._engine, AbortSync(part=part))
            raise refusals[0]
        replies = [one for one in answers if not isinstance(one, DeltaError)]
        searches = [reply.search_ms for reply in replies if reply.search_ms is not None]
        if searches:
            record.timings["search_ms"] = max(searches)
        admissions = {reply.admission for reply in replies}
        return _Begun(part, admissions, pipe)

    async def _finish(self, begun: deque[_Begun], record: RequestRecord) -> bool:
        """Wait until every rank has staged the first part; return whether its sync is complete."""
        first, complete = begun.popleft(), False
        if first.admission != "already_applied":
            # A part that is "staged" is waited for too: the request that sent it might have
            # died.
            complete = await self._keep(first, begun, record)
        first.pipe.close()
        record.admissions.add(first.admission)
        record.staged += 1
        return complete

    async def _keep(self, first: _Begun, others: deque[_Begun], record: RequestRecord) -> bool:
        part = first.part
        try:
            await self._wait_until_staged(part, first.pipe)
        except NotUpdatable:
            await self.drop(part)
            others.clear()
            raise
        except DeltaError:
            await call_all_ranks(self._engine, AbortSync(part=part))
            raise
        try:
            kept = await call_all_ranks(self._engine, PrepareSync(part=part, keep=True))
            await self._check_base(kept[0].base)
            if kept[0].complete and not all(reply.done for reply in kept):
                await self._prepare(part, record)
        except DeltaError:
            await self.drop(part)
            others.clear()
            raise
        return kept[0].complete

    async def _check_base(self, base: Delivery | None) -> None:
        """Refuse a sync that would be written over a version that is known to be incomplete."""
        if base is None:
            return
        missing = await asyncio.to_thread(not_applied, base, self._list_folder)
        if missing:
            raise Conflict(
                f"the engine's version is incomplete: {len(missing)} files of its folder were not "
                f"applied: {missing[:8]}; send them, or a full sync",
                files=missing[:8],
            )

    async def _forget(self, begun: Sequence[_Begun]) -> None:
        """Let the ranks forget the parts that this request has begun."""
        for one in begun:
            if one.admission == "new":
                await call_all_ranks(self._engine, AbortSync(part=one.part))

    async def _prepare(self, part: PartId, record: RequestRecord) -> None:
        """Prepare the commit on all ranks in step; the engine serves between two calls."""
        start = time.perf_counter()
        done = False
        while not done:
            replies = await call_all_ranks(self._engine, PrepareSync(part=part))
            done = all(reply.done for reply in replies)
            record.rebuilt = max(reply.rebuilt for reply in replies)
            if not record.rebuilt:  # it proves whole new tensors before it rebuilds
                record.timings["prove_ms"] = (time.perf_counter() - start) * 1e3
        if record.rebuilt:
            whole = (time.perf_counter() - start) * 1e3
            record.timings["rebuild_ms"] = whole - record.timings.get("prove_ms", 0.0)

    async def _wait_until_staged(self, part: PartId, pipe: StagingPipe) -> None:
        start = time.perf_counter()
        ended = await pipe.wait(_ALIVE_S)
        while not all(
            reply.done for reply in await call_all_ranks(self._engine, PollPart(part=part))
        ):
            if ended:
                wait = (time.perf_counter() - start) * _POLL_SHARE
                await asyncio.sleep(min(max(wait, _MIN_POLL_S), _MAX_POLL_S))
            else:
                ended = await pipe.wait(_ALIVE_S)


def not_applied(delivery: Delivery, list_folder: Callable[[str], Collection[str]]) -> list[str]:
    """Return the files of the version's folder that have not arrived, sorted.

    They are none if nothing can show any: the folder is gone, or not known.

    Args:
        list_folder: returns the names in a folder, given as it is in the delivery.

    Raises:
        PartUnavailable: the folder is in a store that cannot be read now.
    """
    if delivery.complete or delivery.folder is None:
        return []
    try:
        names = list_folder(delivery.folder)
    except PartUnavailable:
        raise
    except DeltaError:
        return []
    return sorted({n for n in names if n.endswith(_SUFFIX)} - {*delivery.files})
