"""What the HTTP processes of an engine share that follows its delta log.

Every rank keeps the same, as it gets the same calls in the same order. It lasts as long as the
engine, whichever of these processes dies.
"""

from __future__ import annotations

import msgspec

from engine_ext.ranks.operations import (
    AcquireFollowLease,
    Following,
    LeaseGrant,
    ShareFollowing,
)
from engine_ext.sync.lease import Lease


class SharedFollowing:
    """Which process follows the log, and what all of them know of it."""

    def __init__(self) -> None:
        self._lease = Lease()
        self._known = Following()

    def acquire(self, request: AcquireFollowLease) -> LeaseGrant:
        """Let one process follow; see `Lease.acquire`."""
        dead = request.instead_of
        grant = self._lease.acquire(request.holder, resumes=False, instead_of=dead)
        if grant.granted:
            self._known = msgspec.structs.replace(self._known, process=request.holder)
        return grant

    def share(self, request: ShareFollowing) -> Following:
        """Record what a process reports, and return what is known."""
        known = self._known
        changed: dict[str, object] = {"name": known.name or request.follower}
        if request.was_read:
            changed["was_read"] = True
        if request.pins:
            changed["pin"] = request.pin
        if (look := request.look) is not None:
            failed = look.error is not None
            changed["look"] = look
            changed["failures"] = known.failures + failed
            changed["in_a_row"] = known.in_a_row + 1 if failed else 0
        self._known = msgspec.structs.replace(known, **changed)
        return self._known
