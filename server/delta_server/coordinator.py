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
                 all ranks have voted, a group decides       prepared    unchanged
                 a rank cannot commit it                     idle        unchanged
    prepared     the group has decided for it                committing  unchanged
                 the group has decided against it            idle        unchanged
    committing   every rank has written: publish, resume     idle        new version
                 a rank has failed, all have undone it       idle        unchanged
                 a rank has failed and cannot undo it        uncertain   mixed: paused, 503
    uncertain    a full sync is committed                    idle        new version

    [1] the parts of the sync that are staged stay, unless they had no numbers of their own

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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from delta_server.commit import EngineCommitter
from delta_server.engine import Engine, Held, call_all_ranks, rank_states, unseen_parts
from delta_server.reporting import SyncReporter
from delta_server.request_options import Options
from delta_server.request_record import RequestRecord
from delta_server.staging import NumberedPart, Staging
from engine_ext.errors import (
    CommitFailed,
    CommittedNotResumed,
    Conflict,
    EngineUncertain,
    RunConflict,
    SyncInProgress,
    as_delta_error,
)
from engine_ext.format import PartId, RunSender
from engine_ext.ranks.operations import (
    ClaimRun,
    CommitSync,
    CommittedSync,
    GetPlan,
    HoldSync,
    PreparedSync,
    RollBack,
    RunClaimed,
    StagedSync,
)

DescribeStaged = Callable[[StagedSync | None], Awaitable[StagedSync | None]]


