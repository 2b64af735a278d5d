"""How far an engine may follow its delta log: the version that it is held at or behind."""

from __future__ import annotations

from dataclasses import dataclass

from engine_ext.delta_log import Listing


@dataclass
class FollowLimit:
    """The limit of one engine.

    Attributes:
        hold: versions of the log that it stays behind the newest.
        pin: a version that it does not go past; None if it is not pinned.
    """

    hold: int = 0
    pin: int | None = None

    def of(self, listing: Listing) -> int | None:
        """Return the last version that may be applied; None if all may, -1 if none may."""
        limits = [] if self.pin is None else [self.pin]
        if self.hold:
            versions = sorted({entry.version for entry in listing.entries})
            limits.append(versions[-1 - self.hold] if len(versions) > self.hold else -1)
        return min(limits, default=None)
