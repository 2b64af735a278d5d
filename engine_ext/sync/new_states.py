"""Prove the whole new bytes of a tensor by the checksum that a part declares, before the commit.

A param of ``gap8_xor`` changes bits of the old values, so wrong old values would give wrong new
ones. Its ``new_checksum`` is of the tensor's whole new bytes in the checkpoint's order, and
possibly no rank holds all of these. A rank that holds all elements proves the tensor while it
stages the part. For any other tensor the ranks gather the live elements, a chunk at a time, and one
of them applies the change and hashes. The model is only read, and no rank ever holds the whole of a
gathered tensor.

The commit checks that the elements which it changes are still what they were when staged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine_ext.dtypes import bits_dtype
from engine_ext.errors import BaseMismatch, NotUpdatable
from engine_ext.format import DecodedPart, ParamDelta, state_hash
from engine_ext.kernels import Bits
from engine_ext.placement import Plan, are_whole, as_host, checkpoint_bits
from engine_ext.ranks import Bytes, RankGroup, ReplicaRanks, gather_bytes, run_on_all_or_none
from engine_ext.sync.staged import StagedPart
from engine_ext.sync.thread_pool import ThreadPool

_CHUNK: Final = 1 << 22  # elements that are gathered and hashed at a time
_READ: Final = 1 << 18  # elements found at a time: bounds the memory that their indices take
_SHARE_BYTES: Final = 16 << 20  # of tensors that one call gathers, about

_Run = tuple[NDArray[np.int64], NDArray[np.int64], Bits]  # first positions, lengths, bits of all


def prove_here(part: DecodedPart, plan: Plan, threads: ThreadPool) -> dict[str, ParamDelta]:
    """Prove the tensors of a part that this rank holds whole; return the others' changes, by name.

    Raises:
        BaseMismatch: the new bytes of a tensor would have another checksum.
        NotUpdatable: the package that computes the checksum is not installed.
    """
    found = {delta.name: delta for delta in part.deltas if delta.new_checksum is not None}
    targets = plan.targets
    whole = [d for d in found.values() if are_whole(targets.get(d.name, ()), d.numel)]

    def prove(delta: ParamDelta) -> None:
        state = _NewState(delta)
        for start, stop in _chunks(delta.numel):
            state.take(start, stop, _runs(delta, plan, start, stop, None))
        state.check()

    threads.map(prove, whole)
    for delta in whole:
        del found[delta.name]
    return found


class GatheredProof:
    """Proves the tensors of a sync that no rank holds whole.

    Args:
        ranks: all that vote on a sync. Those of one replica hold all elements.
    """

    def __init__(self, plan: Plan, ranks: RankGroup) -> None:
        self._plan, self._ranks = plan, ranks
        self._group = ranks.group if isinstance(ranks, ReplicaRanks) else ranks

    def is_done(self, staged: Sequence[StagedPart]) -> bool:
        """Return whether all tensors of a sync are proven; the same on every rank."""
        return not _open(staged)

    def prove_some(self, staged: Sequence[StagedPart]) -> None:
        """Gather and hash the next chunks; all ranks must call it, and if one raises, all do.

        Raises:
            BaseMismatch: the new bytes of a tensor would have another checksum.
            NotUpdatable: they cannot be computed.
        """
        try:
            finished = self._gather_some(staged)
        except BaseException:
            for part in _open(staged):
                part.gathering = None  # whoever asks again gets the same answer
            raise
        for part in finished:
            part.proven = True
            part.unproven.clear()

    def _gather_some(self, staged: Sequence[StagedPart]) -> list[StagedPart]:
        """Gather and hash the next chunks; return the parts whose tensors all ranks have proven."""
        members = self._group.all_gather(self._ranks.rank)
        left, errors, finished = _SHARE_BYTES, list[Exception](), list[StagedPart]()
        for part in _open(staged):
            if part.gathering is None:
                everyone = self._ranks.all_gather(sorted(part.unproven))
                # Another rank has proven what is not here.
                names = sorted(set(everyone[0]).intersection(*everyone[1:]))
                part.gathering = deque(
                    GatheredState(part.unproven[name], self._plan, members, number % len(members))
                    for number, name in enumerate(names)
                )
            while part.gathering and left > 0:
                state = part.gathering[0]
                left -= state.gather_chunk(self._group)
                if state.is_done:
                    errors += state.errors[:1]
                    part.gathering.popleft()
            if part.gathering:
                break
            finished.append(part)

        def check() -> None:
            for error in errors:
                raise error

        run_on_all_or_none(self._ranks, check)
        return finished


class GatheredState:
    """One tensor that the ranks of a replica gather on one of them, to hash its new bytes there.

    Args:
        members: the ranks of the replica.
        hasher: which of them hashes.

    Attributes:
        errors: what is wrong as seen on this rank, which must not raise before the others know.
    """

    def __init__(self, delta: ParamDelta, plan: Plan, members: Sequence[int], hasher: int) -> None:
        self.errors = list[Exception]()
        self._delta, self._plan = delta, plan
        self._members, self._hasher = members, hasher
        self._chunks = deque(_chunks(delta.numel))
        self._state: _NewState | None = None
        if members[hasher] == plan.rank:
            try:
                self._state = _NewState(delta)
            except NotUpdatable as error:
                self.errors.append(error)

    @property
    def is_done(self) -> bool:
        """Whether all chunks were gathered."""
        return not self._chunks

    def gather_chunk(self, group: RankGroup) -> int:
        """Gather the next chunk and return its size in bytes; all ranks of the group must call it.

        Does not raise for what is wrong with the tensor, see `errors`.
        """
        start, stop = self._chunks.popleft() if self._chunks else (0, 0)
        own, dtype = list[_Run](), bits_dtype(self._delta.dtype)
        try:
            own += _runs(self._delta, self._plan, start, stop, self._members)
        except Exception as error:
            self.errors.append(error)
        found = gather_bytes(group, _packed(own), self._hasher)
        if found is not None and self._state is not None:
            try:
                self._state.take(start, stop, [_unpacked(raw, dtype) for raw in found])
                if self.is_done:
                    self._state.check()
            except Exception as error:
                self.errors.append(error)
        return (stop - start) * dtype.itemsize


def _open(staged: Sequence[StagedPart]) -> list[StagedPart]:
    return [part for part in staged if part.manifest.proves_states and not part.proven]


class _NewState:
    """Hashes a tensor's new bytes, chunk by chunk.

    Raises:
        NotUpdatable: the package that computes the checksum is not installed.
    """

    def __init__(self, delta: ParamDelta) -> None:
        assert delta.new_checksum is not None
        self._delta, self._missing = delta, delta.numel
        self._format = delta.new_checksum.partition(":")[0]
        self._hash = state_hash(self._format)

    def take(self, start: int, stop: int, runs: Iterable[_Run]) -> None:
        """Apply the change to the old elements of the next chunk, and hash them."""
        delta = self._delta
        assert delta.indices is not None
        bits: Bits = np.zeros(stop - start, bits_dtype(delta.dtype))
        for first, lengths, values in runs:
            bits[_positions(first, lengths)] = values
            self._missing -= values.size
        # np.searchsorted would copy int32 indices to the int64 of what is searched.
        begin, end = (bisect_left(delta.indices, place) for place in (start, stop))
        changed = delta.indices[begin:end] - start
        bits[changed] = delta.new_bits(bits[changed], begin, end, slice(None))
        self._hash.update(bits.view(np.uint8).data)

    def check(self) -> None:
        """Compare the checksum, after the last chunk.

        Raises:
            BaseMismatch: it is another one.
            NotUpdatable: elements were missing.
        """
        name, expected = self._delta.name, self._delta.new_checksum
        if self._missing:
            raise NotUpdatable(
                f"{name}: {self._missing} of its elements were not found on the ranks of one "
                "replica, so its checksum cannot be verified; publish a full checkpoint",
                tensor=name,
            )
        actual = f"{self._format}:{self._hash.hexdigest()}"
        if actual != expected:
            raise BaseMismatch(
                f"{name} would have the checksum {actual} and not {expected}: the engine's "
                "weights are not the ones the delta was made from, or the delta is damaged; send a "
                "full checkpoint",
                tensor=name,
                expected=expected,
                actual=actual,
            )


def _packed(runs: Sequence[_Run]) -> Bytes:
    """Return some runs as bytes: how many, as int64, their first positions, lengths, and bits."""
    none = np.empty(0, np.int64)
    first = np.concatenate([none, *(run[0] for run in runs)])
    lengths = np.concatenate([none, *(run[1] for run in runs)])
    pieces = [np.array([first.size], np.int64), first, lengths, *(run[2] for run in runs)]
    return np.concatenate([np.ascontiguousarray(piece).view(np.uint8) for piece in pieces])


def _unpacked(raw: Bytes, dtype: np.dtype[Any]) -> _Run:
    """Return what `_packed` has packed, as one."""
    count = int(raw[:8].view(np.int64)[0])
    numbers = raw[8 : 8 + 16 * count].view(np.int64)
    return numbers[:count], numbers[count:], raw[8 + 16 * count :].view(dtype)


def _chunks(numel: int) -> Iterator[tuple[int, int]]:
    for start in range(0, numel, _CHUNK):
        yield start, min(start + _CHUNK, numel)


def _positions(first: NDArray[np.int64], lengths: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Return the positions of all elements of some runs."""
    if first.size == 1:
        return slice(int(first[0]), int(first[0] + lengths[0]))
    before = np.cumsum(lengths) - lengths
    found: NDArray[np.int64] = np.repeat(first - before, lengths) + np.arange(lengths.sum())
    return found


