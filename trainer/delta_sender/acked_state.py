"""What is known of the weights that one engine holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from delta_sender.snapshot import Changes, Snapshot
from engine_ext.wire.digest import Digest


@dataclass(frozen=True, slots=True)
class PostedSync:
    """A sync that was posted to its end.

    Attributes:
        version: that its parts have.
        sync_ids: one of which they have.
        digest: of what the engine holds after it; None where no digest is kept.
        is_whole: the digest leaves no tensor out.
    """

    version: int
    sync_ids: frozenset[str]
    digest: Digest | None
    is_whole: bool

    def is_what_is_held(self, state: dict[str, Any]) -> bool:
        """Whether an engine with this status has committed it."""
        last = state.get("last_sync")
        if state.get("version") != self.version or state.get("engine_state") == "uncertain":
            return False
        if state.get("foreign") is not None:  # weights that came by another way
            return False
        if isinstance(last, dict):
            return last.get("version") == self.version and last.get("sync_id") in self.sync_ids
        digest = self.digest if self.is_whole else None
        return digest is not None and state.get("digest") == digest.hex()


@dataclass(frozen=True, slots=True)
class UnknownOutcome:
    """What an engine holds if it has committed a sync.

    Attributes:
        behind: from the snapshot to that; without old bits. None: too much was missed since.
        posted: that sync; None while it is still being posted.
    """

    behind: Changes | None
    posted: PostedSync | None


class AckedState:
    """An engine holds the snapshot, but for `behind`, at `version`.

    Args:
        snapshot: shared by all engines; not changed here.
        version: the version the engine is at.

    Attributes:
        version: the version that the engine acknowledged last.
        behind: from the snapshot to what the engine holds; what it has missed, reversed. Without
            old bits.
        doubt: what the engine holds in place of that, if it has committed a sync without an answer.
        suspect: the engine may hold other bytes; the next sync is a full one.
        latest: what led to the snapshot; None where that is not known.
    """

    def __init__(self, snapshot: Snapshot, version: int) -> None:
        self.version = version
        self.behind: Changes = {}
        self.doubt: UnknownOutcome | None = None
        self.suspect = False
        self.latest: PostedSync | None = None
        self._snapshot = snapshot
        self._names: list[str] = []  # what is sent when all is sent; empty until the plan is read
        self._digested: set[str] = set()  # names that the digest covers
        self._digest: Digest | None = None  # of what the engine holds
        self._posted: PostedSync | None = None  # what it may be committing

    @property
    def is_proven(self) -> bool:
        """Whether every sync is proven by a digest that leaves no tensor out."""
        return self._digest is not None and self._digested == {*self._names}

    @property
    def newest(self) -> int:
        """The newest version that the engine may be at, as far as is known here."""
        doubted = None if self.doubt is None else self.doubt.posted
        posted = [one.version for one in (doubted, self._posted) if one is not None]
        return max([self.version, *posted])

    def begins(self) -> None:
        """Note that a step is about to be sent, of which nothing was posted yet."""
        self._posted = None

    def miss(self, changes: Changes) -> None:
        """The snapshot is about to move on by `changes`, which this engine does not have.

        What is more than half of the model is not kept: the next sync is a full one then.
        """
        behind = self._moved(changes, self.behind)
        self.behind, self.suspect = behind or {}, self.suspect or behind is None
        if self.doubt is not None and self.doubt.behind is not None:
            behind = self._moved(changes, self.doubt.behind)
            self.doubt = replace(self.doubt, behind=behind)

    def is_left_in_doubt(self, changes: Changes) -> bool:
        """Note that the engine may have committed a step all the same; the snapshot has not moved.

        Args:
            changes: of that step, which is sent no more.

        Returns:
            Whether it may; not if it has refused, or has not got the last part.
        """
        if self._posted is not None:
            self.doubt = UnknownOutcome(without_old(changes), self._posted)
        elif self.doubt is not None and self.doubt.posted is None:
            self.doubt = None
        return self._posted is not None

    def goes_on_alone(self, changes: Changes) -> None:
        """Note that a step is still being sent, and its end is not waited for; see `settle`.

        Where an earlier doubt has not been ended yet, nothing of the step will be sent.
        """
        if self.doubt is None:
            self.doubt = UnknownOutcome(without_old(changes), None)

    def loses_track(self) -> None:
        """Note that the snapshot is not what others are known by: the next sync is a full one."""
        self.behind, self.suspect, self.latest = {}, True, None
        if self.doubt is not None:
            self.doubt = replace(self.doubt, behind=None)

    def decide(self, state: dict[str, Any]) -> None:
        """End the doubt by what the engine says of itself."""
        doubt, self.doubt = self.doubt, None
        if doubt is None or doubt.posted is None or not doubt.posted.is_what_is_held(state):
            return
        self.version, self._digest = doubt.posted.version, doubt.posted.digest
        self.behind = doubt.behind or {}
        self.suspect = self.suspect or doubt.behind is None

    def is_at_the_snapshot(self, state: dict[str, Any]) -> bool:
        """Whether the engine says that it has what led to the snapshot; it has then: a delta log
        has brought it there.
        """
        if self.latest is None or not self.latest.is_what_is_held(state):
            return False
        self.version, self._digest, self.behind = self.latest.version, self.latest.digest, {}
        return True

    def _moved(self, changes: Changes, behind: Changes) -> Changes | None:
        """`behind` once the snapshot has moved by `changes`; None if it is too much to keep."""
        moved: Changes = {}
        left = self._snapshot.nbytes // 2
        for kept in {**changes, **behind}:
            turn = self._snapshot.turn(kept, changes.get(kept), behind.get(kept))
            if turn is not None:
                moved |= without_old({kept: turn})
                left -= turn.nbytes
            if left < 0:
                return None
        return moved


def without_old(changes: Changes) -> Changes:
    """The same without old bits and gaps, which are of use only while a change is sent."""
    none = np.empty(0)
    return {kept: replace(change, old=none, stream=None) for kept, change in changes.items()}
