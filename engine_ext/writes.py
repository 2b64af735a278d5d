"""What a staged delta will write on this rank, and how to take it back.

A `Write` is made while staging: flat checkpoint indices have become offsets in live memory, the
new values have the live dtype, and the old values are gathered, so that the commit has nothing
left to compute. Values move as integers throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.digest import Digest, change_digest
from engine_ext.dtypes import TORCH_DTYPE, bits_dtype
from engine_ext.kernels import bits_of, gather, scatter
from engine_ext.locate import Locator, compact
from engine_ext.placement import Segment
from engine_ext.storage_index import LiveTensor
from engine_ext.wire import ParamDelta

# Elements that a dense param is handled by at a time; bounds the temporaries to some 100 MB.
_CHUNK = 1 << 22


class Write(Protocol):
    """Elements of one live tensor, with their old and new bits."""

    old: torch.Tensor | None

    @property
    def elements(self) -> int:
        """Live elements that are written."""

    @property
    def undo_bytes(self) -> int:
        """Host memory that the old values take."""

    def remember(self) -> None:
        """Gather the old bits."""

    def unchanged(self) -> bool:
        """Whether live memory still holds the old bits."""

    def holds(self) -> bool:
        """Whether live memory holds the new bits."""

    def put(self) -> None:
        """Write the new bits."""

    def undo(self) -> None:
        """Write the old bits."""


@dataclass(slots=True)
class SparseWrite:
    """Single elements of one live tensor.

    Attributes:
        live: the tensor.
        offsets: int32 or int64 [k] in `live.flat()`, on its device.
        new: [k] integers of the live dtype's width, on its device.
        old: the same in host memory, once remembered.
    """

    live: LiveTensor
    offsets: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor | None = None

    @property
    def elements(self) -> int:
        return self.new.numel()

    @property
    def undo_bytes(self) -> int:
        return self.new.numel() * (self.new.element_size() + self.offsets.element_size())

    @property
    def kept(self) -> torch.Tensor:
        """The old bits in host memory."""
        assert self.old is not None
        return self.old

    def _flat(self) -> torch.Tensor:
        return bits_of(self.live.flat())

    def remember(self) -> None:
        self.old = gather(self._flat(), self.offsets).cpu()

    def unchanged(self) -> bool:
        return torch.equal(gather(self._flat(), self.offsets).cpu(), self.kept)

    def holds(self) -> bool:
        return torch.equal(gather(self._flat(), self.offsets), self.new)

    def put(self) -> None:
        scatter(self._flat(), self.offsets, self.new)

    def undo(self) -> None:
        scatter(self._flat(), self.offsets, self.kept.to(self.new.device))


@dataclass(slots=True)
class DenseWrite:
    """The whole of one segment whose elements lie as the loader wrote them.

    Attributes:
        segment: the box; it has no repack.
        new: integers of the live dtype's width, shaped `segment.sizes`.
        old: the same in host memory, once remembered.
    """

    segment: Segment
    new: torch.Tensor
    old: torch.Tensor | None = None

    @property
    def elements(self) -> int:
        return self.new.numel()

    @property
    def undo_bytes(self) -> int:
        return self.new.numel() * self.new.element_size()

    def _box(self) -> torch.Tensor:
        return bits_of(self.segment.live_view())

    def remember(self) -> None:
        self.old = self._box().cpu().clone()

    def unchanged(self) -> bool:
        return self.old is None or torch.equal(self._box().cpu(), self.old)

    def holds(self) -> bool:
        return torch.equal(self._box(), self.new.to(self.segment.live.tensor.device))

    def put(self) -> None:
        self._box().copy_(self.new)

    def undo(self) -> None:
        assert self.old is not None
        self._box().copy_(self.old)


def live_bits(values: NDArray[Any], dtype: str, live: torch.dtype) -> torch.Tensor:
    """New values as the engine's loader would store them.

    Args:
        values: unsigned integers [n], bit patterns of `dtype`.
        dtype: the checkpoint's, by its manifest name.
        live: the live tensor's; where it is another, the values are cast as a copy would.

    Returns:
        Integers [n] of the live dtype's width, in host memory; a copy.
    """
    typed = torch.from_numpy(values.view(np.uint8).copy()).view(TORCH_DTYPE[dtype])
    return bits_of(typed if typed.dtype == live else typed.to(live))


def checkpoint_bits(live: torch.Tensor, live_dtype: torch.dtype, dtype: str) -> NDArray[Any]:
    """The reverse of `live_bits`, for a live dtype that holds every value of `dtype`.

    Args:
        live: integers [n] of the live dtype's width.

    Returns:
        Unsigned integers [n], bit patterns of `dtype`.
    """
    typed = live.cpu().contiguous().view(live_dtype)
    wanted = TORCH_DTYPE[dtype]
    typed = typed if typed.dtype == wanted else typed.to(wanted)
    return bits_of(typed).numpy().view(bits_dtype(dtype))


@dataclass(slots=True)
class StagedParam:
    """One param of a part, ready to be written on this rank.

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


