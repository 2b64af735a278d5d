"""Staging: turn a decoded part into the writes of this rank and the change of the digest.

The host table stages what it has rows for (`host_table`), batch by batch. All else is staged in
pieces: for each piece and each segment of the tensor on this rank, `_Stager` finds the elements,
casts the new values to the live dtype, and reads the old values that must be checked or digested.
The elements on devices are found and read for all pieces together (`device_table`). Several
threads share the batches and the pieces. The model is only read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.errors import NotUpdatable
from engine_ext.format import (
    DecodedPart,
    Digest,
    ParamDelta,
    change_digest,
    tensor_digest,
)
from engine_ext.kernels import Bits, bits_of, typed
from engine_ext.placement import (
    DeviceMemory,
    HostElements,
    Plan,
    Target,
    WholeBox,
    are_whole,
    as_host,
    box_digest,
    checkpoint_bits,
    has_nan,
    live_bits,
)
from engine_ext.sync.device_table import GatherRequest, GatherResult, gather, upload_new
from engine_ext.sync.host_table import HostTable, allocate
from engine_ext.sync.new_states import prove_here
from engine_ext.sync.staged import StagedParam, StagedPart, Write, copies_differ
from engine_ext.sync.thread_pool import ThreadPool
from engine_ext.sync.writes import batch_unread

# Elements of one piece. On the CPU the temporaries of a piece stay in a core's cache, and the
# threads get equal shares; on a device each piece costs several kernel launches.
_HOST_PIECE_ELEMENTS: Final = 1 << 16
_DEVICE_PIECE_ELEMENTS: Final = 1 << 22
# A dense param that is one contiguous run in live memory needs no temporaries.
_RUN_PIECE_ELEMENTS: Final = 1 << 20

_Piece = tuple[ParamDelta, tuple[Target, ...], bool, int, int]
_OnDevices = Mapping[int, GatherResult]  # by the number of the target


def stage_part(
    part: DecodedPart,
    plan: Plan,
    table: HostTable,
    threads: ThreadPool,
    memory: DeviceMemory,
    *,
    undo: bool,
) -> StagedPart:
    """Prepare the writes of a part on this rank; nothing of it is kept but copies of its share.

    Args:
        part: the decoded part; every param has the shape and dtype of a certified tensor. A change
            of the old values is applied to them here. The digest of the change, or the checksum of
            the new bytes, proves that they are the sender's, so that only a digested tensor can be
            sent so.
        table: of the plan.
        memory: for what is kept on devices.
        undo: whether the old values of dense params are kept; those of sparse ones always are.

    Raises:
        BaseMismatch: copies of one element on this rank differ, or a tensor's new bytes would not
            be the declared ones.
        NotUpdatable: a cast would change the bits of a new value.
    """
    manifest = part.manifest
    # Sparse deltas are not retained; see `_Stager._box`.
    whole = any(delta.indices is None for delta in part.deltas) and all(
        are_whole(plan.targets.get(delta.name, ()), delta.numel) for delta in part.deltas
    )
    stager = _Stager(
        *(plan.rank, manifest.full, undo, manifest.digest_part is not None, whole, threads, memory)
    )
    params = [StagedParam.of(delta) for delta in part.deltas]
    in_table = _stage_by_table(part, table, threads, params, undo)
    numbers, pieces = _pieces(part, plan, in_table)
    todo = [*zip(pieces, _on_devices(pieces, stager, threads), strict=True)]
    staged = threads.map(lambda one: stager.stage(*one[0], one[1]), todo, _size)
    for number, piece in zip(numbers, staged, strict=True):
        params[number].absorb(piece)
    writes = [write for param in params for write in param.writes]
    upload_new(writes, memory)
    batch_unread(writes, memory)
    return StagedPart(manifest, params, unproven=prove_here(part, plan, threads))


def _stage_by_table(
    part: DecodedPart,
    table: HostTable,
    threads: ThreadPool,
    params: Sequence[StagedParam],
    undo: bool,
) -> set[int]:
    """Stage the params of a part that the table has rows for; return their numbers."""
    located = threads.map(lambda batch: table.locate(part, batch), [*table.batches(part)])
    todo = []
    for one, arrays in zip(located, allocate(located), strict=True):
        batch = one.batch
        # Threads that stage pieces of one param must not share its writes.
        own = [
            params[number] if batch.start is None else StagedParam.of(part.deltas[number])
            for number in batch.numbers
        ]
        todo.append((one, arrays, own))
    threads.map(lambda one: table.gather(part, *one, undo=undo), todo)
    for one, _, own in todo:
        if one.batch.start is not None:
            params[one.batch.numbers[0]].absorb(own[0])
    return {number for one in located for number in one.batch.numbers}


def _pieces(
    part: DecodedPart, plan: Plan, in_table: AbstractSet[int]
) -> tuple[list[int], list[_Piece]]:
    """Return the pieces of params that are not in the table, and the number of each's param."""
    numbers: list[int] = []
    pieces: list[_Piece] = []
    for number, delta in enumerate(part.deltas):
        if number not in in_table:
            targets, digested = plan.targets.get(delta.name, ()), delta.name in plan.digested
            found = _spans(delta, targets)
            numbers += [number] * len(found)
            pieces += [(delta, targets, digested, start, stop) for start, stop in found]
    return numbers, pieces


