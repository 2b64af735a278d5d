"""The receiver of one rank: stages parts in the background, commits them in one call.

Each of the engine's workers has one `Receiver`. The HTTP side reaches all of them with one
collective call of `Receiver.handle`, which returns errors as answers and never raises: when an
executor sees one rank raise, it leaves the other ranks' answers in its queue. All ranks get the
same calls in the same order and so keep the same `SyncState`.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec

from engine_ext.errors import AdapterNotLoaded, WeightsAsleep
from engine_ext.ranks import ENGINE, LOG_RECORDS, Board, RankGroup, run_on_all_or_none
from engine_ext.ranks import operations as ops
from engine_ext.remote_parts import Locate
from engine_ext.resources import no_full_collections
from engine_ext.settings import Settings
from engine_ext.sync.applier import Applier, Scan
from engine_ext.sync.scrubber import Scrubber
from engine_ext.sync.sync_operations import SyncOperations, check_stopped
from engine_ext.sync.unwritten import Unwritten

logger = logging.getLogger(__name__)

# They write weights or what the scrubber compares them with, or might let the engine do so.
_WRITES = (ops.PrepareSync, ops.HoldSync, ops.CommitSync, ops.RollBack)


def keeps_part(request: ops.Operation[Any]) -> bool:
    """Return whether a request keeps a part of a sync that is not complete; it writes nothing."""
    return isinstance(request, ops.PrepareSync) and request.keep


class Receiver(SyncOperations):
    """One rank's receiver. Every operation has a method with the name of its tag.

    Those that bring in and write syncs are the methods of `SyncOperations`.

    Args: those of `SyncOperations`.
    """

    def __init__(
        self,
        applier: Applier,
        ranks: RankGroup,
        settings: Settings,
        locate: Locate | None = None,
    ) -> None:
        super().__init__(applier, ranks, settings, locate)
        self._board = Board()
        self._scrubber = Scrubber(weakref.WeakMethod(self._scrubbed), ranks.rank)
        self._scrub_interval = settings.scrub_interval
        self._searched = False
        self._unwritten: Unwritten | None = None

    # What the adapter reports -----------------------------------------------------------------

    def weights_replaced(self, by: str) -> None:
        """Take only a full sync from now on; `by` names what in the engine changed the weights."""
        self._sync_state.changed_externally = by
        if not self._sync_state.asleep:  # then it was not lost, and might be other by now
            self._unwritten = None
        self._applier.forget()
        self._drop_staged()
        self._undo = []

    def weights_discarded(self, by: str) -> None:
        """Prepare for the engine to lose all weights, `by` what: `weights_replaced`, and more.

        Tensors that no sync writes are kept until `weights_returned`. If they cannot be, every sync
        is refused from then on.
        """
        kept = self._unwritten
        self.weights_replaced(by)
        self._unwritten = kept
        if kept is None:
            with self._losing_on_error():
                self._unwritten = self._applier.unwritten()

    def weights_returned(self) -> None:
        """Restore what no sync writes; the weights' memory is there again, with any content."""
        if self._unwritten is not None:
            with self._losing_on_error():
                self._unwritten.restore()
            self._unwritten = None

    @contextlib.contextmanager
    def _losing_on_error(self) -> Iterator[None]:
        """Refuse all syncs if something fails: no sync leads to a fresh engine's state any more."""
        try:
            yield
        except Exception as error:
            logger.exception("delta updates: what no sync writes could not be kept")
            self._sync_state.lost = f"{type(error).__name__}: {error}"

    def weights_released(self) -> None:
        """Prepare for the engine to release the weights' memory.

        Returns when neither staging nor scrubbing reads it any more.
        """
        self.set_asleep(True)
        self._drop_staged()
        self._staging.wait()
        self._scrubber.wait()

    def set_asleep(self, asleep: bool, *, other: bool = False) -> None:
        """Record whether the weights' memory is released, and `other` memory to generate with."""
        self._sync_state.asleep, self._sync_state.released = asleep, asleep or other
        if not asleep:  # what was kept for a sleep that failed would be stale at the next one
            self._unwritten = None

    @property
    def uncertain(self) -> bool:
        """Whether some weights might be new and some old."""
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
            DeltaError: the engine has not stopped for it; see `ops.Operation.refusal`.
        """
        if request.adapter is not None:
            raise AdapterNotLoaded(
                f"adapter {request.adapter}: this engine takes no updates of LoRA adapters",
                adapter=request.adapter,
            )
        if not isinstance(request, ops.CommitSync | ops.RollBack):  # these vote on it
            check_stopped(request)
        if self._scrub_interval is not None:
            # Not before: an engine must take no other work on its device while it captures graphs.
            self._scrubber.start(self._scrub_interval)
        rebuilds = isinstance(request, ops.GetDigest) and request.scan
        writes = rebuilds or (isinstance(request, _WRITES) and not keeps_part(request))
        scrubbing = self._scrubber.interrupted() if writes else contextlib.nullcontext()
        with scrubbing, no_full_collections():
            # In the context: what is found later is judged after the write.
            self._sync_state.mismatched |= self._scrubber.take_found()
            reply: ops.ReplyT = getattr(self, request.name)(request)
            return reply

    def status(self, request: ops.GetStatus) -> ops.RankReport:
        """Describe the rank. The first time, copies that the engine has made are looked for."""
        return ops.RankReport(
            state=self._state(),
            status=self._described() if request.details else None,
            unseen=[] if request.parts is None else self._unseen(request.parts),
            findings=self._scrubber.findings,
        )

    def _described(self) -> ops.RankStatus:
        if not self._searched:
            self._searched = True  # it has warmed up
            try:
                self._applier.search_again()
            except Exception:  # the first sync searches, too
                logger.exception("delta updates: the model could not be searched for copies")
        return ops.RankStatus(
            **msgspec.structs.asdict(self._state()),
            run=self._sync_state.run,
            owner=self._sync_state.runs.owner,
            loaded=self._sync_state.loaded,
            mismatched=sorted(self._sync_state.mismatched),
            delivery=self._sync_state.delivery,
            staged=self._sync_state.describe(),
            last_sync=self._last_sync,
            can_roll_back=bool(self._undo),
            scrub=self._scrubber.state,
            **self._applier.describe(),
        )

    def _state(self) -> ops.RankState:
        use = msgspec.convert(self._board.get(ENGINE).value or {}, ops.EngineUse)
        return ops.RankState(
            version=self._sync_state.version,
            engine_state=self._sync_state.engine_state,
            resume_owed=use.resume_owed,
            paused=use.pause,
            asleep=self._sync_state.asleep,
            released=self._sync_state.released,
            foreign=self._sync_state.changed_externally,
        )

    def _unseen(self, parts: ops.Parts) -> list[str]:
        seen = self._sync_state.seen
        return [one for one in parts.identities if not seen(parts.version, one, parts.run)]

    def get(self, request: ops.GetItem) -> ops.BoardItem:
        """Read an item of the board."""
        if request.key == LOG_RECORDS:
            return self._log_records()
        return self._board.get(request.key)

    def put(self, request: ops.PutItem) -> ops.BoardItem:
        """Replace the value of an item of the board, unless another process has changed it."""
        key, value, expected = request.key, request.value, request.expected
        if key == LOG_RECORDS:
            records = msgspec.convert(value, ops.LogRecords).records
            written = self._sync_state.put_log_records(records, expected=expected)
            return self._log_records(written=written)
        more = {"append": request.append, "most": request.most}
        return self._board.put(key, value, expected=expected, **more)

    def lease(self, request: ops.LeaseItem) -> ops.BoardLease:
        """Let one HTTP process have the lease of an item, or take it back."""
        key, holder = request.key, request.holder
        new: dict[str, Any] = {"value": request.value, "expected": request.expected}
        if request.release:
            granted, item = False, self._board.release(key, holder, **new)
        else:
            dead = request.instead_of
            granted, item = self._board.lease(key, holder, instead_of=dead, **new)
        return ops.BoardLease(granted=granted, item=item, state=self._state())

    def _log_records(self, *, written: bool = False) -> ops.BoardItem:
        state = self._sync_state
        value = msgspec.to_builtins(state.log_records)
        return ops.BoardItem(value=value, revision=state.writes, written=written)

    def plan(self, request: ops.GetPlan) -> ops.RankPlan:
        """List every checkpoint tensor with its placement on this rank."""
        plan = self._applier.plan
        return ops.RankPlan(tensors=None if plan is None else plan.table())

    def digest(self, request: ops.GetDigest) -> ops.RankDigest:
        """Return the digests of the elements that this rank counts.

        What a scan finds to be other than written on any rank, all ranks know afterwards.

        Raises:
            WeightsAsleep: a scan was asked for, and the weights' memory is released.
        """

        def check() -> None:
            if self._sync_state.asleep:
                raise WeightsAsleep("the engine has released its weights; wake it up first")

        if request.scan:  # it rebuilds modules in step
            run_on_all_or_none(self._ranks, check)
        tracked, corrupted = self._applier.digests, list[str]()
        found = tracked
        if request.scan:
            scan = run_on_all_or_none(self._ranks, self._applier.scan)
            found, corrupted = scan.digests, sorted({*scan.corrupted, *self._differing(scan)})
            wrong = {name for name, digest in tracked.items() if found.get(name) != digest}
            everywhere = self._ranks.all_gather(sorted(wrong.union(corrupted)))
            self._sync_state.mismatched |= {name for names in everywhere for name in names}
        return ops.RankDigest(
            version=self._sync_state.version,
            tensors={name: digest.hex() for name, digest in found.items()},
            tracked={name: digest.hex() for name, digest in tracked.items()},
            corrupted=corrupted,
        )

    def _differing(self, scan: Scan) -> set[str]:
        """Return the tensors whose copies differ, on one rank or between ranks."""
        digests: dict[tuple[str, str], set[str]] = {}
        for copies in self._ranks.all_gather(scan.copies):
            for box, found in copies.items():
                digests.setdefault(box, set()).update(found)
        return {name for (name, _), found in digests.items() if len(found) > 1}

    # ------------------------------------------------------------------------------------------

    def _scrubbed(self) -> Applier | None:
        """Return what knows the weights, while they are in memory and of a known version."""
        state = self._sync_state
        known = not (state.asleep or state.uncertain) and state.changed_externally is None
        return self._applier if known else None
