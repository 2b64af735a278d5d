"""The staging table of devices: a row for each live box that a certified tensor is written to.

The gaps and values of a part cross the bus as they were sent. Kernels expand the gaps,
find the elements, read their old values, digest the change and make the new values, for all tensors
of a batch at once. On the host, tensors are looked up by name; all else is arithmetic on columns
that have a row for each tensor.

The old values are copied to pinned memory while the next batch is staged; an undo needs them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from engine_ext.dtypes import NAME_OF_TORCH
from engine_ext.format import (
    DIFFERENCES,
    PACKED_ENCODINGS,
    UnpackedPart,
    device_factors,
    loops,
    skip_symbol,
    split_positions,
)
from engine_ext.kernels import StagingStream
from engine_ext.kernels.triton import runs_kernels
from engine_ext.placement import (
    DeviceBatch,
    DeviceMemory,
    DeviceRows,
    LiveTensors,
    Placed,
    Plan,
    Status,
    Target,
)
from engine_ext.sync.staged import NO_PARAMS, StreamedParams, Write

logger = logging.getLogger(__name__)

# Symbols of a batch. It takes 5 bytes of the device for each changed bf16 element meanwhile.
_BATCH_SYMBOLS: Final = 1 << 22
# Batches of all threads: the host makes one ready while the device works on the other.
_BATCHES_AT_ONCE: Final = 2
_STREAMED: Final = frozenset({"deltas", "deltas_zstd", "gap8_exp", "gap8_ulp"})

_Int64s = NDArray[np.int64]


class _Kind(NamedTuple):
    """What the elements of a batch have in common."""

    device: torch.device
    bits: torch.dtype
    offsets: torch.dtype


class _Tensor(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A tensor that has a row in the columns of tensors."""

    number: int
    placed: Placed
    shape: tuple[int, ...]
    dtype: str


class _Tensors(NamedTuple):
    """The consecutive rows of each tensor, int64 [tensors] each.

    Attributes:
        kinds: the number of its kind; -1 if only other ranks hold it.
        first, rows: its first row, and how many it has.
    """

    kinds: _Int64s
    first: _Int64s
    rows: _Int64s


class _Rows(NamedTuple):
    """Data with which the elements of rows are delivered, [rows] each.

    Attributes:
        live: the number of the live tensor.
        counted: whether this rank counts the elements.
        holders: the number of the ranks that hold the same elements; -1 if there are no others.
    """

    live: _Int64s
    counted: NDArray[np.bool_]
    holders: _Int64s


class _Pieces(NamedTuple):
    """Symbols of params, see `engine_ext.format.split_positions`; int64 [pieces] each.

    Attributes:
        number: which of the part's params.
        tensor: which tensor it is of.
    """

    number: _Int64s
    tensor: _Int64s
    start: _Int64s
    stop: _Int64s
    after: _Int64s
    first: _Int64s
    end: _Int64s


class StagedStreams(NamedTuple):
    """The params of a part that were staged from their streams.

    Attributes:
        others: the numbers of the part's other params; None: none was staged.
    """

    others: list[int] | None
    params: StreamedParams
    writes: list[Write]


NO_STREAMS: Final = StagedStreams(None, NO_PARAMS, [])


