"""What the ranks hold of a delta log: a version that all of them can commit, and its group decides.

Where the engine follows without a group, nothing is held.
"""

from __future__ import annotations

from typing import Final

from delta_server.coordinator import Coordinator
from delta_server.engine import part_of
from delta_server.follow_state import FollowState
from delta_server.request_options import Options
from delta_server.request_record import RequestRecord
from engine_ext.log import Entry
from engine_ext.ranks.operations import StagedSync

_HELD_S: Final = 10 * 365 * 86400.0  # the group decides, however long that takes


class HeldVersion:
    """The version that one engine holds for its group, if it holds one."""

    def __init__(self, coordinator: Coordinator, following: FollowState | None) -> None:
        self._coordinator, self._following = coordinator, following
        marks = None if following is None else following.marks
        self._holder = None if marks is None else marks.holder

    async def is_there(self) -> bool:
        """Return whether the ranks hold a version for the group."""
        return self._holder is not None and await self._staged() is not None

    async def _staged(self) -> StagedSync | None:
        return (await self._coordinator.held()).prepared_for(self._holder)

    async def keep(self, entry: Entry) -> None:
        """Let all ranks vote on the staged version, and hold it.

        Raises:
            LogDamaged: it is not complete.
            DeltaError: a rank cannot commit it. Nothing stays staged after both.
        """
        assert self._holder is not None
        held = await self._coordinator.held()
        staged = held.staged
        if staged is None or held.complete_sync(entry.version, staged.sync_id) is None:
            if staged is not None:
                await self._coordinator.drop_staged(part_of(staged))
            raise entry.damaged("its parts are not all of a sync (staged)")
        await self._coordinator.hold_staged(part_of(staged), self._holder, _HELD_S, Options())

    async def take(self, version: int, key: str | None, options: Options) -> bool:
        """Commit what is held, if it is this version; else drop it.

        Args:
            key: of the version's content, see `engine_ext.log.content_key`.

        Returns:
            Whether it was committed.

        Raises:
            DeltaError: see `Coordinator.commit_staged`.
        """
        if self._following is None or self._holder is None:
            return False
        if (staged := await self._staged()) is None:
            return False
        at, prepared = await self._coordinator.version(), self._following.known.group.prepared
        starts_here = staged.full or staged.base_version == at
        if not (starts_here and staged.version == version and prepared == key):
            await self.drop()
            return False
        record = RequestRecord(origin="log", reason="from the delta log")
        await self._coordinator.commit_staged(part_of(staged), options, record, self._holder)
        return True

    async def drop(self) -> None:
        """Drop what is held, if anything is."""
        if self._holder is not None and (staged := await self._staged()) is not None:
            await self._coordinator.drop_staged(part_of(staged), self._holder)
