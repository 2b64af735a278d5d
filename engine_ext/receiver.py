"""The receiver of one rank: stages parts in the background, commits them in one call.

The engine's workers each hold one `Receiver`; the HTTP side reaches all of them with one
collective call of `Receiver.handle`, which answers with a dict and never raises, because an
executor that sees one rank raise leaves the other ranks' answers in its queue. All ranks get the
same calls in the same order and so keep the same `SyncState`.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from engine_ext.errors import CommitFailed, Conflict, DeltaError, MalformedPart, from_wire
from engine_ext.syncs import PartId, SyncState
from engine_ext.wire import Limits, Part, decode_part
from engine_ext.wire.identity import part_identity

logger = logging.getLogger(__name__)


class Applier(Protocol):
    """Writes decoded parts into one rank's live weights."""

    name: str

    def check(self, part: Part) -> None:
        """Raise `NotUpdatable` for a param that cannot be written exactly. Writes nothing."""

    def check_sync(self, parts: list[Part], *, full: bool) -> None:
        """Raise what only the whole sync can tell (missing or repeated tensors)."""

    def commit(self, parts: list[Part], *, full: bool) -> None:
        """Write. Anything raised means that some elements may have been written."""

    def describe(self) -> dict[str, Any]:
        """Apply mode and certification summary, as JSON."""


