"""What a staged delta will write on this rank, and how to take it back.

A `Write` is made while staging: flat checkpoint indices have become offsets in live memory, the
new values have the live dtype, and old values that are to be checked are gathered, so that the
commit has nothing left to compute. Values move as integers throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.device import runs_kernels
from engine_ext.digest import Digest, change_digest
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.errors import BaseMismatch
from engine_ext.holders import Box, box_of
from engine_ext.kernels import Bits, bits_of, host_bits, signed
from engine_ext.locate import Locator, offset_dtype
from engine_ext.placement import Segment
from engine_ext.places import DeviceElements, HostElements, Place, WholeBox
from engine_ext.wire import ParamDelta
from engine_ext.wire.positions import Positions

# Elements that are staged and written at a time by one thread. On the CPU the temporaries stay in
# a core's cache, and the threads' shares come out even; elsewhere each piece costs some launches.
_HOST_SPAN = 1 << 16
_DEVICE_SPAN = 1 << 22


@dataclass(slots=True)
class Write:
    """Elements of one live tensor, with their old and new bits.

    Attributes:
        place: where they lie.
        new: their new bits, in the live dtype.
        keep: whether the old ones are kept.
        old: in host memory; None until `remember`, at the latest until `put`.
    """

    place: Place
    new: Any
    keep: bool = True
    old: Any = None

    @property
    def undo_bytes(self) -> int:
        """Host memory that it takes to know the old bits."""
        return int(self.new.nbytes) + self.place.nbytes if self.keep else 0

    def remember(self) -> None:
        """Gather the old bits, if they are to be kept and are not yet."""
        if self.keep and self.old is None:
            self.old = self.place.read()

    def unchanged(self) -> bool:
        """Whether live memory still holds the old bits, where these were remembered."""
        return self.old is None or self.place.holds(self.old)

    def holds(self) -> bool:
        """Whether live memory holds the new bits."""
        return self.place.holds(self.new)

    def put(self) -> None:
        """Write the new bits."""
        place = self.place
        if self.keep and self.old is None and isinstance(place, (HostElements, DeviceElements)):
            self.old = place.swap(self.new)
        else:
            self.remember()
            place.put(self.new)

    def undo(self) -> None:
        """Write the old bits; before `put` that may be nothing to do."""
        if self.old is not None:
            self.place.put(self.old)


def live_bits(values: Bits, dtype: str, live: torch.dtype) -> Bits:
    """New values as the engine's loader would store them.

    Args:
        values: [n], bit patterns of `dtype`.
        dtype: the checkpoint's, by its manifest name.
        live: the live tensor's; where it is another, the values are cast as a copy would.

    Returns:
        [n], of the live dtype's width; `values` itself where nothing is cast.
    """
    if TORCH_DTYPE[dtype] == live:
        return values
    return host_bits(bits_of(_typed(values, TORCH_DTYPE[dtype]).to(live)))


def checkpoint_bits(bits: Bits, live: torch.dtype, dtype: str) -> Bits:
    """The reverse of `live_bits`, for a live dtype that holds every value of `dtype`."""
    if TORCH_DTYPE[dtype] == live:
        return bits
    if (dtype, live) == ("bfloat16", torch.float32):
        # Widening adds zeros; narrowing again would make every NaN the same one.
        return (bits.view(np.uint32) >> 16).astype(np.uint16)
    return host_bits(bits_of(_typed(bits, live).to(TORCH_DTYPE[dtype])))


def _typed(bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    # A copy, because the wire's buffers are read-only and torch has no read-only tensors.
    return torch.from_numpy(bits.view(np.uint8).copy()).view(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One segment of a certified tensor, with all that staging needs to know of it.

    Attributes:
        segment: where the elements lie.
        locator: finds them.
        ranks: the ranks that hold the same elements, ascending; the first one counts them.
        first: which of the tensor's targets is the first with these elements on this rank; the
            others are copies of it.
        dtype: the live tensor's.
        flat: the live tensor as integers, 1-D.
        host: the same memory, where it is the host's.
    """

    segment: Segment
    locator: Locator
    ranks: tuple[int, ...]
    first: int
    dtype: torch.dtype
    flat: torch.Tensor
    host: Bits | None

    def find(
        self, indices: NDArray[np.int64], sent: Positions | None = None
    ) -> tuple[Any, HostElements | DeviceElements]:
        """Which of some ascending indices lie here, and where; see `Locator`.

        Args:
            indices: int64 [n].
            sent: what all of them were decoded from, if that is known.
        """
        shift, device = self.locator.shift, self.flat.device
        if self.host is not None and shift is not None:
            # As they are: offsets of their own would only cost memory.
            within = self.locator.within(indices)
            return within, HostElements(self.host, indices[within], shift)
        gaps = sent.gaps() if sent and shift is not None and runs_kernels(device) else None
        if gaps is not None and shift is not None:
            from engine_ext.device.gaps import decode

            within = self.locator.within(indices)
            decoded = decode(*gaps, within, shift, _offset_dtype(self.flat), device)
            return within, DeviceElements(self.flat, decoded)
        chosen, offsets = self.locator(indices)
        if self.host is not None:
            return chosen, HostElements(self.host, offsets)
        return chosen, DeviceElements(self.flat, torch.from_numpy(offsets).to(device))


