"""Whether clients can be sent to an engine, for the probes of routers and of Kubernetes.

However many probes there are, the ranks are asked at most once a second (`delta_server.recent`);
the version is known without them. Ranks that compute a long step answer late; their last answer
counts then.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from delta_server.commit import EngineCommitter
from delta_server.engine import changed_by
from delta_server.follow_state import Following
from delta_server.recent import Recent
from delta_server.sources.log import LogReplay
from delta_server.sources.log_follower import LogFollower
from engine_ext.ranks.operations import RankState
from engine_ext.ranks.status import HealthState
from engine_ext.structs import prepare

Reason = Literal[
    "no_answer", "uncertain", "mismatched", "changed_externally", "asleep", "awaits_full_sync",
    "waiting_for_log", "behind_log", "behind_group", "behind",
]  # fmt: skip

_LONGEST_WAIT_S: Final = 0.5  # for the ranks; a probe of Kubernetes waits for a second
_LOG_READ_EVERY_S: Final = 10.0
_NO_WEIGHTS: Final = "the engine was started without weights and awaits a full sync"


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an engine is ready; the answer of ``GET /delta_ready``."""

    ready: bool
    reason: Reason | None = None  # why not
    message: str | None = None  # the same for people
    state: HealthState = "certain"
    version: int | None = None  # of the weights; None if they are of none
    wanted: int | None = None  # the least version that would be ready


prepare(Ready)


class Readiness:
    """What one HTTP process knows of an engine's readiness.

    Args:
        replay, follower: of its delta log, if it has one and follows it.
        least: version below which it is not ready.
    """

    def __init__(
        self,
        committer: EngineCommitter,
        replay: LogReplay | None,
        follower: LogFollower | None,
        least: int | None,
    ) -> None:
        self._committer, self._replay = committer, replay
        self._follower, self._least = follower, least
        self._reading: asyncio.Future[None] | None = None
        self._read_at = -math.inf
        # Another process might have looked at the log.
        self._following: Recent[Following] | None = None
        if follower is not None and follower.group is not None:
            self._following = Recent(follower.shared.read)

    async def check(self, least: int | None = None) -> Ready:
        """Return whether the engine is ready.

        Args:
            least: version below which it is not; the engine's own, if that is later.
        """
        states = await self._known()
        served = self._committer.served.version
        wanted = max((one for one in (least, self._least) if one is not None), default=None)
        version = served if served >= 0 else None

        def ready(reason: Reason | None, message: str | None, state: HealthState) -> Ready:
            return Ready(
                ready=reason is None,
                reason=reason,
                message=message,
                state=state,
                version=version,
                wanted=wanted,
            )

        if not states:
            return ready("no_answer", "the ranks do not answer", "certain")
        if self._committer.uncertain or version is None:
            why = "a weight update failed half-way; send a full sync"
            return ready("uncertain", why, "uncertain")
        if any(one.engine_state == "mismatched" for one in states):
            why = "tensors hold other bits than the syncs have written; send a full sync"
            return ready("mismatched", why, "mismatched")
        if (by := changed_by(states)) is not None:
            why = f"{by} changed the weights outside of delta sync; send a full sync"
            return ready("changed_externally", why, "certain")
        if any(one.asleep for one in states):
            return ready("asleep", "the engine has released its weights", "certain")
        if self._committer.awaits_full_sync:
            version = None
            return ready("awaits_full_sync", _NO_WEIGHTS, "certain")
        if self._follower is not None and self._follower.waits_for_log:
            why = "the delta log was not read since the engine's start"
            return ready("waiting_for_log", why, "waiting_for_log")
        if (replay := self._replay) is not None and not replay.has_caught_up(version):
            self._read_log(replay)
            first = replay.newest_at_start
            wanted = max((one for one in (wanted, first) if one is not None), default=None)
            newest = "not read yet" if first is None else f"{first} when the engine started"
            problem = (replay.describe(version).problem or {}).get("message")
            why = f"the delta log's newest version was {newest}"
            return ready("behind_log", f"{why}: {problem}" if problem else why, "certain")
        group = None if self._follower is None else self._follower.group
        if group is not None and self._following is not None:
            await self._following.get(_LONGEST_WAIT_S)
            if (why_not := group.why_not_ready(version)) is not None:
                return ready("behind_group", why_not, "certain")
        if wanted is not None and version < wanted:
            why = f"the weights are of version {version}, not of {wanted} or later"
            return ready("behind", why, "certain")
        return ready(None, None, "certain")

    async def problem_of_weights(self) -> str | None:
        """Return why the weights are of no version, as far as is known; None if they are of one."""
        states = await self._known()
        if self._committer.awaits_full_sync:
            return _NO_WEIGHTS
        if any(one.engine_state == "mismatched" for one in states):
            return "tensors hold other bits than the syncs have written"
        by = changed_by(states)
        return None if by is None else f"{by} changed the weights outside of delta sync"

    async def _known(self) -> Sequence[RankState]:
        """Return the last answer of the ranks; empty if they do not answer."""
        return await self._committer.recent.get(_LONGEST_WAIT_S) or []

    def _read_log(self, replay: LogReplay) -> None:
        """Read a log that could not be read at the start, now and then."""
        now = time.monotonic()
        is_due = now - self._read_at >= _LOG_READ_EVERY_S
        if replay.newest_at_start is None and is_due:
            self._read_at = now
            self._reading = asyncio.ensure_future(replay.read_newest())
