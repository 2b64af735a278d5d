"""Report every update to Prometheus, to the log, and to the ranks, which keep the history.

The log has one line of ``key=value`` pairs per sync; a value that is not a plain word is written as
a JSON string, so that a sender cannot forge a line. A long request logs its progress every few
seconds, and a long sync of many short requests logs one of its parts every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec

from delta_server import metrics
from delta_server.board import HISTORY, Item
from delta_server.engine import AdapterEngine, Engine
from delta_server.request_record import RequestRecord
from engine_ext.errors import DeltaError, as_delta_error
from engine_ext.format import RunSender
from engine_ext.ranks.operations import CommittedSync, SyncRecord
from engine_ext.structs import prepare

logger = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 5.0
_MOST: Final = 50
_PLAIN = re.compile(r"[\w.:/+-]+", re.ASCII)
_LEVELS = {
    "staged": logging.DEBUG,  # the line of its sync includes it
    "refused": logging.WARNING,
    **dict.fromkeys(("failed", "undone", "uncertain", "unpublished"), logging.ERROR),
}


class SyncReporter:
    """Reports the updates that one HTTP process takes; the engine's ranks keep the history."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._history_of_model = SyncHistory(engine)
        self._tasks: set[asyncio.Task[None]] = set()
        # The sync of the last staged part, and when a line about a staged part was last logged.
        self._sync: tuple[int | None, str | None] | None = None
        self._logged_at = 0.0

    @contextlib.asynccontextmanager
    async def follow(self, record: RequestRecord) -> AsyncIterator[None]:
        """Report one request when it ends; raises what the request raises.

        A request is followed by the task that reads its body and by the task that must continue
        if the first is cancelled. Whichever ends first reports it, once.
        """
        async with _progress_logged(record):
            try:
                yield
            except Exception as error:
                # The route that answers the request logs an unexpected error.
                self._report(record, as_delta_error(error, log=False))
                raise
            self._report(record, None)

    def report_denied(self, error: DeltaError) -> None:
        """Report a request without access to the endpoints."""
        name = type(error).__name__
        metrics.DENIED.labels(name).inc()
        logger.warning("%s", format_line("denied", {"error": name, "message": str(error)}))

    def report_owner(self, what: str, sender: RunSender, adapter: str | None) -> None:
        """Report that a process of a run owns the weights, or owns them no more."""
        facts = {"adapter": adapter, **msgspec.structs.asdict(sender)}
        logger.info("%s", format_line(f"run {what}", facts))

    def report_run(self, committed: CommittedSync, adapter: str | None) -> None:
        """Report a commit that replaces the weights of another run."""
        if committed.base_run in (None, committed.run):
            return
        facts = {
            "adapter": adapter,
            "run": committed.run,
            "version": committed.version,
            "base_run": committed.base_run,
            "base_version": committed.base_version,
            "full": committed.full,
        }
        logger.warning("%s", format_line("run replaced", facts))

    async def history(self, adapter: str | None = None) -> list[SyncRecord]:
        """Return the last syncs of the model or an adapter, the newest one last."""
        return await self._history(adapter).syncs()

    async def flush(self) -> None:
        """Wait until everything is reported."""
        await asyncio.gather(*self._tasks)

    def _report(self, record: RequestRecord, error: DeltaError | None) -> None:
        if record.reported:
            return
        record.reported = True
        sync = record.summary(error)
        metrics.count(sync, error)
        if error is not None and "retry_after" in error.operands:
            # A sender that must wait might retry often; the history does not need every refusal.
            self._log(sync)
            return
        # In the background: an answer is due, and the ranks might have died.
        task = asyncio.ensure_future(self._remember(sync))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _remember(self, sync: SyncRecord) -> None:
        try:
            sync = await self._history(sync.adapter).add(sync)
        except Exception:
            logger.debug("a sync could not be added to the ranks' history", exc_info=True)
        self._log(sync)

    def _history(self, adapter: str | None) -> SyncHistory:
        """Return the history of the model or an adapter; one that is loaded again has a new one."""
        if adapter is None:
            return self._history_of_model
        return SyncHistory(AdapterEngine(self._engine, adapter))

    def _log(self, sync: SyncRecord) -> None:
        facts = msgspec.structs.asdict(sync)
        del facts["at"]
        message, timings = facts.pop("message"), facts.pop("timings_ms")
        level = _LEVELS.get(sync.outcome, logging.INFO)
        if sync.outcome == "staged" and self._is_long(sync):
            level = logging.INFO
        logger.log(level, "%s", format_line("sync", {**facts, **timings, "message": message}))

    def _is_long(self, sync: SyncRecord) -> bool:
        """Return whether a sync has been staging for long without a line in the log."""
        key, now = (sync.version, sync.sync_id), time.monotonic()
        known, self._sync = key == self._sync, key
        if known and now - self._logged_at < _PROGRESS_EVERY_S:
            return False
        self._logged_at = now
        return known


