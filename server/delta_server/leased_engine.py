"""The engine as one of its HTTP processes knows it, and the lease that lets one process change it.

The ranks keep the lease, and who has paused the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from delta_server import metrics, pauses
from delta_server.board import Item
from delta_server.engine import Engine, are_uncertain, rank_states, rank_statuses
from delta_server.recent import Recent
from delta_server.served_versions import ServedVersions
from engine_ext.ranks import ENGINE
from engine_ext.ranks.operations import CallerPause, EngineUse, RankState, RankStatus
from engine_ext.ranks.status import PauseStatus

logger = logging.getLogger(__name__)

_POLL_S = 0.02


@dataclass
class HeldLease:
    """The lease of the engine, while this process holds it."""

    was_paused: bool  # when the lease was granted
    resume_owed: bool  # generation must be resumed, and has not been yet
    publish_owed: bool  # the version of the model's weights might not be published yet
    pause: CallerPause | None  # the caller's, as it was last recorded
    states: Sequence[RankState]  # when the lease was granted


class LeasedEngine:
    """One engine, whose ranks keep what all of its HTTP processes must know.

    Attributes:
        served: the version of the model's weights; it changes before generation is resumed.
        recent: the state of the ranks, which keeps `uncertain` up to date.
        awaits_full_sync: whether the engine was started without weights and has none yet, as far as
            is known.
    """

    def __init__(self, engine: Engine) -> None:
        self.served = ServedVersions()
        self._uncertain, self.awaits_full_sync = False, True
        self.recent = Recent[Sequence[RankState]](self._refreshed)
        self._engine = engine
        self._use = Item(engine, ENGINE, EngineUse)
        self._lock = asyncio.Lock()

    @property
    def uncertain(self) -> bool:
        """Whether a write has failed half-way, so that generation must not be served.

        As far as this process knows; see `is_uncertain`.
        """
        return self._uncertain

    @uncertain.setter
    def uncertain(self, value: bool) -> None:
        self._uncertain = value
        metrics.UNCERTAIN.set(value)

    async def status(self, engine: Engine | None = None) -> list[RankStatus]:
        """Return the state of every rank's receiver, and update `uncertain`."""
        replies = await rank_statuses(engine or self._engine)
        if engine is None or engine is self._engine:
            self._update_state(replies)
            self.awaits_full_sync = replies[0].awaits is not msgspec.UNSET
            metrics.show_run(replies[0].run)
        else:
            self.uncertain = are_uncertain(replies)
        return replies

    async def states(self) -> list[RankState]:
        """Return what every HTTP process must know of the ranks."""
        return await rank_states(self._engine)

    async def _refreshed(self) -> Sequence[RankState]:
        """Return what `states` does, and update `uncertain`."""
        if self.awaits_full_sync:  # never again once it has weights
            return await self.status()
        states = await rank_states(self._engine)
        self._update_state(states)
        return states

    async def is_uncertain(self) -> bool:
        """Return whether generation must not be served; asks the ranks if the engine is shared.

        The ranks are asked at most once a second. That is safe because a failed commit leaves the
        engine paused: a request that is let through meanwhile waits.
        """
        if self._engine.shared and self.recent.is_due:
            await self.recent.get()
        return self.uncertain

    async def describe_pause(self, state: RankState) -> PauseStatus | None:
        """Return what is known of a pause that is not a commit's; None without one.

        An engine that sleeps is paused, too, and that alone is none.

        Args:
            state: of the first rank.
        """
        if state.resume_owed:
            return None
        try:
            paused = await self._engine.is_paused()
        except Exception:  # replicas that are just being paused or resumed differ
            paused = state.paused is not None
        if not paused or (state.released and state.paused is None):
            metrics.PAUSED_SINCE.set(0)
            return None
        return pauses.describe(state.paused)

    async def see_pause(self, lease: HeldLease) -> CallerPause | None:
        """Find out if a caller has paused the engine; return the pause.

        The ranks keep it from the end of the lease on. No commit must owe a resume. A sleep begins
        no pause, and ends none.
        """
        if not await self._engine.is_paused():
            lease.pause = None
        elif lease.pause is None and not any(state.released for state in await self.states()):
            lease.pause = pauses.begin()
        metrics.PAUSED_SINCE.set(0 if lease.pause is None else lease.pause.since)
        return lease.pause

    @contextlib.asynccontextmanager
    async def lease(self, *, pauses: bool) -> AsyncIterator[HeldLease]:
        """Hold the lease of the engine: no other process pauses or resumes it meanwhile."""
        async with self._lock:
            lease: HeldLease | None = None
            try:
                lease = await self._acquire(pauses)
                yield lease
            finally:
                # Also if the answer to the last request for it was lost.
                use = None
                if lease is not None:
                    use = EngineUse(
                        resume_owed=lease.resume_owed,
                        publish_owed=lease.publish_owed,
                        pause=lease.pause,
                    )
                try:
                    await self._use.release(use)
                except Exception:
                    # This process can acquire it again, and others can if this one is dead.
                    logger.exception("the lease of the engine could not be released")

    async def _acquire(self, pauses: bool) -> HeldLease:
        while True:
            was_paused = await self._engine.is_paused()
            known = self._use.value
            owed = known.resume_owed or (pauses and not was_paused)
            unpublished = known.publish_owed or pauses  # if this process dies before it is
            use = msgspec.structs.replace(known, resume_owed=owed, publish_owed=unpublished)
            leases = await self._use.try_lease(use)
            written, states = leases[0].item.written, [lease.state for lease in leases]
            if not leases[0].granted:
                await asyncio.sleep(_POLL_S)
            elif written or not pauses:  # else it might be another one's pause that was seen
                self._update_state(states)
                if self.uncertain:
                    self.served.lose()
                else:
                    self.served.see(states[0].version)
                use = self._use.value
                unpublished = (known if written else use).publish_owed
                return HeldLease(was_paused, use.resume_owed, unpublished, use.pause, states)

    def _update_state(self, replies: Sequence[RankState]) -> None:
        self.uncertain = are_uncertain(replies)
        self.recent.note(replies)
