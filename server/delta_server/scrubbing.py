"""What scrubbing finds on the ranks: the metric, and its part of the status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from delta_server import metrics
from delta_server.board import SCRUB, Item
from delta_server.engine import Engine, call_all_ranks
from engine_ext.ranks.operations import GetStatus, RankStatus, ScrubState
from engine_ext.structs import prepare

logger = logging.getLogger(__name__)

_LONGEST_PERIOD_S: Final = 10.0


def combined(replies: Sequence[RankStatus]) -> ScrubState | None:
    """Return what scrubbing has found on all ranks; None if it is off."""
    states = [reply.scrub for reply in replies if reply.scrub is not None]
    if not states:
        return None
    ended = [state.passed_at for state in states if state.passed_at is not None]
    return ScrubState(
        passes=min(state.passes for state in states),
        passed_at=min(ended) if len(ended) == len(states) else None,
        mismatched=sorted({name for state in states for name in state.mismatched}),
        error=next((state.error for state in states if state.error), None),
    )


class Counted(msgspec.Struct, frozen=True):
    """The findings of all ranks that some HTTP process has counted."""

    findings: int = 0


prepare(Counted)


async def count_findings(engine: Engine, interval: float) -> None:
    """Count what the ranks' scrubbing finds, until cancelled.

    The ranks keep what was counted, so that of several HTTP processes one counts each finding.
    """
    counted = Item(engine, SCRUB, Counted)
    while True:
        await asyncio.sleep(min(interval, _LONGEST_PERIOD_S))
        try:
            reports = await call_all_ranks(engine, GetStatus(details=False))
            found = sum(report.findings for report in reports)
            while (new := found - counted.value.findings) > 0:
                if await counted.try_put(Counted(found)):
                    metrics.SCRUB_MISMATCHES.inc(new)
        except Exception:
            logger.debug("the ranks' scrubbing could not be asked", exc_info=True)
