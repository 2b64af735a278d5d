"""What the HTTP processes of an engine share that follows its delta log; the ranks keep it.

One of the processes follows. If it dies, another one takes over: names, pins, failures and the
last look stay.
"""

from __future__ import annotations

import os
import re
import socket
import uuid

from delta_server.commit import call_all_ranks
from delta_server.engine import Engine
from delta_server.leases import acquire
from delta_server.process_identity import new_name, pid_of
from engine_ext.log import Listing
from engine_ext.ranks.operations import AcquireFollowLease, Following, LogLook, ShareFollowing


class FollowState:
    """How one process sees it.

    Args:
        engine: its ranks keep it.
        hold: versions of the log that the engine stays behind the newest.

    Attributes:
        known: what the ranks have answered last.
    """

    def __init__(self, engine: Engine, hold: int) -> None:
        self._engine, self.hold = engine, hold
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
        self._name = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._process = new_name()
        self.known = Following(name=self._name)

    @property
    def name(self) -> str:
        """The engine's name among the log's followers, whichever process follows."""
        return self.known.name or self._name

    @property
    def pid(self) -> int | None:
        """The id of the process that follows; None before one does."""
        return None if self.known.process is None else pid_of(self.known.process)

    @property
    def leads(self) -> bool:
        """Whether this process follows, as far as is known."""
        return self.known.process == self._process

    async def lead(self) -> bool:
        """Return whether this process follows; it does from now on if the one that did is dead."""

        def request(dead: str | None) -> AcquireFollowLease:
            return AcquireFollowLease(holder=self._process, instead_of=dead)

        return await acquire(self._engine, request)

    async def read(self) -> Following:
        """Ask the ranks."""
        return await self._share(ShareFollowing(follower=self._name))

    async def record(self, look: LogLook) -> Following:
        """Report to the ranks how a look at the log has ended."""
        return await self._share(ShareFollowing(follower=self._name, look=look))

    async def note_read(self) -> Following:
        """Record that the log could be read."""
        return await self._share(ShareFollowing(follower=self._name, was_read=True))

    async def pin(self, version: int | None) -> Following:
        """Hold the engine at a version, or let it continue."""
        return await self._share(ShareFollowing(follower=self._name, pins=True, pin=version))

    async def _share(self, request: ShareFollowing) -> Following:
        [self.known, *_] = await call_all_ranks(self._engine, request)
        return self.known

    def last_version(self, listing: Listing) -> int | None:
        """Return the last version that can be applied; None if all can, -1 if none can."""
        limits = [] if self.known.pin is None else [self.known.pin]
        if self.hold:
            versions = sorted({entry.version for entry in listing.entries})
            limits.append(versions[-1 - self.hold] if len(versions) > self.hold else -1)
        return min(limits, default=None)
