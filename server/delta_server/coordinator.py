"""The coordinator: the only one that decides when verified parts change the weights, and whether.

Sources submit the parts that they have taken in. The ranks keep the state, so that several HTTP
processes coordinate one engine; all ranks get the same calls in the same order and answer alike::

    state        what leaves it                              to          the engine's weights
    -----------  ------------------------------------------  ----------  ------------------------
    idle         a part is admitted (owner, base, run)       staging     unchanged
    staging      every rank has staged the part              staged      unchanged
                 a rank refuses it                           idle [1]    unchanged
    staged       the rest of the sync is staged              complete    unchanged
                 another sync: of a later attempt of the     staging     unchanged
                 run, or after the stage timeout
    complete     all ranks have prepared: pause, vote        committing  unchanged
                 a rank cannot commit it                     idle        unchanged
    committing   every rank has written: publish, resume     idle        new version
                 a rank has failed, all have undone it       idle        unchanged
                 a rank has failed and cannot undo it        uncertain   mixed: paused, 503
    uncertain    a full sync is committed                    idle        new version

    [1] the parts of the sync that are staged stay, unless the request had all of them

A part that was committed at the engine's version is answered ``already_applied``, and nothing is
written; not while the weights are uncertain, mismatched or changed by something else, nor if the
staged sync has this part, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import xxhash

from delta_server.commit import EngineCommitter
from delta_server.engine import Engine, call_all_ranks, unseen_parts
from delta_server.intake import VerifiedPart
from delta_server.reporting import SyncReporter
from delta_server.request_options import Options
from delta_server.request_record import RequestRecord
from delta_server.staging import Staging
from engine_ext.errors import CommitFailed, Conflict, EngineUncertain, RunConflict
from engine_ext.format import PartId, RunSender, Unproven
from engine_ext.ranks.operations import (
    ClaimRun,
    CommitSync,
    CommittedSync,
    RollBack,
    RunClaimed,
)


class Coordinator:
    """Brings verified parts into the weights of one engine, or of one of its LoRA adapters.

    Attributes:
        adapter: the name of the LoRA adapter whose own tensors are changed; None means the model.
    """

    def __init__(
        self, engine: Engine, committer: EngineCommitter, reporter: SyncReporter, staging: Staging
    ) -> None:
        self._engine, self._committer = engine, committer
        self._reporter, self._staging = reporter, staging
        self.adapter: str | None = None
        self._part_locks = weakref.WeakValueDictionary[str, asyncio.Lock]()

    def for_adapter(self, name: str, engine: Engine, staging: Staging) -> Coordinator:
        """Return the coordinator of an adapter of the same engine, which `engine` shows."""
        coordinator = copy.copy(self)
        coordinator.adapter, coordinator._engine, coordinator._staging = name, engine, staging
        return coordinator

    async def submit(
        self,
        parts: Sequence[PartId],
        verified: Sequence[VerifiedPart],
        options: Options,
        record: RequestRecord,
        *,
        whole: bool = False,
        apart: bool = False,
    ) -> dict[str, Any]:
        """Stage parts of one sync, commit if they complete it; return the answer as JSON.

        Args:
            parts, verified: of the same length.
            whole: the parts have no numbers and are all of their sync: they become one transaction.
                If they name the version that the engine is at, those not seen before become its
                continuation.
            apart: the part has nothing but its version to connect it with others; see
                `engine_ext.format.Unproven`.

        Raises:
            DeltaError: each class fixes the state that the engine is in then.
        """
        async with self._part_lock(verified):
            pairs = list(zip(parts, verified, strict=True))
            if whole or apart:
                pairs = await self._as_transaction(pairs, apart=apart)
                record.set_parts([part for part, _ in pairs], record.verified)
            return await self._apply(pairs, options, record, whole=whole)

    async def commit_staged(
        self, part: PartId, options: Options, record: RequestRecord
    ) -> dict[str, Any]:
        """Commit the staged sync that a part belongs to; return the answer as JSON.

        Raises:
            DeltaError: each class fixes the state that the engine is in then. If the sync lacks
                parts or was dropped, it is a `Conflict`, and nothing of it stays staged.
        """
        async with self._reporter.follow(record):
            record.set_parts([part], [])
            record.phase, record.reason = "commit", options.reason
            return await self._commit(part, options, record)

    async def drop_staged(self, part: PartId) -> None:
        """Drop the staged sync if this part belongs to it."""
        await self._staging.drop(part)

    async def roll_back(self, options: Options) -> dict[str, Any]:
        """Restore the version before the last one, weights and weight version.

        Raises:
            Conflict: the old values were not kept. The engine is unchanged.
            CommitFailed: the rollback failed half-way. The engine is uncertain.
        """
        record = RequestRecord(adapter=self.adapter)
        async with self._reporter.follow(record):
            record.phase = "rollback"
            restored, pause_ms = await self._committer.run(RollBack(), options, self._engine)
            record.timings |= {"pause_ms": pause_ms, "commit_ms": restored.commit_ms}
            versions = {"version": restored.version, "base_version": restored.rolled_back}
            record.set_result("rolled_back", {**versions, "run": restored.run})
            return {
                "status": "rolled_back",
                "version": restored.version,
                "rolled_back": restored.rolled_back,
                "run": restored.run,
                "digest": restored.digest,
                "timings_ms": record.rounded_timings(),
            }

    async def claim(self, sender: RunSender, *, takeover: bool) -> RunClaimed:
        """Let the process of a run alone change the weights.

        Raises:
            RunConflict: another run owns them, or has taken over from this one (`RunFenced`).
            SyncInProgress: a sender that names no run has staged parts. The engine is unchanged
                after both.
        """
        now, at = time.monotonic(), time.time()
        request = ClaimRun(sender=sender, takeover=takeover, now=now, at=at)
        [claimed, *_] = await call_all_ranks(self._engine, request)
        if claimed.owner is not None and claimed.owner.since == at:
            self._reporter.report_owner("claimed", sender, self.adapter)
        return claimed

    async def release(self, sender: RunSender) -> bool:
        """Let anyone change the weights, if this process of a run owns them; return whether."""
        now, at = time.monotonic(), time.time()
        request = ClaimRun(sender=sender, releases=True, now=now, at=at)
        [reply, *_] = await call_all_ranks(self._engine, request)
        if reply.released:
            self._reporter.report_owner("released", sender, self.adapter)
        return reply.released

    # ------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _part_lock(self, verified: Sequence[VerifiedPart]) -> AsyncIterator[None]:
        """Make a repeat wait until the request that it repeats is answered."""
        async with contextlib.AsyncExitStack() as stack:
            for identity in sorted({one.identity for one in verified}):
                lock = self._part_locks.setdefault(identity, asyncio.Lock())
                await stack.enter_async_context(lock)
            yield

    async def _as_transaction(
        self, pairs: Sequence[tuple[PartId, VerifiedPart]], *, apart: bool
    ) -> list[tuple[PartId, VerifiedPart]]:
        """Number the parts of one request as parts of one sync; leave out those seen before."""
        first = pairs[0][0]
        by_identity = {part.identity: (part, one) for part, one in pairs}
        unseen = await unseen_parts(self._engine, first.version, list(by_identity), first.run)
        fresh = [one for one in by_identity if one in unseen] or list(by_identity)[:1]
        sync_id = "files:" + xxhash.xxh3_128_hexdigest("".join(sorted(fresh)).encode())
        chosen = [by_identity[identity] for identity in fresh]
        # A full sync must cover the model, and a folder that proves states has an index.
        proven = all(one.manifest.full or one.manifest.proves_states for _, one in chosen)

        def unproven(part: PartId) -> Unproven | None:
            own = part.unproven or Unproven()
            return None if proven else msgspec.structs.replace(own, apart=apart)

        return [
            (
                msgspec.structs.replace(
                    part,
                    sync_id=part.sync_id or sync_id,
                    part=number,
                    num_parts=len(fresh),
                    unproven=unproven(part),
                ),
                one,
            )
            for number, (part, one) in enumerate(chosen)
        ]

    async def _apply(
        self,
        pairs: list[tuple[PartId, VerifiedPart]],
        options: Options,
        record: RequestRecord,
        *,
        whole: bool,
    ) -> dict[str, Any]:
        last = pairs[-1][0]
        try:
            if await self._staging.stage(pairs, record, whole=whole) and record.commits:
                record.phase = "commit"
                return await self._commit(last, options, record)
        except CommitFailed as error:
            if record.phase == "stage" and not isinstance(error, EngineUncertain):
                await self._committer.halt(options)  # a commit has paused the engine itself
            raise
        except RunConflict:
            raise
        except Conflict:
            # Another HTTP process might have received the same parts and committed them meanwhile.
            # Not certain for a full sync: another one might have led to its version.
            identities = [part.identity for part, _ in pairs]
            if last.full or await unseen_parts(self._engine, last.version, identities, last.run):
                raise
            record.admissions = {"already_applied"}
        facts: dict[str, Any] = {"version": last.version, "base_version": last.base_version}
        if record.admissions != {"already_applied"}:
            return record.answer("staged", {**facts, "run": last.run})
        # From the digest a sender sees if more was committed than it has sent this time.
        return record.answer("already_applied", facts | await self._committer.publish(self._engine))

    async def _commit(
        self, part: PartId, options: Options, record: RequestRecord
    ) -> dict[str, Any]:
        request = CommitSync(version=part.version, sync_id=part.sync_id)
        committed: CommittedSync
        try:
            committed, record.timings["pause_ms"] = await self._committer.run(
                request, options, self._engine
            )
        except CommitFailed:
            raise
        except Exception:
            # Every rank is as it was. A sync that stays staged would keep the next one out.
            with contextlib.suppress(Exception):
                await self._staging.drop(part)
            raise
        record.timings["commit_ms"] = committed.commit_ms
        self._reporter.report_run(committed, self.adapter)
        return record.answer("committed", msgspec.structs.asdict(committed))
