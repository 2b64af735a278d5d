"""What a staged delta will write on this rank, and how to take it back.

A `Write` is made while staging (see `engine_ext.apply.stager`): flat checkpoint indices have become
offsets in live memory, the new values have the live dtype, and old values that are to be checked
are gathered, so that the commit has nothing left to compute. Values move as integers throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.kernels.gather_scatter import Bits, bits_of, host_bits
from engine_ext.kernels.triton import runs_kernels
from engine_ext.placement.live_elements import DeviceElements, HostElements, Place
from engine_ext.placement.locator import Locator, offset_dtype
from engine_ext.placement.ownership import Box, box_of
from engine_ext.placement.segments import Segment
from engine_ext.wire import ParamDelta
from engine_ext.wire.digest import Digest
from engine_ext.wire.positions import Positions

# Elements that are staged and written at a time by one thread. On the CPU the temporaries stay in
# a core's cache, and the threads' shares come out even; elsewhere each piece costs some launches.
_HOST_SPAN = 1 << 16
_DEVICE_SPAN = 1 << 22
# Of a dense param that lies as it came nothing is gathered, so that there are no temporaries.
_RUN_SPAN = 1 << 20


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
    return host_bits(bits_of(typed(values, TORCH_DTYPE[dtype]).to(live)))


def checkpoint_bits(bits: Bits, live: torch.dtype, dtype: str) -> Bits:
    """The reverse of `live_bits`, for a live dtype that holds every value of `dtype`."""
    if TORCH_DTYPE[dtype] == live:
        return bits
    if (dtype, live) == ("bfloat16", torch.float32):
        # Widening adds zeros; narrowing again would make every NaN the same one.
        return (bits.view(np.uint32) >> 16).astype(np.uint16)
    return host_bits(bits_of(typed(bits, live).to(TORCH_DTYPE[dtype])))


def typed(bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    raw = bits.view(np.uint8)
    # torch has no read-only tensors.
    return torch.from_numpy(raw if raw.flags.writeable else raw.copy()).view(dtype)


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

    @property
    def is_run(self) -> bool:
        """Whether the elements lie in host memory as in the checkpoint, in one run."""
        return self.host is not None and self.locator.shift is not None

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
            from engine_ext.kernels.triton.gap_decode import decode

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
        counted: elements of the delta that this rank counts (see `engine_ext.placement.ownership`).
        change: digest of those elements, new minus old; in a full sync of the new alone.
        replaced: in a full sync that of the old, where a part tells how much they change.
        replicas: for each set of ranks that hold the same elements, the digest of this rank's.
    """

    delta: ParamDelta
    writes: list[Write] = field(default_factory=list)
    counted: int = 0
    change: Digest = Digest.ZERO
    replaced: Digest = Digest.ZERO
    replicas: dict[tuple[int, ...], Digest] = field(default_factory=dict)

    def absorb(self, other: StagedParam) -> None:
        """Add other elements of the same param."""
        self.writes += other.writes
        self.counted += other.counted
        if other.change is not Digest.ZERO:
            self.change += other.change
            self.replaced += other.replaced
        for ranks, change in other.replicas.items():
            self.replicas[ranks] = self.replicas.get(ranks, Digest.ZERO) + change


def spans(delta: ParamDelta, targets: Sequence[Target]) -> list[tuple[int, int]]:
    """The pieces in which a param is staged: ranges of its values."""
    if not targets:
        return []
    if delta.indices is None and all(target.is_run for target in targets):
        step = _RUN_SPAN
    else:
        step = _DEVICE_SPAN if targets[0].host is None else _HOST_SPAN
    return [(start, min(start + step, delta.nnz)) for start in range(0, delta.nnz, step)]


def as_host(bits: Any) -> Bits:
    """What a place of single elements reads, as an array."""
    return host_bits(bits) if isinstance(bits, torch.Tensor) else bits
