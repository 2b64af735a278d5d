"""Follow a delta log: look for new versions until cancelled, and apply them during generation.

An engine that follows is at a version of its log, and moves on only by it. The status, the log and
the heartbeat show the reason that keeps it from a version (damage, a full disk, weights that
sleep); it stays at its version and looks again, so that it continues once the cause is gone.

If several HTTP processes serve the engine, one of them follows, see `delta_server.follow_state`;
each can look, pin and report.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import time
from typing import Any, Final

from delta_server import metrics
from delta_server.follow_state import FollowState, LogLook
from delta_server.request_options import Options
from delta_server.sources.log import LogReplay, shown
from delta_server.sources.log_group import FollowGroup
from delta_server.waiting import wait_for_event
from engine_ext.errors import DeltaError, LogDiverged, VersionConflict, WeightsAsleep
from engine_ext.log import (
    FollowerState,
    Heartbeat,
    live_heartbeats,
    remove_heartbeat,
    write_heartbeat,
)
from engine_ext.ranks.status import FollowStatus
from engine_ext.remote_parts import Peers
from engine_ext.settings import is_engine_root

logger = logging.getLogger(__name__)

_JITTER: Final = 0.2  # of the interval, so that engines do not look all at once
_LONGEST_WAIT_S: Final = 60.0  # after failures
_BEATS_TO_EXPIRE: Final = 10
_BEATS_OF_A_LOOK: Final = 4  # per expiry, while a look takes long
_SHORTEST_EXPIRY_S: Final = 120.0
_MARKS_READ_EVERY_S: Final = 1.0  # while a version is prepared for the group
_LONGEST_GOODBYE_S: Final = 5.0  # to remove the heartbeat, which expires anyway


class LogFollower:
    """Follows a delta log with one engine.

    Args:
        replay: replays the log.
        shared: what this process shares with others; of `replay`, too.
        peers: whom the log asks for parts, those with heartbeats included.

    Attributes:
        shared: as given.
        group: with which it takes versions together; None: it takes each alone.
    """

    def __init__(self, replay: LogReplay, shared: FollowState, peers: Peers) -> None:
        self._replay, self.shared, self._peers = replay, shared, peers
        settings = replay.inlet.settings
        self._interval, group = settings.follow_interval, settings.follow_group
        self.group: FollowGroup | None = None
        if group is not None and shared.marks is not None:
            self.group = FollowGroup(group, replay, shared, shared.marks, self._expires_s())
        self._in_a_row = 0
        self._cannot_write = self._is_over = False
        self._asked = False  # for a look, whoever leads
        self._news = asyncio.Event()  # that, or the end of a look
        self._beating = asyncio.Lock()

    async def describe(self) -> FollowStatus:
        """Return how the engine follows."""
        known = await self.shared.read()
        return FollowStatus(
            name=self.shared.name,
            pid=self.shared.pid,
            interval=self._interval,
            hold=self.shared.hold,
            pinned=known.pin,
            looked_at=None if known.look is None else known.look.at,
            failures=known.failures,
            error=None if known.look is None else known.look.error,
            group=None if self.group is None else self.group.describe(),
        )

    @property
    def waits_for_log(self) -> bool:
        """Whether the log was never read since the engine's start, as far as is known."""
        return not self.shared.known.was_read

    async def at_start(self) -> None:
        """Replay the log before the engine serves; pruning sees the engine from here on."""
        with contextlib.suppress(Exception):  # ranks that do not answer: the replay finds out
            await self.shared.lead()
        await self._beat_meanwhile()
        await self._find_peers()
        replay = asyncio.ensure_future(self._replay.at_start())
        try:
            await self._beat_until(replay)
            await replay
        finally:
            replay.cancel()

    async def run(self) -> None:
        """Look at the log until cancelled; the heartbeat is removed then.

        While another process follows, this one waits to take over.
        """
        try:
            while True:
                asked, self._asked = self._asked, False
                # A look is a task of its own: what cancels a call to the engine does not end this
                # loop, and what ends this loop does not stop a commit half-way.
                turn = asyncio.ensure_future(self._turn(asked))
                await self._beat_until(turn)
                await self._rest()
        finally:
            self._is_over = True
            if self.shared.leads:
                gone = asyncio.to_thread(remove_heartbeat, self._replay.log, self.shared.name)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(gone, _LONGEST_GOODBYE_S)

    async def _rest(self) -> None:
        """Wait for the next look; it comes early if the group's version is complete."""
        end = time.monotonic() + self._wait_s()
        while not self._asked and (left := end - time.monotonic()) > 0:
            self._news.clear()
            group = self.group if self.group is not None and self.group.waits else None
            await wait_for_event(
                self._news, left if group is None else min(left, _MARKS_READ_EVERY_S)
            )
            if group is not None:
                with contextlib.suppress(Exception):  # the look finds out
                    self._asked |= await group.is_complete()

    async def _beat_until(self, task: asyncio.Future[None]) -> None:
        """Wait for a task; a slow store or a long log must not make the engine look dead."""
        beat_s = self._expires_s() / _BEATS_OF_A_LOOK
        while not (await asyncio.wait({task}, timeout=beat_s))[0]:
            await asyncio.wait({asyncio.ensure_future(self._beat_meanwhile())})

    async def _turn(self, asked: bool) -> None:
        """Look at the log if this process follows, or was asked to."""
        try:
            looks = asked or await self.shared.lead()
        except Exception:
            looks = True  # which reports why the ranks do not answer
        if looks:
            await self.look()

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
                what = "delta log: not followed for now: %s"
                logger.error(what, shown(message), exc_info=not known)

    async def catch_up(self, options: Options) -> dict[str, Any]:
        """Look at once; see `LogReplay.run` for what it returns and raises."""
        error: BaseException | None = None
        await self._find_peers()
        try:
            if self.group is not None:
                return await self.group.look(options, self._beat_meanwhile)
            return await self._replay.run(options, fold=True)
        except BaseException as failed:  # a call that is cancelled, too
            error = failed
            if not isinstance(error, WeightsAsleep):
                metrics.FOLLOW_FAILURES.inc()
            raise
        finally:
            await self._ended(error)
            self._news.set()

    async def _find_peers(self) -> None:
        """Find the engines that follow the log and say where they are, if this one does."""
        if self._peers.own is None:
            return
        with contextlib.suppress(DeltaError, OSError):  # the look finds out
            beats = await asyncio.to_thread(live_heartbeats, self._replay.log)
            urls = (beat.url for beat in beats if beat.url is not None)
            self._peers.found = frozenset(url for url in urls if is_engine_root(url))

    async def pin(self, version: int | None) -> dict[str, Any]:
        """Hold the engine at a version, or let it continue; return the result as JSON.

        A later version is reached first, as the log has it. No look that has begun goes past it.

        Raises:
            VersionConflict: the engine is past it; versions are not gone back to.
        """
        async with self._replay.idle():
            current = await self._replay.inlet.coordinator.version()
            if version is not None and version < current:
                raise VersionConflict(
                    f"the engine is at version {current}, past {version}",
                    expected=version,
                    actual=current,
                )
            await self.shared.record(pin=version)
            if self.group is not None:
                await self.group.pinned(self._beat_meanwhile)
        self._asked = True
        self._news.set()
        status = "released" if version is None else "pinned"
        return {"status": status, "pinned": version, "version": current}

    def _wait_s(self) -> float:
        wait = min(self._interval * 2.0 ** min(self._in_a_row, 10), _LONGEST_WAIT_S)
        return max(wait, self._interval) * random.uniform(1 - _JITTER, 1 + _JITTER)

    def _expires_s(self) -> float:
        return max(_SHORTEST_EXPIRY_S, _BEATS_TO_EXPIRE * self._interval)

    async def _ended(self, error: BaseException | None) -> None:
        """Report to the log and the other processes how a look has ended."""
        asleep = isinstance(error, WeightsAsleep)
        wire = None if error is None or asleep else as_wire(error)
        self._in_a_row = self._in_a_row + 1 if wire else 0
        # Ranks that do not answer have ended the look; the next one finds out if they do.
        with contextlib.suppress(Exception):
            version = await self._replay.inlet.coordinator.version()
            look = self._look(version, wire, asleep)
            metrics.BEHIND_LOG.set(look.behind)
            await self._beat(version, look, self.shared.known.failures + (wire is not None))
            group = None
            if self.group is not None:
                group = functools.partial(self.group.state, is_read=error is None)
            self._in_a_row = (await self.shared.record_look(look, group)).in_a_row

    async def _beat_meanwhile(self) -> Heartbeat | None:
        """Write the heartbeat during a look, with the error of the last one.

        Return it; None if it could not be written.
        """
        if not self.shared.leads and self.group is None:
            return None
        known = self.shared.known
        error, asleep = (
            (None, False) if known.look is None else (known.look.error, known.look.asleep)
        )
        written: Heartbeat | None = None
        with contextlib.suppress(Exception):  # the look finds out
            if self.group is not None:
                await self.group.read_meanwhile()
        with contextlib.suppress(Exception):  # ranks that do not answer: the look finds out
            version = await self._replay.inlet.coordinator.version()
            look = self._look(version, error, asleep)
            written = await self._beat(version, look, known.failures)
            if self.group is not None:
                await self.shared.record_group(self.group.state_meanwhile)
        return written

    def _look(self, version: int, error: dict[str, Any] | None, asleep: bool) -> LogLook:
        return LogLook(
            at=time.time(),
            newest=self._replay.listing.newest,
            behind=self._replay.behind(version),
            problem=self._replay.problem,
            error=error,
            asleep=asleep,
        )

    async def _beat(self, version: int, look: LogLook, failures: int) -> Heartbeat | None:
        """Write the heartbeat; a log that cannot be written is followed all the same."""
        async with self._beating:
            if self._is_over:  # a look that is still under way; the heartbeat is removed
                return None
            return await self._write(version, look, failures)

    async def _write(self, version: int, look: LogLook, failures: int) -> Heartbeat | None:
        error = look.error
        heartbeat = Heartbeat(
            name=self.shared.name,
            engine=self._replay.inlet.engine.name,
            version=version,
            newest=look.newest,
            behind=look.behind,
            state=self._state(look),
            failures=failures,
            error=None if error is None else f"{error['type']}: {error['message']}",
            url=self._peers.own,
            at=look.at,
            expires_s=self._expires_s(),
        )
        times = (0.0, 0.0)
        if self.group is not None:
            heartbeat, times = self.group.put_into(heartbeat), self.group.times
        try:
            await asyncio.to_thread(write_heartbeat, self._replay.log, heartbeat)
            self._cannot_write = False
            if self.group is not None:
                self.group.note_beat(heartbeat, *times)
            return heartbeat
        except Exception as failure:
            if not self._cannot_write:
                message = "delta log: no heartbeat can be written, so pruning does not see this "
                logger.warning("%sengine: %s", message, failure)
            self._cannot_write = True
            return None

    def _state(self, look: LogLook) -> FollowerState:
        if look.asleep:
            return "asleep"
        if look.error is not None:
            diverged = look.error["type"] == LogDiverged.__name__
            return "diverged" if diverged else "failing"
        if self.shared.known.pin is not None:
            return "pinned"
        if self.shared.hold:
            return "held"
        return "waiting" if self.group is not None and self.group.waits else "following"


def as_wire(error: BaseException) -> dict[str, Any]:
    """Return an error as the status has it."""
    if isinstance(error, DeltaError):
        return error.to_wire()
    return {"type": type(error).__name__, "message": str(error)}
