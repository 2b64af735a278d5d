"""Prove the whole new bytes of a tensor by the checksum that a part declares, before the commit.

A param of ``gap8_xor`` changes bits of the old values, so wrong old values would give wrong new
ones. Its ``new_checksum`` is of the tensor's whole new bytes in the checkpoint's order, which no
rank may hold. A rank that holds all elements proves the tensor while it stages the part. For any
other tensor the ranks gather the live elements, a chunk at a time, and one of them applies the
change and hashes. The model is only read, and no rank ever holds the whole of a gathered tensor.

The commit checks that the elements which it changes are still what they were when staged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine_ext.apply.staged import StagedPart
from engine_ext.apply.thread_pool import ThreadPool
from engine_ext.dtypes import bits_dtype
from engine_ext.errors import BaseMismatch, NotUpdatable
from engine_ext.kernels import Bits
from engine_ext.placement import Plan, as_host, checkpoint_bits
from engine_ext.ranks import Ranks, together
from engine_ext.replicas import ReplicaRanks
from engine_ext.wire import ParamDelta, Part, state_hash

_CHUNK: Final = 1 << 22  # elements that are gathered and hashed at a time
_READ: Final = 1 << 18  # elements found at a time: bounds the memory that their indices take
_SHARE_BYTES: Final = 64 << 20  # of tensors that one call gathers, at least

_Run = tuple[NDArray[np.int64], NDArray[np.int64], Bits]  # first positions, lengths, bits of all
_Read = Callable[[int, int], Iterable[_Run]]


def prove_here(part: Part, plan: Plan, threads: ThreadPool) -> dict[str, ParamDelta]:
    """Prove the tensors of a part that this rank holds whole; return the others' changes, by name.

    Raises:
        BaseMismatch: the new bytes of a tensor would have another checksum.
        NotUpdatable: the package that computes the checksum is not installed.
    """
    found = {delta.name: delta for delta in part.deltas if delta.new_checksum is not None}
    whole = [delta for delta in found.values() if _is_whole(delta, plan)]
    threads.map(lambda delta: _check(delta, _hash(delta, _reader(delta, plan))), whole)
    for delta in whole:
        del found[delta.name]
    return found


class GatheredProof:
    """Proves the tensors of a sync that no rank holds whole.

    Args:
        ranks: all that vote on a sync. Those of one replica hold all elements.
    """

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        self._plan, self._ranks = plan, ranks
        self._group = ranks.group if isinstance(ranks, ReplicaRanks) else ranks

    def is_done(self, staged: Sequence[StagedPart]) -> bool:
        """Return whether all tensors of a sync are proven; the same on every rank."""
        return not _open(staged)

    def prove_some(self, staged: Sequence[StagedPart]) -> None:
        """Prove the next tensors; all ranks must call it, and if one raises, all do.

        Raises:
            BaseMismatch: the new bytes of a tensor would have another checksum.
            NotUpdatable: they cannot be computed.
        """
        members = self._group.all_gather(self._ranks.rank)
        left, results = _SHARE_BYTES, list[Exception | None]()
        for part in _open(staged):
            if left <= 0:
                break
            everyone = self._ranks.all_gather(sorted(part.unproven))
            names = sorted(set(everyone[0]).intersection(*everyone[1:]))
            while names and left > 0:
                delta = part.unproven.pop(names.pop(0))
                left -= delta.numel * bits_dtype(delta.dtype).itemsize
                hasher = members[len(results) % len(members)]
                results.append(self._gather(delta, members, hasher))
            if not names:  # what is left here, another rank has proven
                part.unproven.clear()
                part.proven = True

        def check() -> None:
            for error in filter(None, results):
                raise error

        together(self._ranks, check)

    def _gather(self, delta: ParamDelta, members: Collection[int], hasher: int) -> Exception | None:
        """Gather one tensor on one rank and check it there; all ranks of the group must call it.

        Returns what is wrong as seen on this rank, which must not raise before the others know.
        """
        errors = list[Exception]()
        todo = deque(_chunks(delta.numel))

        def read(start: int, stop: int) -> list[_Run]:
            todo.popleft()
            own: list[_Run] | None = None
            try:
                own = list(_runs(delta, self._plan, start, stop, members))
            except Exception as error:
                errors.append(error)
            return [run for runs in self._group.all_gather(own) for run in runs or ()]

        if hasher == self._ranks.rank:
            try:
                _check(delta, _hash(delta, read))
            except Exception as error:
                errors.append(error)
        while todo:
            read(*todo[0])
        return errors[0] if errors else None


def _open(staged: Sequence[StagedPart]) -> list[StagedPart]:
    return [part for part in staged if part.manifest.proves_states and not part.proven]


def _check(delta: ParamDelta, actual: str) -> None:
    if actual != delta.new_checksum:
        raise BaseMismatch(
            f"{delta.name} would have the checksum {actual} and not {delta.new_checksum}: the "
            "engine's weights are not the ones the delta was made from, or the delta is damaged; "
            "send a full checkpoint",
            tensor=delta.name,
            expected=delta.new_checksum,
            actual=actual,
        )


def _hash(delta: ParamDelta, read: _Read) -> str:
    """Return the checksum of a tensor's new bytes; `read` returns its old elements in a range.

    Raises:
        NotUpdatable: some elements are missing, or the checksum's package.
    """
    assert delta.new_checksum is not None
    assert delta.indices is not None
    checksum_format = delta.new_checksum.partition(":")[0]
    state = state_hash(checksum_format)
    missing = delta.numel
    for start, stop in _chunks(delta.numel):
        bits: Bits = np.zeros(stop - start, bits_dtype(delta.dtype))
        for first, lengths, values in read(start, stop):
            bits[_positions(first, lengths)] = values
            missing -= values.size
        begin, end = map(int, np.searchsorted(delta.indices, (start, stop)))
        changed = delta.indices[begin:end] - start
        bits[changed] = delta.new_bits(bits[changed], begin, end, slice(None))
        state.update(bits.view(np.uint8).data)
    if missing:
        raise NotUpdatable(
            f"{delta.name}: {missing} of its elements were not found on the ranks of one replica, "
            "so its checksum cannot be verified; publish a full checkpoint",
            tensor=delta.name,
        )
    return f"{checksum_format}:{state.hexdigest()}"


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


def _is_whole(delta: ParamDelta, plan: Plan) -> bool:
    """Return whether this rank holds all elements of a tensor."""
    targets = plan.targets.get(delta.name, ())
    held = 0
    for number, target in enumerate(targets):
        if target.first == number:
            copies = target.locator.copies
            held += int(np.prod(target.segment.sizes, dtype=np.int64)) // copies
    return bool(targets) and held == delta.numel


def _reader(delta: ParamDelta, plan: Plan) -> _Read:
    return lambda start, stop: _runs(delta, plan, start, stop, None)


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
