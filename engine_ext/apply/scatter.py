"""The scatter apply: direct writes of the changed elements through certified placements.

Staging does all the work: it locates, casts, gathers old values and digests the change. What the
commit has left is to see that the old values still hold, and one scatter per live tensor.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
import torch

from engine_ext.apply.consensus import _check_replicas, _expect, _sum
from engine_ext.apply.staged import StagedParam, StagedPart, UndoLog, Write, spans
from engine_ext.apply.stager import Stager
from engine_ext.derived.recompute import Recomputed, triggered
from engine_ext.dtypes import NAME_OF_TORCH, TORCH_DTYPE, bits_dtype
from engine_ext.errors import BaseMismatch, NotUpdatable
from engine_ext.model.storage_index import StorageIndex
from engine_ext.placement.plan import Plan
from engine_ext.placement.segments import Status
from engine_ext.placement.targets import Target
from engine_ext.wire import ParamDelta, Part
from engine_ext.wire.digest import Digest, change_digest

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Piece = tuple[ParamDelta, tuple[Target, ...], bool, int, int]


class ScatterApplier:
    """Stages and writes deltas on one rank.

    Args:
        model: the live model.
        index: its storage index, as of the certification.
        plan: this rank's plan.
        undo_bytes: host memory that the old values of one sync may take.
        threads: how many live tensors are written at once.
        recomputed: derived tensors that follow the weights, proven.
    """

    name = "scatter"

    def __init__(
        self,
        model: torch.nn.Module,
        index: StorageIndex,
        plan: Plan,
        *,
        undo_bytes: int,
        threads: int,
        recomputed: Sequence[Recomputed] = (),
    ) -> None:
        self.plan = plan
        self.digests = plan.scan(threads)
        self._model = model
        self._index = index
        self._undo_bytes = undo_bytes
        self._threads = threads
        self._recomputed = recomputed
        devices = {entry.tensor.device for entry in index.entries}
        self._devices = [device for device in devices if device.type != "cpu"]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="delta-write")
        for dtype in {placed.spec.dtype for placed in plan.placement.values()}:
            # Compile now what the first sync would otherwise wait for.
            none = np.empty(0, bits_dtype(NAME_OF_TORCH[dtype]))
            change_digest("", np.empty(0, np.int64), none, none)

    def stage(self, part: Part) -> StagedPart:
        """Check every param of a part and make it ready.

        Raises:
            NotUpdatable: names the tensor. Nothing was written.
            BaseMismatch: names a tensor of which this rank holds several copies that differ.
        """
        for delta in part.deltas:
            self._check_param(delta)
        manifest = part.manifest
        stager = Stager(
            self.plan.rank,
            manifest.full,
            undo=not manifest.full or self._full_fits(),
            replaced=manifest.digest_part is not None,
        )
        pieces: list[_Piece] = []
        counts = []
        for delta in part.deltas:
            targets = self.plan.targets.get(delta.name, ())
            digested = delta.name in self.plan.digested
            found = spans(delta, targets)
            counts.append(len(found))
            pieces += [(delta, targets, digested, start, stop) for start, stop in found]
        shares = iter(self._each(pieces, lambda piece: stager.span(*piece)))
        params = []
        for delta, count in zip(part.deltas, counts, strict=True):
            param = next(shares) if count else StagedParam(delta)
            for _ in range(count - 1):
                param.absorb(next(shares))
            params.append(param)
        return StagedPart(part.manifest, params)

    def check_sync(self, staged: Sequence[StagedPart], *, full: bool) -> None:
        """Refuse what only the whole sync can tell, on this rank.

        Raises:
            NotUpdatable: parts overlap, a ``full`` sync leaves tensors out, the engine has moved
                a weight, or the old values would not fit the undo log. Nothing was written.
        """
        self.check_in_place()
        _refuse_overlap(staged)
        if full:
            self._check_covers(staged)
        elif (needed := self._undo_needed(staged)) > self._undo_bytes:
            raise NotUpdatable(
                f"the old values take {needed} bytes, --delta-undo-bytes allows "
                f"{self._undo_bytes}; send a full sync",
                needed=needed,
                limit=self._undo_bytes,
            )

    def check_in_place(self) -> None:
        """Refuse to write when the engine has moved a weight, or a derived tensor that is to
        follow, since start-up.

        Raises:
            NotUpdatable: names them.
        """
        moved = self._index.moved(self._model)
        moved = sorted({*moved, *(path for one in self._recomputed for path in one.moved())})
        if moved:
            raise NotUpdatable(f"the engine moved these after start-up: {moved}", tensors=moved)

    def check_base(self, staged: Sequence[StagedPart]) -> None:
        """Prove that the old values gathered while staging still hold.

        Raises:
            BaseMismatch: one does not. Nothing was written.
        """
        self._synchronize()
        writes = [w for part in staged for w in part.writes if w.old is not None]
        if not all(self._each(writes, Write.unchanged)):
            raise BaseMismatch("a weight changed between staging and commit; send the sync again")

    def brief(self, staged: Sequence[StagedPart]) -> dict[str, Any]:
        """What the other ranks must know of this rank's share of a sync, as JSON."""
        replicas: dict[tuple[int, ...], Digest] = {}
        for part in staged:
            for param in part.params:
                for ranks, change in param.replicas.items():
                    replicas[ranks] = replicas.get(ranks, Digest.ZERO) + change
        return {
            "counted": sum(param.counted for part in staged for param in part.params),
            "changes": [
                _sum(param.change - param.replaced for param in part.params).hex()
                for part in staged
            ],
            "added": _sum(param.change for part in staged for param in part.params).hex(),
            "replicas": [[list(ranks), change.hex()] for ranks, change in replicas.items()],
            "digest": self.digest.hex(),
        }

    def agree(self, staged: Sequence[StagedPart], briefs: Sequence[dict[str, Any]]) -> None:
        """Judge a sync by what all ranks have said of it; every rank comes to the same end.

        Raises:
            BaseMismatch: the old values are not the sender's, or differ between ranks.
            NotUpdatable: an element is on no rank.
        """
        owned = sum(brief["counted"] for brief in briefs)
        nnz = sum(part.nnz for part in staged)
        if owned != nnz:
            raise NotUpdatable(f"{nnz - owned} of {nnz} elements are on no rank")
        full = all(part.manifest.full for part in staged)
        if not full:
            _check_replicas(briefs)
        changes = [
            _sum(Digest.parse(brief["changes"][number]) for brief in briefs)
            for number in range(len(staged))
        ]
        before = _sum(Digest.parse(brief["digest"]) for brief in briefs)
        for number, (part, change) in enumerate(zip(staged, changes, strict=True)):
            _expect("the digest of a part's change", part.manifest.digest_part, change, number)
            if not part.manifest.full:
                _expect("the model's digest", part.manifest.digest_before, before, number)
        # After a full sync nothing of what was there before is left.
        added = _sum(Digest.parse(brief["added"]) for brief in briefs)
        after = added if full else before + added
        for number, part in enumerate(staged):
            _expect("the digest after the sync", part.manifest.digest_after, after, number)

    def write(self, staged: Sequence[StagedPart]) -> None:
        """Write, and let the derived tensors follow.

        Raises:
            Exception: some elements may have been written.
        """
        self._each([write for part in staged for write in part.writes], Write.put)
        self._synchronize()
        self._recompute(self._written(staged))

    def undo(self, staged: Sequence[StagedPart]) -> None:
        """Put the old values back after `write`, whole or half, derived tensors too.

        Raises:
            RuntimeError: they were not kept.
            Exception: a derived tensor could not be computed from them again.
        """
        writes = [write for part in staged for write in part.writes]
        if not all(write.keep for write in writes):
            raise RuntimeError("the old values were not kept: the sync was larger than the log")
        self._each(writes, Write.undo)
        self._synchronize()
        self._recompute(self._written(staged))

    def finish(self, staged: Sequence[StagedPart]) -> UndoLog | None:
        """Advance the digests after a write; returns what takes it back, if that was kept.

        A full sync sets them, as nobody knows what lay there before.
        """
        changes: dict[str, Digest] = {}
        for part in staged:
            for param in part.params:
                name = param.delta.name
                # Of a tensor that other ranks count there is no digest here.
                if name in self.digests:
                    change = param.change
                    if part.manifest.full:
                        change -= self.digests[name]
                    self.digests[name] += change
                    changes[name] = changes.get(name, Digest.ZERO) + change
        writes = [write for part in staged for write in part.writes]
        if not all(write.keep for write in writes):
            return None
        places = [(write.place, write.old) for write in writes]
        return UndoLog(places, changes, self._written(staged))

    def roll_back(self, log: UndoLog) -> None:
        """Take a committed sync back: weights, derived tensors and digests."""
        self._each(log.writes, lambda write: write[0].put(write[1]))
        self._synchronize()
        self._recompute(log.live)
        for name, change in log.changes.items():
            self.digests[name] -= change

    @property
    def digest(self) -> Digest:
        """Of all covered elements that this rank counts."""
        return _sum(self.digests.values())

    def describe(self) -> dict[str, Any]:
        """Apply mode, certification summary and digest of this rank, as JSON."""
        placement = self.plan.placement
        return {
            "apply": self.name,
            "certification": dict(Counter(p.status.value for p in placement.values())),
            "uncertified": {
                name: placed.reason
                for name, placed in placement.items()
                if placed.status is Status.UNCERTIFIED
            },
            "digest": self.digest.hex(),
        }

    def _check_param(self, delta: ParamDelta) -> None:
        placed = self.plan.placement.get(delta.name)
        if placed is None:
            raise NotUpdatable(
                f"{delta.name}: the checkpoint this engine was loaded from has no such tensor",
                tensor=delta.name,
            )
        if placed.status is Status.IGNORED:
            raise NotUpdatable(
                f"{delta.name}: the engine ignores this tensor; leave it out", tensor=delta.name
            )
        dtype = NAME_OF_TORCH[placed.spec.dtype]
        if (delta.shape, delta.dtype) != (placed.spec.shape, dtype):
            raise NotUpdatable(
                f"{delta.name}: the checkpoint's is {dtype} {list(placed.spec.shape)}, the "
                f"delta's {delta.dtype} {list(delta.shape)}",
                tensor=delta.name,
            )
        reason = placed.reason if placed.status is Status.UNCERTIFIED else self._refusal(delta)
        if reason:
            raise NotUpdatable(
                f"{delta.name}: this engine cannot update it exactly: {reason}",
                tensor=delta.name,
                reason=reason,
            )

    def _refusal(self, delta: ParamDelta) -> str | None:
        """Why this way of writing cannot carry a delta of a certified tensor, if so."""
        placed = self.plan.placement[delta.name]
        recast = any(segment.recast for segment in placed.segments)
        if delta.differences and delta.name not in self.plan.digested:
            return "its values are differences to old ones that no digest proves; send new ones"
        if delta.differences and recast:
            return "its values are differences, and the loader's casts change them; send new ones"
        if recast and _has_nan(delta):
            return "a new value is NaN, and the loader's casts change the bits of a NaN"
        return None

    def _check_covers(self, staged: Sequence[StagedPart]) -> None:
        params = [param for part in staged for param in part.params]
        sparse = sorted({p.delta.name for p in params if p.delta.indices is not None})
        if sparse:
            raise NotUpdatable(
                f"a full sync sends every element, these are sparse: {sparse}", tensors=sparse
            )
        sent = {param.delta.name for param in params}
        missing = sorted(self.plan.held - sent)
        if missing:
            raise NotUpdatable(
                f"a full sync must cover every tensor; {len(missing)} are missing: {missing}",
                tensors=missing,
            )

    def _written(self, staged: Sequence[StagedPart]) -> frozenset[str]:
        """The live tensors of this rank that hold something of the params of a sync."""
        params = [param for part in staged for param in part.params if param.writes]
        targets = [target for p in params for target in self.plan.targets[p.delta.name]]
        return frozenset(target.segment.live.name for target in targets)

    def _recompute(self, live: frozenset[str]) -> None:
        """Compute the derived tensors again that may be made of these live tensors."""
        for one in triggered(self._recomputed, live):
            one()
            self._synchronize()

    def _undo_needed(self, staged: Sequence[StagedPart]) -> int:
        return sum(write.undo_bytes for part in staged for write in part.writes)

    def _full_fits(self) -> bool:
        size = sum(entry.end - entry.start for entry in self._index.entries)
        return size <= self._undo_bytes

    def _each(self, items: Sequence[_Item], do: Callable[[_Item], _Result]) -> list[_Result]:
        """Do something with every item, side by side; nothing of it goes on after it returns.

        Raises:
            Exception: what one of them raised; some of the others were not begun then.
        """
        results: dict[int, _Result] = {}
        todo = deque(enumerate(items))

        def work() -> None:
            try:
                while (taken := _take(todo)) is not None:
                    results[taken[0]] = do(taken[1])
            except BaseException:
                todo.clear()
                raise

        others = min(self._threads, len(items)) - 1
        futures = [self._pool.submit(work) for _ in range(others)]
        try:
            work()
        finally:
            wait(futures)
        for future in futures:
            future.result()
        return [results[number] for number in range(len(items))]

    def _synchronize(self) -> None:
        """Wait for all work on the devices of the weights, the engine's and this thread's."""
        for device in self._devices:
            torch.get_device_module(device).synchronize(device)


