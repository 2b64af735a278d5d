"""The receiver of one rank: stages parts in the background, commits them in one call.

The engine's workers each hold one `Receiver`; the HTTP side reaches all of them with one
collective call of `Receiver.handle`, which answers with a dict and never raises, because an
executor that sees one rank raise leaves the other ranks' answers in its queue. All ranks get the
same calls in the same order and so keep the same `SyncState`.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec

from engine_ext.apply.applier import Applier
from engine_ext.apply.staged import StagedPart, UndoLog
from engine_ext.apply.transaction import Transaction
from engine_ext.errors import (
    CommitFailed,
    Conflict,
    MalformedPart,
    WeightsAsleep,
    WriteUndone,
    as_delta_error,
)
from engine_ext.ranks import Ranks
from engine_ext.receiver.lease import Lease
from engine_ext.receiver.sync_history import SyncHistory
from engine_ext.receiver.sync_state import SyncState
from engine_ext.wire import Limits, decode_part
from engine_ext.wire.identity import PartId, part_identity


class Receiver:
    """One rank's receiver.

    Args:
        applier: writes into this rank's weights.
        ranks: how to vote with the other ranks.
        base_version: version of the freshly loaded weights.
        stage_timeout: seconds for which a staged sync keeps others out.
        read_workers: threads that read, verify and decode parts.
        limits: bounds for what is decoded.
        undo_bytes: host memory that the old values of one version may take, its continuations'
            included.
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
    ) -> None:
        self.state = SyncState(base_version, stage_timeout)
        self._hold = Lease()
        self._log_hold = Lease()
        history = SyncHistory()
        self._ranks = ranks
        self.adopt(applier)
        self._limits = limits
        self._undo_bytes = undo_bytes
        self._threads = ThreadPoolExecutor(read_workers, thread_name_prefix="delta-stage")
        self._staging: dict[int, Future[StagedPart]] = {}
        # Those of dropped syncs too.
        self._running: list[Future[StagedPart]] = []
        # What takes the last version back, its continuations too; empty where that is impossible.
        self._undo: list[UndoLog] = []
        self._last_sync: dict[str, Any] | None = None
        self._operations: dict[str, Callable[..., dict[str, Any]]] = {
            "status": self._status,
            "state": self._state,
            "hold": self._take_hold,
            "release": self._release_hold,
            "hold_log": self._take_log,
            "release_log": self._release_log,
            "unseen": self._unseen,
            "begin": self._begin,
            "poll": self._poll,
            "settle": self._settle,
            "drop": self._drop,
            "commit": self._commit,
            "rollback": self._rollback,
            "plan": self._plan,
            "digest": self._digest,
            "note": history.note,
            "history": history.show,
        }

    def adopt(self, applier: Applier) -> None:
        """Write with this applier from now on."""
        self._applier = applier
        self._transaction = Transaction(applier, self._ranks)

    def weights_replaced(self, by: str) -> None:
        """Note that the engine itself has loaded other weights; only a full sync is taken then.

        Args:
            by: what did it, for the refusals.
        """
        self.state.foreign = by
        self._drop()
        self._undo = []

    def weights_released(self) -> None:
        """Note that the engine is about to release the weights' memory.

        Returns when nothing that is being staged reads it any more.
        """
        self.state.asleep = True
        self._drop()
        wait(self._running)

    def handle(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out one operation; the answer has ``ok`` or ``error`` (see `DeltaError.to_wire`).

        Never raises. An error that is not a `DeltaError` is a fault of this program and is
        reported as such, with the engine unchanged unless the operation was ``commit``.
        """
        try:
            return {"ok": self._operations[operation](**arguments)}
        except Exception as error:
            return {"error": as_delta_error(error).to_wire()}

    def _state(self) -> dict[str, Any]:
        """What every HTTP process must know; costs next to nothing."""
        return {
            "version": self.state.version,
            "engine_state": "uncertain" if self.state.uncertain else "certain",
            "resume_owed": self._hold.owed,
        }

    def _take_hold(self, holder: str, resumes: bool, instead_of: str | None) -> dict[str, Any]:
        """Let one HTTP process pause and resume the engine; see `Lease.take`."""
        taken = self._hold.take(holder, resumes=resumes, instead_of=instead_of)
        return {**taken, **self._state()}

    def _release_hold(self, holder: str, owed: bool) -> dict[str, Any]:
        self._hold.release(holder, owed=owed)
        return {}

    def _take_log(self, holder: str, instead_of: str | None) -> dict[str, Any]:
        """Let one HTTP process replay the delta log, and no other."""
        return self._log_hold.take(holder, resumes=False, instead_of=instead_of)

    def _release_log(self, holder: str) -> dict[str, Any]:
        self._log_hold.release(holder, owed=False)
        return {}

    def _status(self) -> dict[str, Any]:
        return {
            **self._state(),
            "asleep": self.state.asleep,
            "foreign": self.state.foreign,
            "staged": self.state.describe(),
            "last_sync": self._last_sync,
            "can_roll_back": bool(self._undo),
            **self._applier.describe(),
        }

    def _unseen(self, version: int, identities: list[str]) -> dict[str, Any]:
        """Which of these parts were not committed at this version yet."""
        return {"unseen": [i for i in identities if not self.state.seen(version, i)]}

    def _begin(self, part: dict[str, Any], path: str, now: float) -> dict[str, Any]:
        """Admit a part and start staging it from a spool file."""
        part_id = msgspec.convert(part, PartId)
        before = self.state.sync
        admission = self.state.admit(part_id, now)
        if self.state.sync is not before:
            self._staging.clear()
        if admission == "new":
            future = self._threads.submit(self._stage, path, part_id.identity)
            self._staging[part_id.part] = future
            self._running = [*(other for other in self._running if not other.done()), future]
        return {
            "admission": admission,
            "version": self.state.version,
            "complete": self._complete(),
        }

    def _stage(self, path: str, identity: str) -> StagedPart:
        """Read, verify, decode and locate one part; runs beside the engine's main loop."""
        with open(path, "rb") as file:
            # Nothing writes there, but of memory that is read-only torch has no tensors.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        part = decode_part(data, self._limits)
        if part_identity(part.header, data) != identity:
            raise MalformedPart("the part changed between its arrival and its staging")
        return self._applier.stage(part)

    def _poll(self, part: int) -> dict[str, Any]:
        """Whether a part is staged on this rank; raises what staging it raised."""
        future = self._staging.get(part)
        if future is None:
            raise Conflict("the sync of this part was dropped while the part was being staged")
        if not future.done():
            return {"done": False}
        return {"done": True, "nnz": future.result().nnz}

    def _settle(self, part: int, staged: bool) -> dict[str, Any]:
        """Keep a part that all ranks have staged, or forget one that some rank refused."""
        self.state.settle(part, staged=staged)
        if not staged:
            self._staging.pop(part, None)
        if self._complete():
            self._transaction.agree(self._checked)
        return {"complete": self._complete()}

    def _drop(self, version: int | None = None, sync_id: str | None = None) -> dict[str, Any]:
        """Forget the staged sync; where a version is given, only that one."""
        sync = self.state.sync
        if version is not None and (
            sync is None or (sync.version, sync.sync_id) != (version, sync_id)
        ):
            return {}
        self.state.drop()
        self._staging.clear()
        return {}

    def _commit(self, version: int, sync_id: str | None) -> dict[str, Any]:
        """Write the staged sync on every rank, or leave every rank as it was."""

        def prepare() -> Sequence[StagedPart]:
            sync = self.state.sync
            if sync is None or (sync.version, sync.sync_id) != (version, sync_id):
                raise Conflict(f"no sync to version {version} is staged")
            staged = self._checked()
            self._applier.check_base(staged)
            return staged

        staged = self._transaction.agree(prepare)
        sync = self.state.sync
        assert sync is not None
        base, apply = self.state.version, self._applier.name
        start = time.perf_counter()
        try:
            log = self._transaction.write(staged)
        except CommitFailed as error:
            error.operands["version"] = base
            self.state.commit(uncertain=True)
            self._undo = []
            raise
        except WriteUndone:
            self.state.drop()
            raise
        finally:
            self._staging.clear()
        commit_ms = (time.perf_counter() - start) * 1e3
        if self.state.uncertain or self.state.foreign is not None:
            # What the old values were is not known to anybody; they cannot be gone back to.
            log = None
        continued = sync.continues and sync.version == base
        earlier = self._undo if continued else []
        kept = [*earlier, log] if log is not None and (earlier or not continued) else []
        self._undo = kept if sum(one.nbytes for one in kept) <= self._undo_bytes else []
        self.state.commit(uncertain=False)
        elements = {e.name: e.numel for part in staged for e in part.manifest.params}
        self._last_sync = {
            "version": sync.version,
            "base_version": base,
            "sync_id": sync.sync_id,
            "full": sync.full,
            "apply": apply,
            "parts": len(staged),
            "nnz": sum(part.nnz for part in staged),
            "tensors": len(elements),
            "elements": sum(elements.values()),
            "commit_ms": round(commit_ms, 3),
            "rollback": bool(self._undo),
            "digest": self._applier.digest.hex(),
        }
        return self._last_sync

    def _checked(self) -> Sequence[StagedPart]:
        """The staged sync, checked as a whole.

        Raises:
            DeltaError: it is not complete, or cannot be written as the weights are now.
        """
        sync = self.state.sync
        if sync is None or not sync.complete:
            raise Conflict("the sync lacks parts")
        # The engine may have gone to sleep since the parts were admitted.
        self.state.check_writable(full=sync.full)
        staged = [self._staging[number].result() for number in sorted(sync.slots)]
        self._applier.check_sync(staged, full=sync.full)
        return staged

    def _rollback(self) -> dict[str, Any]:
        """Restore the version before the last one on every rank."""

        def prepare() -> Sequence[StagedPart]:
            self.state.check_writable(full=False)
            if not self._undo or self.state.previous is None:
                raise Conflict("there is no version to go back to: the old values were not kept")
            self._applier.check_in_place()
            return []

        self._transaction.agree(prepare)
        start = time.perf_counter()
        undo, self._undo = self._undo, []
        self._drop()
        try:
            self._transaction.roll_back(undo)
        except CommitFailed:
            self.state.uncertain = True
            raise
        rolled_back = self.state.version
        self.state.roll_back()
        return {
            "version": self.state.version,
            "rolled_back": rolled_back,
            "commit_ms": round((time.perf_counter() - start) * 1e3, 3),
            "digest": self._applier.digest.hex(),
        }

    def _plan(self) -> dict[str, Any]:
        """What is known of every checkpoint tensor on this rank; null while nothing is."""
        plan = self._applier.plan
        return {"tensors": None if plan is None else plan.table()}

    def _digest(self, scan: bool) -> dict[str, Any]:
        """The digest of every covered tensor's elements that this rank counts."""
        if scan and self.state.asleep:
            raise WeightsAsleep("the engine has released its weights; wake it up first")
        tracked = self._applier.digests
        plan = self._applier.plan
        found = plan.scan() if scan and plan is not None else tracked
        return {
            "version": self.state.version,
            "tensors": {name: digest.hex() for name, digest in found.items()},
            "tracked": {name: digest.hex() for name, digest in tracked.items()},
        }

    def _complete(self) -> bool:
        return self.state.sync is not None and self.state.sync.complete
