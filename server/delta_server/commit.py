"""Commits and rollbacks: pause generation, carry out one operation on every rank, resume.

The order is always: acquire the lease of the engine that the ranks keep; stop generation and call
the operation on all ranks, in one call into the engine; record the change; publish the engine's
weight version and resume, in another one; release the lease. The two calls cannot be one: a change
is recorded, and noted for requests that ask for a version, after all ranks of all replicas have
written and before a token of the new weights can be computed. An engine that the caller had paused
stays paused, and so does one whose weights are uncertain.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Sequence,
)
from typing import Any, ParamSpec, TypeVar

import msgspec

from delta_server import pauses
from delta_server.audit import Audit
from delta_server.engine import Engine, Held, call_all_ranks, rank_states, total_digest
from delta_server.leased_engine import HeldLease, LeasedEngine
from delta_server.request_options import Options
from delta_server.served_versions import UNKNOWN
from engine_ext.audit import AuditRecord
from engine_ext.errors import (
    AuditUnavailable,
    CommitFailed,
    CommittedNotResumed,
    DeltaError,
    EngineUncertain,
)
from engine_ext.format import Origin
from engine_ext.ranks.operations import (
    AbortSync,
    CommitSync,
    CommittedSync,
    GetStatus,
    Operation,
    RankState,
    RollBack,
    StoppedCall,
    Written,
)
from engine_ext.ranks.status import AuditStatus

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_WrittenT = TypeVar("_WrittenT", bound=Written)
Resumes = Callable[[Sequence[RankState]], bool]
REPEAT_S = 1.0  # until what follows a commit is repeated; then twice as long, ...
_LONGEST_REPEAT_S = 30.0


class EngineCommitter(LeasedEngine):
    """Commits and rollbacks of one engine.

    Other HTTP processes can serve the same engine. The ranks keep the lease, and know whether a
    failed commit has left the engine paused, so that any process can recover from that.

    Attributes:
        repeating: repeats what follows a commit, after that has failed; None if it never has.
    """

    def __init__(self, engine: Engine, audit: Audit | None = None) -> None:
        super().__init__(engine)
        self.repeating: asyncio.Task[None] | None = None
        self._audit = audit
        self._caller_at_work = False

    async def run(
        self,
        request: Operation[_WrittenT],
        options: Options,
        engine: Engine | None = None,
        origin: Origin | None = None,
    ) -> tuple[_WrittenT, dict[str, float]]:
        """Carry out one operation while generation is paused.

        Args:
            engine: the engine as the operation's adapter sees it; None means the model's weights.
            origin: who has brought the parts that are committed.

        Returns:
            The first rank's reply with the facts of all ranks, and the timings of the pause, see
            `pauses.PausePhases.ended`.

        Raises:
            AuditUnavailable: the change could not be recorded, so no rank was asked to write.
            CommitFailed: some rank failed half-way, or did not answer. The engine stays paused.
            CommittedNotResumed: every rank has written, and the engine, or what records the
                change, failed after that.
            SaltUnavailable: the options want a salt, which the engine cannot give. Nothing is
                paused.
            DeltaError: every rank has refused, and none has written. A sync that was held for a
                group is dropped; it stays held after any other error before the write.
        """
        is_model = engine is None or engine is self._engine
        if options.flush_cache == "salt":
            await self._engine.check_salt()
        async with self.lease(pauses=True) as lease:
            draft = await self._begin_record(request, engine or self._engine, origin, lease)
            phases = pauses.PausePhases()
            try:
                await self._end_requests(lease, options)
                phases.end("stop")
                if is_model:
                    self.served.begin_write()
                stopped = await self._call_stopped(request, options, engine or self._engine)
                written = await self._written(request, stopped, engine or self._engine)
                phases.end(
                    "call",
                    stop=stopped.stop_ms,
                    caches=stopped.caches_ms,
                    vote=written.vote_ms,
                    commit=written.commit_ms,
                )
            except CommitFailed:
                # The engine stays paused: neither this process nor the other HTTP processes
                # must generate from mixed weights.
                self.uncertain = True
                self.served.lose()
                lease.publish_owed |= is_model  # they might have written all the same
                if self._audit is not None and draft is not None:
                    await self._audit.failed(draft)
                raise
            except BaseException as error:
                if isinstance(error, Exception):
                    self.served.keep()
                else:  # it is not known whether they have written
                    self.served.doubt()
                    lease.publish_owed |= is_model
                if not self.uncertain and (not lease.was_paused or lease.resume_owed):
                    try:
                        await self._publish(lease, None, resumes=True)
                    except Exception:  # the caller gets to know what the ranks have answered
                        logger.exception("generation could not be resumed; that is repeated")
                        self._publish_later(engine or self._engine)
                raise
            self.uncertain = False
            if is_model:
                lease.publish_owed = True
                self.served.move(written.version, written.digest)
                self.awaits_full_sync = False
            elif self.served.version == UNKNOWN:  # an adapter's failed write has ended so
                with contextlib.suppress(Exception):  # the next lease sees it
                    self.served.see((await rank_states(self._engine))[0].version)
            try:
                await self._finish(written, lease, is_model, draft, phases)
            except CommittedNotResumed:
                self._publish_later(engine or self._engine)
                raise
            return written, phases.ended()

    async def _end_requests(self, lease: HeldLease, options: Options) -> None:
        """End the requests in flight, if they are not to be kept and the caller has not paused.

        Not in the call that stops the engine and writes: replicas end theirs at different times,
        and one that waited for the others' vote would answer nothing meanwhile. While the weights
        are uncertain no request is waited for, which would end on them.
        """
        mode = options.pause_mode
        if mode != "keep" and not lease.was_paused and not (self.uncertain and mode == "wait"):
            await self._engine.end_requests(mode)

    async def halt(self, options: Options) -> None:
        """Pause generation for good, because a rank's weights have become uncertain."""
        self.uncertain = True
        try:
            async with self.lease(pauses=True) as lease:
                self.served.lose()
                if not lease.was_paused:
                    await self._end_requests(lease, options)
                    state = GetStatus(details=False)
                    flushes = options.flush_cache is True
                    stopped = await self._engine.call_stopped(state, flushes)
                    if stopped.refusal is not None:
                        raise stopped.refusal
        except Exception:
            self.served.lose()
            logger.exception("generation could not be paused; its requests answer 503")

    async def end_requests(self) -> None:
        """End the requests in flight, as a commit with the pause mode ``abort`` does.

        Those that the caller's own pause keeps stay, as they do then.

        Raises:
            EngineUncertain: an earlier write failed half-way. Nothing is changed.
        """
        async with self.lease(pauses=True) as lease:
            if lease.was_paused:
                return
            if self.uncertain:
                lease.resume_owed = False  # nothing was paused
                raise EngineUncertain("an earlier write failed half-way; send a full sync")
            try:
                await self._engine.end_requests("abort")
            finally:
                try:
                    await self._publish(lease, None, resumes=True)
                except Exception:
                    self._publish_later(self._engine)
                    raise

    def _publish_later(self, engine: Engine) -> None:
        """Repeat what follows a commit until it succeeds: not every sender repeats its sync."""

        async def repeat() -> None:
            wait_s = REPEAT_S
            while True:
                await asyncio.sleep(wait_s)
                try:
                    await self.publish(engine)
                except EngineUncertain:
                    return
                except Exception as error:
                    logger.warning("delta updates: still not resumed after a commit: %s", error)
                    wait_s = min(2 * wait_s, _LONGEST_REPEAT_S)
                else:
                    return

        if self.repeating is None or self.repeating.done():
            self.repeating = asyncio.ensure_future(repeat())

    async def publish(self, engine: Engine | None = None) -> dict[str, Any]:
        """Repeat what follows a commit, for a sender that did not get its first answer.

        Return digest and run of the live model, or of the adapter as which `engine` sees the
        engine.
        """
        async with self.lease(pauses=False) as lease:
            held = Held.of(await self.status(engine))
            if held.uncertain:
                raise EngineUncertain("the ranks are not at one version; send a full sync")
            is_model = engine is None or engine is self._engine
            version = held.version if is_model else None
            await self._publish(lease, version, resumes=lease.resume_owed)
            if self._audit is not None:
                try:
                    await self._audit.settle(engine or self._engine)
                except AuditUnavailable as error:
                    message = (
                        f"version {held.version} is committed, but not recorded: {error.message}"
                    )
                    raise CommittedNotResumed(message) from error
            return {"digest": held.digest, "run": held.run}

    async def describe_audit(self) -> AuditStatus | None:
        """Return how far the audit trail is; None without one."""
        return None if self._audit is None else await self._audit.describe()

    async def record_start(self) -> None:
        """Record the weights that the engine has loaded, unless another process has.

        If that is not possible, the engine serves them and takes no version.
        """
        if self._audit is None:
            return
        with contextlib.suppress(AuditUnavailable):  # logged, and in the status
            async with self.lease(pauses=False):
                await self._audit.settle(self._engine)

    async def check_audit(self, engine: Engine) -> None:
        """Raise `AuditUnavailable` if a change of the weights could not be recorded now."""
        if self._audit is not None:
            async with self.lease(pauses=False):
                await self._audit.begin(engine)

    async def run_external_change(
        self, change: Callable[[], Awaitable[_T]], resumes: Resumes | None = None
    ) -> _T:
        """Let the caller pause, resume, put to sleep or wake the engine, but not during a commit.

        A pause that a failed commit has left behind is the caller's from then on. The change is
        completed even if the caller disconnects.

        Args:
            resumes: returns whether requests in flight generate during the change or after it,
                given the states of the ranks, or nothing if they are not known; None: they do not.

        Raises:
            EngineUncertain: they would, from weights that are uncertain. Nothing is changed.
            CommittedNotResumed: a commit has left the engine paused without its version published,
                and that failed again. Nothing is changed.
            Exception: what `change` raises.
        """
        if self._caller_at_work:  # a resume that ends a pause, which waits for requests
            self._check_resumes(resumes, ())
            return await change()
        return await asyncio.shield(self._run_external_change(change, resumes))

    def _check_resumes(self, resumes: Resumes | None, states: Sequence[RankState]) -> None:
        """Raise `EngineUncertain` if requests in flight would continue from uncertain weights.

        They are not refused like new ones, and would be answered under the version before.
        """
        if self.uncertain and resumes is not None and resumes(states):
            raise EngineUncertain(
                "the weights are uncertain, and requests in flight would continue from them; send "
                "a full sync first"
            )

    async def _run_external_change(
        self, change: Callable[[], Awaitable[_T]], resumes: Resumes | None
    ) -> _T:
        async with contextlib.AsyncExitStack() as stack:
            lease = None
            try:
                lease = await stack.enter_async_context(self.lease(pauses=False))
            except Exception:
                logger.exception("the ranks did not answer whether a commit is running")
            self._check_resumes(resumes, () if lease is None else lease.states)
            if lease is not None:
                await self._publish_before_change(lease)
            self._caller_at_work = True
            try:
                result = await change()
            finally:
                self._caller_at_work = False
            if lease is not None:
                lease.resume_owed = False
                if not lease.was_paused:
                    lease.pause = None  # one that ended unseen
                try:
                    await self.see_pause(lease)
                except Exception:
                    logger.exception("a pause or its end could not be seen")
            return result

    async def end_long_pause(self, most: float) -> None:
        """Resume generation if a caller has paused it more than `most` seconds ago.

        Not while the weights are uncertain, or the engine sleeps, also in part. A pause that nobody
        has seen begin counts from the first call that finds it, and one that nobody has seen end is
        forgotten.
        """
        [state, *_] = await rank_states(self._engine)
        if state.paused is None and not await self._engine.is_paused():
            return
        async with self.lease(pauses=False) as lease:
            if lease.resume_owed or (pause := await self.see_pause(lease)) is None:
                return
            seconds = time.monotonic() - pause.began
            if seconds < most:
                return
            replies = await self.status()
            if self.uncertain or any(reply.released for reply in replies):
                return
            await self._publish(lease, None, resumes=True)
            await self.see_pause(lease)
            logger.warning(
                "delta updates: generation is resumed: %s had paused it %.0f s ago, longer than "
                "--delta-max-pause",
                *(pause.by or "a caller", seconds),
            )

    async def _begin_record(
        self,
        request: Operation[_WrittenT],
        engine: Engine,
        origin: Origin | None,
        lease: HeldLease,
    ) -> AuditRecord | None:
        """Make sure that a change can be recorded; see `Audit.begin`."""
        if self._audit is None:
            return None
        rolls_back = isinstance(request, RollBack)
        try:
            return await self._audit.begin(engine, rolls_back=rolls_back, origin=origin)
        except BaseException:
            if not lease.was_paused:
                lease.resume_owed = False  # nothing was paused
            raise

    async def _finish(
        self,
        written: Written,
        lease: HeldLease,
        is_model: bool,
        draft: AuditRecord | None,
        phases: pauses.PausePhases,
    ) -> None:
        """Record and publish the version, then resume; raise what failed, see `run`.

        An engine whose version is not published stays paused: its tokens would get the old one.
        """
        failures: list[Exception] = []
        if self._audit is not None and draft is not None:
            try:
                await self._audit.done(draft, written)
            except Exception as error:
                failures.append(error)
            phases.end("audit")
        try:
            version = written.version if is_model else None
            await self._publish(lease, version, resumes=lease.resume_owed)
            phases.end("resume")
        except Exception as error:
            failures.append(error)
        if failures:
            why = f"{type(failures[0]).__name__}: {failures[0]}"
            raise CommittedNotResumed(
                f"version {written.version} is committed, but recording or publishing the version, "
                f"or resuming generation, failed: {why}; send the sync again"
            ) from failures[0]

    async def _publish(self, lease: HeldLease, version: int | None, *, resumes: bool) -> None:
        """Publish the model's version, and resume if `resumes`, in one call; else both stay owed.

        Args:
            version: None: the one that is served, if a commit might have written it without
                publishing it. Also in a pause of the caller's, which they can end before the commit
                is repeated.
        """
        if version is None and lease.publish_owed and self.served.version != UNKNOWN:
            version = self.served.version
        if version is None and not resumes:
            return
        await self._engine.publish(None if version is None else str(version), resumes=resumes)
        lease.publish_owed &= version is None
        lease.resume_owed &= not resumes

    async def _publish_before_change(self, lease: HeldLease) -> None:
        """Publish what a commit owes before a caller pauses or resumes: the pause is theirs then.

        Raises:
            CommittedNotResumed: the version is not published, and its tokens would get the old one.
        """
        try:
            await self._publish(lease, None, resumes=False)
        except Exception as error:
            raise CommittedNotResumed(
                f"version {self.served.version} is committed, but publishing it failed: "
                f"{type(error).__name__}: {error}; generation stays paused until it is published"
            ) from error

    async def _call_stopped(
        self, request: Operation[_WrittenT], options: Options, engine: Engine
    ) -> StoppedCall[_WrittenT]:
        try:
            return await engine.call_stopped(request, options.flush_cache)
        except Exception as error:
            # A sync that is still staged would keep out the full sync that ends this state.
            with contextlib.suppress(Exception):
                await call_all_ranks(engine, AbortSync())
            self._publish_later(engine)
            raise CommitFailed(
                f"the ranks did not answer whether they committed: {type(error).__name__}: "
                f"{error}; generation answers 503 until they do, or a full sync is answered"
            ) from error

    async def _written(
        self, request: Operation[_WrittenT], stopped: StoppedCall[_WrittenT], engine: Engine
    ) -> _WrittenT:
        """Return the first rank's reply with the facts of all ranks; raises as `run`."""
        answers = stopped.answers
        refusals = [answer for answer in answers if isinstance(answer, DeltaError)]
        replies = [answer for answer in answers if not isinstance(answer, DeltaError)]
        failed = [refusal for refusal in refusals if isinstance(refusal, CommitFailed)]
        if failed:
            raise failed[0]
        if refusals and replies:
            raise CommitFailed(
                f"{len(refusals)} of {len(answers)} ranks did not commit: {refusals[0].message}; "
                "generation answers 503 until a full sync commits"
            )
        if stopped.refusal is not None:  # the ranks have nothing against the sync
            raise stopped.refusal
        if refusals:
            if isinstance(request, CommitSync) and request.group is not None:
                # They would refuse it again, and its group has no other way to give it up.
                drop = AbortSync(
                    version=request.version, sync_id=request.sync_id, group=request.group
                )
                with contextlib.suppress(Exception):
                    await call_all_ranks(engine, drop)
            raise refusals[0]
        facts: dict[str, Any] = {"digest": total_digest(reply.digest for reply in replies)}
        if isinstance(replies[0], CommittedSync):  # each rank keeps old values as it has room
            facts["rollback"] = all(r.rollback for r in replies if isinstance(r, CommittedSync))
        return msgspec.structs.replace(replies[0], **facts)


def serialize_with_commits(
    committer: EngineCommitter,
    change: Callable[_P, Coroutine[Any, Any, _T]],
    resumes: Callable[..., bool] | None = None,
) -> Callable[_P, Coroutine[Any, Any, _T]]:
    """Wrap a method of the engine, such as to pause, so that the caller's calls wait for commits.

    The adapter itself keeps calling the original method.

    Args:
        resumes: as for `EngineCommitter.run_external_change`; it also gets the call's arguments.
    """

    @functools.wraps(change)
    async def serialized(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        def asked(states: Sequence[RankState]) -> bool:
            return resumes is not None and resumes(states, *args, **kwargs)

        return await committer.run_external_change(lambda: change(*args, **kwargs), asked)

    return serialized
