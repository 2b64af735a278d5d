"""Sources: the ways by which a version gets to an engine, behind one port.

========================  ==========================================================================
``push``                  the body of a request; the step that has changed nothing
``files``                 files that a request names: parts, or the folder of a version
``disk_files``            where they are: a folder below a ``--delta-root``
``store_files``           or an object store
``folders``               the versions that other trainers publish, as parts
``pulls``                 versions that the engine is asked to fetch, then to commit
``log``                   the delta log, replayed; ``log_follower`` follows it, ``log_history``
                          compares it with what led to the engine's version
``transfer``              an engine's own transfer API
``numbering``             completes what parts say of their sync, for all of these
========================  ==========================================================================

A failure in a source reaches no rank: what it has taken in is removed, and the engine is
unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from delta_server.coordinator import Coordinator
from delta_server.engine import Engine
from delta_server.intake import Intake, VerifiedPart
from delta_server.request_options import Options
from delta_server.request_record import RequestRecord
from delta_server.sources.store_files import StoreFiles
from delta_server.staging import NumberedPart
from delta_server.upload_limits import MinimumRate, UploadSlots
from engine_ext.errors import Conflict
from engine_ext.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inlet:
    """What sources of one engine, or of one of its adapters, work with."""

    engine: Engine
    settings: Settings
    coordinator: Coordinator
    intake: Intake
    store_files: StoreFiles
    minimum_rate: MinimumRate
    upload_slots: UploadSlots
    follows: bool  # versions come from the engine's log alone

    def refuse_pushes(self) -> None:
        """Refuse an update that does not come from the log, if the engine follows one.

        Raises:
            Conflict: the engine follows.
        """
        if self.follows:
            raise Conflict(
                "the engine follows its delta log (--delta-follow) and takes versions from there "
                "alone; publish the version in the log"
            )


class Source(ABC):
    """Brings a version to the engine, or some parts of one; used once.

    - It ends in `VerifiedPart`: intake has received, checked and decompressed every part that
      `parts` yields.
    - It calls no rank and commits nothing. What it must know of the engine it asks the coordinator.
    - `parts` removes what it has taken in and not yielded, also if it is closed early. What it has
      yielded belongs to `deliver`, which removes it whatever happens.
    - `complete` is called once, in the turn of the parts: while another request with one of
      them is in progress, it waits. The coordinator sees numbered parts only.
    - What `parts` and `complete` raise leaves the engine unchanged.
    - `settled` is called once, after everything else, and raises nothing.

    Attributes:
        inlet: brings the parts to the engine.
        options, record: of the request.
    """

    def __init__(self, inlet: Inlet, options: Options, record: RequestRecord) -> None:
        self.inlet, self.options, self.record = inlet, options, record

    @abstractmethod
    def parts(self) -> AsyncGenerator[VerifiedPart, None]:
        """Yield the parts as they are taken in.

        Raises:
            DeltaError: one is refused, or cannot be read.
        """

    @abstractmethod
    async def complete(self, verified: Sequence[VerifiedPart]) -> list[NumberedPart]:
        """Return the parts of one sync with all that must be known of them; some can be left out.

        Args:
            verified: what `parts` has yielded, not empty.

        Raises:
            DeltaError: they are not of one sync.
        """

    async def settled(self, status: str | None) -> None:  # noqa: B027
        """Give up what the source still holds, once the delivery has ended.

        Args:
            status: of the answer; None if there is none.
        """


async def deliver(source: Source) -> dict[str, Any]:
    """Bring the parts of a source to the coordinator; return the answer as JSON.

    Once all have arrived, the delivery ends and is reported even if its caller is cancelled: a
    sender that disconnects must not stop a commit half-way.

    Raises:
        DeltaError: each class fixes the state that the engine is in then.
    """
    verified: list[VerifiedPart] = []
    async with source.inlet.coordinator.reporter.follow(source.record):
        try:
            async with contextlib.aclosing(source.parts()) as arriving:
                async for one in arriving:
                    verified.append(one)
                    source.record.add(one.manifest, one.identity, one.wire_bytes)
        except BaseException:
            await _settle(source, verified, None)
            raise
        return await asyncio.shield(_submit(source, verified))


async def _submit(source: Source, verified: Sequence[VerifiedPart]) -> dict[str, Any]:
    coordinator, record = source.inlet.coordinator, source.record
    status: str | None = None
    try:
        async with coordinator.reporter.follow(record), coordinator.turn(record.identities):
            record.reason = source.options.reason or record.reason
            numbered = await source.complete(verified)
            record.parts = [part for part, _ in numbered]
            answer = await coordinator.submit(numbered, source.options, record)
            status = answer["status"]
            return answer
    finally:
        await _settle(source, verified, status)


async def _settle(source: Source, verified: Sequence[VerifiedPart], status: str | None) -> None:
    with contextlib.ExitStack() as removed:
        for one in verified:
            removed.callback(one.remove)
    try:
        await source.settled(status)
    except Exception:  # the answer is what has happened to the weights
        logger.exception("a source could not give up what it holds")