@dataclass(frozen=True, slots=True)
class Target:
    """One segment of a certified tensor, with all that staging needs to know of it.

    Attributes:
        segment: where the elements lie.
        locator: finds them.
        ranks: the ranks that hold the same elements, ascending; the first one counts them.
    """

    segment: Segment
    locator: Locator
    ranks: tuple[int, ...]


def stage_param(
    delta: ParamDelta, targets: Sequence[Target], rank: int, *, digested: bool, undo: bool
) -> StagedParam:
    """Locate a param's elements on this rank and gather their old values.

    Args:
        delta: the decoded param; shape and dtype agree with the tensor's.
        targets: the segments of the tensor on this rank.
        rank: this rank.
        digested: whether the digest covers the tensor.
        undo: whether the old values of a dense param are kept; a sparse one's always are.

    The model is only read.
    """
    staged = StagedParam(delta)
    for target in targets:
        boxed = delta.indices is None and target.segment.repack is None
        if boxed:
            staged.writes.append(_box_write(delta, target.segment, undo))
        for indices, values in _pieces(delta):
            chosen, offsets = target.locator(indices)
            if not offsets.size:
                continue
            write = _element_write(delta.dtype, target.segment.live, offsets, values[chosen])
            if not boxed:
                staged.writes.append(write)
            # An element that is broadcast lies there several times, and counts once.
            once = slice(None, None, target.locator.copies)
            indices, values = indices[chosen][once], values[chosen][once]
            if target.ranks[0] == rank:
                staged.counted += indices.size
            if digested:
                old = checkpoint_bits(write.kept[once], write.live.tensor.dtype, delta.dtype)
                _add_change(staged, target.ranks, rank, indices, old, values)
    return staged


def _add_change(
    staged: StagedParam,
    ranks: tuple[int, ...],
    rank: int,
    indices: NDArray[np.int64],
    old: NDArray[Any],
    new: NDArray[Any],
) -> None:
    change = change_digest(staged.delta.name, indices, old, new)
    if ranks[0] == rank:
        staged.change += change
    if len(ranks) > 1:
        staged.replicas[ranks] = staged.replicas.get(ranks, Digest.ZERO) + change


def _box_write(delta: ParamDelta, segment: Segment, undo: bool) -> DenseWrite:
    live = segment.live.tensor.dtype
    typed = torch.from_numpy(delta.values.view(np.uint8).copy()).view(TORCH_DTYPE[delta.dtype])
    box = segment.source_view(typed)
    write = DenseWrite(segment, bits_of(box if box.dtype == live else box.to(live)))
    if undo:
        write.remember()
    return write


def _element_write(
    dtype: str, live: LiveTensor, offsets: NDArray[np.int64], values: NDArray[Any]
) -> SparseWrite:
    device = live.tensor.device
    where = compact(offsets, live.flat().numel()).to(device)
    write = SparseWrite(live, where, live_bits(values, dtype, live.tensor.dtype).to(device))
    write.remember()
    return write


def _pieces(delta: ParamDelta) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
    """The param's flat indices and values, a dense one's a bounded number at a time."""
    if delta.indices is not None:
        yield delta.indices, delta.values
        return
    for start in range(0, delta.numel, _CHUNK):
        stop = min(start + _CHUNK, delta.numel)
        yield np.arange(start, stop), delta.values[start:stop]
