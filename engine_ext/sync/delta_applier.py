"""The applier of a certified model: it writes the changed elements directly, in O(nnz).

Staging does the work in advance: it locates, casts, reads old values and digests the change. The
commit then checks that the old values are unchanged, by a sample if the pass that writes compares
all of them, writes, and recomputes the derived tensors that depend on what was written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from engine_ext.dtypes import NAME_OF_TORCH, bits_dtype
from engine_ext.errors import BaseMismatch, NotUpdatable
from engine_ext.format import (
    DecodedPart,
    Digest,
    ParamDelta,
    UnpackedPart,
    change_digest,
    expand_part,
)
from engine_ext.model import StorageIndex
from engine_ext.placement import (
    Certified,
    DeviceMemory,
    Placed,
    Plan,
    WholeBox,
    has_nan,
    keeps_bits,
    summary,
    uncertified,
)
from engine_ext.ranks import RankGroup, SingleRank
from engine_ext.startup import LaterCopies
from engine_ext.sync import checks, consensus
from engine_ext.sync.applier import Scan
from engine_ext.sync.digest_table import DigestTable
from engine_ext.sync.host_table import HostTable
from engine_ext.sync.moved_tensors import MovedTensors, TraceAgain
from engine_ext.sync.new_states import GatheredProof
from engine_ext.sync.post_load import PostLoad
from engine_ext.sync.staged import CHANGED, StagedParam, StagedPart, UndoLog
from engine_ext.sync.stager import stage_part
from engine_ext.sync.stream_table import NO_STREAMS, StagedStreams, StreamTable
from engine_ext.sync.thread_pool import ThreadPool
from engine_ext.sync.tied import check_tied
from engine_ext.sync.totals import Advance, part_totals, totals
from engine_ext.sync.unwritten import Unwritten, unwritten
from engine_ext.sync.writes import are_unchanged, put_all, restore, undo_all

logger = logging.getLogger(__name__)


class DeltaApplier:
    """Stages, writes and undoes syncs on one rank; see `engine_ext.sync.applier.Applier`.

    Args:
        model: that was traced: the live one, or the unprocessed one.
        index: its storage index, made before the certification.
        undo_bytes: host memory that the old values of one sync can take.
        threads: how many pieces of live tensors are staged or written at once.
        post_load: what the engine computed from weights after loading; None if that is nothing on
            any rank.
        certified: the digests that the certification gave.
        ranks: of the engine, this one among them.
        trace_again: finds where moved tensors are; None if none can be followed.
        later: finds what is computed from weights only once the engine generates.
        memory: of devices, for what syncs keep there; None: nothing is reserved.

    Attributes:
        digests: of the elements that this rank counts, by checkpoint tensor.
        threads: they stage and write.
        post_load: see above; empty if that is nothing.
    """

    name: str = "scatter"

    def __init__(
        self,
        model: torch.nn.Module,
        index: StorageIndex,
        plan: Plan,
        *,
        undo_bytes: int,
        threads: int,
        post_load: PostLoad | None = None,
        certified: Certified | None = None,
        ranks: RankGroup | None = None,
        trace_again: TraceAgain | None = None,
        later: LaterCopies | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.plan, self._model = plan, model
        self.digests = DigestTable(plan.scan(threads, certified))
        self.copies: dict[str, Digest] = {}
        self._undo_bytes = undo_bytes
        self.post_load = post_load or PostLoad(model, index, plan.placement, SingleRank())
        self._ranks = ranks or SingleRank()
        self._later = later
        self._refused: dict[str, str] = {}  # since start-up: why, by tensor
        self._proof = GatheredProof(plan, self._ranks)
        self._places = MovedTensors(model, index, plan.placement, self.post_load, trace_again)
        self.threads = ThreadPool(threads)
        self._memory = memory or DeviceMemory()
        devices = {entry.tensor.device for entry in index.entries}
        self._devices = [device for device in devices if device.type != "cpu"]
        dtypes = {placed.spec.dtype for placed in plan.placement.values()}
        for dtype in dtypes & NAME_OF_TORCH.keys():
            # Compiles the loops, which the first sync would otherwise wait for.
            none = np.empty(0, bits_dtype(NAME_OF_TORCH[dtype]))
            change_digest("", np.empty(0, np.int64), none, none)
        self._table, self._streams = HostTable(plan), StreamTable(plan)

    def refusal(self, delta: ParamDelta, placed: Placed, digested: bool) -> str | None:
        """Return why a delta cannot be written exactly, or None if it can.

        The delta has the shape and dtype of the tensor, which is not uncertified; `digested` is
        whether the digest covers it.
        """
        recast = any(segment.recast for segment in placed.segments)
        if delta.cleared is not None:
            return None if digested else "the loader's casts lose bits of the old values"
        if delta.differences and not digested:
            return "it is sent as differences, but no digest proves the old values; send new values"
        if delta.differences and recast:
            return "it is sent as differences, but the loader casts the values; send new values"
        if (recast or not keeps_bits(placed)) and has_nan(delta.values, delta.dtype):
            return "a new value is NaN, and the loader's casts change the bits of a NaN"
        return None

    @property
    def index(self) -> StorageIndex:
        """The storage index of the live tensors, where they are written to."""
        return self._places.index

    @property
    def digest(self) -> Digest:
        """The digest of all covered elements that this rank counts."""
        return self.digests.total

    def stage(self, part: DecodedPart, streams: StagedStreams = NO_STREAMS) -> StagedPart:
        """Check every param of a part and prepare its writes. The model is only read.

        Params that the engine is proven to ignore are skipped; `check_sync` compares those that are
        tied to a tensor of the checkpoint.

        Args:
            streams: the params that are staged already, and are not in `part`.

        Raises:
            NotUpdatable: names the tensor.
            BaseMismatch: names a tensor whose copies on this rank differ.
        """
        ignored = [delta for delta in part.deltas if checks.is_ignored(delta, self.plan)]
        if ignored:
            names = {delta.name for delta in ignored}
            part = replace(part, deltas=tuple(d for d in part.deltas if d.name not in names))
        for delta in part.deltas:
            checks.check_param(delta, self.plan, self.refusal, full=part.manifest.full)
        undo = not part.manifest.full or self._size() <= self._undo_bytes
        staged = self._stage(part, undo=undo)
        for param in staged.params:
            param.tied = not self.plan.writes(param.name)
        staged.streamed = streams.params
        staged.together += streams.writes
        for delta in ignored:
            staged.skipped[delta.name] = staged.skipped.get(delta.name, 0) + delta.nnz
        staged.compared = self._compared(ignored, part)
        # Here, in a thread: the commit has no time to look at each param.
        own = part_totals(staged)
        own.advance = Advance(self.digests, own.changes, full=part.manifest.full)
        return staged

    def stage_unpacked(self, part: UnpackedPart) -> StagedPart:
        """Stage a part whose positions are not expanded; the stream table takes what it has.

        Errors: see `stage`.
        """
        found = self._streams.stage(part, self._memory)
        return self.stage(expand_part(part, self.threads.size, found.others), found)

    def _stage(self, part: DecodedPart, *, undo: bool) -> StagedPart:
        return stage_part(part, self.plan, self._table, self.threads, self._memory, undo=undo)

    def _compared(self, ignored: Sequence[ParamDelta], part: DecodedPart) -> list[StagedParam]:
        """Stage ignored params as the tensors that they are tied to; they are not written."""
        found = []
        for delta in ignored:
            tied = self.plan.tied.get(delta.name)
            if tied is not None:
                own = msgspec.structs.replace(delta, name=tied, new_checksum=None)
                checks.check_param(own, self.plan, self.refusal, full=part.manifest.full)
                one = replace(part, deltas=(own,))
                [param] = self._stage(one, undo=False).params
                param.name = delta.name
                found.append(param)
        return found

    def check_sync(self, staged: Sequence[StagedPart], *, full: bool) -> None:
        """Check what only all parts of a sync together show on this rank.

        Raises:
            BaseMismatch: a weight has moved. Nothing was written.
            NotUpdatable: parts overlap, tied tensors would get different values, a ``full`` sync
                leaves tensors out, the engine has come to keep copies, or the old values would not
                fit the undo log. Nothing was written.
        """
        self._places.check()
        whole = totals(staged)
        self._check_no_copies(name for name in self._refused if name in whole.names)
        if not whole.is_checked:
            checks.check_no_overlap(staged)
            check_tied(staged, self.plan.tied, self.plan.dropped)
            if full:
                checks.check_covers(staged, self.plan)
            whole.is_checked = True
        if not full:  # modules that were rebuilt since can have added to it
            checks.check_undo_log(staged, self._undo_bytes)
        self._advanced(staged)

    def prepare(self, staged: Sequence[StagedPart], *, full: bool) -> bool:
        """Prove the next tensors, or rebuild the next modules; return whether nothing is left.

        All ranks must call it until it returns True. It takes twice the time of the engine's own
        processing of a batch.

        Raises:
            BaseMismatch: a tensor's new bytes would not be the declared ones.
            NotUpdatable: a module cannot be rebuilt, or the undo log would be too large. Nothing
                was written after either.
        """
        if not self._proof.is_done(staged):
            self._proof.prove_some(staged)
        else:
            self.post_load.rebuild_some(staged)
        if not self.is_prepared(staged):
            return False
        if not full:
            checks.check_undo_log(staged, self._undo_bytes)
        return True

    def is_prepared(self, staged: Sequence[StagedPart]) -> bool:
        """Return whether every tensor is proven, and every module rebuilt that a sync changes."""
        return not self.post_load.pending(staged) and self._proof.is_done(staged)

    def scan(self) -> Scan:
        """Read the weights in live memory, and rebuild every module; all ranks must call it."""
        corrupted = {*self.post_load.corrupted()}
        moved = set(self.moved())  # their places hold what is left
        digests, copies = self.plan.scan_all()
        return Scan(
            {name: digest for name, digest in digests.items() if name not in moved},
            sorted(corrupted | moved),
            {(name, box): found for (name, box), found in copies.items() if name not in moved},
        )

    def search_again(self) -> bool:
        """Refuse the weights that the engine has come to keep copies of since it was loaded.

        It takes as long as the walk over all modules at start-up. Return whether it was done: what
        has moved would be taken for a copy.
        """
        if self._places.tensors():
            return False
        found = {} if self._later is None else self._later.refuse(self.plan.placement)
        for name, reason in found.items():
            logger.warning("delta updates will refuse %s from now on: %s", name, reason)
        self._refused |= found
        return True

    def has_grown(self) -> bool:
        """Return whether modules have attributes that they lacked at the last search."""
        return self._later is not None and self._later.has_grown()

    def check_rollback(self, logs: Sequence[UndoLog]) -> None:
        """Check that committed syncs can be undone; search for copies again.

        Raises:
            BaseMismatch: something has moved, see `MovedTensors.check`.
            NotUpdatable: the engine has come to keep copies of what they have written.
        """
        self._places.check()
        self.search_again()
        written = {name for log in logs for name in log.live_names}
        self._check_no_copies(
            name
            for name in self._refused
            if any(t.segment.live.name in written for t in self.plan.targets.get(name, ()))
        )

    def _check_no_copies(self, names: Iterable[str]) -> None:
        """Raise NotUpdatable if there is one of these tensors, which were refused since."""
        for name in names:
            reason = self._refused[name]
            raise NotUpdatable(
                f"{name}: this engine cannot update it exactly: {reason}; restart the engine",
                tensor=name,
                reason=reason,
            )

    def moved(self) -> list[str]:
        """Return the weights and the recomputed tensors that are not where they were placed.

        They are given by the checkpoint's tensors, or by live ones that hold none of these.
        """
        return self._places.tensors()

    def place_again(self) -> None:
        """Follow what has moved, so that a ``full`` sync is written to where it is now.

        Raises:
            NotUpdatable: a tensor cannot be followed there. Nothing was changed.
            TracingError: the dry run of the engine's loader has changed the model.
        """
        self.adopt(self._places.follow(self.plan))

    def adopt(self, plan: Plan) -> None:
        """Stage by another plan of the same model."""
        self._proof = GatheredProof(plan, self._ranks)
        self._table, self._streams = HostTable(plan), StreamTable(plan)
        self.plan = plan

    def check_base(self, staged: Sequence[StagedPart]) -> None:
        """Check that the old values read while staging are still in live memory.

        Only a sample is checked of those that `write` compares, in the pass that overwrites them:
        whatever else updates the weights changes more than a few elements.

        Raises:
            BaseMismatch: one of them is not. Nothing was written.
        """
        self._synchronize()
        sampled = self.compares_while_writing(staged)
        if not are_unchanged(totals(staged).writes, self.threads, sampled=sampled):
            raise BaseMismatch(CHANGED)

    def rank_summary(self, staged: Sequence[StagedPart]) -> dict[str, Any]:
        """See `engine_ext.sync.consensus.rank_summary`."""
        return consensus.rank_summary(staged, self.digest)

    def agree(self, staged: Sequence[StagedPart], summaries: Sequence[dict[str, Any]]) -> None:
        """See `engine_ext.sync.consensus.agree`."""
        consensus.agree(staged, summaries)

    def write(self, staged: Sequence[StagedPart], given_up: Sequence[UndoLog] = ()) -> None:
        """Write the new values and recompute the derived tensors that depend on them.

        The old values of whole tensors take the memory of the logs that are `given_up`: otherwise a
        full sync would have two logs as large as the weights while it writes, and memory from the
        system is cleared first, which takes as long as the copy.

        Raises:
            BaseMismatch: an old value read while staging is not in live memory any more.
            Exception: some elements might have been written; after each error `undo` restores them.
        """
        memory = {
            id(elements.segment): old
            for log in given_up
            for elements, old in log.writes
            if isinstance(elements, WholeBox)
        }
        writes = (write for part in totals(staged).writes for write in part.all)
        for write in writes if memory else ():
            if write.keep and isinstance(write.elements, WholeBox):
                write.memory = memory.pop(id(write.elements.segment), None)
        try:
            self.put(staged, compares=self.compares_while_writing(staged))
        except Exception:
            self._synchronize()  # kernels write old values to memory that might be freed
            raise
        self._after_write(self._written(staged))

    def put(self, staged: Sequence[StagedPart], *, compares: bool) -> None:
        """Write the new values, and nothing that follows from them.

        Args:
            compares: whether known old values are compared in the same pass.

        Raises:
            BaseMismatch: one of them was not in memory. Some elements were written.
        """
        whole = totals(staged)
        # What the engine's processing computes can be a view of a weight.
        shared = bool(whole.modules)
        put_all(whole.writes, self.threads, self._memory, compares=compares, shared=shared)

    def compares_while_writing(self, staged: Sequence[StagedPart]) -> bool:
        """Return whether `put` compares the old values, and not `check_base`.

        Not in a full sync, whose old values another rank might not keep for an undo. Not with
        rebuilt modules: what the engine's processing computes can be a view of a weight, which is
        written twice then, and the second pass would not find the old values.
        """
        plain = not any(part.manifest.full for part in staged)
        return plain and not totals(staged).modules and not self.post_load.checks_first

    def undo(self, staged: Sequence[StagedPart]) -> None:
        """Restore the old values after `write` succeeded or failed, derived tensors too.

        They are what `write` has found in live memory, also where that is not what was staged.

        Raises:
            RuntimeError: the old values were not kept.
            Exception: a write could not be undone, all others are; or a derived tensor could not be
                recomputed.
        """
        whole = totals(staged)
        if not whole.keeps:
            raise RuntimeError("the old values were not kept: they do not fit the undo log")
        try:
            undo_all(whole.writes, self.threads)
        finally:
            self._synchronize()  # kernels read the old values, also if some could not be launched
        self._after_write(self._written(staged))

    def finish(self, staged: Sequence[StagedPart]) -> UndoLog | None:
        """Advance the digests after a write; see `Applier.finish`."""
        whole, advance = totals(staged), self._advanced(staged)
        self.digests = advance.start.plus(advance.numbers, advance.sums)
        self._advance_copies(staged)
        known = self.post_load.committed(staged)
        if not whole.keeps:
            return None
        log = UndoLog(
            numbers=advance.numbers,
            sums=advance.sums,
            live_names=self._written(staged),
            rebuilt=known,
            nbytes=whole.undo_bytes,
        )
        for part in whole.writes:
            part.end_write(log)
        return log

    def _advanced(self, staged: Sequence[StagedPart]) -> Advance:
        """Return what the digests become; found before the commit, it is kept till then."""
        whole, start = totals(staged), self.digests
        if whole.advance is None or whole.advance.start is not start:
            full, parts = any(part.manifest.full for part in staged), []
            for part in whole.parts:
                known = part.advance
                if known is None or known.start is not start:
                    known = Advance(start, part.changes, full=full)
                parts.append(known)
            whole.advance = Advance.joined(start, parts)
        return whole.advance

    def _advance_copies(self, staged: Sequence[StagedPart]) -> None:
        if not self.copies:
            return
        whole, full = totals(staged), any(part.manifest.full for part in staged)
        for name in [n for n in self.copies if any(n in part.names for part in whole.parts)]:
            if full:
                del self.copies[name]
                continue
            replicated = whole.replicated(name)
            others = (c for ranks, c in replicated.items() if ranks[0] != self.plan.rank)
            self.copies[name] += Digest.total(others)

    def roll_back(self, log: UndoLog) -> None:
        """Restore the weights, derived tensors and digests from before a committed sync.

        Raises:
            Exception: some elements might have been restored.
        """
        self._synchronize()  # the engine's last step
        try:
            restore(log, self.threads)
        finally:
            self._synchronize()  # kernels read the old values, also if some could not be launched
        self._after_write(log.live_names)
        self.digests = self.digests.minus(log.numbers, log.sums)
        self.copies.clear()
        self.post_load.restored(log.rebuilt)

    def unwritten(self) -> Unwritten:
        """Copy the tensors that a full sync does not write whole."""
        live, placement = self.post_load.model, self.plan.placement
        return Unwritten(unwritten(live, self._model, placement, self.post_load))

    def forget(self) -> None:
        """Rely no more on what the weights were computed to: something else might change them."""
        self.post_load.forget()

    def describe(self) -> dict[str, Any]:
        """Return the apply mode, certification summary and digest of this rank, as JSON."""
        return {
            "apply": self.name,
            "certification": summary(self.plan.placement),
            "uncertified": uncertified(self.plan.placement),
            "digest": self.digest.hex(),
        }

    def _size(self) -> int:
        """Return the bytes of the weights."""
        return sum(entry.end - entry.start for entry in self._places.index.entries)

    def _written(self, staged: Sequence[StagedPart]) -> frozenset[str]:
        """Return the live tensors on this rank that a sync writes to, by name."""
        return totals(staged).live_names | self.post_load.written(staged)

    def _after_write(self, live_names: frozenset[str]) -> None:
        """Wait for the writes, and recompute what depends on these live tensors."""
        self._synchronize()
        for recompute in self.post_load.recomputed_from(live_names):
            recompute()
            self._synchronize()

    def _synchronize(self) -> None:
        """Wait for all work on the devices of the weights, the engine's and this thread's."""
        for device in self._devices:
            torch.get_device_module(device).synchronize(device)
