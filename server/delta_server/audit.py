"""The audit trail of one engine: one record per change of its weights, on disk before it serves.

A record is written while generation is paused, after every rank has written and before generation
resumes, so no token is computed by weights without a record. That one can be written is checked
before the pause; if not, the change is refused with the engine unchanged. If writing it fails all
the same, the ranks keep the record, the status says so, and nothing more is committed before it is
in the file.

The ranks keep what was recorded last. So every HTTP process continues the trail, under the lease of
the engine; one that finds other weights than were recorded writes what it has found.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from delta_server.board import Item
from delta_server.engine import AdapterEngine, Engine, Held, changed_by, rank_statuses
from engine_ext.audit import AuditFile, AuditRecord
from engine_ext.errors import AuditUnavailable
from engine_ext.format import Origin, RunSender
from engine_ext.ranks.operations import CommittedSync, RankStatus, Written
from engine_ext.ranks.status import AuditStatus
from engine_ext.structs import prepare

logger = logging.getLogger(__name__)

_AUDIT = "audit"
_MOST_TEXT = 200


class _Weights(msgspec.Struct, frozen=True, kw_only=True):
    """The last record's facts of the weights of the model, or of an adapter."""

    version: int
    digest: str | None
    run: str | None


class _Trail(msgspec.Struct, frozen=True, kw_only=True):
    """The value of the board's item.

    Attributes:
        boot: names this start of the engine.
        weights: by adapter; that of the model is "".
        pending: records that could not be written yet.
        written: how many are in the file since the start.
        last: the hash of the last one's line.
        problem: why the last attempt to write has failed.
    """

    boot: str = ""
    weights: dict[str, _Weights] = {}
    pending: list[dict[str, Any]] = []
    written: int = 0
    last: str | None = None
    problem: dict[str, Any] | None = None


prepare(_Trail)


