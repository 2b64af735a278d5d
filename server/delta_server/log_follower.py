"""Follow a delta log: look for new versions until cancelled, and apply them beside generation.

An engine that follows is at a version of its log, and moves on only by it. What keeps it from a
version (damage, a full disk, weights that sleep) is in the status, the log and the heartbeat; it
stays at its version and looks again, so that it goes on by itself once the cause is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import socket
import time
import uuid
from typing import Any, Final

from delta_server import metrics
from delta_server.engine import Engine
from delta_server.follow_limit import FollowLimit
from delta_server.log_replay import LogReplay
from delta_server.request_options import Options
from engine_ext.delta_log import FollowerState, Heartbeat, remove_heartbeat, write_heartbeat
from engine_ext.errors import Conflict, DeltaError, VersionConflict, WeightsAsleep

logger = logging.getLogger(__name__)

_JITTER: Final = 0.2  # of the interval, so that engines do not look all at once
_LONGEST_WAIT_S: Final = 60.0  # after failures
_BEATS_TO_EXPIRE: Final = 10
_BEATS_OF_A_LOOK: Final = 4  # per expiry, while a look takes long
_SHORTEST_EXPIRY_S: Final = 120.0
_LONGEST_GOODBYE_S: Final = 5.0  # to remove the heartbeat, which expires anyway


class LogFollower:
    """Follows a delta log with one engine.

    Args:
        replay: replays the log.
        engine: its name is in the heartbeat.
        interval: seconds between two looks.
        limit: of `replay`, too.
    """

    def __init__(
        self, replay: LogReplay, engine: Engine, interval: float, limit: FollowLimit
    ) -> None:
        self._replay, self._engine = replay, engine
        self._interval, self._limit = interval, limit
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
        self._name = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._failures = self._in_a_row = 0
        self._error: dict[str, Any] | None = None
        self._looked_at: float | None = None
        self._asleep = self._cannot_write = False
        self._wake = asyncio.Event()
        self._beating = asyncio.Lock()

    def describe(self) -> dict[str, Any]:
        """Return how the engine follows, as JSON."""
        return {
            "name": self._name,
            "interval": self._interval,
            "hold": self._limit.hold,
            "pinned": self._limit.pin,
            "looked_at": self._looked_at,
            "failures": self._failures,
            "error": self._error,
        }

    async def run(self) -> None:
        """Look at the log until cancelled; the heartbeat is removed then."""
        beat_s = self._expires_s() / _BEATS_OF_A_LOOK
        try:
            while True:
                self._wake.clear()
                # A look is a task of its own: what cancels a call to the engine does not end this
                # loop, and what ends this loop does not stop a commit half-way.
                look = asyncio.ensure_future(self.look())
                while not (await asyncio.wait({look}, timeout=beat_s))[0]:
                    # A slow store must not make the engine look dead.
                    await asyncio.wait({asyncio.ensure_future(self._beat())})
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._wait_s())
        finally:
            gone = asyncio.to_thread(remove_heartbeat, self._replay.log, self._name)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(gone, _LONGEST_GOODBYE_S)

    async def look(self) -> None:
        """Apply what the log has; whatever keeps the engine from it is kept for the status."""
        try:
            await self.catch_up(Options())
        except WeightsAsleep:
            logger.debug("delta log: the weights sleep")
        except Exception as error:
            known = error if isinstance(error, DeltaError) else None
            message = f"{type(error).__name__}: {known.message if known else error}"
            if self._in_a_row == 1:  # the same again is in the status
                logger.error("delta log: not followed for now: %s", message, exc_info=not known)

    async def catch_up(self, options: Options) -> dict[str, Any]:
        """Look at once; see `LogReplay.run` for what it returns and raises."""
        self._asleep = False
        try:
            found = await self._replay.run(options, fold=True)
        except WeightsAsleep:
            self._asleep = True
            raise
        except Exception as error:
            self._failures += 1
            self._in_a_row += 1
            metrics.FOLLOW_FAILURES.inc()
            self._error = as_wire(error)
            raise
        else:
            self._in_a_row, self._error = 0, None
            return found
        finally:
            await self._beat()
            self._looked_at = time.time()

    async def pin(self, version: int | None) -> dict[str, Any]:
        """Hold the engine at a version, or let it go on; return the result as JSON.

        A later version is reached first, as the log has it. No look that has begun goes past it.

        Raises:
            VersionConflict: the engine is past it; versions are not gone back to.
        """
        async with self._replay.idle():
            current = await self._replay.version()
            if version is not None and version < current:
                raise VersionConflict(
                    f"the engine is at version {current}, past {version}",
                    expected=version,
                    actual=current,
                )
            self._limit.pin = version
        self._wake.set()
        status = "released" if version is None else "pinned"
        return {"status": status, "pinned": version, "version": current}

    def _wait_s(self) -> float:
        wait = min(self._interval * 2.0 ** min(self._in_a_row, 10), _LONGEST_WAIT_S)
        return max(wait, self._interval) * random.uniform(1 - _JITTER, 1 + _JITTER)

    def _expires_s(self) -> float:
        return max(_SHORTEST_EXPIRY_S, _BEATS_TO_EXPIRE * self._interval)

    async def _beat(self) -> None:
        """Write the heartbeat; a log that cannot be written is followed all the same."""
        async with self._beating:
            await self._write_beat()

    async def _write_beat(self) -> None:
        try:
            version = await self._replay.version()
        except Exception:
            return
        behind = self._replay.behind(version)
        metrics.BEHIND_LOG.set(behind)
        error = None
        if self._error is not None:
            error = f"{self._error['type']}: {self._error['message']}"
        heartbeat = Heartbeat(
            name=self._name,
            engine=self._engine.name,
            version=version,
            newest=self._replay.newest,
            behind=behind,
            state=self._state(),
            failures=self._failures,
            error=error,
            at=time.time(),
            expires_s=self._expires_s(),
        )
        try:
            await asyncio.to_thread(write_heartbeat, self._replay.log, heartbeat)
            self._cannot_write = False
        except Exception as failure:
            if not self._cannot_write:
                message = "delta log: no heartbeat can be written, so pruning does not see this "
                logger.warning("%sengine: %s", message, failure)
            self._cannot_write = True

    def _state(self) -> FollowerState:
        if self._asleep:
            return "asleep"
        if self._error is not None:
            return "failing"
        if self._limit.pin is not None:
            return "pinned"
        return "held" if self._limit.hold else "following"


def as_wire(error: Exception) -> dict[str, Any]:
    """Return an error as the status has it."""
    if isinstance(error, DeltaError):
        return error.to_wire()
    return {"type": type(error).__name__, "message": str(error)}


def refuse_pushes(follower: LogFollower | None) -> None:
    """Refuse an update that does not come from the log of an engine that follows one.

    Raises:
        Conflict: the engine follows.
    """
    if follower is not None:
        raise Conflict(
            "the engine follows its delta log (--delta-follow) and takes versions from there "
            "alone; publish the version in the log"
        )