def _spans(delta: ParamDelta, targets: Sequence[Target]) -> list[tuple[int, int]]:
    """Return the pieces of a param that might be on this rank, as ranges of its values."""
    if not targets:
        return []
    step = _DEVICE_PIECE_ELEMENTS if targets[0].host is None else _HOST_PIECE_ELEMENTS
    if delta.indices is None and all(target.is_run for target in targets):
        step = _RUN_PIECE_ELEMENTS
    spans = [(start, min(start + step, delta.nnz)) for start in range(0, delta.nnz, step)]
    if delta.indices is None:
        return spans
    ends = [target.locator.ends for target in targets]
    first, end = min(first for first, _ in ends), max(end for _, end in ends)
    indices = delta.indices
    return [span for span in spans if indices[span[0]] < end and indices[span[1] - 1] >= first]


def _size(piece: tuple[_Piece, _OnDevices]) -> int:
    delta, *_, start, stop = piece[0]
    return (stop - start) * delta.values.itemsize


def _on_devices(
    pieces: Sequence[_Piece], stager: _Stager, threads: ThreadPool
) -> list[dict[int, GatherResult]]:
    """Locate the single elements of each piece on devices, by the number of the target.

    Those of a dense param are located piece by piece: all at once would take more memory of a
    device than the weights.
    """
    wanted = [
        (piece, number, GatherRequest(target, delta.indices[start:stop], reads))
        for piece, (delta, targets, digested, start, stop) in enumerate(pieces)
        for reads in (delta.needs_old or stager.needs_old(digested),)
        for number, target in enumerate(targets)
        if target.host is None and delta.indices is not None
    ]
    located = gather([one for *_, one in wanted], threads, stager.memory)
    found: list[dict[int, GatherResult]] = [{} for _ in pieces]
    for (piece, number, _), one in zip(wanted, located, strict=True):
        found[piece][number] = one
    return found


def _indices(delta: ParamDelta, target: Target, start: int, stop: int) -> NDArray[Any]:
    """Return the flat indices of a piece, as `Target.find` takes them."""
    if delta.indices is None:
        return np.arange(start, stop)
    indices = delta.indices[start:stop]
    # It takes narrow ones only where no sum can pass what int32 holds.
    if not (target.is_run and target.locator.offset_dtype is np.int32):
        indices = indices.astype(np.int64, copy=False)
    return indices


