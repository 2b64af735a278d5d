"""What a rank would write for staged parts."""

from __future__ import annotations

from engine_ext.sync.staged import StagedPart, Write
from engine_ext.sync.totals import totals


def writes_of(*parts: StagedPart) -> list[Write]:
    """Return the writes of the parts of a sync, in their order, and of its rebuilt modules."""
    return [write for part in totals(parts).writes for write in part.all]
