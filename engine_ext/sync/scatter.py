"""The scatter apply: write the changed elements directly, through the certified placement."""

from __future__ import annotations

from collections.abc import Sequence

from engine_ext.format import ParamDelta
from engine_ext.model import StorageIndex
from engine_ext.placement import Placed, has_nan
from engine_ext.sync.staged import StagedPart
from engine_ext.sync.thread_pool import ThreadPool
from engine_ext.sync.writes import put_all


class ScatterWriter:
    """Writes with one scatter per piece of a live tensor, in O(nnz)."""

    name = "scatter"
    keeps_deltas = False
    checks_base = True

    def refusal(self, delta: ParamDelta, placed: Placed, digested: bool) -> str | None:
        """Return why a delta cannot be scattered exactly, or None if it can."""
        recast = any(segment.recast for segment in placed.segments)
        if delta.cleared is not None:
            return None if digested else "the loader's casts lose bits of the old values"
        if delta.differences and not digested:
            return "it is sent as differences, but no digest proves the old values; send new values"
        if delta.differences and recast:
            return "it is sent as differences, but the loader casts the values; send new values"
        if recast and has_nan(delta.values, delta.dtype):
            return "a new value is NaN, and the loader's casts change the bits of a NaN"
        return None

    def follow(self, index: StorageIndex) -> None:
        """Do nothing: staged writes have the addresses."""

    def check(self, staged: Sequence[StagedPart]) -> None:
        """Accept every sync: a staged write does not depend on the others."""

    def write(self, staged: Sequence[StagedPart], threads: ThreadPool, *, compares: bool) -> None:
        """Write the new values; can raise BaseMismatch, see `put_all`."""
        put_all([w for part in staged for w in part.writes], threads, compares=compares)
