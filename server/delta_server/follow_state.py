"""What the HTTP processes of an engine share that follows its delta log; the ranks keep it.

One of the processes follows: it has the lease of the board's item. If it dies, another one takes
over: names, pins, failures and the last look stay.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from delta_server.board import FOLLOW, Item
from delta_server.engine import Engine
from delta_server.process_identity import pid_of
from engine_ext.log import GroupMarks, Listing
from engine_ext.structs import prepare


class LogLook(msgspec.Struct, frozen=True, kw_only=True):
    """How a look at the delta log ended, of an engine that follows one."""

    at: float  # Unix time of its end
    newest: int | None  # version in the log; None if it has none, or was never read
    behind: int  # versions in the log after that of the weights
    problem: dict[str, Any] | None  # why the engine cannot reach the newest version
    error: dict[str, Any] | None  # the error that ended the look
    asleep: bool  # the weights' memory was released


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a member of a group of followers."""

    complete: int | None = None  # the newest version that the group takes, as far as is known
    prepared: str | None = None  # what the ranks hold for it; see `engine_ext.log.content_key`
    waits_for: list[str] = []  # the members that keep it from the next version, and why
    until: float = 0.0  # to then the group waits for this member, on `time.monotonic`
    is_member: bool = False  # it has had what was complete, so that none is without it


class Following(msgspec.Struct, frozen=True, kw_only=True):
    """The state that all HTTP processes of an engine share that follows its delta log."""

    name: str | None = None  # the engine's, among the log's followers
    pin: int | None = None  # a version that the engine does not go past
    look: LogLook | None = None  # the last one, of any process
    was_read: bool = False  # the log was, since the engine's start
    failures: int = 0  # looks that an error has ended
    in_a_row: int = 0  # of these, since one ended well
    group: GroupState = GroupState()


prepare(Following)


class FollowState:
    """How one process sees it.

    Args:
        engine: its ranks keep it.
        hold: versions of the log that the engine stays behind the newest.
        marks: of the group that it takes versions with, if it does.
    """

    def __init__(self, engine: Engine, hold: int, marks: GroupMarks | None = None) -> None:
        self._item, self.hold, self.marks = Item(engine, FOLLOW, Following), hold, marks
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
        self._name = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"

    @property
    def known(self) -> Following:
        """What the ranks have answered last."""
        return self._item.value

    @property
    def name(self) -> str:
        """The engine's name among the log's followers, whichever process follows."""
        return self.known.name or self._name

    @property
    def pid(self) -> int | None:
        """The id of the process that follows; None before one does."""
        return None if self._item.holder is None else pid_of(self._item.holder)

    @property
    def leads(self) -> bool:
        """Whether this process follows, as far as is known."""
        return self._item.holder == self._item.name

    async def lead(self) -> bool:
        """Return whether this process follows; it does from now on if the one that did is dead."""
        named = None if self.known.name else self._named(self.known)
        return await self._item.acquire(named)

    async def read(self) -> Following:
        """Ask the ranks."""
        return await self._item.read()

    async def record_look(
        self, look: LogLook, group: Callable[[GroupState], GroupState] | None = None
    ) -> Following:
        """Report to the ranks how a look at the log has ended.

        Args:
            group: returns the new state of the member, from that which the ranks have.
        """
        failed = look.error is not None

        def changes(known: Following) -> dict[str, Any]:
            return {
                "look": look,
                "failures": known.failures + failed,
                "in_a_row": known.in_a_row + 1 if failed else 0,
                "group": known.group if group is None else group(known.group),
            }

        return await self._update(changes)

    async def record_prepared(self, key: str | None) -> Following:
        """Record what the ranks hold for the group."""
        return await self.record_group(lambda known: msgspec.structs.replace(known, prepared=key))

    async def record_group(self, change: Callable[[GroupState], GroupState]) -> Following:
        """Record what `change` returns of the member's state, whatever other processes record."""
        return await self._update(lambda known: {"group": change(known.group)})

    async def record(self, **changes: Any) -> Following:
        """Record fields of `Following`."""
        return await self._update(lambda known: changes)

    async def _update(self, changes: Callable[[Following], dict[str, Any]]) -> Following:
        return await self._item.update(
            lambda known: msgspec.structs.replace(self._named(known), **changes(known))
        )

    def _named(self, known: Following) -> Following:
        """Give the engine a name, unless another process was first."""
        return msgspec.structs.replace(known, name=known.name or self._name)

    def last_complete(self, listing: Listing) -> int | None:
        """Return the last version that can be applied, as `last_version`, and is complete."""
        last = self.last_version(listing)
        if self.marks is None:
            return last
        complete = self.marks.newest(listing)
        limits = [-1 if complete is None else complete, *([] if last is None else [last])]
        return min(limits)

    def last_version(self, listing: Listing) -> int | None:
        """Return the last version that can be applied; None if all can, -1 if none can.

        A version that is not complete for the group counts, too.
        """
        limits = [] if self.known.pin is None else [self.known.pin]
        if self.hold:
            versions = sorted({entry.version for entry in listing.entries})
            limits.append(versions[-1 - self.hold] if len(versions) > self.hold else -1)
        return min(limits, default=None)
