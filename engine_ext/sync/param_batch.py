"""Stage many sparse params in two compiled calls: one finds their elements, one reads them.

For a call of its own a param gives up the interpreter lock and waits for it again, which takes
longer than its elements if there are not many thousand of them, as in an expert's tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

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
    made_with_numba,
    memory_at,
    prefetch,
    register_intrinsics,
)
from engine_ext.placement import HostElements, LocatedElements, Plan, TargetTable, fits_table
from engine_ext.sync.pieces import is_one_piece
from engine_ext.sync.staged import StagedParam, Write

_gather_change, _digest_sums = loops.gather_change, loops.digest_sums

_CUT: Final = 1 << 12  # elements of which only those between the target's ends are copied
_GROUP: Final = 1 << 17  # elements of a batch: their copies stay in a core's cache


class Batch(msgspec.Struct, eq=False, gc=False):
    """Params of a part that are staged together.

    Attributes:
        numbers: which of the part's params they are.
        rows: of their targets in the table.
        indices, values: of all params, one after another, as far as they may be on this rank;
            copies unless it is one param.
        located: which of them are on this rank.
    """

    numbers: list[int]
    rows: NDArray[np.int64]
    indices: NDArray[np.int32]
    values: Bits
    located: LocatedElements

    @property
    def count(self) -> int:
        """How many elements are on this rank."""
        return int(self.located.counts.sum())


class Batcher:
    """Stages params in batches.

    Args:
        plan: of this rank; of its tensors a batch has those that are one box of one live tensor in
            host memory, in the checkpoint's own dtype, and are digested.
    """

    def __init__(self, plan: Plan) -> None:
        self._rank = plan.rank
        alone = {n: t[0] for n, t in plan.targets.items() if len(t) == 1 and n in plan.digested}
        exact = {n: t for n, t in alone.items() if plan.placement[n].spec.dtype == t.dtype}
        self._targets = {n: target for n, target in exact.items() if fits_table(target)}
        self._rows = {name: row for row, name in enumerate(self._targets)}
        self._table = TargetTable([*self._targets.values()])
        seeds = [loops.digest_seeds(name) for name in self._targets]
        self._seeds = np.array(seeds, np.uint64).reshape(-1, 2)
        # Compiles the loops, which the first sync would otherwise wait for.
        widths = {target.flat.itemsize for target in self._targets.values()}
        compiled = [_loop(width, differs) for width in widths for differs in (False, True)]
        self._compiled = None not in compiled and self._table.warm_up()

    def chosen(self, part: DecodedPart) -> Iterator[list[int]]:
        """Yield the numbers of the params of a part that are staged in a batch, by batch.

        Those of a batch have one width, and are all differences or all values, as a part's are.
        """
        if part.manifest.full or not self._compiled:
            return
        groups: dict[Any, list[int]] = {}  # by dtype of the bits
        room: dict[Any, int] = {}
        for number, delta in enumerate(part.deltas):
            if delta.name not in self._rows or not _is_small(delta):
                continue
            bits, size = delta.values.dtype, delta.values.size
            if bits in groups and size > room[bits]:
                yield groups.pop(bits)
            if bits not in groups:
                groups[bits], room[bits] = [], _GROUP
            groups[bits].append(number)
            room[bits] -= size
        yield from groups.values()

    def locate(self, part: DecodedPart, numbers: list[int]) -> Batch:
        """Find the elements of some params of a part; several threads may.

        Args:
            numbers: of `chosen`.
        """
        deltas = [part.deltas[number] for number in numbers]
        rows = np.array([self._rows[delta.name] for delta in deltas], np.int64)
        own_indices, own_values = [], []
        for delta in deltas:
            places, values = delta.indices, delta.values
            assert places is not None
            if places.size > _CUT:
                own = self._targets[delta.name].locator.within(places)
                places, values = places[own], values[own]
            own_indices.append(places)
            own_values.append(values)
        ends = np.cumsum([places.size for places in own_indices], dtype=np.int64)
        indices = _joined(own_indices)
        located = self._table.locate(rows, indices, ends)
        return Batch(numbers, rows, indices, _joined(own_values), located)

    def gather(
        self,
        part: DecodedPart,
        batch: Batch,
        arrays: tuple[Offsets, Bits, Bits],
        params: Sequence[StagedParam],
        *,
        undo: bool,
    ) -> None:
        """Read the old values of a batch and digest its change; several threads may.

        Args:
            arrays: for the offsets, int32, the old and the new bits; `batch.count` of each.
            params: of the part; those of the batch get their writes and digests.
            undo: whether the old values are kept for an undo.
        """
        table, located, rows = self._table, batch.located, batch.rows
        first = part.deltas[batch.numbers[0]]
        loop = _loop(batch.values.itemsize, first.differences)
        assert loop is not None
        offsets, old, new = arrays
        places = np.empty(located.positions.size, np.int32)
        lanes = np.empty((rows.size, 2), np.uint64)
        loop(
            *(table.addresses[rows], table.sizes[rows], table.shifts[rows], table.is_run[rows]),
            *(located.starts, located.counts, located.positions, located.offsets),
            *(self._seeds[rows], loops.DIGEST_FACTORS, batch.indices, batch.values),
            *(True if first.differences else None, places, offsets, old, new, lanes),
        )
        start = 0
        for number, count, sums in zip(
            batch.numbers, located.counts.tolist(), lanes.tolist(), strict=True
        ):
            if not count:
                continue
            param, own = params[number], slice(start, start + count)
            start += count
            target = self._targets[param.name]
            assert target.host is not None
            elements, live = HostElements(target.host, offsets[own]), target.segment.live.name
            param.writes.append(Write(elements, new[own], live, undo, old[own]))
            change = Digest(*sums)
            if target.ranks[0] == self._rank:
                param.counted, param.change = count, change
            if len(target.ranks) > 1:
                param.replicas[target.ranks] = change


def _is_small(delta: ParamDelta) -> bool:
    indices = delta.indices
    if indices is None or delta.cleared is not None:
        return False
    return indices.itemsize == 4 and indices.size > 0 and is_one_piece(delta)


def _joined(arrays: Sequence[Any]) -> Any:
    """Return arrays, [n] of one dtype, one after another; contiguous."""
    return np.ascontiguousarray(arrays[0]) if len(arrays) == 1 else np.concatenate(arrays)


def _gather_all(
    addresses: Any,
    sizes: Any,
    shifts: Any,
    is_run: Any,
    starts: Any,
    counts: Any,
    positions: Any,
    found: Any,
    seeds: Any,
    factors: Any,
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
    for k in range(counts.size):
        end, first = begin + counts[k], starts[k]
        live = memory_at(addresses[k], sizes[k], new)
        where, was, now = offsets[begin:end], old[begin:end], new[begin:end]
        last = first + counts[k]
        if is_run[k]:
            own, sent = indices[first:last], values[first:last]
            sums = _gather_change(
                *(live, shifts[k], seeds[k, 0], seeds[k, 1], factors),
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
            sums = _digest_sums(*(seeds[k, 0], seeds[k, 1], factors, places[first:last], now, was))
        lanes[k, 0], lanes[k, 1] = sums
        begin = end


@made_with_numba
def _loop(types: Any, width: int, differences: bool) -> Callable[..., None]:
    """Compile the loop for elements of `width` bytes; None without numba."""
    register_intrinsics()
    loops.register()
    bits = f"uint{8 * width}"
    out, words = array(types, bits, readonly=False), array(types, "int64")
    narrow, lanes = array(types, "int32"), types.Array(types.uint64, 2, "C")
    written = array(types, "int32", readonly=False)
    arguments = (
        *(array(types, "uint64"), words, words, array(types, "boolean")),
        *(words, words, narrow, narrow, lanes, array(types, "uint64"), narrow),
        *(array(types, bits), types.boolean if differences else types.none),
        *(written, written, out, out, lanes),
    )
    return compile_loop(_gather_all, types.void(*arguments))