def make_targets(
    segments: Sequence[Segment], holders: dict[Box, tuple[int, ...]]
) -> tuple[Target, ...]:
    """The targets of a certified tensor.

    Args:
        segments: of its placement on this rank.
        holders: the ranks that hold a box of it.
    """
    found = [box_of(segment) for segment in segments]
    targets = []
    for segment, box in zip(segments, found, strict=True):
        flat = bits_of(segment.live.flat())
        host = host_bits(flat) if flat.device.type == "cpu" else None
        runs_kernels(flat.device)  # they are compiled now, and not when the first sync waits for it
        first, dtype = found.index(box), segment.live.tensor.dtype
        targets.append(Target(segment, Locator(segment), holders[box], first, dtype, flat, host))
    return tuple(targets)


def _offset_dtype(flat: torch.Tensor) -> torch.dtype:
    return torch.int32 if offset_dtype(flat.numel()) is np.int32 else torch.int64


@dataclass(slots=True)
class StagedParam:
    """One param of a part, or some elements of it, ready to be written on this rank.

    Attributes:
        delta: the decoded param.
        writes: what is written here; empty where this rank holds none of its elements.
        counted: elements of the delta that this rank counts (see `engine_ext.holders`).
        change: digest of those elements, new minus old.
        replicas: for each set of ranks that hold the same elements, the digest of this rank's.
    """

    delta: ParamDelta
    writes: list[Write] = field(default_factory=list)
    counted: int = 0
    change: Digest = Digest.ZERO
    replicas: dict[tuple[int, ...], Digest] = field(default_factory=dict)

    def absorb(self, other: StagedParam) -> None:
        """Add other elements of the same param."""
        self.writes += other.writes
        self.counted += other.counted
        if other.change is not Digest.ZERO:
            self.change += other.change
        for ranks, change in other.replicas.items():
            self.replicas[ranks] = self.replicas.get(ranks, Digest.ZERO) + change


def spans(delta: ParamDelta, targets: Sequence[Target]) -> list[tuple[int, int]]:
    """The pieces in which a param is staged: ranges of its values."""
    if not targets:
        return []
    step = _DEVICE_SPAN if targets[0].host is None else _HOST_SPAN
    return [(start, min(start + step, delta.nnz)) for start in range(0, delta.nnz, step)]


@dataclass(frozen=True, slots=True)
class Stager:
    """How the params of one part are staged on this rank. The model is only read.

    Attributes:
        rank: this rank.
        full: whether the part belongs to a full sync, which takes the old values as they are.
        undo: whether the old values of dense params are kept; those of sparse ones always are.
    """

    rank: int
    full: bool
    undo: bool

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
        indices = np.arange(start, stop) if delta.indices is None else delta.indices[start:stop]
        values = delta.values[start:stop]
        sent = delta.positions if stop - start == delta.nnz else None
        firsts: dict[int, Bits] = {}
        for number, target in enumerate(targets):
            chosen, place = target.find(indices, sent)
            new = values[chosen]
            if not new.size:
                continue
            gathered = None
            if delta.differences:
                gathered = place.read()
                new = new + checkpoint_bits(as_host(gathered), target.dtype, delta.dtype)
            write = _element_write(place, live_bits(new, delta.dtype, target.dtype))
            write.old = gathered
            if digested:
                write.remember()
            if delta.indices is not None or not _in_boxes(target):
                staged.writes.append(write)
            # An element that is broadcast lies there several times, and counts once.
            copies = target.locator.copies
            if target.first == number and target.ranks[0] == self.rank:
                staged.counted += new.size // copies
            if not digested:
                continue
            old = checkpoint_bits(as_host(write.old), target.dtype, delta.dtype)
            old = old.reshape(-1, copies)
            expected = old if target.first == number else firsts[target.first]
            alone = target.first == number and copies == 1
            if not (alone or self.full) and (old != expected[:, :1]).any():
                raise BaseMismatch(
                    f"{delta.name}: the engine holds copies of it that are not the same; send a "
                    "full sync",
                    tensor=delta.name,
                )
            if target.first == number:
                firsts[number] = old
                own = indices[chosen][::copies], old[:, 0], new[::copies]
                self._count(staged, target, *own)
        return staged

    def _count(
        self,
        staged: StagedParam,
        target: Target,
        indices: NDArray[np.int64],
        old: Bits,
        new: Bits,
    ) -> None:
        change = change_digest(staged.delta.name, indices, old, new)
        if target.ranks[0] == self.rank:
            staged.change += change
        if len(target.ranks) > 1:
            known = staged.replicas.get(target.ranks, Digest.ZERO)
            staged.replicas[target.ranks] = known + change

    def _box(self, delta: ParamDelta, target: Target) -> Write:
        segment = target.segment
        box = segment.source_view(_typed(delta.values, TORCH_DTYPE[delta.dtype]))
        write = Write(WholeBox(segment), bits_of(box.to(target.dtype)), self.undo)
        write.remember()
        return write


def _in_boxes(target: Target) -> bool:
    """Whether a dense param is written there as a whole."""
    return target.segment.repack is None


def _element_write(place: HostElements | DeviceElements, new: Bits) -> Write:
    if isinstance(place, HostElements):
        return Write(place, new)
    return Write(place, signed(new.copy()).to(place.flat.device))


def as_host(bits: Any) -> Bits:
    """What a place of single elements reads, as an array."""
    return host_bits(bits) if isinstance(bits, torch.Tensor) else bits