class Coordinator:
    """Brings verified parts into the weights of one engine, or of one of its LoRA adapters.

    Attributes:
        adapter: the name of the LoRA adapter whose own tensors are changed; None means the model.
        reporter: reports every update.
        describe_staged: returns what is staged with what its group of engines has recorded, and
            makes sure that this process watches it, see `FleetCommits.describe`.
    """

    def __init__(
        self, engine: Engine, committer: EngineCommitter, reporter: SyncReporter, staging: Staging
    ) -> None:
        self._engine, self._committer = engine, committer
        self.reporter, self._staging = reporter, staging
        self.adapter: str | None = None
        self.describe_staged: DescribeStaged  # the service sets it
        self._part_locks = weakref.WeakValueDictionary[str, asyncio.Lock]()

    def for_adapter(self, name: str, engine: Engine, staging: Staging) -> Coordinator:
        """Return the coordinator of an adapter of the same engine, which `engine` shows."""
        coordinator = copy.copy(self)
        coordinator.adapter, coordinator._engine, coordinator._staging = name, engine, staging
        return coordinator

    @contextlib.asynccontextmanager
    async def turn(self, identities: Iterable[str]) -> AsyncIterator[None]:
        """Make a repeat of parts wait until the request that it repeats is answered."""
        async with contextlib.AsyncExitStack() as stack:
            for identity in sorted({*identities}):
                lock = self._part_locks.setdefault(identity, asyncio.Lock())
                await stack.enter_async_context(lock)
            yield

    async def submit(
        self, parts: Sequence[NumberedPart], options: Options, record: RequestRecord
    ) -> dict[str, Any]:
        """Stage parts of one sync, commit if they complete it; return the answer as JSON.

        Call it in their `turn`.

        Raises:
            DeltaError: each class fixes the state that the engine is in then.
        """
        last = parts[-1][0]
        try:
            if await self._staging.stage(parts, record) and record.commits:
                record.phase = "commit"
                return await self._commit(last, options, record)
        except CommitFailed as error:
            if record.phase == "stage" and not isinstance(error, EngineUncertain):
                await self._committer.halt(options)  # a commit has paused the engine itself
            raise
        except RunConflict:
            raise
        except Conflict as error:
            if isinstance(error, SyncInProgress):
                await self._watch_held()
            # Another HTTP process might have received the same parts and committed them meanwhile.
            # Not certain for a full sync: another one might have led to its version.
            identities = [part.identity for part, _ in parts]
            if last.full or await self.unseen(last.version, last.run, identities):
                raise
            record.admissions = {"already_applied"}
        facts: dict[str, Any] = {"version": last.version, "base_version": last.base_version}
        if record.admissions != {"already_applied"}:
            return record.answer("staged", {**facts, "run": last.run})
        # From the digest a sender sees if more was committed than it has sent this time.
        return record.answer("already_applied", facts | await self._committer.publish(self._engine))

    async def hold_staged(
        self, part: PartId, group: str, lease: float, options: Options | None
    ) -> float:
        """Let all ranks vote on the staged sync that a part belongs to, and hold it for a group.

        Return when the lease ends.

        Args:
            lease: seconds for which it is held.
            options: of its commit; None if it is held for this group: its lease alone is changed.

        Raises:
            AuditUnavailable: its commit could not be recorded.
            SaltUnavailable: the options want a salt, which the engine cannot give.
            SyncInProgress: it is held for another group.
            DeltaError: each class fixes the state that the engine is in then. Nothing of the sync
                stays staged after any of these, unless another group holds it.
        """
        until, ends = time.time() + lease, time.monotonic() + lease
        prepared = PreparedSync(group=group, until=until, ends=ends)
        request = HoldSync(version=part.version, sync_id=part.sync_id, prepared=prepared)
        try:
            if options is not None:
                await self.check_options(options)
                await self._committer.check_audit(self._engine)
            await call_all_ranks(self._engine, request)
        except Exception as error:
            with contextlib.suppress(Exception):
                await self._staging.drop(part, group)
            if isinstance(error, CommitFailed) and not isinstance(error, EngineUncertain):
                await self._committer.halt(Options())
            raise
        return until

    async def check_options(self, options: Options) -> None:
        """Raise `SaltUnavailable` if the engine cannot commit with these options."""
        if options.flush_cache == "salt":
            await self._engine.check_salt()

    async def commit_staged(
        self, part: PartId, options: Options, record: RequestRecord, group: str | None = None
    ) -> dict[str, Any]:
        """Commit the staged sync that a part belongs to; return the answer as JSON.

        Args:
            group: that has decided for it, if it is held for one.

        Raises:
            DeltaError: each class fixes the state that the engine is in then. If the sync lacks
                parts or was dropped, it is a `Conflict`, and nothing of it stays staged. Without a
                group nothing does after any error; with one it stays held unless ranks refuse it.
        """
        async with self.reporter.follow(record):
            record.parts = [part]
            record.phase, record.reason = "commit", options.reason
            return await self._commit(part, options, record, group)

    async def drop_staged(self, part: PartId, group: str | None = None) -> None:
        """Drop the staged sync if this part belongs to it, and no other group decides on it."""
        await self._staging.drop(part, group)

    async def held(self) -> Held:
        """Return what the engine holds."""
        return Held.of(await self._committer.status(self._engine))

    async def version(self) -> int:
        """Return the engine's version."""
        [state, *_] = await rank_states(self._engine)
        return state.version

    async def unseen(self, version: int, run: str | None, identities: Sequence[str]) -> set[str]:
        """Return those of some parts that were not committed at the engine's version.

        Args:
            version, run: that the parts lead to, and that they name.
        """
        return await unseen_parts(self._engine, version, list(identities), run)

    async def checkpoint(self) -> dict[str, tuple[str, tuple[int, ...]]] | None:
        """Return manifest dtype and shape of each tensor that the engine was loaded from, by name.

        None if it was started without weights.
        """
        [reply, *_] = await call_all_ranks(self._engine, GetPlan())
        if reply.tensors is None:
            return None
        return {row["name"]: (row["dtype"], tuple(row["shape"])) for row in reply.tensors}

    async def publish(self) -> dict[str, Any]:
        """Repeat what follows a commit; return digest and run, see `EngineCommitter.publish`."""
        return await self._committer.publish(self._engine)

    async def end_requests(self) -> None:
        """End the requests in flight; see `EngineCommitter.end_requests`."""
        await self._committer.end_requests()

    async def set_weight_version(self, text: str) -> None:
        """Set the engine's own weight version, with no sync."""
        await self._engine.publish(text, resumes=False)

    async def roll_back(self, options: Options) -> dict[str, Any]:
        """Restore the version before the last one, weights and weight version.

        Raises:
            Conflict: the old values were not kept. The engine is unchanged.
            CommitFailed: the rollback failed half-way. The engine is uncertain.
        """
        record = RequestRecord(adapter=self.adapter)
        async with self.reporter.follow(record):
            record.phase = "rollback"
            try:
                restored, timings = await self._committer.run(RollBack(), options, self._engine)
            except SyncInProgress:
                await self._watch_held()
                raise
            record.timings |= timings
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
            self.reporter.report_owner("claimed", sender, self.adapter)
        return claimed

    async def release(self, sender: RunSender) -> bool:
        """Let anyone change the weights, if this process of a run owns them; return whether."""
        now, at = time.monotonic(), time.time()
        request = ClaimRun(sender=sender, releases=True, now=now, at=at)
        [reply, *_] = await call_all_ranks(self._engine, request)
        if reply.released:
            self.reporter.report_owner("released", sender, self.adapter)
        return reply.released

    # ------------------------------------------------------------------------------------------

    async def _is_held(self, group: str) -> bool:
        """Return whether the ranks hold a sync for a group; False if they do not answer."""
        with contextlib.suppress(Exception):
            return (await self.held()).prepared_for(group) is not None
        return False

    async def _watch_held(self) -> None:
        """Watch the held sync that keeps others out: the process that has might be dead."""
        with contextlib.suppress(Exception):  # the next one who is kept out tries again
            await self.describe_staged((await self.held()).staged)

    async def _commit(
        self, part: PartId, options: Options, record: RequestRecord, group: str | None = None
    ) -> dict[str, Any]:
        request = CommitSync(version=part.version, sync_id=part.sync_id, group=group)
        committed: CommittedSync
        try:
            committed, timings = await self._committer.run(
                request, options, self._engine, record.origin
            )
        except CommitFailed:
            raise
        except Exception as error:
            # Every rank is as it was. A sync that stays staged would keep the next one out. A group
            # tries again what it has decided for, unless it would be refused again.
            if group is None or isinstance(error, Conflict):
                with contextlib.suppress(Exception):
                    await self._staging.drop(part, group)
            elif not isinstance(error, CommittedNotResumed) and await self._is_held(group):
                held = as_delta_error(error)
                held.operands["held"] = True
                if held is not error:
                    raise held from error
            raise
        record.timings |= timings
        self.reporter.report_run(committed, self.adapter)
        return record.answer("committed", msgspec.structs.asdict(committed))
