"""The staging table of host memory: a row for each live box that a certified tensor is written to.

One compiled call locates the elements of a batch of params, a second one reads and digests them. A
batch is many small params or a piece of a large one; a row says where its elements are. For a call
of its own a small param, as an expert's tensor, would give up the interpreter lock and wait for it
again, which takes longer than its elements.

The arrays of a part's elements are cut from two blocks of memory. Memory from the system is cleared
page by page when it is first touched, which takes several times as long as staging takes to fill
it, and numpy asks for huge pages only for large arrays. The undo log keeps the block of offsets and
old bits alive, and not that of the new bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.format import DecodedPart, Digest, ParamDelta, loops
from engine_ext.kernels import (
    AHEAD,
    Bits,
    Offsets,
    array,
    compile_loop,
    made_once,
    made_with_numba,
    memory_at,
    prefetch,
    register_intrinsics,
)
from engine_ext.placement import HostElements, Plan, Target, box_loop
from engine_ext.sync.staged import StagedParam, Write, copies_differ

_gather_change, _digest_sums, _box_loop = loops.gather_change, loops.digest_sums, box_loop

_CUT_ELEMENTS: Final = 1 << 12  # of more elements only those between the target's ends are copied
_COPIED_ELEMENTS: Final = 1 << 16  # a param with more has batches of its own, and is not copied
_BATCH_ELEMENTS: Final = 1 << 17  # their copies stay in a core's cache
_INT32_ELEMENTS: Final = 1 << 31  # of so many an int32 is the index
_ALIGNMENT_BYTES: Final = 64  # of a cache line, which no two threads should write to

# Columns of the table.
_START, _END = 0, 1  # first flat index of the box, and one more than its last
_OFFSET = 2  # of its first element in live memory
_DIMS, _DIMS_END = 3, 4  # where its dimensions are in the array of all
_IS_RUN = 5  # whether it is one run in the checkpoint and in live memory
_SHIFT = 6  # index minus offset of a run
_ADDRESS, _SIZE = 7, 8  # of the live tensor, which has so many elements
_COLUMNS: Final = 9


class _Kind(NamedTuple):
    """Bytes of an element, of a flat index and of an offset: a batch has one kind of rows."""

    width: int
    place: int
    offset: int


class _Tensor(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The consecutive rows of one tensor, from row `first` on."""

    kind: _Kind
    first: int
    rows: int


class _Row(NamedTuple):
    """Data with which a row's elements are delivered.

    Attributes:
        host, live: the live tensor's memory, and its name.
        counted: whether this rank counts the elements.
        replicas: the ranks that hold the same elements, if there are others.
        copy_of: the row of the same tensor that has the same elements, if there is one before it.
    """

    host: Bits
    live: str
    counted: bool
    replicas: tuple[int, ...] | None
    copy_of: int | None


class Batch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Elements of a part that are staged together.

    Attributes:
        numbers: which of the part's params they are.
        start, stop: which of the only param's values they are; None if they are whole params.
    """

    kind: _Kind
    numbers: list[int]
    tensors: list[_Tensor]
    start: int | None = None
    stop: int | None = None


class LocatedBatch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Which elements of a batch are on this rank; an item for each row of each param.

    Attributes:
        rows: of the items, int64 [items].
        indices, values: of all params, one after another; copies if there are several.
        starts: of an item whose row is a run, the number of its first element in `indices`; of
            another one, where its elements begin in `positions` and `offsets`; int64 [items].
        counts: how many are in the row's box, int64 [items].
        positions: numbers of the elements that are in boxes which are no runs, int32 [n].
        offsets: where these are in live memory, int32 or int64 [n].
    """

    batch: Batch
    rows: NDArray[np.int64]
    indices: NDArray[Any]
    values: Bits
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    positions: NDArray[np.int32]
    offsets: Offsets

    @property
    def count(self) -> int:
        """How many elements are on this rank."""
        return int(self.counts.sum())