def format_line(what: str, facts: Mapping[str, Any]) -> str:
    """Return one line for the log; facts that are None are left out."""
    pairs = (f"{key}={_value(value)}" for key, value in facts.items() if value is not None)
    return f"delta {what} {' '.join(pairs)}"


def _value(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


@contextlib.asynccontextmanager
async def _progress_logged(record: RequestRecord) -> AsyncIterator[None]:
    """Log the progress of a request now and then, unless another task does."""
    if record.progress_logged:
        yield
        return
    record.progress_logged = True
    task = asyncio.ensure_future(_log_progress(record))
    try:
        yield
    finally:
        task.cancel()
        record.progress_logged = False


async def _log_progress(record: RequestRecord) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_EVERY_S)
        logger.info("%s", format_line("sync", record.progress()))


class _Staged(msgspec.Struct, frozen=True):
    """The sum of the staged parts of the sync in progress; there is at most one."""

    record: SyncRecord | None = None


prepare(_Staged)


class SyncHistory:
    """The last 50 syncs of the model, or of the adapter as which `engine` sees the engine.

    The ranks keep them for all HTTP processes. Only the process that took a request knows its
    answer and its timings. A sync of many requests is one record, which sums up what each of its
    parts has cost, whichever process has taken it.
    """

    def __init__(self, engine: Engine) -> None:
        self._item = Item(engine, HISTORY, _Staged)

    async def add(self, record: SyncRecord) -> SyncRecord:
        """Remember one request, and return its record with earlier shares added.

        A ``staged`` record is a share of a later one of the same version and ``sync_id``.
        """
        whole = record

        def change(staged: _Staged) -> _Staged:
            nonlocal whole
            whole = _summed(staged.record, record)
            if record.outcome == "staged":
                return _Staged(whole)
            return _Staged() if record.outcome == "committed" else staged

        def append(staged: _Staged) -> SyncRecord | None:
            return None if record.outcome == "staged" else _summed(staged.record, record)

        await self._item.update(change, append=append, most=_MOST)
        return whole

    async def syncs(self) -> list[SyncRecord]:
        """Return all that is remembered, the newest one last."""
        return msgspec.convert(await self._item.entries(), list[SyncRecord])


def _summed(staged: SyncRecord | None, record: SyncRecord) -> SyncRecord:
    """Return a record with the earlier shares of its sync, if `staged` is of that."""
    key = (record.version, record.sync_id)
    if staged is None or (staged.version, staged.sync_id) != key:
        return record
    earlier, later = staged.timings_ms, record.timings_ms
    phases = {**earlier, **later}
    timings = {p: round(earlier.get(p, 0.0) + later.get(p, 0.0), 3) for p in phases}
    parts, size = staged.parts + record.parts, staged.bytes + record.bytes
    return msgspec.structs.replace(record, bytes=size, parts=parts, timings_ms=timings)
