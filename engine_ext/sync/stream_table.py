"""The staging table of devices: a row for each live box that a certified tensor is written to.

The gaps and values of a part cross the bus as they were sent. Kernels expand the gaps,
find the elements, read their old values, digest the change and make the new values, for all tensors
of a batch at once. The host's share of a tensor is a look-up and a few numbers.

The old values are copied to pinned memory while the next batch is staged; an undo needs them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.dtypes import NAME_OF_TORCH
from engine_ext.format import (
    DIFFERENCES,
    PACKED_ENCODINGS,
    Digest,
    UnpackedPart,
    device_factors,
    loops,
    skip_symbol,
    split_positions,
)
from engine_ext.kernels import StagingStream
from engine_ext.kernels.triton import runs_kernels
from engine_ext.placement import DeviceBatch, DeviceMemory, DeviceRows, Placed, Plan, Status, Target
from engine_ext.sync.staged import StagedParam, Write

logger = logging.getLogger(__name__)

# Symbols of a batch. It takes 5 bytes of the device for each changed bf16 element meanwhile.
_BATCH_SYMBOLS: Final = 1 << 22
_STREAMED: Final = frozenset({"deltas", "deltas_zstd", "gap8_exp", "gap8_ulp"})

_Int64s = NDArray[np.int64]


class _Kind(NamedTuple):
    """What the elements of a batch have in common."""

    device: torch.device
    bits: torch.dtype
    offsets: torch.dtype


class _Tensor(NamedTuple):
    """The consecutive rows of one tensor, from row `first` on; none if other ranks hold it."""

    kind: _Kind | None
    placed: Placed
    dtype: str
    first: int
    rows: int


class _Row(NamedTuple):
    """Data with which a row's elements are delivered.

    Attributes:
        counted: whether this rank counts the elements.
        replicas: the ranks that hold the same elements, if there are others.
    """

    flat: torch.Tensor
    live: str
    counted: bool
    replicas: tuple[int, ...] | None


class _Piece(NamedTuple):
    """Symbols of one param, see `engine_ext.format.split_positions`."""

    number: int
    tensor: _Tensor
    start: int
    stop: int
    after: int
    first: int
    end: int


class StagedStreams(NamedTuple):
    """The params of a part that were staged from their streams.

    Attributes:
        numbers: which of the part's params they are.
    """

    numbers: frozenset[int]
    params: list[StagedParam]
    writes: list[Write]


NO_STREAMS: Final = StagedStreams(frozenset(), [], [])


class StreamTable:
    """Stages gaps of elements on devices; made at start-up.

    It has the addresses of live tensors, and keeps their memory.

    Args:
        plan: of this rank. The table has those of its digested and exact tensors whose boxes are on
            a device that runs the kernels and have no copies, are not moved or tied; and those that
            only other ranks hold.
    """

    def __init__(self, plan: Plan) -> None:
        self._tensors: dict[str, _Tensor] = {}
        self._rows: list[_Row] = []
        targets: list[Target] = []
        seeds: list[tuple[int, int]] = []
        tied = {*plan.tied, *plan.tied.values()}
        for name, placed in plan.placement.items():
            if name not in plan.digested or name in tied:
                continue
            own, spec, kind = plan.targets.get(name, ()), placed.spec, None
            if placed.status is not Status.NOT_ON_RANK:
                kind = _kind_of(own, spec.dtype) if placed.status is Status.EXACT else None
                if kind is None:
                    continue
            dtype = NAME_OF_TORCH[spec.dtype]
            self._tensors[name] = _Tensor(kind, placed, dtype, len(targets), len(own))
            targets += own
            seeds += [loops.digest_seeds(name)] * len(own)
        for target in targets:
            replicas = target.ranks if len(target.ranks) > 1 else None
            live = target.segment.live.name
            self._rows.append(_Row(target.flat, live, target.ranks[0] == plan.rank, replicas))
        if not targets:
            self._tensors.clear()
            return
        rows, dims = _tables_of(targets, seeds)
        self._addresses = rows[:, 0].copy()
        from engine_ext.kernels.triton import gap_expand

        self._boxes = {
            device: gap_expand.Boxes(*(torch.from_numpy(t).to(device) for t in (rows, dims)))
            for device in {target.flat.device for target in targets}
        }

    def stage(self, part: UnpackedPart, memory: DeviceMemory) -> StagedStreams:
        """Stage the params of a part that have rows here; several threads can do so at once.

        All of them or none: if a stream is not as the manifest says, staging by the host has the
        error; if memory does not suffice, pinned or on the device, the host's way needs less.
        """
        numbers = self._numbers(part)
        entries = part.manifest.params
        params = {
            number: StagedParam(entries[number].name, entries[number].nnz, False)
            for number in numbers
        }
        writes = list[Write]()
        streams: dict[torch.device, StagingStream] = {}
        try:
            # An exception holds memory that kernels still use: they end before it goes.
            with contextlib.ExitStack() as ends:
                for kind, pieces in self._batches(part, numbers):
                    if kind.device not in streams:
                        streams[kind.device] = StagingStream(kind.device)
                        ends.callback(streams[kind.device].wait)
                    stream = streams[kind.device]
                    with stream.current():
                        batch = _Batch(part, kind, pieces, stream).locate(self._boxes[kind.device])
                        if batch is None:
                            return NO_STREAMS
                        writes += self._deliver(batch, params, memory)
                    del batch  # before the next one takes memory
        except RuntimeError:
            logger.warning("delta updates: a part is staged by the host", exc_info=True)
            return NO_STREAMS
        return StagedStreams(frozenset(numbers), list(params.values()), writes)

    def _numbers(self, part: UnpackedPart) -> list[int]:
        """Return which params have rows here."""
        manifest, tensors = part.manifest, self._tensors
        if manifest.full or manifest.encoding not in _STREAMED or not tensors:
            return []
        found = []
        for number, entry in enumerate(manifest.params):
            tensor = tensors.get(entry.name)
            if tensor is None or not entry.nnz or entry.is_dense or entry.new_checksum is not None:
                continue
            # The host path refuses a tensor that does not fit, or cannot be updated any more.
            placed = tensor.placed
            symbols, rest = divmod(part.streams[number].size, entry.pos_width)
            fits = (entry.shape, entry.dtype) == (placed.spec.shape, tensor.dtype)
            fits &= part.values_dtype in (None, entry.dtype) and not rest and symbols >= entry.nnz
            if fits and placed.status is not Status.UNCERTIFIED:
                found.append(number)
        return found

    def _batches(
        self, part: UnpackedPart, numbers: Sequence[int]
    ) -> Iterator[tuple[_Kind, list[_Piece]]]:
        """Yield the pieces that are staged together."""
        found: dict[_Kind, list[_Piece]] = {}
        room: dict[_Kind, int] = {}
        for number in numbers:
            entry = part.manifest.params[number]
            tensor = self._tensors[entry.name]
            if tensor.kind is None:
                continue
            stream, kind = part.streams[number], tensor.kind
            for piece in split_positions(
                *(part.manifest.encoding, stream, entry.pos_width, entry.nnz, _BATCH_SYMBOLS)
            ):
                size = piece.stop - piece.start
                if size > room.get(kind, 0):
                    if kind in found:
                        yield kind, found[kind]
                    found[kind], room[kind] = [], _BATCH_SYMBOLS
                found[kind].append(_Piece(number, tensor, *piece))
                room[kind] -= size
        yield from found.items()

    def _deliver(
        self, batch: _Batch, params: dict[int, StagedParam], memory: DeviceMemory
    ) -> Iterator[Write]:
        """Stage the located elements, and give each param its share."""
        chosen = np.flatnonzero(batch.counts)
        if not chosen.size:
            return
        write, lanes = batch.stage(memory)
        rows = batch.rows[chosen]
        own = [self._rows[row] for row in rows.tolist()]
        counts = batch.counts[chosen]
        elements = DeviceRows(
            *([row.flat for row in own], self._addresses[rows], [row.live for row in own]),
            *(counts, write.offsets, write.offsets_lease),
        )
        old = batch.stream.begin_download(write.old)
        launched = DeviceBatch.as_read(elements, write.new, write.old, old, memory)
        yield Write(elements, write.new, "", True, old, batch=launched, lease=write.new_lease)
        sums = lanes.cpu().numpy().view(np.uint64)[chosen].tolist()
        numbers = batch.numbers[chosen].tolist()
        for place, (number, count, row) in enumerate(
            zip(numbers, counts.tolist(), own, strict=True)
        ):
            param, change = params[number], Digest(*sums[place])
            param.rows.append((elements, place))
            if row.counted:
                param.counted += count
                param.change += change
            if row.replicas is not None:
                known = param.replicas.get(row.replicas, Digest.ZERO)
                param.replicas[row.replicas] = known + change


class _Elements(NamedTuple):
    """The staged elements of a batch."""

    offsets: torch.Tensor
    offsets_lease: Any
    new: torch.Tensor
    new_lease: Any
    old: torch.Tensor


class _Batch:
    """Pieces of one kind that are staged together, an item for each row of each.

    Attributes:
        rows, numbers, counts: of the items: the row, which of the part's params it is of, and how
            many elements are on this rank; int64 [items].
    """

    def __init__(
        self, part: UnpackedPart, kind: _Kind, pieces: Sequence[_Piece], stream: StagingStream
    ) -> None:
        self._part, self._kind, self._pieces, self.stream = part, kind, pieces, stream
        several = np.array([piece.tensor.rows for piece in pieces], np.int64)
        first = np.array([piece.tensor.first for piece in pieces], np.int64)
        self._piece = np.repeat(np.arange(len(pieces)), several)
        before = np.cumsum(several) - several
        self.rows = (first - before)[self._piece] + np.arange(self._piece.size)
        self.numbers = np.array([piece.number for piece in pieces], np.int64)[self._piece]
        self.counts: _Int64s = np.zeros(0, np.int64)

    def locate(self, boxes: Any) -> _Batch | None:
        """Find the elements; return None if a stream is not what the manifest says."""
        from engine_ext.kernels.triton import gap_expand

        pieces, streams, entries = self._pieces, self._part.streams, self._part.manifest.params
        spans = np.array([piece[2:] for piece in pieces], np.int64)
        width = np.array([entries[piece.number].pos_width for piece in pieces], np.int64)
        numels = np.array([entries[piece.number].numel for piece in pieces], np.int64)
        nnz = np.array([entries[piece.number].nnz for piece in pieces], np.int64)
        start, stop, after, begin, end = spans.T
        sizes, counts = stop - start, end - begin
        whole = np.array([streams[piece.number].size for piece in pieces], np.int64) // width
        counted = np.where(stop == whole, end == nnz, end <= nnz)
        sent, places = _sent(self._part, pieces, width, whole)
        if not counted.all() or not places:
            return None
        values_at = np.cumsum(counts) - counts
        of, programs = self._piece, -(-sizes // gap_expand.BLOCK)
        ends = np.cumsum(programs[of])
        begins = ends - programs[of]
        low, high, upper, stride, skip = (one[of] for one in places)
        columns = (
            *(self.rows, low, high, after[of], numels[of], values_at[of], counts[of]),
            *(begins, ends - 1, stride, upper, skip),
        )
        item = np.repeat(np.arange(of.size), programs[of])
        done = (np.arange(item.size) - begins[item]) * gap_expand.BLOCK
        each = item, done, np.minimum(sizes[of][item] - done, gap_expand.BLOCK)
        symbols = self.stream.upload(sent, torch.uint8)
        tables = [
            self.stream.upload([np.stack(one, 1).reshape(-1)], torch.int64).view(-1, len(one))
            for one in (each, columns)
        ]
        self._located = gap_expand.locate(boxes, symbols, *tables)
        # The values are copied while the kernels run.
        values = [self._part.values[p.number][p.first : p.end] for p in pieces]
        self._values = self.stream.upload(values, self._kind.bits)
        found = self._located.found.cpu().numpy()
        self.counts = found[:, 2]
        if (found[:, 0] != counts[of]).any() or (after[of] + found[:, 1] > numels[of]).any():
            return None
        return self

    def stage(self, memory: DeviceMemory) -> tuple[_Elements, torch.Tensor]:
        """Read the old bits and make the new ones; with them come the digests' sums.

        Nothing waits for the device.
        """
        from engine_ext.kernels.triton import gap_expand

        kind, count = self._kind, int(self.counts.sum())
        offsets, offsets_lease = memory.room(count, kind.offsets, kind.device)
        new, new_lease = memory.room(count, kind.bits, kind.device)
        old = torch.empty(count, dtype=kind.bits, device=kind.device)
        adds = self._part.manifest.encoding == DIFFERENCES
        factors = device_factors(kind.device)
        lanes = gap_expand.stage(
            *(self._located, self._values, factors, offsets, new, old), adds=adds
        )
        return _Elements(offsets, offsets_lease, new, new_lease, old), lanes


def _sent(
    part: UnpackedPart, pieces: Sequence[_Piece], width: _Int64s, whole: _Int64s
) -> tuple[list[NDArray[np.uint8]], tuple[_Int64s, ...]]:
    """Return the symbols of pieces as they are sent to the device, and where the kernels find them.

    Args:
        width: bytes of each's symbols.
        whole: how many symbols the param of each has.

    Returns:
        The bytes, and the columns of an item that say where they are, for each piece; no columns if
        a stream ends within a gap.
    """
    stop = np.array([piece.stop for piece in pieces], np.int64)
    sizes = stop - np.array([piece.start for piece in pieces], np.int64)
    if part.manifest.encoding not in PACKED_ENCODINGS:
        raw = [
            part.streams[piece.number][piece.start * each : piece.stop * each]
            for piece, each in zip(pieces, width.tolist(), strict=True)
        ]
        at = np.cumsum(sizes * width) - sizes * width
        none = np.full_like(at, -1)
        return raw, (at, at + 1, np.where(width == 4, at + 2, none), width, none)
    wide = width == 2
    low, high = [], []
    for piece, is_wide in zip(pieces, wide.tolist(), strict=True):
        stream = part.streams[piece.number]
        low.append(stream[piece.start : piece.stop])
        if is_wide:
            half = stream.size // 2
            high.append(stream[half + piece.start : half + piece.stop])
    last = np.array([symbols[-1] for symbols in low], np.int64)
    last[wide] += 256 * np.array([symbols[-1] for symbols in high], np.int64)
    skip = np.where(wide, skip_symbol(2), skip_symbol(1))
    if ((last == skip) & (stop == whole)).any():
        return [], ()
    high_sizes = np.where(wide, sizes, 0)
    high_at = sizes.sum() + np.cumsum(high_sizes) - high_sizes
    none = np.full_like(sizes, -1)
    places = (
        np.cumsum(sizes) - sizes,
        np.where(wide, high_at, none),
        none,
        np.ones_like(sizes),
        skip,
    )
    return low + high, places


def _kind_of(targets: Sequence[Target], dtype: torch.dtype) -> _Kind | None:
    """Return the kind of a tensor's targets, or None if they do not fit the table."""
    kinds = set()
    for number, target in enumerate(targets):
        on_device = target.host is None and runs_kernels(target.flat.device)
        plain = target.first == number and target.dtype == dtype and not target.segment.recast
        if not on_device or not plain or target.locator.box is None:
            return None
        offsets = torch.int32 if target.locator.offset_dtype is np.int32 else torch.int64
        kinds.add(_Kind(target.flat.device, target.flat.dtype, offsets))
    return kinds.pop() if len(kinds) == 1 else None


def _tables_of(
    targets: Sequence[Target], seeds: Sequence[tuple[int, int]]
) -> tuple[_Int64s, _Int64s]:
    """Return the rows and the dimensions that the kernels read."""
    rows = np.zeros((len(targets), 8), np.int64)
    rows[:, 6:] = np.array(seeds, np.uint64).view(np.int64)
    dims = [np.zeros((1, 3), np.int64)]  # not empty: the kernels get its address
    at = 1
    for row, target in enumerate(targets):
        box = target.locator.box
        assert box is not None
        dims.append(box.dims)
        rows[row, :6] = target.flat.data_ptr(), box.start, box.end, box.offset, at, len(box.dims)
        at += len(box.dims)
    return rows, np.concatenate(dims)