class HostTable:
    """Stages sparse params in host memory; made at start-up.

    It has the addresses of live tensors, and keeps their memory.

    Args:
        plan: of this rank. The table has those of its digested tensors whose live tensors have the
            checkpoint's own dtype, and whose boxes have no copies and are not moved. Without numba
            it has none.
    """

    def __init__(self, plan: Plan) -> None:
        self._tensors: dict[str, _Tensor] = {}
        self._targets: list[Target] = []
        self._rows: list[_Row] = []
        seeds = []
        for name, targets in plan.targets.items():
            spec = plan.placement[name].spec
            offsets = {np.dtype(target.locator.offset_dtype).itemsize for target in targets}
            fits = len(offsets) == 1 and all(_fits(target, spec.dtype) for target in targets)
            if name not in plan.digested or not fits:
                continue
            index = 4 if math.prod(spec.shape) <= _INT32_ELEMENTS else 8
            kind, first = _Kind(spec.dtype.itemsize, index, offsets.pop()), len(self._rows)
            self._tensors[name] = _Tensor(kind, first, len(targets))
            self._targets += targets
            self._rows += _rows_of(targets, first, plan.rank)
            seeds += [loops.digest_seeds(name)] * len(targets)
        self._seeds = np.array(seeds, np.uint64).reshape(-1, 2)
        self._table, self._dims = _table_of(self._targets)
        self._one_row_each = len(self._rows) == len(self._tensors)
        # Compiles the loops, which the first sync would otherwise wait for.
        kinds = {tensor.kind for tensor in self._tensors.values()}
        compiled: list[Any] = [_locate_loop(kind.place, kind.offset) for kind in kinds]
        compiled += [_gather_loop(kind, differs) for kind in kinds for differs in (False, True)]
        if None in compiled:
            self._tensors.clear()

    def batches(self, part: DecodedPart) -> Iterator[Batch]:
        """Yield the batches of a part; every param that has rows here is in some, others in none.

        The values of a batch are all differences or all new bits, as a part's are.
        """
        if part.manifest.full:
            return
        found: dict[_Kind, Batch] = {}
        room: dict[_Kind, int] = {}
        for number, delta in enumerate(part.deltas):
            tensor = self._tensors.get(delta.name)
            if tensor is None or delta.indices is None or delta.cleared is not None:
                continue
            kind, size = tensor.kind, delta.values.size
            if size > _COPIED_ELEMENTS:
                yield from self._pieces(number, delta, tensor)
            elif size:
                batch = found.get(kind)
                if batch is not None and size > room[kind]:
                    yield batch
                    batch = None
                if batch is None:
                    batch = found[kind] = Batch(kind, [], [])
                    room[kind] = _BATCH_ELEMENTS
                batch.numbers.append(number)
                batch.tensors.append(tensor)
                room[kind] -= size
        yield from found.values()

    def _pieces(self, number: int, delta: ParamDelta, tensor: _Tensor) -> Iterator[Batch]:
        """Yield the pieces of a large param that might be on this rank."""
        assert delta.indices is not None
        own = self._table[tensor.first : tensor.first + tensor.rows]
        first, end = own[:, _START].min(), own[:, _END].max()
        for start in range(0, delta.nnz, _BATCH_ELEMENTS):
            stop = min(start + _BATCH_ELEMENTS, delta.nnz)
            if delta.indices[start] < end and delta.indices[stop - 1] >= first:
                yield Batch(tensor.kind, [number], [tensor], start, stop)

    def locate(self, part: DecodedPart, batch: Batch) -> LocatedBatch:
        """Find the elements of a batch; several threads can do so at once."""
        kind, piece = batch.kind, slice(batch.start, batch.stop)
        whole = batch.start is None
        own_indices, own_values = [], []
        for number, tensor in zip(batch.numbers, batch.tensors, strict=True):
            delta = part.deltas[number]
            places, values = delta.indices, delta.values
            assert places is not None
            if not whole:
                places, values = places[piece], values[piece]
            elif places.size > _CUT_ELEMENTS and tensor.rows == 1:
                within = self._targets[tensor.first].locator.within(places)
                places, values = places[within], values[within]
            if places.itemsize != kind.place:
                places = places.astype(f"i{kind.place}")
            own_indices.append(places)
            own_values.append(values)
        indices, values = _joined(own_indices), _joined(own_values)
        sizes = [places.size for places in own_indices]
        rows = np.array([tensor.first for tensor in batch.tensors], np.int64)
        ends = np.cumsum(sizes, dtype=np.int64)
        begins = ends - sizes
        if not self._one_row_each:
            several = [tensor.rows for tensor in batch.tensors]
            before = np.cumsum(several) - several
            ends, begins = np.repeat(ends, several), np.repeat(begins, several)
            rows = np.repeat(rows - before, several) + np.arange(ends.size)
        starts, counts = np.empty((2, rows.size), np.int64)
        most = 0 if self._table[rows, _IS_RUN].all() else int((ends - begins).sum())
        positions, offsets = np.empty(most, np.int32), np.empty(most, f"i{kind.offset}")
        loop = _locate_loop(kind.place, kind.offset)
        assert loop is not None
        found = loop(
            *(rows, begins, ends, self._table, self._dims, indices),
            *(starts, counts, positions, offsets),
        )
        positions, offsets = positions[:found].copy(), offsets[:found].copy()
        return LocatedBatch(batch, rows, indices, values, starts, counts, positions, offsets)

    def gather(
        self,
        part: DecodedPart,
        located: LocatedBatch,
        arrays: tuple[Offsets, Bits, Bits],
        params: Sequence[StagedParam],
        *,
        undo: bool,
    ) -> None:
        """Read the old values of a batch and digest its change; several threads can do so at once.

        Args:
            arrays: of `allocate`.
            params: one for each of the batch's numbers; they get their writes and digests.
            undo: whether the old values are kept for an undo.

        Raises:
            BaseMismatch: copies of an element on this rank differ.
        """
        differs = part.deltas[located.batch.numbers[0]].differences
        loop = _gather_loop(located.batch.kind, differs)
        assert loop is not None
        offsets, old, new = arrays
        places = np.empty(located.positions.size, located.indices.dtype)
        lanes = np.empty((located.rows.size, 2), np.uint64)
        loop(
            *(located.rows, self._table, self._seeds, loops.DIGEST_FACTORS),
            *(located.starts, located.counts, located.positions, located.offsets),
            *(located.indices, located.values, True if differs else None),
            *(places, offsets, old, new, lanes),
        )
        if not self._one_row_each:
            tensors = zip(params, located.batch.tensors, strict=True)
            params = [param for param, tensor in tensors for _ in range(tensor.rows)]
        rows, counts, start = located.rows.tolist(), located.counts.tolist(), 0
        old_of: dict[int, Bits] = {}
        for param, row, count, sums in zip(params, rows, counts, lanes.tolist(), strict=True):
            if not count:
                continue
            own = slice(start, start + count)
            start += count
            host, live, counted, replicas, copy_of = self._rows[row]
            before = old[own]
            param.writes.append(
                Write(HostElements(host, offsets[own]), new[own], live, undo, before)
            )
            if not self._one_row_each:
                old_of[row] = before
                if copy_of is not None:
                    if not np.array_equal(before, old_of[copy_of]):
                        raise copies_differ(param.name)
                    continue
            change = Digest(*sums)
            if counted:
                is_first = param.change is Digest.ZERO
                param.counted += count
                param.change = change if is_first else param.change + change
            if replicas is not None:
                known = param.replicas.get(replicas)
                param.replicas[replicas] = change if known is None else known + change