def _runs(
    delta: ParamDelta, plan: Plan, start: int, stop: int, members: Collection[int] | None
) -> Iterator[_Run]:
    """Yield the checkpoint's bits of a range of a tensor, as far as this rank is to read them.

    Args:
        members: the ranks that gather: the first that holds an element reads it; None if this rank
            reads all that it holds.
    """
    for number, target in enumerate(plan.targets.get(delta.name, ())):
        readers = [rank for rank in target.ranks if members is None or rank in members]
        reads = members is None or min(readers) == plan.rank
        if target.first != number or not reads:
            continue
        first, end = target.locator.overlap(start, stop)
        shift = target.locator.shift
        if shift is not None:
            if end > first:
                live = as_host(target.flat[first - shift : end - shift].cpu())
                bits = checkpoint_bits(live, target.dtype, delta.dtype)
                yield np.array([first - start]), np.array([end - first]), bits
            continue
        for begin in range(first, end, _READ):
            indices = np.arange(begin, min(begin + _READ, end))
            chosen, elements = target.find(indices)
            once: Any = slice(None, None, target.locator.copies)
            live = as_host(elements.read())[once]
            if live.size:
                bits = checkpoint_bits(live, target.dtype, delta.dtype)
                yield (*_as_runs(indices[chosen][once] - start), bits)


def _as_runs(positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first positions and the lengths of the runs in some positions."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    edges = np.concatenate([[0], breaks, [positions.size]])
    return positions[edges[:-1]], np.diff(edges)