def _take(todo: deque[_Item]) -> _Item | None:
    """The next item, for one of several threads; None when there is none left."""
    try:
        return todo.popleft()
    except IndexError:
        return None


def _has_nan(delta: ParamDelta) -> bool:
    dtype = TORCH_DTYPE[delta.dtype]
    if not dtype.is_floating_point:
        return False
    values = torch.from_numpy(delta.values.view(np.uint8).copy()).view(dtype)
    # torch knows no isnan of the 8-bit floats; float16 holds all their values.
    return bool((values.half() if dtype.itemsize == 1 else values).isnan().any())


def _refuse_overlap(staged: Sequence[StagedPart]) -> None:
    """Refuse a sync in which some element of a tensor is sent more than once."""
    by_name: dict[str, list[ParamDelta]] = defaultdict(list)
    for part in staged:
        for param in part.params:
            by_name[param.delta.name].append(param.delta)
    for name, deltas in by_name.items():
        if len(deltas) > 1 and _overlap(deltas):
            raise NotUpdatable(f"{name}: two parts send the same elements", tensor=name)


def _overlap(deltas: Sequence[ParamDelta]) -> bool:
    if any(delta.indices is None for delta in deltas):
        return True
    indices = np.concatenate([d.indices for d in deltas if d.indices is not None])
    return len(np.unique(indices)) != len(indices)