def allocate(batches: Sequence[LocatedBatch]) -> list[tuple[Offsets, Bits, Bits]]:
    """Return uninitialised arrays for the offsets, old and new bits of each located batch."""
    kept, sent = _Block(), _Block()
    for located in batches:
        count, bits = located.count, located.values.dtype
        kept.add(count, located.offsets.dtype)
        kept.add(count, bits)
        sent.add(count, bits)
    undo, new = iter(kept.arrays()), iter(sent.arrays())
    return [(next(undo), next(undo), next(new)) for _ in batches]


class _Block:
    """Arrays in one block of memory."""

    def __init__(self) -> None:
        self._size = 0
        self._views: list[tuple[int, int, np.dtype[Any]]] = []

    def add(self, count: int, dtype: np.dtype[Any]) -> None:
        """Add an array of `count` elements."""
        nbytes = count * dtype.itemsize
        self._views.append((self._size, nbytes, dtype))
        self._size += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def arrays(self) -> list[NDArray[Any]]:
        """Return the arrays in the order they were added."""
        whole = np.empty(self._size, np.uint8)
        return [whole[at : at + nbytes].view(dtype) for at, nbytes, dtype in self._views]


def _fits(target: Target, dtype: Any) -> bool:
    """Return whether a target can be a row: one box of aligned host memory, of this dtype."""
    in_place = target.locator.box is not None and target.dtype == dtype
    return in_place and target.host is not None and target.host.flags.aligned


def _rows_of(targets: Sequence[Target], first: int, rank: int) -> Iterator[_Row]:
    for number, target in enumerate(targets):
        assert target.host is not None
        replicas = target.ranks if len(target.ranks) > 1 else None
        copy_of = None if target.first == number else first + target.first
        live = target.segment.live.name
        yield _Row(target.host, live, target.ranks[0] == rank, replicas, copy_of)


