"""Staging: turn a decoded part into the writes of this rank and the change of the digest.

Params that are small and in one segment are staged together (`param_batch`), the others in pieces,
by several threads. For each piece and each segment of the tensor on this rank, `_Stager` finds the
elements, casts the new values to the live dtype, and reads the old
values that must be checked or digested. The model is only read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.errors import BaseMismatch, NotUpdatable
from engine_ext.format import (
    DecodedPart,
    Digest,
    ParamDelta,
    change_digest,
    gather_change,
    tensor_digest,
)
from engine_ext.kernels import Bits, Offsets, bits_of, typed
from engine_ext.placement import (
    HostElements,
    LiveElements,
    Plan,
    Target,
    WholeBox,
    as_host,
    checkpoint_bits,
    has_nan,
    live_bits,
)
from engine_ext.sync.device_staging import Located, Wanted, locate, upload_new
from engine_ext.sync.new_states import prove_here
from engine_ext.sync.param_batch import Batch, Batcher
from engine_ext.sync.pieces import holds_all, spans
from engine_ext.sync.staged import StagedParam, StagedPart, Write
from engine_ext.sync.staged_arrays import StagedArrays, allocate
from engine_ext.sync.thread_pool import ThreadPool

_Piece = tuple[ParamDelta, tuple[Target, ...], bool, Mapping[int, StagedArrays], int, int]
_OnDevices = Mapping[int, Located]  # by the number of the target


def stage_part(
    part: DecodedPart, plan: Plan, batcher: Batcher, threads: ThreadPool, *, undo: bool, keep: bool
) -> StagedPart:
    """Prepare the writes of a part on this rank.

    Args:
        part: the decoded part; every param has the shape and dtype of a certified tensor. A change
            of the old values is applied to them here. The digest of the change, or the checksum of
            the new bytes, proves that they are the sender's, so that only a digested tensor may be
            sent so.
        batcher: of the plan.
        undo: whether the old values of dense params are kept; those of sparse ones always are.
        keep: whether the params as they were sent are kept. Else nothing of the part is, but copies
            of this rank's share.

    Raises:
        BaseMismatch: copies of one element on this rank differ, or a tensor's new bytes would not
            be the declared ones.
        NotUpdatable: a cast would change the bits of a new value.
    """
    manifest = part.manifest
    # Of sparse deltas no memory is kept; see `_Stager._box`.
    whole = any(delta.indices is None for delta in part.deltas) and all(
        holds_all(delta, plan.targets.get(delta.name, ())) for delta in part.deltas
    )
    stager = _Stager(plan.rank, manifest.full, undo, manifest.digest_part is not None, whole)
    groups = [*batcher.chosen(part)]
    batches = threads.map(lambda numbers: batcher.locate(part, numbers), groups)
    batched = {number for numbers in groups for number in numbers}
    others = [number for number in range(len(part.deltas)) if number not in batched]
    arrays, of_batches = _arrays(part, plan, others, batches)
    params = [StagedParam.of(delta, keep=keep) for delta in part.deltas]
    numbers, pieces = _pieces(part, plan, arrays)
    todo = [*zip(pieces, _on_devices(pieces, stager, threads), strict=True)]
    staged = threads.map(lambda one: stager.stage(*one[0], one[1]), todo, _size)
    for number, piece in zip(numbers, staged, strict=True):
        params[number].absorb(piece)
    gathering = [*zip(batches, of_batches, strict=True)]
    threads.map(lambda one: batcher.gather(part, *one, params, undo=undo), gathering)
    upload_new([write for param in params for write in param.writes])
    return StagedPart(manifest, params, unproven=prove_here(part, plan, threads))


def _pieces(
    part: DecodedPart, plan: Plan, arrays: Mapping[int, Mapping[int, StagedArrays]]
) -> tuple[list[int], list[_Piece]]:
    """Return the pieces of params, given their arrays by number, and the number of each's param."""
    numbers: list[int] = []
    pieces: list[_Piece] = []
    for number, own_arrays in arrays.items():
        delta = part.deltas[number]
        targets, digested = plan.targets.get(delta.name, ()), delta.name in plan.digested
        found = spans(delta, targets)
        numbers += [number] * len(found)
        pieces += [(delta, targets, digested, own_arrays, start, stop) for start, stop in found]
    return numbers, pieces


def _size(piece: tuple[_Piece, _OnDevices]) -> int:
    delta, *_, start, stop = piece[0]
    return (stop - start) * delta.values.itemsize


def _on_devices(
    pieces: Sequence[_Piece], stager: _Stager, threads: ThreadPool
) -> list[dict[int, Located]]:
    """Locate the single elements of each piece on devices, by the number of the target.

    Those of a dense param are located piece by piece: all at once would take more memory of a
    device than the weights.
    """
    wanted = [
        (piece, number, Wanted(target, delta.indices[start:stop], reads))
        for piece, (delta, targets, digested, _, start, stop) in enumerate(pieces)
        for reads in (delta.needs_old or stager.needs_old(digested),)
        for number, target in enumerate(targets)
        if target.host is None and delta.indices is not None
    ]
    located = locate([one for *_, one in wanted], threads)
    found: list[dict[int, Located]] = [{} for _ in pieces]
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