class StreamTable:
    """Stages gaps of elements on devices; made at start-up.

    It has the addresses of live tensors, and keeps their memory.

    Args:
        plan: of this rank. The table has those of its digested and exact tensors whose boxes are on
            a device that runs the kernels and have no copies, are not moved or tied; and those that
            only other ranks hold.
    """

    def __init__(self, plan: Plan) -> None:
        self._turns = threading.Semaphore(_BATCHES_AT_ONCE)
        self._names: dict[str, _Tensor] = {}
        self._kinds: list[_Kind] = []
        targets: list[Target] = []
        seeds: list[tuple[int, int]] = []
        tensors: list[tuple[int, int, int]] = []
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
            self._names[name] = _Tensor(len(tensors), placed, spec.shape, dtype)
            tensors.append((_number_of(kind, self._kinds), len(targets), len(own)))
            targets += own
            seeds += [loops.digest_seeds(name)] * len(own)
        if not targets:
            self._names.clear()
            return
        self._tensors = _Tensors(*np.array(tensors, np.int64).T)
        self._live, self._rows, self._holders = _rows_of(targets, plan.rank)
        from engine_ext.kernels.triton import gap_expand

        tables = _tables_of(targets, seeds)
        self._boxes = {
            device: gap_expand.Boxes(*(torch.from_numpy(t).to(device) for t in tables))
            for device in {target.flat.device for target in targets}
        }

    def stage(self, part: UnpackedPart, memory: DeviceMemory) -> StagedStreams:
        """Stage the params of a part that have rows here; several threads can do so at once.

        All of them or none: if a stream is not as the manifest says, staging by the host has the
        error; if memory on the device does not suffice, the host's way needs less.
        """
        numbers, tensors = self._find(part)
        if not numbers.size:
            return NO_STREAMS
        entries, columns = part.manifest.params, part.columns
        names = [entries[number].name for number in numbers.tolist()]
        params = StreamedParams(names, columns.nnz[numbers], columns.numel[numbers])
        writes = list[Write]()
        streams: dict[torch.device, StagingStream] = {}
        try:
            # An exception holds memory that kernels still use: they end before it goes.
            with contextlib.ExitStack() as ends:
                for kind, pieces in self._batches(part, numbers, tensors):
                    if kind.device not in streams:
                        streams[kind.device] = StagingStream(kind.device)
                        ends.callback(streams[kind.device].wait)
                    stream = streams[kind.device]
                    with self._turns, stream.current():
                        batch = _Batch(part, kind, pieces, self._tensors, stream)
                        if not batch.locate(self._boxes[kind.device]):
                            return NO_STREAMS
                        places = np.searchsorted(numbers, batch.numbers)
                        writes += self._deliver(batch, places, params, memory)
                        del batch  # before the next one takes memory
        except RuntimeError:
            logger.warning("delta updates: a part is staged by the host", exc_info=True)
            return NO_STREAMS
        left = np.ones(len(entries), np.bool_)
        left[numbers] = False
        return StagedStreams(np.flatnonzero(left).tolist(), params, writes)

    def _find(self, part: UnpackedPart) -> tuple[_Int64s, _Int64s]:
        """Return the numbers of the params that have rows here, ascending, and of their tensors."""
        manifest, columns, find = part.manifest, part.columns, self._names.get
        if manifest.full or manifest.encoding not in _STREAMED or not self._names:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        # The host path refuses a tensor that does not fit, or cannot be updated any more.
        wide, lost = part.values_dtype, Status.UNCERTIFIED
        found = [
            own.number
            if (own := find(entry.name)) is not None
            and own.shape == entry.shape
            and own.dtype == entry.dtype
            and wide in (None, own.dtype)
            and own.placed.status is not lost
            else -1
            for entry in manifest.params
        ]
        tensors = np.array(found, np.int64)
        symbols, rest = np.divmod(_sizes(part), np.maximum(columns.pos_width, 1))
        fits = (tensors >= 0) & (columns.nnz > 0) & (columns.pos_width > 0)
        numbers = np.flatnonzero(fits & (rest == 0) & (symbols >= columns.nnz))
        return numbers, tensors[numbers]

    def _batches(
        self, part: UnpackedPart, numbers: _Int64s, tensors: _Int64s
    ) -> Iterator[tuple[_Kind, _Pieces]]:
        """Yield the pieces that are staged together."""
        kinds = self._tensors.kinds[tensors]
        for number, kind in enumerate(self._kinds):
            own = kinds == number
            pieces = _divided(part, numbers[own], tensors[own])
            until, start = np.cumsum(pieces.stop - pieces.start), 0
            while start < until.size:
                most = _BATCH_SYMBOLS + (until[start - 1] if start else 0)
                stop = max(start + 1, int(np.searchsorted(until, most, "right")))
                yield kind, _Pieces(*(column[start:stop] for column in pieces))
                start = stop

    def _deliver(
        self, batch: _Batch, places: _Int64s, params: StreamedParams, memory: DeviceMemory
    ) -> Iterator[Write]:
        """Stage the located elements, and give the params at these places their shares."""
        chosen = np.flatnonzero(batch.counts)
        if not chosen.size:
            return
        write, lanes = batch.stage(memory)
        rows, places = batch.rows[chosen], places[chosen]
        live, counted, holders = (column[rows] for column in self._rows)
        elements = DeviceRows(
            *(self._live, live, batch.counts[chosen], write.offsets, write.offsets_lease)
        )
        old = batch.stream.begin_download(write.old)
        launched = DeviceBatch.as_read(elements, write.new, write.old, old, memory)
        yield Write(elements, write.new, "", True, old, batch=launched, lease=write.new_lease)
        sums = lanes.cpu().numpy().view(np.uint64)[chosen]
        params.add(elements, places, sums, counted)
        for number in np.unique(holders[holders >= 0]).tolist():
            held = holders == number
            params.add_replicas(self._holders[number], places[held], sums[held])


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
        self,
        part: UnpackedPart,
        kind: _Kind,
        pieces: _Pieces,
        tensors: _Tensors,
        stream: StagingStream,
    ) -> None:
        self._part, self._kind, self._pieces, self.stream = part, kind, pieces, stream
        several, first = tensors.rows[pieces.tensor], tensors.first[pieces.tensor]
        self._piece = np.repeat(np.arange(several.size), several)
        before = np.cumsum(several) - several
        self.rows = (first - before)[self._piece] + np.arange(self._piece.size)
        self.numbers = pieces.number[self._piece]
        self.counts: _Int64s = np.zeros(0, np.int64)

    def locate(self, boxes: Any) -> bool:
        """Find the elements; return False if a stream is not what the manifest says."""
        from engine_ext.kernels.triton import gap_expand

        part, pieces = self._part, self._pieces
        number, _, start, stop, after, begin, end = pieces
        columns = part.columns
        width, numels, nnz = (
            column[number] for column in (columns.pos_width, columns.numel, columns.nnz)
        )
        sizes, counts = stop - start, end - begin
        whole = _sizes(part)[number] // width
        counted = np.where(stop == whole, end == nnz, end <= nnz)
        sent = _sent(part, pieces, width, whole)
        if not counted.all() or sent is None:
            return False
        values_at = np.cumsum(counts) - counts
        of, programs = self._piece, -(-sizes // gap_expand.BLOCK)
        ends = np.cumsum(programs[of])
        begins = ends - programs[of]
        low, high, upper, stride, skip = (one[of] for one in sent.places)
        items = (
            *(self.rows, low, high, after[of], numels[of], values_at[of], counts[of]),
            *(begins, ends - 1, stride, upper, skip),
        )
        item = np.repeat(np.arange(of.size), programs[of])
        done = (np.arange(item.size) - begins[item]) * gap_expand.BLOCK
        each = item, done, np.minimum(sizes[of][item] - done, gap_expand.BLOCK)
        symbols = self.stream.upload(sent.symbols, torch.uint8)
        tables = [
            self.stream.upload([np.stack(one, 1).reshape(-1)], torch.int64).view(-1, len(one))
            for one in (each, items)
        ]
        self._located = gap_expand.locate(boxes, symbols, *tables)
        # The values are copied while the kernels run.
        at, itemsize = part.values.begins[number], self._kind.bits.itemsize
        values = _cut(part.values.whole, at + begin * itemsize, at + end * itemsize)
        self._values = self.stream.upload(values, torch.uint8).view(self._kind.bits)
        found = self._located.found.cpu().numpy()
        self.counts = found[:, 2]
        wrong = (found[:, 0] != counts[of]) | (after[of] + found[:, 1] > numels[of])
        return not wrong.any()

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


class _Sent(NamedTuple):
    """The symbols of pieces as they are sent to the device, and where the kernels find them.

    Attributes:
        symbols: uint8 [bytes] each, one after another.
        places: the columns of an item that say where they are, for each piece.
    """

    symbols: list[NDArray[np.uint8]]
    places: tuple[_Int64s, _Int64s, _Int64s, _Int64s, _Int64s]


def _sent(part: UnpackedPart, pieces: _Pieces, width: _Int64s, whole: _Int64s) -> _Sent | None:
    """Return the symbols of pieces; None if a stream ends within a gap.

    Args:
        width: bytes of each's symbols.
        whole: how many symbols the param of each has.
    """
    data, begin = part.streams.whole, part.streams.begins[pieces.number]
    sizes, none = pieces.stop - pieces.start, np.full_like(width, -1)
    if part.manifest.encoding not in PACKED_ENCODINGS:
        at = np.cumsum(sizes * width) - sizes * width
        symbols = _cut(data, begin + pieces.start * width, begin + pieces.stop * width)
        return _Sent(symbols, (at, at + 1, np.where(width == 4, at + 2, none), width, none))
    wide = width == 2
    # The low bytes of each, and its high bytes if it has some.
    begins = np.stack([begin + pieces.start, begin + np.where(wide, whole + pieces.start, 0)], 1)
    lengths = np.stack([sizes, np.where(wide, sizes, 0)], 1)
    ends = begins + lengths
    last = data[ends[:, 0] - 1] + np.where(wide, data[ends[:, 1] - 1].astype(np.int64) << 8, 0)
    skip = np.where(wide, skip_symbol(2), skip_symbol(1))
    if ((last == skip) & (pieces.stop == whole)).any():
        return None
    at = (np.cumsum(lengths) - lengths.reshape(-1)).reshape(-1, 2)
    places = at[:, 0], np.where(wide, at[:, 1], none), none, np.ones_like(none), skip
    return _Sent(_cut(data, begins.reshape(-1), ends.reshape(-1)), places)


def _cut(whole: NDArray[np.uint8], begins: _Int64s, ends: _Int64s) -> list[NDArray[np.uint8]]:
    """Return some bytes of an array in their order; those that are neighbours are one array."""
    some = begins < ends
    begins, ends = begins[some], ends[some]
    if not begins.size:
        return []
    first = np.flatnonzero(np.concatenate([[True], begins[1:] != ends[:-1]]))
    last = np.append(first[1:], begins.size) - 1
    pairs = zip(begins[first].tolist(), ends[last].tolist(), strict=True)
    return [whole[begin:end] for begin, end in pairs]


def _sizes(part: UnpackedPart) -> _Int64s:
    """Return the bytes of each param's stream."""
    return part.streams.ends - part.streams.begins


def _divided(part: UnpackedPart, numbers: _Int64s, tensors: _Int64s) -> _Pieces:
    """Return the pieces of some params; those of a param that fits a batch are one."""
    widths, nnz = part.columns.pos_width[numbers], part.columns.nnz[numbers]
    sizes, none = _sizes(part)[numbers] // widths, np.zeros_like(numbers)
    rows = np.stack([numbers, tensors, none, sizes, none, none, nnz], 1)
    large = np.flatnonzero(sizes > _BATCH_SYMBOLS)
    if large.size:
        found = [rows[sizes <= _BATCH_SYMBOLS]]
        streams = part.streams.views(numbers[large].tolist())
        for at, stream in zip(large.tolist(), streams, strict=True):
            pieces = split_positions(
                part.manifest.encoding, stream, int(widths[at]), int(nnz[at]), _BATCH_SYMBOLS
            )
            found.append(np.array([[*rows[at, :2], *piece] for piece in pieces], np.int64))
        rows = np.concatenate(found)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return _Pieces(*np.ascontiguousarray(rows.T))


def _number_of(one: Any, known: list[Any]) -> int:
    """Return the number of an object among those known; it is added if it is new. -1 for None."""
    if one is None:
        return -1
    if one not in known:
        known.append(one)
    return known.index(one)


def _rows_of(
    targets: Sequence[Target], rank: int
) -> tuple[LiveTensors, _Rows, list[tuple[int, ...]]]:
    """Return what the elements of targets are delivered with."""
    keys = [(t.segment.live.name, t.flat.data_ptr(), t.dtype) for t in targets]
    live = dict(zip(keys, targets, strict=True))
    numbers = {key: number for number, key in enumerate(live)}
    holders: list[tuple[int, ...]] = []
    shared = [target.ranks if len(target.ranks) > 1 else None for target in targets]
    rows = _Rows(
        np.array([numbers[key] for key in keys], np.int64),
        np.array([target.ranks[0] == rank for target in targets], np.bool_),
        np.array([_number_of(ranks, holders) for ranks in shared], np.int64),
    )
    names, addresses, _ = zip(*live, strict=True)
    flats = [target.flat for target in live.values()]
    return LiveTensors(flats, np.array(addresses, np.int64), names), rows, holders


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
