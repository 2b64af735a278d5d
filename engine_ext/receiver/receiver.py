"""The receiver of one rank: stages parts in the background, commits them in one call.

Each of the engine's workers has one `Receiver`. The HTTP side reaches all of them with one
collective call of `Receiver.handle`, which returns errors as answers and never raises: when an
executor sees one rank raise, it leaves the other ranks' answers in its queue. All ranks get the
same calls in the same order and so keep the same `SyncState`.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from engine_ext.apply import Applier, StagedPart, Transaction, UndoLog
from engine_ext.errors import AdapterNotLoaded, CommitFailed, Conflict, WeightsAsleep, WriteUndone
from engine_ext.ranks import Ranks, together
from engine_ext.receiver.background_staging import BackgroundStaging
from engine_ext.receiver.lease import Lease
from engine_ext.receiver.sync_history import SyncHistory
from engine_ext.receiver.sync_state import Sync, SyncState
from engine_ext.remote_parts import Locate
from engine_ext.scrub import Scrubber
from engine_ext.wire import Limits
from engine_ext.wire import operations as ops

logger = logging.getLogger(__name__)

# They write weights or what the scrubber compares them with, or may let the engine do so.
_WRITES = (ops.PrepareSync, ops.CommitSync, ops.RollBack)
_MOST_PULLED = 16  # names that are remembered
_DROPPED = "the sync of this part was dropped while the part was being staged"


class Receiver:
    """One rank's receiver. Every operation has a method with the name of its tag.

    Args:
        base_version: version of the freshly loaded weights.
        stage_timeout: seconds after its last part for which a staged sync keeps others out.
        read_workers: how many parts are staged at once.
        shared: whether other ranks of this host stage the same parts.
        locate: see `engine_ext.remote_parts.PartLocator.locate`; None if all ranks are on the host
            of the spool.
        undo_bytes: host memory that the old values of one version may take, with those of its
            continuations.
        scrub_interval: seconds in which each tensor is scrubbed once; None turns scrubbing off.
    """

    def __init__(
        self,
        applier: Applier,
        ranks: Ranks,
        *,
        base_version: int,
        stage_timeout: float,
        read_workers: int,
        limits: Limits,
        undo_bytes: int = 4 << 30,
        scrub_interval: float | None = None,
        shared: bool = False,
        locate: Locate | None = None,
    ) -> None:
        self._sync_state = SyncState(base_version, stage_timeout)
        self._lease = Lease()
        self._log_lease = Lease()
        self._history = SyncHistory()
        self._ranks = ranks
        self.adopt(applier)
        self._undo_bytes = undo_bytes
        self._staging = BackgroundStaging(read_workers, limits, shared=shared, locate=locate)
        # Undo the last version with its continuations; empty if it cannot be undone.
        self._undo: list[UndoLog] = []
        self._last_sync: ops.CommittedSync | None = None
        self._pulled: dict[str, ops.Pulled] = {}
        self._scrubber = Scrubber(weakref.WeakMethod(self._scrubbed), ranks.rank)
        self._scrub_interval = scrub_interval

    # What the adapter reports -----------------------------------------------------------------

    def adopt(self, applier: Applier) -> None:
        """Write with this applier from now on."""
        self._applier = applier
        self._transaction = Transaction(applier, self._ranks)

    def weights_replaced(self, by: str) -> None:
        """Take only a full sync from now on; `by` names what in the engine changed the weights."""
        self._sync_state.foreign = by
        self._applier.forget()
        self._drop_staged()
        self._undo = []

    def weights_released(self) -> None:
        """Prepare for the engine to release the weights' memory.

        Returns when neither staging nor scrubbing reads it any more.
        """
        self.set_asleep(True)
        self._drop_staged()
        self._staging.wait()
        self._scrubber.wait()

    def set_asleep(self, asleep: bool) -> None:
        """Record whether the weights' memory is released."""
        self._sync_state.asleep = asleep

    @property
    def uncertain(self) -> bool:
        """Whether some weights may be new and some old."""
        return self._sync_state.uncertain

    # Operations -------------------------------------------------------------------------------

    def handle(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out one operation, encoded by `ops.encode_request`; return its encoded answer.

        Never raises. An error that is not a `DeltaError` is a bug and is reported as one; the
        engine is unchanged then, unless the operation was a commit or a rollback.
        """
        return ops.encode_answer(lambda: self.execute(ops.decode_request(operation, arguments)))

    def execute(self, request: ops.Operation[ops.ReplyT]) -> ops.ReplyT:
        """Carry out one operation; raises what its method raises.

        Raises:
            AdapterNotLoaded: it is for a LoRA adapter, which `AdapterReceivers` serves.
        """
        if request.adapter is not None:
            raise AdapterNotLoaded(
                f"adapter {request.adapter}: this engine takes no updates of LoRA adapters",
                adapter=request.adapter,
            )
        if self._scrub_interval is not None:
            # Not before: an engine that still captures graphs may take no other work on its device.
            self._scrubber.start(self._scrub_interval)
        rebuilds = isinstance(request, ops.GetDigest) and request.scan
        writes = rebuilds or isinstance(request, _WRITES)
        with self._scrubber.interrupted() if writes else contextlib.nullcontext():
            reply: ops.ReplyT = getattr(self, request.name)(request)
            return reply

    def status(self, request: ops.GetStatus) -> ops.RankStatus:
        """Describe the receiver."""
        return ops.RankStatus(
            version=self._sync_state.version,
            engine_state=self._sync_state.engine_state,
            resume_owed=self._lease.resume_owed,
            asleep=self._sync_state.asleep,
            foreign=self._sync_state.foreign,
            delivery=self._sync_state.delivery,
            staged=self._sync_state.describe(),
            last_sync=self._last_sync,
            can_roll_back=bool(self._undo),
            scrub=self._scrubber.state,
            **self._applier.describe(),
        )

    def state(self, request: ops.GetState) -> ops.RankState:
        """Describe what every HTTP process must know; cheap."""
        return ops.RankState(
            version=self._sync_state.version,
            engine_state=self._sync_state.engine_state,
            resume_owed=self._lease.resume_owed,
        )

    def acquire_lease(self, request: ops.AcquireLease) -> ops.EngineLease:
        """Let one HTTP process pause and resume the engine."""
        dead = request.instead_of
        grant = self._lease.acquire(request.holder, resumes=request.resumes, instead_of=dead)
        return ops.EngineLease(grant=grant, state=self.state(ops.GetState()))

    def release_lease(self, request: ops.ReleaseLease) -> ops.Reply:
        """Take the lease back."""
        self._lease.release(request.holder, owed=request.owed)
        return ops.Reply()

    def acquire_log_lease(self, request: ops.AcquireLogLease) -> ops.LeaseGrant:
        """Let one HTTP process replay the delta log."""
        return self._log_lease.acquire(request.holder, resumes=False, instead_of=request.instead_of)

    def release_log_lease(self, request: ops.ReleaseLogLease) -> ops.Reply:
        """Take the lease of the delta log back."""
        self._log_lease.release(request.holder, owed=False)
        return ops.Reply()

    def unseen(self, request: ops.FindUnseen) -> ops.Unseen:
        """Find which parts were not committed at this version."""
        seen = self._sync_state.seen
        unseen = [one for one in request.identities if not seen(request.version, one)]
        return ops.Unseen(unseen=unseen)

    def begin(self, request: ops.BeginPart) -> ops.PartBegun:
        """Admit a part and start staging it.

        Raises:
            DeltaError: see `SyncState.admit`.
        """
        before = self._sync_state.sync
        try:
            admission = self._sync_state.admit(request.part, request.now)
        finally:
            if self._sync_state.sync is not before:
                self._staging.clear()
        if admission == "new":
            self._staging.start(request.part, request.path, self._applier.stage, request.source)
        return ops.PartBegun(admission=admission)

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

    def settle(self, request: ops.SettlePart) -> ops.PartSettled:
        """Keep a part that every rank has staged, or forget one that some rank refused.

        Raises:
            Conflict: the part was dropped.
            DeltaError: the sync is complete, and some rank refuses it, see `Transaction.agree`.
        """
        prepared, holds = False, self._sync_state.holds(request.part)
        # A replica that has fallen asleep has dropped it: the others must not wait for its vote.
        everywhere = all(self._ranks.all_gather(holds))
        if request.staged and not everywhere:
            raise Conflict(_DROPPED)
        if holds:
            self._sync_state.settle(request.part.part, staged=request.staged)
            if not request.staged:
                self._staging.forget(request.part.part)
        if everywhere and self._complete():
            prepared = self._applier.is_prepared(self._agree(self._checked))
        sync, base = self._sync_state.sync, None
        if sync is not None and sync.complete and not sync.full:
            continued = sync.continues and sync.version == self._sync_state.version
            base = None if continued else self._sync_state.delivery
        return ops.PartSettled(complete=self._complete(), prepared=prepared, base=base)

    def prepare(self, request: ops.PrepareSync) -> ops.SyncPrepared:
        """Do a share of what must precede the commit; to be repeated until it is done.

        Raises:
            Conflict: the sync was dropped.
            NotUpdatable: this rank cannot commit it.
        """

        def staged_parts() -> tuple[Sequence[StagedPart], bool]:
            sync = self._sync_state.sync
            if sync is None or not sync.complete or not self._sync_state.holds(request.part):
                raise Conflict(_DROPPED)
            return self._staging.results(sync.slots), sync.full

        # The rebuilds communicate: a rank that cannot take part must not be waited for.
        staged, full = together(self._ranks, staged_parts)
        done = self._applier.prepare(staged, full=full)
        return ops.SyncPrepared(
            done=done, rebuilt=sum(len(part.rebuilt.modules) for part in staged)
        )

    def drop(self, request: ops.DropSync) -> ops.Reply:
        """Forget the staged sync; if the request names a version, only that one."""
        if request.version is None or self._is_staged(request.version, request.sync_id):
            self._drop_staged()
        return ops.Reply()

    def commit(self, request: ops.CommitSync) -> ops.CommittedSync:
        """Write the staged sync on every rank, or leave every rank as it was.

        Raises:
            CommitFailed: some rank failed and could not be restored, or checking the sync has
                changed its model; the engine is uncertain.
            DeltaError: some rank refused or failed; every rank is unchanged.
        """

        def prepare() -> Sequence[StagedPart]:
            if not self._is_staged(request.version, request.sync_id):
                raise Conflict(f"no sync to version {request.version} is staged")
            staged = self._checked()
            if not self._applier.is_prepared(staged):
                raise Conflict("the sync was not prepared; send it again")
            self._applier.check_base(staged)
            return staged

        staged = self._agree(prepare)
        sync = self._sync_state.sync
        assert sync is not None
        base, apply = self._sync_state.version, self._applier.name
        start = time.perf_counter()
        try:
            log = self._transaction.write(staged)
            commit_ms = _ms_since(start)
            self._keep_undo(sync, base, log)
            skipped = Counter[str]()
            for part in staged:
                skipped.update(part.skipped)
            elements = {e.name: e.numel for part in staged for e in part.manifest.params}
            elements = {n: numel for n, numel in elements.items() if n not in skipped}
            committed = ops.CommittedSync(
                version=sync.version,
                base_version=base,
                sync_id=sync.sync_id,
                full=sync.full,
                apply=apply,
                parts=len(staged),
                nnz=sum(part.nnz for part in staged),
                tensors=len(elements),
                elements=sum(elements.values()),
                commit_ms=commit_ms,
                skipped=dict(skipped),
                rollback=bool(self._undo),
                digest=self._applier.digest.hex(),
            )
            proven = any(part.manifest.digest_after is not None for part in staged)
            self._sync_state.commit(_names(staged), proven=proven)
        except WriteUndone:
            self._drop_staged()
            raise
        except Exception as error:
            self._fail(error)
        self._staging.clear()
        self._last_sync = committed
        return committed

    def rollback(self, request: ops.RollBack) -> ops.RolledBack:
        """Restore the version before the last one on every rank.

        Raises:
            CommitFailed: some rank failed half-way; the engine is uncertain.
            DeltaError: some rank refused; every rank is unchanged.
        """

        def prepare() -> Sequence[StagedPart]:
            self._sync_state.check_writable(full=False)
            if not self._undo or self._sync_state.previous is None:
                raise Conflict("there is no version to go back to: the old values were not kept")
            self._applier.check_in_place()
            return []

        self._transaction.agree(prepare)
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
                commit_ms=_ms_since(start),
                digest=self._applier.digest.hex(),
            )
        except Exception as error:
            self._fail(error)

    def record_pull(self, request: ops.RecordPull) -> ops.Reply:
        """Remember what was pulled under the name of a checkpoint; the oldest name gives way."""
        self._pulled.pop(request.checkpoint, None)
        self._pulled[request.checkpoint] = request.pulled
        if len(self._pulled) > _MOST_PULLED:
            del self._pulled[next(iter(self._pulled))]
        return ops.Reply()

    def find_pull(self, request: ops.FindPull) -> ops.Pulled:
        """Find what was pulled under the name of a checkpoint."""
        return self._pulled.get(request.checkpoint, ops.Pulled())

    def plan(self, request: ops.GetPlan) -> ops.RankPlan:
        """List every checkpoint tensor with its placement on this rank."""
        plan = self._applier.plan
        return ops.RankPlan(tensors=None if plan is None else plan.table())

    def digest(self, request: ops.GetDigest) -> ops.RankDigest:
        """Return the digests of the elements that this rank counts.

        Raises:
            WeightsAsleep: a scan was asked for, and the weights' memory is released.
        """

        def check() -> None:
            if self._sync_state.asleep:
                raise WeightsAsleep("the engine has released its weights; wake it up first")

        if request.scan:  # it rebuilds modules in step
            together(self._ranks, check)
        tracked, corrupted = self._applier.digests, list[str]()
        found = tracked
        if request.scan:
            found, corrupted = self._applier.scan()
        return ops.RankDigest(
            version=self._sync_state.version,
            tensors={name: digest.hex() for name, digest in found.items()},
            tracked={name: digest.hex() for name, digest in tracked.items()},
            corrupted=corrupted,
        )

    def take_scrub_findings(self, request: ops.TakeScrubFindings) -> ops.ScrubFindings:
        """Return what scrubbing has found since it was last asked."""
        return ops.ScrubFindings(mismatched=self._scrubber.take_untold())

    def record(self, request: ops.RecordSync) -> ops.SyncRecord:
        """Add a request to the history."""
        return self._history.add(request.record)

    def history(self, request: ops.GetHistory) -> ops.History:
        """List the last syncs."""
        return ops.History(syncs=self._history.syncs())

    # ------------------------------------------------------------------------------------------

    def _scrubbed(self) -> Applier | None:
        """Return what knows the weights, while they are in memory and of a known version."""
        state = self._sync_state
        known = not (state.asleep or state.uncertain) and state.foreign is None
        return self._applier if known else None

    def _complete(self) -> bool:
        return self._sync_state.sync is not None and self._sync_state.sync.complete

    def _is_staged(self, version: int, sync_id: str | None) -> bool:
        sync = self._sync_state.sync
        return sync is not None and (sync.version, sync.sync_id) == (version, sync_id)

    def _drop_staged(self) -> None:
        self._sync_state.drop()
        self._staging.clear()

    def _agree(self, prepare: Callable[[], Sequence[StagedPart]]) -> Sequence[StagedPart]:
        """Agree on a sync with the other ranks, see `Transaction.agree`."""
        try:
            return self._transaction.agree(prepare)
        except CommitFailed as error:
            self._fail(error)

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
            raise Conflict("the sync lacks parts")
        # The engine may have gone to sleep since the parts were admitted.
        self._sync_state.check_writable(full=sync.full)
        staged = self._staging.results(sync.slots)
        self._sync_state.check_apart(_names(staged))
        self._applier.check_sync(staged, full=sync.full)
        return staged

    def _keep_undo(self, sync: Sync, base: int, log: UndoLog | None) -> None:
        """Keep the old values of a sync that was just written, if they can be restored later."""
        if self._sync_state.uncertain or self._sync_state.foreign is not None:
            log = None  # it is not known of which version the old values were
        continued = sync.continues and sync.version == base
        earlier = self._undo if continued else []
        kept = [*earlier, log] if log is not None and (earlier or not continued) else []
        self._undo = kept if sum(one.nbytes for one in kept) <= self._undo_bytes else []


def _names(staged: Sequence[StagedPart]) -> set[str]:
    return {entry.name for part in staged for entry in part.manifest.params}


def _ms_since(start: float) -> float:
    return round((time.perf_counter() - start) * 1e3, 3)