class Ranks(Protocol):
    """This rank's place among the engine's ranks."""

    rank: int

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; all ranks must call it."""


class Receiver:
    """One rank's receiver.

    Args:
        applier: writes into this rank's weights.
        ranks: how to vote with the other ranks.
        base_version: version of the freshly loaded weights.
        stage_timeout: seconds for which a staged sync keeps others out.
        read_workers: threads that read, verify and decode parts.
        limits: bounds for what is decoded.
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
    ) -> None:
        self.state = SyncState(base_version, stage_timeout)
        self._applier = applier
        self._ranks = ranks
        self._limits = limits
        self._threads = ThreadPoolExecutor(read_workers, thread_name_prefix="delta-stage")
        self._staging: dict[int, Future[Part]] = {}
        self._last_sync: dict[str, Any] | None = None
        self._operations: dict[str, Callable[..., dict[str, Any]]] = {
            "status": self._status,
            "unseen": self._unseen,
            "begin": self._begin,
            "poll": self._poll,
            "settle": self._settle,
            "drop": self._drop,
            "commit": self._commit,
        }

    def handle(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out one operation; the answer has ``ok`` or ``error`` (see `DeltaError.to_wire`).

        Never raises. An error that is not a `DeltaError` is a fault of this program and is
        reported as such, with the engine unchanged unless the operation was ``commit``.
        """
        try:
            return {"ok": self._operations[operation](**arguments)}
        except DeltaError as error:
            return {"error": error.to_wire()}
        except Exception as error:
            logger.exception("delta operation %s failed", operation)
            return {"error": DeltaError(f"{type(error).__name__}: {error}").to_wire()}

    def _status(self) -> dict[str, Any]:
        return {
            "version": self.state.version,
            "engine_state": "uncertain" if self.state.uncertain else "certain",
            "asleep": self.state.asleep,
            "staged": self.state.describe(),
            "last_sync": self._last_sync,
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
            self._staging[part_id.part] = self._threads.submit(self._stage, path, part_id.identity)
        return {
            "admission": admission,
            "version": self.state.version,
            "complete": self._complete(),
        }

    def _stage(self, path: str, identity: str) -> Part:
        """Read, verify, decode and check one part; runs beside the engine's main loop."""
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        part = decode_part(data, self._limits)
        if part_identity(part.header, data) != identity:
            raise MalformedPart("the part changed between its arrival and its staging")
        self._applier.check(part)
        return part

    def _poll(self, part: int) -> dict[str, Any]:
        """Whether a part is staged on this rank; raises what staging it raised."""
        future = self._staging.get(part)
        if future is None:
            raise Conflict("the sync of this part was dropped while the part was being staged")
        if not future.done():
            return {"done": False}
        staged = future.result()
        return {"done": True, "nnz": sum(delta.nnz for delta in staged.deltas)}

    def _settle(self, part: int, staged: bool) -> dict[str, Any]:
        """Keep a part that all ranks have staged, or forget one that some rank refused."""
        self.state.settle(part, staged=staged)
        if not staged:
            self._staging.pop(part, None)
        if self._complete():
            self._check_sync()
        return {"complete": self._complete()}

    def _drop(self) -> dict[str, Any]:
        """Forget the staged sync."""
        self.state.drop()
        self._staging.clear()
        return {}

    def _commit(self, version: int, sync_id: str | None) -> dict[str, Any]:
        """Write the staged sync on every rank, or report that no rank began.

        The vote before the write makes sure that every rank has staged the same sync; the vote
        after it makes every rank know whether all of them succeeded.
        """
        refusal = self._refusal(version, sync_id)
        refusals = [r for r in self._ranks.all_gather(refusal) if r is not None]
        if refusals:
            raise from_wire(refusals[0])
        sync = self.state.sync
        assert sync is not None
        parts = [self._staging[number].result() for number in sorted(sync.slots)]
        base = self.state.version
        start = time.perf_counter()
        failures = self._vote(self._write(parts, sync.full))
        commit_ms = (time.perf_counter() - start) * 1e3
        self.state.commit(uncertain=bool(failures))
        self._staging.clear()
        if failures:
            raise CommitFailed(
                f"the write failed on {len(failures)} rank(s), weights are mixed: {failures[0]}; "
                "generation answers 503 until a full sync commits",
                version=base,
                failed=failures,
            )
        self._last_sync = {
            "version": sync.version,
            "base_version": base,
            "sync_id": sync.sync_id,
            "full": sync.full,
            "apply": self._applier.name,
            "parts": len(parts),
            "nnz": sum(delta.nnz for part in parts for delta in part.deltas),
            "tensors": len({delta.name for part in parts for delta in part.deltas}),
            "commit_ms": round(commit_ms, 3),
        }
        return self._last_sync

    def _write(self, parts: list[Part], full: bool) -> str | None:
        """Apply on this rank; a failure comes back as text, for the vote."""
        try:
            self._applier.commit(parts, full=full)
        except Exception as error:
            logger.exception("writing a delta failed")
            return f"rank {self._ranks.rank}: {type(error).__name__}: {error}"
        return None

    def _vote(self, failure: str | None) -> list[str]:
        """Every rank's failure to write; that the ranks cannot be heard is one too."""
        try:
            return [f for f in self._ranks.all_gather(failure) if f]
        except Exception as error:
            logger.exception("the vote after writing a delta failed")
            return [f"rank {self._ranks.rank}: no vote: {type(error).__name__}: {error}"]

    def _refusal(self, version: int, sync_id: str | None) -> dict[str, Any] | None:
        """Why this rank cannot commit that sync, as an error on the wire, or None."""
        sync = self.state.sync
        if sync is None or (sync.version, sync.sync_id) != (version, sync_id):
            return Conflict(f"no sync to version {version} is staged").to_wire()
        if not self._complete():
            return Conflict(f"the sync to version {version} lacks parts").to_wire()
        try:
            # The engine may have gone to sleep since the parts were admitted.
            self.state.check_writable(full=sync.full)
            self._check_sync()
        except DeltaError as error:
            return error.to_wire()
        except Exception as error:
            # The other ranks wait for this one's vote.
            logger.exception("checking a sync failed")
            return DeltaError(f"{type(error).__name__}: {error}").to_wire()
        return None

    def _check_sync(self) -> None:
        sync = self.state.sync
        assert sync is not None
        parts = [self._staging[number].result() for number in sorted(sync.slots)]
        self._applier.check_sync(parts, full=sync.full)

    def _complete(self) -> bool:
        return self.state.sync is not None and self.state.sync.complete