class _Found(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The elements of a piece that are in one segment, each once."""

    new: Bits  # in the checkpoint dtype, [n]
    indices: NDArray[np.int64] | None  # flat, [n]; None if they are consecutive, from `start` on
    start: int
    old: Bits | None  # in the checkpoint dtype, [n, copies]; None if not needed


@dataclass(frozen=True, slots=True)
class _Stager:
    """Stages the params of one part."""

    rank: int
    full: bool  # the part belongs to a full sync, which replaces old values unchecked
    undo: bool  # the old values of dense params are kept
    replaced: bool  # the old values that a full part replaces are digested, too
    whole: bool  # all of the part's tensors are on this rank, so that its memory can be kept
    threads: ThreadPool
    memory: DeviceMemory

    def stage(
        self,
        delta: ParamDelta,
        targets: Sequence[Target],
        digested: bool,
        start: int,
        stop: int,
        on_devices: _OnDevices,
    ) -> StagedParam:
        """Stage the piece of a param from value `start` to `stop`; can raise BaseMismatch.

        `on_devices` has what is located already, by the number of the target.
        """
        staged = StagedParam.of(delta)
        if delta.indices is None and start == 0:
            staged.writes += [self._box(delta, t) for t in targets if t.segment.repack is None]
        old_of: dict[int, Bits] = {}
        for number, target in enumerate(targets):
            is_run = delta.indices is None and target.is_run
            if is_run:
                found = self._find_run(delta, target, digested, start, stop)
            else:
                known = on_devices.get(number)
                found = self._find_elements(staged, delta, target, digested, start, stop, known)
            if not found.new.size:
                continue
            is_first = target.first == number
            if is_first and target.ranks[0] == self.rank:
                staged.counted += found.new.size
            if not digested:
                continue
            if found.old is not None and not self.full:
                expected = found.old if is_first else old_of[target.first]
                alone = is_first and found.old.shape[1] == 1
                if not alone and (found.old != expected[:, :1]).any():
                    raise copies_differ(delta.name)
                old_of[number] = found.old
            if is_first:
                self._add_digests(staged, target, found)
        return staged

    def needs_old(self, digested: bool) -> bool:
        """Return whether old values are digested or compared."""
        return digested and (self.replaced or not self.full)

    def _find_run(
        self, delta: ParamDelta, target: Target, digested: bool, start: int, stop: int
    ) -> _Found:
        """Find the elements of a dense param that is one run here; a box writes them."""
        shift = target.locator.shift
        assert target.host is not None
        assert shift is not None
        first, end = target.locator.overlap(start, stop)
        old = None
        if self.needs_old(digested):
            live = target.host[first - shift : end - shift]
            old = checkpoint_bits(live, target.dtype, delta.dtype).reshape(-1, 1)
        return _Found(delta.values[first:end], None, first, old)

    def _find_elements(
        self,
        staged: StagedParam,
        delta: ParamDelta,
        target: Target,
        digested: bool,
        start: int,
        stop: int,
        known: GatherResult | None,
    ) -> _Found:
        """Find single elements, and add the write of them unless a box writes them."""
        copies = target.locator.copies
        indices = _indices(delta, target, start, stop)
        values = delta.values[start:stop]
        boxed = delta.indices is None and target.segment.repack is None
        if boxed and not self.needs_old(digested):
            chosen, _ = target.locator(indices)
            return _Found(values[chosen][::copies], indices[chosen][::copies], 0, None)
        if known is None:
            reads = delta.needs_old or self.needs_old(digested)
            known = self._gathered(GatherRequest(target, indices, reads))
        chosen, elements = known.chosen, known.elements
        new = values[chosen]
        if not new.size:
            return _Found(new, indices[chosen], 0, None)
        read = None
        if delta.needs_old:
            read = known.old
            before = checkpoint_bits(as_host(read), target.dtype, delta.dtype)
            new = delta.new_bits(before, start, stop, chosen)
            if TORCH_DTYPE[delta.dtype] != target.dtype and has_nan(new, delta.dtype):
                raise NotUpdatable(
                    f"{delta.name}: a new value is NaN, and the loader's cast changes its bits",
                    tensor=delta.name,
                )
        bits: Any = live_bits(new, delta.dtype, target.dtype)
        if isinstance(elements, HostElements) and not bits.flags.owndata:
            bits = bits.copy()  # a view would keep the whole part's values alive
        write = Write(elements, bits, target.segment.live.name, self.undo, read)
        old = None
        if self.needs_old(digested):
            write.old = known.old if write.keep else None
            old = checkpoint_bits(as_host(known.old), target.dtype, delta.dtype)
            old = old.reshape(-1, copies)
        write.batch = None if write.old is None else known.batch
        if not boxed:
            staged.writes.append(write)
        return _Found(new[::copies], indices[chosen][::copies], 0, old)

    def _gathered(self, request: GatherRequest) -> GatherResult:
        """Find the elements of a request, and read their old bits if it says so."""
        if request.target.host is None:
            return gather([request], self.threads, self.memory)[0]
        chosen, elements = request.target.find(request.indices)
        return GatherResult(chosen, elements, elements.read() if request.reads else None)

    def _add_digests(self, staged: StagedParam, target: Target, found: _Found) -> None:
        name, old = staged.name, None if found.old is None else found.old[:, 0]
        counted = target.ranks[0] == self.rank
        if self.full:
            if counted:
                staged.change += tensor_digest(name, found.new, found.indices, found.start)
            if counted and old is not None:
                staged.replaced += tensor_digest(name, old, found.indices, found.start)
            return
        assert old is not None
        change = change_digest(name, found.indices, old, found.new, found.start)
        if counted:
            staged.change += change
        if len(target.ranks) > 1:
            known = staged.replicas.get(target.ranks, Digest.ZERO)
            staged.replicas[target.ranks] = known + change

    def _box(self, delta: ParamDelta, target: Target) -> Write:
        segment = target.segment
        box = segment.source_view(typed(delta.values, TORCH_DTYPE[delta.dtype]))
        bits = bits_of(box.to(target.dtype))
        if not self.whole:
            bits = bits.clone()  # a view would keep the other ranks' shares alive
        write = Write(WholeBox(segment), bits, segment.live.name, self.undo)
        if not self.full:  # nothing checks this box's in a full sync; the write itself reads them
            write.read_old()
            if target.host is None:
                write.digest = box_digest(write.old)
        return write
