"""Staging: from a decoded param to what is written on this rank, and to what the digest gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_ext.apply.staged import StagedParam, Write
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.errors import BaseMismatch
from engine_ext.kernels.gather_scatter import Bits, bits_of, signed
from engine_ext.placement.casts import as_host, checkpoint_bits, live_bits, typed
from engine_ext.placement.live_elements import DeviceElements, HostElements, WholeBox
from engine_ext.placement.targets import Target
from engine_ext.wire import ParamDelta
from engine_ext.wire.digest import Digest, change_digest, tensor_digest


@dataclass(frozen=True, slots=True)
class _Share:
    """What of a piece of a param lies in one segment, each element once.

    Attributes:
        new: bit patterns in the checkpoint dtype, [n].
        indices: flat indices, int64 [n]; None: they follow each other, from `start`.
        start: the first index where they do.
        old: those in live memory, [n, copies]; None where nothing depends on them.
    """

    new: Bits
    indices: NDArray[np.int64] | None
    start: int
    old: Bits | None


@dataclass(frozen=True, slots=True)
class Stager:
    """How the params of one part are staged on this rank. The model is only read.

    Attributes:
        rank: this rank.
        full: whether the part belongs to a full sync, which replaces old values whatever they are.
        undo: whether the old values of dense params are kept; those of sparse ones always are.
        replaced: whether the old values that a full part replaces are digested too.
    """

    rank: int
    full: bool
    undo: bool
    replaced: bool = False

    def span(
        self, delta: ParamDelta, targets: Sequence[Target], digested: bool, start: int, stop: int
    ) -> StagedParam:
        """Locate a piece of a param's elements, and gather the old values that are checked.

        Args:
            delta: the decoded param; shape and dtype agree with the tensor's. Differences are
                added to the old values here; that these are the sender's is seen by the digest
                of the change, so that only a digested tensor may come so.
            targets: the tensor's on this rank.
            digested: whether the digest covers the tensor.
            start, stop: of `spans`.

        Raises:
            BaseMismatch: copies of one element differ.
        """
        staged = StagedParam(delta)
        if delta.indices is None and start == 0:
            staged.writes += [self._box(delta, target) for target in targets if _in_boxes(target)]
        firsts: dict[int, Bits] = {}
        for number, target in enumerate(targets):
            is_run = delta.indices is None and target.is_run
            find = self._run if is_run else self._elements
            share = find(staged, target, digested, start, stop)
            if not share.new.size:
                continue
            is_first = target.first == number
            if is_first and target.ranks[0] == self.rank:
                staged.counted += share.new.size
            if not digested:
                continue
            if share.old is not None and not self.full:
                expected = share.old if is_first else firsts[target.first]
                alone = is_first and share.old.shape[1] == 1
                if not alone and (share.old != expected[:, :1]).any():
                    raise BaseMismatch(
                        f"{delta.name}: the engine holds copies of it that are not the same; send "
                        "a full sync",
                        tensor=delta.name,
                    )
                firsts[number] = share.old
            if is_first:
                self._count(staged, target, share)
        return staged

    def _asks_for_old(self, digested: bool) -> bool:
        return digested and (self.replaced or not self.full)

    def _run(
        self, staged: StagedParam, target: Target, digested: bool, start: int, stop: int
    ) -> _Share:
        """Of a dense param, where it lies in one run; it is written as a box."""
        delta, shift = staged.delta, target.locator.shift
        assert target.host is not None
        assert shift is not None
        first, end = target.locator.overlap(start, stop)
        old = None
        if self._asks_for_old(digested):
            live = target.host[first - shift : end - shift]
            old = checkpoint_bits(live, target.dtype, delta.dtype).reshape(-1, 1)
        return _Share(delta.values[first:end], None, first, old)

    def _elements(
        self, staged: StagedParam, target: Target, digested: bool, start: int, stop: int
    ) -> _Share:
        """Element by element; makes the write, unless a box does."""
        delta, copies = staged.delta, target.locator.copies
        indices = np.arange(start, stop) if delta.indices is None else delta.indices[start:stop]
        values = delta.values[start:stop]
        sent = delta.positions if stop - start == delta.nnz else None
        boxed = delta.indices is None and _in_boxes(target)
        if boxed and not self._asks_for_old(digested):
            chosen, _ = target.locator(indices)
            return _Share(values[chosen][::copies], indices[chosen][::copies], 0, None)
        chosen, place = target.find(indices, sent)
        new = values[chosen]
        if not new.size:
            return _Share(new, indices[chosen], 0, None)
        gathered = None
        if delta.differences:
            gathered = place.read()
            new = new + checkpoint_bits(as_host(gathered), target.dtype, delta.dtype)
        write = _element_write(place, live_bits(new, delta.dtype, target.dtype), self.undo)
        write.old = gathered
        old = None
        if self._asks_for_old(digested):
            live = place.read() if write.old is None else write.old
            write.old = live if write.keep else None
            old = checkpoint_bits(as_host(live), target.dtype, delta.dtype).reshape(-1, copies)
        if not boxed:
            staged.writes.append(write)
        return _Share(new[::copies], indices[chosen][::copies], 0, old)

    def _count(self, staged: StagedParam, target: Target, share: _Share) -> None:
        name, old = staged.delta.name, None if share.old is None else share.old[:, 0]
        counted = target.ranks[0] == self.rank
        if self.full:
            if counted:
                staged.change += tensor_digest(name, share.new, share.indices, share.start)
            if counted and old is not None:
                staged.replaced += tensor_digest(name, old, share.indices, share.start)
            return
        assert old is not None
        change = change_digest(name, share.indices, old, share.new, share.start)
        if counted:
            staged.change += change
        if len(target.ranks) > 1:
            known = staged.replicas.get(target.ranks, Digest.ZERO)
            staged.replicas[target.ranks] = known + change

    def _box(self, delta: ParamDelta, target: Target) -> Write:
        segment = target.segment
        box = segment.source_view(typed(delta.values, TORCH_DTYPE[delta.dtype]))
        write = Write(WholeBox(segment), bits_of(box.to(target.dtype)), self.undo)
        if not self.full:  # there they are kept when they are replaced; nothing is checked by them
            write.remember()
        return write


def _in_boxes(target: Target) -> bool:
    """Whether a dense param is written there as a whole."""
    return target.segment.repack is None


def _element_write(place: HostElements | DeviceElements, new: Bits, keep: bool) -> Write:
    if isinstance(place, HostElements):
        return Write(place, new, keep)
    return Write(place, signed(new.copy()).to(place.flat.device), keep)
