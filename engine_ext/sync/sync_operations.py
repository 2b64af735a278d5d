"""The operations that bring a sync in and write it, or undo the last one, on one rank.

All ranks get the same calls in the same order and so keep the same `SyncState`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn

from engine_ext.errors import (
    BaseMismatch,
    CommitFailed,
    Conflict,
    EngineUncertain,
    WriteUndone,
    from_wire,
)
from engine_ext.format import PartId
from engine_ext.model import TracingError
from engine_ext.ranks import RankGroup, run_on_all_or_none
from engine_ext.ranks import operations as ops
from engine_ext.remote_parts import Locate
from engine_ext.settings import Settings
from engine_ext.sync.applier import Applier
from engine_ext.sync.background_staging import BackgroundStaging
from engine_ext.sync.disposer import Disposer
from engine_ext.sync.staged import StagedPart, UndoLog
from engine_ext.sync.sync_state import Sync, SyncState
from engine_ext.sync.totals import totals
from engine_ext.sync.transaction import Transaction

logger = logging.getLogger(__name__)

_DROPPED = "the sync of this part was dropped while the part was being staged"


class SyncOperations:
    """The operations of `Receiver` that stage, commit, drop and roll back syncs.

    Args:
        settings: those of the engine; a LoRA adapter's have other versions, and no scrubbing.
        locate: see `engine_ext.remote_parts.locate_part`; None if all ranks are on the host
            of the spool.
    """

    def __init__(
        self,
        applier: Applier,
        ranks: RankGroup,
        settings: Settings,
        locate: Locate | None = None,
    ) -> None:
        self._sync_state = SyncState(settings.base_version, settings.stage_timeout)
        self._staging = BackgroundStaging(settings.read_workers, locate)
        self._ranks = ranks
        self.adopt(applier)
        # Of the old values of one version, with those of its continuations.
        self._undo_bytes = settings.undo_bytes
        # Undo the last version with its continuations; empty if it cannot be undone.
        self._undo: list[UndoLog] = []
        self._last_sync: ops.CommittedSync | None = None
        self._syncs = 0  # that have begun
        self._search_due = False
        self._disposer = Disposer()

    def adopt(self, applier: Applier) -> None:
        """Write with this applier from now on."""
        self._applier = applier
        self._transaction = Transaction(applier, self._ranks)

    def begin(self, request: ops.BeginPart) -> ops.PartBegun:
        """Admit a part and start staging it.

        Raises:
            CommitFailed: the engine's loader was traced again, because weights have moved, and has
                changed the model; the engine is uncertain.
            NotUpdatable: weights have moved, and a ``full`` sync cannot follow them.
            DeltaError: see `SyncState.admit`.
        """
        before = self._sync_state.sync
        if request.shares_doubts:
            self._sync_state.share(self._ranks.all_gather(self._sync_state.doubts))
        try:
            admission = self._sync_state.admit(
                request.part, request.now, request.at, request.nbytes
            )
        finally:
            if self._sync_state.sync is not before:
                self._staging.clear()
        search_ms = None
        if self._sync_state.sync is not before:
            search_ms = self._look_at_memory(request.part)
        if admission == "new":
            self._staging.start(request, self._applier.stage_unpacked)
        return ops.PartBegun(admission=admission, search_ms=search_ms)

    def claim(self, request: ops.ClaimRun) -> ops.RunClaimed:
        """Let the process of a run alone change the weights, or end that.

        Raises:
            RunConflict, SyncInProgress: see `SyncState.claim`; only for a claim.
        """
        state, before, sender = self._sync_state, self._sync_state.sync, request.sender
        released = request.releases and state.release(sender)
        if not request.releases:
            state.claim(sender, takeover=request.takeover, now=request.now, at=request.at)
        if state.sync is not before:
            self._staging.clear()
        highest = state.runs.highest(sender.run)
        return ops.RunClaimed(owner=state.runs.owner, released=released, highest=highest)

    def poll(self, request: ops.PollPart) -> ops.PartProgress:
        """Return whether a part is staged on this rank.

        Raises:
            Conflict: the part was dropped.
            DeltaError: this rank refused the part.
        """
        future = self._staging.get(request.part.part)
        if future is None or not self._sync_state.holds(request.part):
            raise Conflict(_DROPPED)
        done = future.done()
        if done:
            future.result()  # raises what staging has raised
        return ops.PartProgress(done=done)

    def prepare(self, request: ops.PrepareSync) -> ops.SyncPrepared:
        """Keep a part, or do a share of what must precede the commit of its sync.

        A part is kept when every rank has staged it. The share is to be repeated until it is done.

        Raises:
            Conflict: the part, or the sync, was dropped.
            NotUpdatable: this rank cannot commit the sync.
            DeltaError: the kept part completes the sync, and some rank refuses it, see
                `Transaction.agree`.
        """
        return self._keep(request.part) if request.keep else self._work(request.part)

    def _keep(self, part: PartId) -> ops.SyncPrepared:
        done, holds = False, self._sync_state.holds(part)
        if holds:
            self._sync_state.settle(part.part, staged=True)
        complete = holds and self._complete()
        # A replica that has fallen asleep has dropped it, or the parts before it: the others must
        # not wait for its vote.
        if any(vote != [True, complete] for vote in self._ranks.all_gather([holds, complete])):
            raise Conflict(_DROPPED)
        if complete:
            done = self._applier.is_prepared(self._agree(self._checked))
        sync, base = self._sync_state.sync, None
        if sync is not None and sync.complete and not sync.full:
            continued = sync.continues and sync.version == self._sync_state.version
            base = None if continued else self._sync_state.delivery
        return ops.SyncPrepared(complete=complete, done=done, base=base)

    def _work(self, part: PartId) -> ops.SyncPrepared:
        def staged_parts() -> tuple[Sequence[StagedPart], bool]:
            sync = self._sync_state.sync
            if sync is None or not sync.complete or not self._sync_state.holds(part):
                raise Conflict(_DROPPED)
            return self._staging.results(sync.slots), sync.full

        # The rebuilds communicate: a rank that cannot take part must not be waited for.
        staged, full = run_on_all_or_none(self._ranks, staged_parts)
        done = self._applier.prepare(staged, full=full)
        return ops.SyncPrepared(complete=True, done=done, rebuilt=len(totals(staged).modules))

    def abort(self, request: ops.AbortSync) -> ops.Reply:
        """Forget one part, or the staged sync; if the request names a version, only that one.

        A sync that is held for a group is kept then, unless the request names the group.
        """
        part = request.part
        is_named = part is not None or request.version is not None
        if is_named and self._sync_state.is_held_from(request.group):
            return ops.Reply()
        if part is not None:
            if self._sync_state.holds(part):
                self._sync_state.settle(part.part, staged=False)
                self._staging.forget(part.part)
        elif request.version is None or self._is_staged(request.version, request.sync_id):
            self._drop_staged()
        return ops.Reply()

    def hold(self, request: ops.HoldSync) -> ops.Reply:
        """Vote on the staged sync as its commit does, and keep it until its group has decided.

        Raises:
            CommitFailed: as for `commit`.
            SyncInProgress: another group decides on it.
            DeltaError: some rank refuses it. Every rank is unchanged.
        """

        def prepare() -> Sequence[StagedPart]:
            self._sync_state.check_not_held(request.prepared.group)
            return self._ready(request.version, request.sync_id)

        known = self._sync_state.describe()
        before = None if known is None else known.prepared
        renews = before is not None and before.group == request.prepared.group
        # A replica that has fallen asleep holds none: the others must not wait for its vote.
        if not all(self._ranks.all_gather(renews)):
            self._agree(prepare)
        self._sync_state.hold(request.prepared)
        return ops.Reply()

    def commit(self, request: ops.CommitSync) -> ops.CommittedSync:
        """Write the staged sync on every rank, or leave every rank as it was.

        Raises:
            SyncInProgress: the sync is held for a group that the request does not name.
            CommitFailed: some rank failed and could not be restored, or checking the sync has
                changed its model; the engine is uncertain.
            DeltaError: some rank refused or failed; every rank is unchanged.
        """

        def prepare() -> Sequence[StagedPart]:
            check_stopped(request)
            self._sync_state.check_not_held(request.group)
            return self._ready(request.version, request.sync_id)

        begun = time.perf_counter()
        staged = self._agree(prepare)
        vote_ms = _ms_since(begun)
        sync = self._sync_state.sync
        assert sync is not None
        base, apply = self._sync_state.version, self._applier.name
        base_run = self._sync_state.run
        loads = self._applier.plan is None  # the first weights, from what is staged
        start = time.perf_counter()
        try:
            given_up: list[UndoLog] = []
            if sync.full:
                # No more going back to the version before, also if the write is undone.
                given_up, self._undo = self._undo, []
            log = self._transaction.write(staged, given_up)
            commit_ms = _ms_since(start)
            spent = [*given_up, *self._keep_undo(sync, base, log)]
            skipped, whole = Counter[str](), totals(staged)
            for part in staged:
                skipped.update(part.skipped)
            nnz, tensors, elements = whole.sent(skipped)
            digest = self._applier.digest.hex()  # whatever can fail comes before the version moves
            self._sync_state.commit(whole.names, proven=whole.proven)
            committed = ops.CommittedSync(
                version=sync.version,
                base_version=base,
                run=self._sync_state.run,
                base_run=base_run,
                sync_id=sync.sync_id,
                full=sync.full,
                apply=apply,
                parts=len(staged),
                nnz=nnz,
                tensors=tensors,
                elements=elements,
                vote_ms=vote_ms,
                commit_ms=commit_ms,
                skipped=dict(skipped),
                rollback=bool(self._undo),
                digest=digest,
            )
        except (BaseMismatch, WriteUndone):  # what was staged might be of other old values
            self._drop_staged()
            raise
        except Exception as error:
            self._fail(error)
        self._staging.clear()
        self._last_sync = committed
        if not loads:
            self._disposer.dispose(staged, spent)
        return committed

    def rollback(self, request: ops.RollBack) -> ops.RolledBack:
        """Restore the version before the last one on every rank.

        Raises:
            SyncInProgress: a group of engines has yet to decide on the staged sync.
            CommitFailed: some rank failed half-way; the engine is uncertain.
            DeltaError: some rank refused; every rank is unchanged.
        """

        def prepare() -> Sequence[StagedPart]:
            check_stopped(request)
            self._sync_state.check_not_held()
            self._sync_state.check_writable(full=False)
            if not self._undo or self._sync_state.previous is None:
                raise Conflict(
                    "there is no version to go back to: the old values were not kept; send the "
                    "older version as a full sync"
                )
            self._applier.check_rollback(self._undo)
            return []

        begun = time.perf_counter()
        self._agree(prepare)
        vote_ms = _ms_since(begun)
        start = time.perf_counter()
        undo, self._undo = self._undo, []
        self._drop_staged()
        try:
            self._transaction.roll_back(undo)
            rolled_back = self._sync_state.version
            self._sync_state.roll_back()
            return ops.RolledBack(
                version=self._sync_state.version,
                rolled_back=rolled_back,
                vote_ms=vote_ms,
                commit_ms=_ms_since(start),
                digest=self._applier.digest.hex(),
                run=self._sync_state.run,
            )
        except Exception as error:
            self._fail(error)

    # ------------------------------------------------------------------------------------------

    def _complete(self) -> bool:
        return self._sync_state.sync is not None and self._sync_state.sync.complete

    def _is_staged(self, version: int, sync_id: str | None) -> bool:
        sync = self._sync_state.sync
        return sync is not None and (sync.version, sync.sync_id) == (version, sync_id)

    def _ready(self, version: int, sync_id: str | None) -> Sequence[StagedPart]:
        """Return the parts of the staged sync, if it is this one and can be written at once."""
        if not self._is_staged(version, sync_id):
            raise Conflict(f"no sync to version {version} is staged; send it again")
        staged = self._checked()
        if not self._applier.is_prepared(staged):
            raise Conflict("the sync was not prepared; send it again")
        self._applier.check_base(staged)
        return staged

    def _drop_staged(self) -> None:
        self._sync_state.drop()
        self._staging.clear()

    def _agree(self, prepare: Callable[[], Sequence[StagedPart]]) -> Sequence[StagedPart]:
        """Agree on a sync with the other ranks, see `Transaction.agree`."""
        try:
            return self._transaction.agree(prepare)
        except EngineUncertain:  # since an earlier write; what is staged can end it
            raise
        except CommitFailed as error:
            self._fail(error)
        except BaseMismatch as error:  # the same on all ranks
            self._sync_state.mismatched |= set(error.operands.get("moved", ()))
            raise

    def _look_at_memory(self, part: PartId) -> float | None:
        """Notice what the engine has done to its model, before the first part of a sync is staged.

        A search for copies takes 50 µs for each module: over a second for 25,000, hundredths where
        a layer's experts are two tensors. So it comes before every sync whose number is a power of
        two: before the first, after the first commit, and in case the engine generates later; and
        before a sync that finds new attributes on modules, which are counted each time, and again
        before its commit. Tensors in objects and dictionaries that were there before wait for the
        next power of two.

        Returns:
            The milliseconds that the search took; None if there was none.
        """
        search_ms = None
        try:
            if part.full:
                self._follow_moves()
            self._syncs += 1
            power_of_two = self._syncs & (self._syncs - 1) == 0
            self._search_due |= power_of_two or self._applier.has_grown()
            if self._search_due:
                start = time.perf_counter()
                self._search_due = not self._applier.search_again()
                search_ms = _ms_since(start)
        except TracingError as error:
            self._fail(CommitFailed(f"tracing the loader again has changed the model: {error}"))
        except Exception:
            self._sync_state.settle(part.part, staged=False)
            raise
        return search_ms

    def _follow_moves(self) -> None:
        """Let a ``full`` sync be written to where weights are now.

        Until it has committed nobody knows what is there.
        """
        moved = self._applier.moved()
        if not moved:
            return
        self._sync_state.mismatched |= set(moved)
        self._undo = []  # of the places before
        self._applier.place_again()
        logger.warning("delta updates: %d tensors have moved; a full sync follows", len(moved))

    def _fail(self, error: Exception) -> NoReturn:
        """Record that the weights are uncertain, and raise what says so."""
        self._sync_state.fail()
        self._applier.forget()
        self._undo = []
        self._staging.clear()
        if not isinstance(error, CommitFailed):
            logger.error("a write could not be recorded", exc_info=error)
            error = CommitFailed(f"the weights were written, but recording it failed: {error!r}")
        error.operands["version"] = self._sync_state.version
        raise error

    def _checked(self) -> Sequence[StagedPart]:
        """Return the parts of the staged sync; raises DeltaError if it cannot be written now."""
        sync = self._sync_state.sync
        if sync is None or not sync.complete:
            raise Conflict("the sync lacks parts; send it again")
        # The engine might have gone to sleep since the parts were admitted.
        self._sync_state.check_writable(full=sync.full)
        if self._applier.has_grown():  # by a forward pass in that time
            self._search_due = not self._applier.search_again()
        staged = self._staging.results(sync.slots)
        self._sync_state.check_apart(totals(staged).names)
        self._applier.check_sync(staged, full=sync.full)
        return staged

    def _keep_undo(self, sync: Sync, base: int, log: UndoLog | None) -> list[UndoLog]:
        """Keep the old values of a sync that was just written, if they can be restored later.

        Return the logs that are of no use any more.
        """
        if (
            self._sync_state.engine_state != "certain"
            or self._sync_state.changed_externally is not None
        ):
            log = None  # it is not known which version the old values were of
        continued = _continued(sync, base)
        earlier = self._undo if continued else []
        kept = [*earlier, log] if log is not None and (earlier or not continued) else []
        before, self._undo = self._undo, kept
        if sum(one.nbytes for one in kept) > self._undo_bytes:
            self._undo = []
        logs = before if log is None else [*before, log]
        return [one for one in logs if not any(one is other for other in self._undo)]


def check_stopped(request: ops.Operation[ops.ReplyT]) -> None:
    """Raise why the engine has not stopped for an operation, if it has not."""
    if request.refusal is not None:
        raise from_wire(request.refusal)


def _continued(sync: Sync, base: int) -> bool:
    """Return whether a sync continues the version that the engine has."""
    return sync.continues and sync.version == base


def _ms_since(start: float) -> float:
    return round((time.perf_counter() - start) * 1e3, 3)
