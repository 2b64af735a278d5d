"""Tells of every update: to Prometheus, to the log, and to the ranks, which remember it.

The log has one line for each sync, of ``key=value`` pairs; values that are no plain words are JSON
strings, so that a sender cannot forge a line. A request that takes long says every few seconds how
far it is, and of a sync that does, a part of it is told every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import ClientDisconnect

from delta_server import metrics
from delta_server.commit import call
from delta_server.engine import Engine
from delta_server.request_record import RequestRecord
from engine_ext.errors import DeltaError, MalformedPart

logger = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 5.0
_PLAIN = re.compile(r"[\w.:/+-]+", re.ASCII)
_LEVELS = {
    "staged": logging.DEBUG,  # the line of its sync has it too
    "refused": logging.WARNING,
    "failed": logging.ERROR,
    "undone": logging.ERROR,
    "uncertain": logging.ERROR,
    "unpublished": logging.ERROR,
}


class SyncReporter:
    """Tells of the updates that one HTTP process takes.

    Args:
        engine: whose ranks remember them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._telling: set[asyncio.Task[None]] = set()
        self._sync: tuple[Any, Any] | None = None  # of which a part was staged last
        self._said_at = 0.0

    @contextlib.asynccontextmanager
    async def follow(self, outcome: RequestRecord) -> AsyncIterator[None]:
        """Tell of one request, when it ends.

        The request is followed by whoever reads its body, and by what must go on when that one is
        cancelled: what ends first tells, once.
        """
        async with _ticking(outcome):
            try:
                yield
            except Exception as error:
                self._tell(outcome, as_delta_error(error))
                raise
            self._tell(outcome, None)

    def denied(self, error: DeltaError) -> None:
        """Tell of a request that may not use the endpoints."""
        metrics.count_denied(error)
        logger.warning("%s", line("denied", {"error": type(error).__name__, "message": str(error)}))

    async def history(self) -> list[dict[str, Any]]:
        """What became of the last syncs, the newest one last."""
        answers = await call(self._engine, "history", {})
        syncs: list[dict[str, Any]] = answers[0]["syncs"]
        return syncs

    async def settled(self) -> None:
        """Wait until all is told."""
        await asyncio.gather(*self._telling)

    def _tell(self, outcome: RequestRecord, error: DeltaError | None) -> None:
        if outcome.told:
            return
        outcome.told = True
        record = outcome.record(error)
        metrics.count(record, error)
        if error is not None and "retry_after" in error.operands:
            # Whoever was told to wait may come again and again: the ranks need not hear of it.
            self._log(record)
            return
        # Nobody waits for it: an answer is due, and the ranks may have died.
        task = asyncio.ensure_future(self._note(record))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _note(self, record: dict[str, Any]) -> None:
        try:
            answers = await call(self._engine, "note", {"record": record})
            record = answers[0]["record"]
        except Exception:
            logger.debug("the ranks did not hear what became of a sync", exc_info=True)
        self._log(record)

    def _log(self, record: Mapping[str, Any]) -> None:
        facts = {k: v for k, v in record.items() if k not in ("at", "timings_ms", "message")}
        facts |= record["timings_ms"]
        facts["message"] = record["message"]
        level = _LEVELS.get(record["outcome"], logging.INFO)
        if record["outcome"] == "staged" and self._is_long(record):
            level = logging.INFO
        logger.log(level, "%s", line("sync", facts))

    def _is_long(self, record: Mapping[str, Any]) -> bool:
        """Whether a sync has had parts staged for long, and nothing was said of it meanwhile."""
        sync, now = (record["version"], record["sync_id"]), time.monotonic()
        known, self._sync = sync == self._sync, sync
        if known and now - self._said_at < _PROGRESS_EVERY_S:
            return False
        self._said_at = now
        return known


def as_delta_error(error: Exception) -> DeltaError:
    """The error as one of the tree; what is none of it is a fault of this program."""
    if isinstance(error, ClientDisconnect):
        return MalformedPart("the connection was closed before the body was complete")
    if isinstance(error, DeltaError):
        return error
    return DeltaError(f"{type(error).__name__}: {error}")


def line(what: str, facts: Mapping[str, Any]) -> str:
    """One line of the log; facts that are None are left out."""
    pairs = (f"{key}={_value(value)}" for key, value in facts.items() if value is not None)
    return f"delta {what} {' '.join(pairs)}"


def _value(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


@contextlib.asynccontextmanager
async def _ticking(outcome: RequestRecord) -> AsyncIterator[None]:
    """Say now and then how far a request is."""
    if outcome.ticking:
        yield
        return
    outcome.ticking = True
    task = asyncio.ensure_future(_tick(outcome))
    try:
        yield
    finally:
        task.cancel()
        outcome.ticking = False


async def _tick(outcome: RequestRecord) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_EVERY_S)
        logger.info("%s", line("sync", outcome.progress()))
