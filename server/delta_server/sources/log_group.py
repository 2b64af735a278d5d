"""Take the versions of a delta log together with other followers: one member of a group.

Each look of a member takes what is complete for the group, and then works on the next version::

    prepare     stage it, let all ranks vote, hold it; the heartbeat says so
    mark        all live members have prepared it: it is complete; see `engine_ext.log.groups`
    commit      at the next reading of the marks, about a second later

A member is live while its heartbeat counts. One that dies is waited for until then. One that could
neither read the marks nor write its heartbeat for so long is not ready: the others can have gone on
without it. One that starts has no part in the group before it has the version that is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from delta_server.follow_state import FollowState, GroupState
from delta_server.request_options import Options
from delta_server.sources.log import ENGINE_ERRORS, LogReplay
from engine_ext.errors import DeltaError, LogDamaged
from engine_ext.log import (
    CannotFold,
    GroupMarks,
    Heartbeat,
    content_key,
    has_prepared,
    live_heartbeats,
    next_target,
    version_of_key,
    why_not_newer,
)
from engine_ext.ranks.status import GroupStatus

logger = logging.getLogger(__name__)

_TRY_AGAIN_S: Final = 30.0  # a version that could not be prepared
_MARKED_IN_S: Final = 1.0  # by who has read the heartbeat before


class FollowGroup:
    """One engine's part in its group.

    Args:
        name: the group's.
        marks: those that `replay` goes by.
        expires_s: seconds for which the engine's heartbeat counts.
    """

    def __init__(
        self, name: str, replay: LogReplay, state: FollowState, marks: GroupMarks, expires_s: float
    ) -> None:
        self.name, self._replay, self._shared = name, replay, state
        self._marks, self._expires_s = marks, expires_s
        self._is_member = False
        self._reach: int | None = None
        self._failed: dict[int, float] = {}  # when a version could not be prepared
        self._folds = True  # several versions become one, if there are several
        self._waits_for: list[str] = []
        self._read_at = 0.0  # before a look has read the marks last
        self._seen_at = 0.0  # before they were read without anything prepared, as the log says
        self._until = 0.0
        self._said: str | None = None  # what is prepared by the last heartbeat
        self._looking = asyncio.Lock()

    def describe(self) -> GroupStatus:
        """Return the member's state for the status."""
        known = self._shared.known.group
        return GroupStatus(
            name=self.name,
            complete=known.complete,
            prepared=None if known.prepared is None else version_of_key(known.prepared),
            waits_for=known.waits_for,
        )

    @property
    def waits(self) -> bool:
        """Whether a version is prepared, and not complete as far as is known."""
        return self._shared.known.group.prepared is not None

    def why_not_ready(self, version: int) -> str | None:
        """Return why the group can have another version than the engine; None if it has not."""
        known = self._shared.known.group
        if known.complete is not None and version < known.complete:
            return f"version {known.complete} is complete for the group {self.name}"
        if time.monotonic() >= known.until:
            why = "the delta log was not read, or the heartbeat not written, for"
            return f"{why} {self._expires_s:.0f} s: the group {self.name} can be at another version"
        return None

    async def is_complete(self) -> bool:
        """Return whether what the engine has prepared is complete now; reads the marks alone."""
        await asyncio.to_thread(self._marks.read)
        return self._shared.known.group.prepared in self._marks.keys

    def put_into(self, heartbeat: Heartbeat) -> Heartbeat:
        """Return the engine's heartbeat with what the group must know of it."""
        known = self._shared.known.group
        return msgspec.structs.replace(
            heartbeat,
            group=self.name if self._is_member or known.is_member else None,
            prepared=known.prepared,
            reach=self._reach,
            cannot=self._cannot(),
        )

    async def read_meanwhile(self) -> None:
        """Read the marks before a heartbeat during a look.

        While nothing is prepared, no version becomes complete that is not there now: the group
        waits for the engine.

        Raises:
            LogDamaged: the log cannot be read.
        """
        at, known = time.monotonic(), self._shared.known.group
        await asyncio.to_thread(self._marks.read)
        if known.prepared is None and self._said is None and at < max(self._until, known.until):
            self._seen_at = at

    def note_beat(self, heartbeat: Heartbeat, seen_at: float, read_at: float) -> None:
        """Note that the heartbeat is written: the others wait for the engine.

        Args:
            seen_at, read_at: `times` before that.
        """
        self._said = heartbeat.prepared
        if time.monotonic() < max(self._until, self._shared.known.group.until):  # without a gap
            read_at = max(read_at, seen_at)
        self._until = max(self._until, read_at + self._expires_s)

    @property
    def times(self) -> tuple[float, float]:
        """When the marks were read last for `note_beat`."""
        return self._seen_at, self._read_at

    def state_meanwhile(self, known: GroupState) -> GroupState:
        """Return what all HTTP processes must know during a look.

        Args:
            known: to them now.
        """
        newest = self._marks.newest(self._replay.listing)
        found = [one for one in (newest, known.complete) if one is not None]
        return msgspec.structs.replace(
            known,
            complete=max(found, default=None),
            until=max(self._until, known.until),
            is_member=self._is_member or known.is_member,
        )

    def state(self, known: GroupState, *, is_read: bool) -> GroupState:
        """Return what all HTTP processes must know after a look.

        Args:
            known: to them now.
            is_read: whether this process has read the log now; if not, others might know more.
        """
        state = self.state_meanwhile(known)
        complete = self._marks.newest(self._replay.listing) if is_read else state.complete
        return msgspec.structs.replace(state, complete=complete, waits_for=self._waits_for)

    async def look(
        self, options: Options, beat: Callable[[], Awaitable[Heartbeat | None]]
    ) -> dict[str, Any]:
        """Take what is complete, and work on the next version; return the result as JSON.

        Args:
            beat: writes the heartbeat, and returns it; None if that was not possible.

        Raises:
            LogDamaged: the log cannot be read, or not lead to what is complete.
            DeltaError: the engine could not take or prepare a version.
        """
        async with self._looking:
            try:
                return await self._look(options, beat)
            except Exception as error:
                why = error.message if isinstance(error, DeltaError) else str(error)
                self._waits_for = [f"this engine: {why}"]
                with contextlib.suppress(Exception):  # the ranks do not answer
                    await self._forget_dropped()
                raise

    async def _look(
        self, options: Options, beat: Callable[[], Awaitable[Heartbeat | None]]
    ) -> dict[str, Any]:
        applied: list[int] = []
        while True:
            read_at = time.monotonic()
            self._reach = None
            found = await self._replay.run(options, fold=True)
            self._read_at, version = max(self._read_at, read_at), found["version"]
            applied += found["applied"]
            if found["applied"]:
                self._failed, self._folds = {}, True
            await self._forget_prepared()
            complete = self._marks.newest(self._replay.listing)
            self._is_member |= complete is None or version >= complete
            self._reach = await self._replay.next_step(self._cannot(), folds=self._folds)
            if not await self._advance(version, beat):
                return {**found, "applied": applied, "waits_for": self._waits_for}

    async def _advance(self, version: int, beat: Callable[[], Awaitable[Heartbeat | None]]) -> bool:
        """Prepare the next version; return whether to look again: it is complete, or given up."""
        own, others = await self._members(beat)
        self._waits_for = []
        if own is None:
            self._waits_for = ["this engine, whose heartbeat cannot be written"]
            return False
        listing = self._replay.awaited(self._replay.listing)
        refused = {one for member in others for one in member.cannot} | {*self._cannot()}
        if refused:
            self._reach = await self._replay.next_step(refused, folds=self._folds)
            own = msgspec.structs.replace(own, reach=self._reach)
        found = next_target(own, others, listing)
        if found is None:
            self._waits_for = self._behind(version, others)
            return False
        target, key = found
        if self._shared.known.group.prepared != key:
            if not await self._withdraw(version, beat):
                self._waits_for = ["the next look: what is prepared might be complete"]
                return self._is_behind(version)
            await self._prepare(target, key, refused)
            own, others = await self._members(beat)  # the others might have looked before it
            if own is None or next_target(own, others, listing) != found:
                self._waits_for = ["the next look: the members prepare different versions"]
                return False
        members = [own, *others]
        late = [one for one in members if not has_prepared(one, target, key)]
        self._waits_for = [f"{one.name}: {_why_late(one)}" for one in late]
        if late:
            return False
        names = sorted(one.name for one in members)
        async with self._replay.idle():  # no process pins the engine meanwhile
            if (await self._shared.read()).group.prepared != key:
                return True
            await asyncio.to_thread(self._marks.write, key, names)
        logger.info("delta log: version %d is complete for the group %s", target, self.name)
        return True

    async def _withdraw(
        self, version: int, beat: Callable[[], Awaitable[Heartbeat | None]]
    ) -> bool:
        """Let the others know that what is prepared will be dropped; return whether it can be.

        It stays if the heartbeat cannot be written, as the others count on it, or if a version has
        become complete before. A mark that is written later shows at the next heartbeat.
        """
        was = self._shared.known.group.prepared
        if was is None:
            return True
        withdrawn = False
        await self._shared.record_prepared(None)
        try:
            if await beat() is not None:
                await asyncio.sleep(_MARKED_IN_S)
                await asyncio.to_thread(self._marks.read)
                withdrawn = not self._is_behind(version)
        finally:
            if not withdrawn:
                await self._shared.record_prepared(was)
        return withdrawn

    def _is_behind(self, version: int) -> bool:
        """Return whether a version is complete that the engine lacks and can take."""
        complete = self._marks.newest(self._replay.awaited(self._replay.listing))
        return complete is not None and complete > version

    async def _prepare(self, target: int, key: str, refused: set[int]) -> None:
        try:
            await self._replay.hold(target, refused)
        except ENGINE_ERRORS:  # another version would meet it, too
            raise
        except (CannotFold, DeltaError) as error:
            self._failed[target] = time.monotonic()
            if not isinstance(error, CannotFold):
                raise
            self._folds = False  # the group takes one version after another
            return
        await self._shared.record_prepared(key)
        await self._forget_prepared()  # another process has pinned the engine meanwhile

    async def _forget_prepared(self) -> None:
        """Forget what was prepared, if the ranks do not hold it any more.

        They drop it if the log, just read, does not have it for this engine: it is refused, or past
        a pin.
        """
        key = self._shared.known.group.prepared
        if key is None:
            return
        version, listing = version_of_key(key), self._replay.awaited(self._replay.listing)
        if version is None or content_key(listing, version) != key:
            await self._shared.record_prepared(None)
            async with self._replay.idle():
                await self._replay.held.drop()
        else:
            await self._forget_dropped()

    async def _forget_dropped(self) -> None:
        """Forget what was prepared, if the ranks do not hold it any more."""
        prepared = self._shared.known.group.prepared
        if prepared is not None and not await self._replay.held.is_there():
            await self._shared.record_prepared(None)

    async def pinned(self, beat: Callable[[], Awaitable[Heartbeat | None]]) -> None:
        """Drop what is prepared past the pin, while the log is not replayed: it keeps all back."""
        known = self._shared.known
        prepared = None if known.group.prepared is None else version_of_key(known.group.prepared)
        if known.pin is not None and prepared is not None and prepared > known.pin:
            await self._shared.record_prepared(None)
            await beat()
            await self._replay.held.drop()

    async def _members(
        self, beat: Callable[[], Awaitable[Heartbeat | None]]
    ) -> tuple[Heartbeat | None, list[Heartbeat]]:
        """Write the engine's heartbeat; return it and those of the other members.

        Raises:
            LogDamaged: it is not certain who they are.
        """
        own, name = await beat(), self._shared.name
        if own is None:
            return None, []
        try:
            beats = await asyncio.to_thread(live_heartbeats, self._replay.log, strict=True)
        except OSError as error:
            raise LogDamaged(f"cannot read the delta log: {error.strerror}") from error
        return own, [one for one in beats if one.group == self.name and one.name != name]

    def _behind(self, version: int, others: list[Heartbeat]) -> list[str]:
        """Return what keeps the group at its version, if the log has a newer one."""
        newest = self._replay.listing.newest
        if newest is None or newest <= version:
            return []
        listing, cannot = self._replay.awaited(self._replay.listing), map(str, self._cannot())
        why = why_not_newer(listing, version, {*cannot}) or "it is pinned, or holds back"
        failing = [f"{one.name}: {_why_late(one)}" for one in others if one.cannot or one.error]
        return [f"this engine: {why}", *failing]

    def _cannot(self) -> list[int]:
        """Return the versions that the engine could not prepare, for a while."""
        since = time.monotonic() - _TRY_AGAIN_S
        self._failed = {one: at for one, at in self._failed.items() if at > since}
        return sorted(self._failed)


def _why_late(member: Heartbeat) -> str:
    """Return why a member has not prepared a version."""
    if member.error is not None:
        return member.error
    state = "" if member.state in ("following", "waiting") else f", {member.state}"
    return f"at version {member.version}{state}"