def _table_of(targets: Sequence[Target]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the table, [rows, columns], and the dimensions that it refers to."""
    table = np.zeros((len(targets), _COLUMNS), np.int64)
    dims = [np.empty(0, np.int64)]
    at = 0
    for row, target in enumerate(targets):
        box, shift = target.locator.box, target.locator.shift
        assert box is not None
        if shift is None:
            dims.append(box.dims.reshape(-1))
        end = at + dims[-1].size if shift is None else at
        address, size = target.flat.data_ptr(), target.flat.numel()
        table[row] = *box[:3], at, end, shift is not None, shift or 0, address, size
        at = end
    return table, np.concatenate(dims)


def _joined(arrays: Sequence[Any]) -> Any:
    """Return arrays, [n] of one dtype, one after another; contiguous."""
    return np.ascontiguousarray(arrays[0]) if len(arrays) == 1 else np.concatenate(arrays)


def _locate_all(
    rows: Any,
    begins: Any,
    ends: Any,
    table: Any,
    dims: Any,
    indices: Any,
    starts: Any,
    counts: Any,
    positions: Any,
    offsets: Any,
) -> Any:
    """Compiled: fill the last four arrays; return how much of the last two is filled."""
    at = np.int64(0)
    for k in range(rows.size):
        row, begin, end = rows[k], begins[k], ends[k]
        first = begin + np.searchsorted(indices[begin:end], table[row, _START])
        last = begin + np.searchsorted(indices[begin:end], table[row, _END])
        if table[row, _IS_RUN]:
            starts[k], counts[k] = first, last - first
            continue
        own = dims[table[row, _DIMS] : table[row, _DIMS_END]]
        found, places = positions[at:], offsets[at:]
        count = _box_loop(
            *(indices[first:last], table[row, _START], table[row, _OFFSET], own, found, places)
        )
        for number in range(count):
            found[number] += first
        starts[k], counts[k] = at, count
        at += count
    return at


@made_once
def _register() -> None:
    """Register what the loops call with numba; ImportError if it is not installed."""
    from numba.extending import register_jitable

    register_intrinsics()
    loops.register()
    register_jitable(_box_loop)


@made_with_numba
def _locate_loop(types: Any, index: int, offset: int) -> Callable[..., int]:
    """Compile the loop for indices and offsets of so many bytes; None without numba."""
    _register()
    words, out = array(types, "int64"), array(types, "int64", readonly=False)
    arguments = (
        *(words, words, words, types.Array(types.int64, 2, "C"), words),
        *(array(types, f"int{8 * index}"), out, out),
        *(array(types, f"int{8 * n}", readonly=False) for n in (4, offset)),
    )
    return compile_loop(_locate_all, types.int64(*arguments))


def _gather_all(
    rows: Any,
    table: Any,
    seeds: Any,
    factors: Any,
    starts: Any,
    counts: Any,
    positions: Any,
    found: Any,
    indices: Any,
    values: Any,
    differences: Any,
    places: Any,
    offsets: Any,
    old: Any,
    new: Any,
    lanes: Any,
) -> None:
    """Compiled: fill the last four arrays; `places` is room for indices.

    `differences` is None or True, so that one of two loops is compiled.
    """
    begin = np.int64(0)
    for k in range(rows.size):
        row = rows[k]
        end, first = begin + counts[k], starts[k]
        live = memory_at(np.uint64(table[row, _ADDRESS]), table[row, _SIZE], new)
        where, was, now = offsets[begin:end], old[begin:end], new[begin:end]
        last = first + counts[k]
        if table[row, _IS_RUN]:
            own, sent = indices[first:last], values[first:last]
            sums = _gather_change(
                *(live, table[row, _SHIFT], seeds[row, 0], seeds[row, 1], factors),
                *(own, sent, differences, where, was, now),
            )
        else:
            ahead = max(np.int64(0), counts[k] - 1)
            for j in range(counts[k]):
                prefetch(live, found[first + min(j + AHEAD, ahead)])
                position, offset = positions[first + j], found[first + j]
                places[first + j], where[j], was[j] = indices[position], offset, live[offset]
                after = values[position]
                if differences is not None:
                    after = live.dtype.type(after + live[offset])
                now[j] = after
            sums = _digest_sums(
                *(seeds[row, 0], seeds[row, 1], factors, places[first:last], now, was)
            )
        lanes[k, 0], lanes[k, 1] = sums
        begin = end


@made_with_numba
def _gather_loop(types: Any, kind: _Kind, differences: bool) -> Callable[..., None]:
    """Compile the loop for a kind of rows; None without numba."""
    _register()
    bits, places, where = (
        f"{name}{8 * size}" for name, size in zip(("uint", "int", "int"), kind, strict=True)
    )
    out, words = array(types, bits, readonly=False), array(types, "int64")
    table, lanes = types.Array(types.int64, 2, "C"), types.Array(types.uint64, 2, "C")
    arguments = (
        *(words, table, lanes, array(types, "uint64")),
        *(words, words, array(types, "int32"), array(types, where)),
        *(array(types, places), array(types, bits)),
        types.boolean if differences else types.none,
        *(array(types, places, readonly=False), array(types, where, readonly=False)),
        *(out, out, lanes),
    )
    return compile_loop(_gather_all, types.void(*arguments))