class Audit:
    """Keeps the audit trail of an engine; for one HTTP process of it.

    Call all but `describe` with the lease of the engine.
    """

    def __init__(self, engine: Engine, file: AuditFile) -> None:
        self._engine, self._file = engine, file
        self._item = Item(engine, _AUDIT, _Trail)

    async def describe(self) -> AuditStatus:
        """Return how far the trail is."""
        trail = await self._item.read()
        return AuditStatus(
            file=str(self._file.path),
            records=trail.written,
            pending=len(trail.pending),
            last=trail.last,
            problem=trail.problem,
        )

    async def settle(self, engine: Engine) -> list[RankStatus]:
        """Write what is not recorded of the weights as they are; return the status of the ranks.

        Args:
            engine: the engine as the adapter sees it whose weights are meant.

        Raises:
            AuditUnavailable: that cannot be written.
        """
        replies = await rank_statuses(engine)
        trail = await self._item.read()
        boot = trail.boot or uuid.uuid4().hex
        adapter, now = _adapter_of(engine), _weights(replies)
        missing = [msgspec.convert(one, AuditRecord) for one in trail.pending]
        known = trail.weights.get(adapter or "")
        if known is None:
            missing.append(self._record("loaded", boot, adapter, now))
        elif _differ(known, now):
            missing.append(self._found(boot, adapter, known, now, replies))
        if missing:
            await self._write(missing)
        return replies

    async def begin(
        self, engine: Engine, *, rolls_back: bool = False, origin: Origin | None = None
    ) -> AuditRecord:
        """Make sure that a change of the weights can be recorded, before it begins; return a draft.

        Raises:
            AuditUnavailable: it cannot. The status says why until it can.
        """
        replies = await self.settle(engine)
        try:
            await asyncio.to_thread(self._file.check)
        except AuditUnavailable as error:
            await self._note(error)
            raise
        trail, first = self._item.value, replies[0]
        if trail.problem is not None:
            await self._item.update(lambda known: msgspec.structs.replace(known, problem=None))
        before, kind = _weights(replies), "rolled_back" if rolls_back else "committed"
        record = self._record(kind, trail.boot, _adapter_of(engine), before)
        record = msgspec.structs.replace(
            record,
            base_version=before.version,
            digest_before=before.digest,
            origin=None if rolls_back else origin,
        )
        staged = None if rolls_back else first.staged
        if staged is not None:
            owner = staged.owner
            record = msgspec.structs.replace(
                record,
                full=staged.full,
                parts=len(staged.parts),
                bytes=staged.bytes,
                sync_id=staged.sync_id and staged.sync_id[:_MOST_TEXT],
                sender=None
                if owner is None
                else RunSender(run=owner.run, epoch=owner.epoch, host=owner.host, pid=owner.pid),
            )
        return record

    async def done(self, record: AuditRecord, written: Written) -> None:
        """Write the record of a change: what every rank has written.

        Raises:
            AuditUnavailable: it cannot be written; the ranks keep it.
        """
        if isinstance(written, CommittedSync):
            record = msgspec.structs.replace(record, parts=written.parts, full=written.full)
        weights = _Weights(version=written.version, digest=written.digest, run=written.run)
        await self._write([_of_now(record, weights)])

    async def failed(self, record: AuditRecord) -> None:
        """Record that the weights are of no version any more, if that can be written."""
        weights = _Weights(version=record.version, digest=None, run=None)
        record = msgspec.structs.replace(_of_now(record, weights), kind="uncertain")
        try:
            await self._write([record])
        except Exception:  # the answer is what has happened to the weights
            logger.exception("delta audit: a failed write could not be recorded")

    async def _write(self, records: Sequence[AuditRecord]) -> None:
        """Append records; the last one of each adapter says what its weights are now."""
        try:
            last = await asyncio.to_thread(self._file.append, records)
        except AuditUnavailable as error:
            if any(one.kind not in ("loaded", "found") for one in records):
                await self._update(records, pending=[msgspec.to_builtins(one) for one in records])
            # Else the next attempt finds out the same again.
            await self._note(error)
            raise
        written = self._item.value.written + len(records)
        await self._update(records, pending=[], written=written, last=last, problem=None)

    async def _update(self, records: Sequence[AuditRecord], **changes: Any) -> None:
        new = {
            one.adapter or "": _Weights(version=one.version, digest=one.digest, run=one.run)
            for one in records
        }

        def change(known: _Trail) -> _Trail:
            weights = {**known.weights, **new}
            return msgspec.structs.replace(known, boot=records[0].boot, weights=weights, **changes)

        await self._item.update(change)

    async def _note(self, error: AuditUnavailable) -> None:
        logger.error("delta audit: %s", error.message)
        problem = error.to_wire()
        await self._item.update(lambda known: msgspec.structs.replace(known, problem=problem))

    def _record(self, kind: Any, boot: str, adapter: str | None, weights: _Weights) -> AuditRecord:
        return AuditRecord(
            kind=kind,
            at=round(time.time(), 3),
            version=weights.version,
            run=weights.run,
            digest=weights.digest,
            adapter=adapter,
            engine=self._engine.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            boot=boot,
        )

    def _found(
        self,
        boot: str,
        adapter: str | None,
        known: _Weights,
        now: _Weights,
        replies: Sequence[RankStatus],
    ) -> AuditRecord:
        """Return the record of weights that nobody has recorded."""
        sync = replies[0].last_sync
        record = self._record("found", boot, adapter, now)
        record = msgspec.structs.replace(
            record,
            base_version=known.version,
            digest_before=known.digest,
            changed_by=changed_by(replies),
        )
        follows = sync is not None and (sync.version, sync.base_version) == (
            now.version,
            known.version,
        )
        if record.changed_by is None and now.digest is None:
            return msgspec.structs.replace(record, kind="uncertain")
        if record.changed_by is not None or sync is None or not follows:
            return record
        # Another process has committed it and died.
        return msgspec.structs.replace(
            record,
            kind="committed",
            late=True,
            full=sync.full,
            parts=sync.parts,
            sync_id=sync.sync_id and sync.sync_id[:_MOST_TEXT],
        )


def _of_now(record: AuditRecord, weights: _Weights) -> AuditRecord:
    at = round(time.time(), 3)
    return msgspec.structs.replace(record, at=at, **msgspec.structs.asdict(weights))


def _adapter_of(engine: Engine) -> str | None:
    return engine.adapter if isinstance(engine, AdapterEngine) else None


def _weights(replies: Sequence[RankStatus]) -> _Weights:
    """Return what is known of the weights."""
    held = Held.of(replies)
    if held.uncertain or held.changed_by is not None:
        return _Weights(version=held.version, digest=None, run=None)
    return _Weights(version=held.version, digest=held.digest, run=held.run)


def _differ(known: _Weights, now: _Weights) -> bool:
    """Return whether weights are others than those recorded; unknown ones are all alike."""
    return now != known and (now.digest, known.digest) != (None, None)