def _arrays(
    part: DecodedPart, plan: Plan, params: Sequence[int], batches: Sequence[Batch]
) -> tuple[dict[int, dict[int, StagedArrays]], list[tuple[Offsets, Bits, Bits]]]:
    """Return the arrays of params and of batches.

    Args:
        params: numbers of those that are in no batch.

    Returns:
        By param and number of the target those whose elements one loop finds, and those of batches.
    """
    runs = [
        (number, which, delta, target)
        for number, delta in ((number, part.deltas[number]) for number in params)
        if delta.name in plan.digested and not part.manifest.full
        for which, target in enumerate(plan.targets.get(delta.name, ()))
        if _is_gathered(delta, target)
    ]
    sizes = [(batch.count, batch.values.dtype) for batch in batches]
    allocated, of_batches = allocate([run[2:] for run in runs], sizes)
    found: dict[int, dict[int, StagedArrays]] = {number: {} for number in params}
    for (number, which, *_), one in zip(runs, allocated, strict=True):
        found[number][which] = one
    return found, of_batches


def _is_gathered(delta: ParamDelta, target: Target) -> bool:
    """Return whether one loop finds, reads and digests a delta's elements in a run of memory.

    They are single ones, live memory has their very bits, and the new ones are sent, or differences
    from the old ones.
    """
    exact = target.is_run and TORCH_DTYPE[delta.dtype] == target.dtype
    return exact and delta.indices is not None and delta.cleared is None


class _Found(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The elements of a piece that are in one segment, each once."""

    new: Bits  # in the checkpoint dtype, [n]
    indices: NDArray[np.int64] | None  # flat, [n]; None if they are consecutive, from `start` on
    start: int
    old: Bits | None  # in the checkpoint dtype, [n, copies]; None if not needed
    change: Digest | None = None  # if it is known


@dataclass(frozen=True, slots=True)
class _Stager:
    """Stages the params of one part."""

    rank: int
    full: bool  # the part belongs to a full sync, which replaces old values unchecked
    undo: bool  # the old values of dense params are kept
    replaced: bool  # the old values that a full part replaces are digested, too
    whole: bool  # all of the part's tensors are on this rank, so that its memory may be kept

    def stage(
        self,
        delta: ParamDelta,
        targets: Sequence[Target],
        digested: bool,
        arrays: Mapping[int, StagedArrays],
        start: int,
        stop: int,
        on_devices: _OnDevices,
    ) -> StagedParam:
        """Stage the piece of a param from value `start` to `stop`; may raise BaseMismatch.

        `arrays` has those of the targets whose elements one loop finds, by number, and `on_devices`
        what is located already.
        """
        staged = StagedParam.of(delta)
        if delta.indices is None and start == 0:
            staged.writes += [self._box(delta, t) for t in targets if t.segment.repack is None]
        old_of: dict[int, Bits] = {}
        for number, target in enumerate(targets):
            is_run = delta.indices is None and target.is_run
            if is_run:
                found = self._find_run(delta, target, digested, start, stop)
            elif number in arrays:
                found = self._gather(staged, delta, target, arrays[number].piece(start, stop))
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
                    raise BaseMismatch(
                        f"{delta.name}: the copies of it on this rank differ; send a full sync",
                        tensor=delta.name,
                    )
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

    def _gather(
        self, staged: StagedParam, delta: ParamDelta, target: Target, arrays: StagedArrays
    ) -> _Found:
        """Find, read and digest single elements in one pass; see `_is_gathered`."""
        assert delta.indices is not None
        assert target.host is not None
        assert target.locator.shift is not None
        piece = slice(arrays.start, arrays.stop)
        change = gather_change(
            *(delta.name, delta.indices[piece], delta.values[piece]),
            *(target.host, target.locator.shift, (arrays.offsets, arrays.old, arrays.new)),
            differences=delta.differences,
        )
        if arrays.new.size:
            elements, live = HostElements(target.host, arrays.offsets), target.segment.live.name
            staged.writes.append(Write(elements, arrays.new, live, self.undo, arrays.old))
        return _Found(arrays.new, None, 0, arrays.old.reshape(-1, 1), change)

    def _find_elements(
        self,
        staged: StagedParam,
        delta: ParamDelta,
        target: Target,
        digested: bool,
        start: int,
        stop: int,
        known: Located | None,
    ) -> _Found:
        """Find single elements, and add the write of them unless a box writes them."""
        copies = target.locator.copies
        indices = _indices(delta, target, start, stop)
        values = delta.values[start:stop]
        boxed = delta.indices is None and target.segment.repack is None
        if boxed and not self.needs_old(digested):
            chosen, _ = target.locator(indices)
            return _Found(values[chosen][::copies], indices[chosen][::copies], 0, None)
        elements: LiveElements
        if known is None:
            chosen, elements = target.find(indices)
        else:
            chosen, elements = known.chosen, known.elements
        new = values[chosen]
        if not new.size:
            return _Found(new, indices[chosen], 0, None)
        read = None
        if delta.needs_old:
            read = elements.read() if known is None else known.old
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
            live = write.old
            if live is None:
                live = elements.read() if known is None else known.old
            write.old = live if write.keep else None
            old = checkpoint_bits(as_host(live), target.dtype, delta.dtype).reshape(-1, copies)
        if not boxed:
            staged.writes.append(write)
        return _Found(new[::copies], indices[chosen][::copies], 0, old)

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
        change = found.change
        if change is None:
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
        return write
