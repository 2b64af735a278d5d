"""One rank's share of a sync: which params it sends, and what is sent of each."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from delta_sender.diff.change import Bits, Change
from delta_sender.encode.encoding_policy import EncodingChoice, ParamStats, escaped_of
from delta_sender.encode.part_builder import Bucket
from delta_sender.encode.sync_round import Attempt, SyncRound
from delta_sender.results import RankError
from delta_sender.sharded.box import Box
from delta_sender.sharded.owned import OwnedShards, ShardedState
from delta_sender.sharded.ownership import Tensor
from delta_sender.sharded.ranks import Ranks
from engine_ext.dtypes import TORCH_DTYPE, bits_dtype
from engine_ext.format import (
    DIFFERENCES,
    Digest,
    ParamDelta,
    change_digest,
    encode_part,
    tensor_digest,
)

_POSITION_BYTES: Final = 4  # about


@dataclass(slots=True)
class ShardParam:
    """One tensor, or this rank's changes of it, in a part.

    Attributes:
        change: The changes of this rank's box; None: the whole tensor is sent.
        counts: Whether it counts in the part's digest.
        values: The whole tensor's bits [numel] once they are assembled, in a full sync.
    """

    tensor: Tensor
    box: Box
    change: Change | None
    choice: EncodingChoice
    counts: bool
    values: Bits | None = None

    @property
    def dtype(self) -> str:
        """The tensor's manifest dtype."""
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of positions and values, about."""
        if self.change is None or self.choice.dense:
            return self.tensor.nbytes
        width = TORCH_DTYPE[self.tensor.dtype].itemsize
        return self.change.nnz * (width + _POSITION_BYTES)


@dataclass(slots=True)
class Sent:
    """What a rank has sent of one attempt."""

    digest: Digest = Digest.ZERO  # that it adds to the model's
    nnz: int = 0
    picked: Counter[str] = field(default_factory=Counter)


class OwnedChanges:
    """What this rank sends in one attempt; a `ParamSource`. All is read by then.

    Args:
        state: What the engine holds.
        speed: Of the link, in bytes/s.

    Attributes:
        names: Of the tensors that the engine gets, from all ranks.
        sent: What has been encoded by now.
    """

    def __init__(
        self,
        ranks: Ranks,
        owned: OwnedShards,
        state: ShardedState,
        sync_round: SyncRound,
        attempt: Attempt,
        speed: float,
    ) -> None:
        self._ranks, self._owned, self._snapshot = ranks, owned, state.snapshot
        self._policy, self._full, self._speed = attempt.policy, attempt.full, speed
        self._plan, self._read, self._held = state.plan, sync_round.changes, state.missed
        self._proves = state.proves_parts and not (attempt.full or attempt.policy.any_base)
        self.digest_before = state.digest.hex() if self._proves and state.digest else None
        self.names = state.plan.names
        self.sent = Sent()
        self._lock = threading.Lock()

    def params(self) -> Iterator[ShardParam]:
        """Yield what this rank sends."""
        for name in self.names:
            param = self._param(name)
            if param is not None:
                yield param

    def metadata(self, params: Sequence[ShardParam], encoding: str, last: bool) -> dict[str, Any]:
        """Return the digest that every part of the sync names; `encode` adds the part's own."""
        return {} if self.digest_before is None else {"digest_before": self.digest_before}

    def shares_bytes_by(self, params: Sequence[ShardParam]) -> Hashable:
        """Return what no other destination has: `sent` counts what is encoded for this one."""
        return id(self)

    def assembled(
        self, buckets: Sequence[Bucket[ShardParam]]
    ) -> Iterator[tuple[int, Bucket[ShardParam]]]:
        """Yield buckets, and their numbers, as they can be encoded.

        In a full sync, tensor after tensor is assembled on the rank that sends it, in step with the
        other ranks: iterate to the end, whatever happens.

        Raises:
            RankError: Ranks have failed, and have left.
        """
        if not self._full:
            yield from enumerate(buckets)
            return
        place = {p.tensor.name: (n, p) for n, one in enumerate(buckets) for p in one.params}
        missing = [len(one.params) for one in buckets]
        for name in self.names:
            try:
                values = self._assembled(name)
            except RankError:
                raise
            except Exception as error:  # other ranks might be sending their parts of it
                self._ranks.leave(f"{name} could not be assembled")
                raise RankError(f"{name}: not assembled: {error}", [self._ranks.rank]) from error
            if values is not None:
                number, param = place[name]
                param.values = values
                missing[number] -= 1
                if not missing[number]:
                    yield number, buckets[number]

    def encode(self, params: Sequence[ShardParam], *, encoding: str, **metadata: Any) -> bytes:
        """Return a part's bytes, and count in `sent` what it has."""
        deltas, digest = [], Digest.ZERO
        for param in params:
            delta, added = self._delta(param, encoding)
            deltas.append(delta)
            if param.counts:
                digest += added
        with self._lock:
            self.sent.digest += digest
            self.sent.nnz += sum(delta.nnz for delta in deltas)
            self.sent.picked.update(str(param.choice) for param in params)
        declares = self._proves or encoding == DIFFERENCES
        digest_part = digest.hex() if declares else None
        return encode_part(deltas, encoding=encoding, digest_part=digest_part, **metadata)

    def _assembled(self, name: str) -> Bits | None:
        """Return a whole tensor's new bits on the rank that sends it, None on the others."""
        tensor, rank = self._owned.ownership[name], self._ranks.rank
        if tensor.assembler != rank:
            if name in self._owned.boxes:
                self._ranks.send(self._new_values(name), tensor.assembler)
            return None
        dtype = bits_dtype(tensor.dtype)
        found = np.empty(tensor.shape, dtype)
        for box, owner in tensor.owners:
            if owner == rank:
                values = self._new_values(name)
                if box.is_whole:
                    return values
            else:
                values = np.empty(box.numel, dtype)
                self._ranks.receive(values, owner)
            found[box.slices] = values.reshape(box.sizes)
        return found.reshape(-1)

    def _param(self, name: str) -> ShardParam | None:
        """Return what this rank sends of a tensor; None for nothing."""
        tensor, box = self._owned.ownership[name], self._owned.boxes.get(name)
        counts = self._plan.counts(name)
        if self._full:
            if tensor.assembler != self._ranks.rank:
                return None
            return ShardParam(
                tensor, Box.whole(tensor.shape), None, self._choose(tensor, None), counts
            )
        if box is None:
            return None
        key = self._snapshot.key(name)
        change = self._snapshot.change_between(key, self._held.get(key), self._read.get(key))
        if change is None:
            return None
        choice = self._choose(tensor, change, box, proven=counts)
        return ShardParam(tensor, box, change, choice, counts)

    def _choose(
        self, tensor: Tensor, change: Change | None, box: Box | None = None, proven: bool = False
    ) -> EncodingChoice:
        dtype = TORCH_DTYPE[tensor.dtype]
        if change is None or box is None:
            stats = ParamStats(tensor.numel, tensor.numel, dtype.itemsize, dtype.is_floating_point)
            return self._policy.choose(stats, True, self._speed)
        escaped = None
        if proven and self._policy.may_send_differences:
            escaped = escaped_of(change)
        is_large = change.is_dense and box.is_whole
        stats = ParamStats(
            box.numel, change.nnz, dtype.itemsize, dtype.is_floating_point, escaped, is_large
        )
        # Only whole tensors can travel dense.
        return self._policy.choose(stats, False, self._speed, sparse=not box.is_whole)

    def _new_values(self, name: str) -> Bits:
        """Return the new bits of this rank's box of a tensor, [n]; read-only."""
        key = self._snapshot.key(name)
        return self._snapshot.image(key, self._read.get(key)).values

    def _delta(self, param: ShardParam, encoding: str) -> tuple[ParamDelta, Digest]:
        """Return a param as it is sent, and what it adds to the digest."""
        tensor, change = param.tensor, param.change
        name, of_tensor = tensor.name, (tensor.name, tensor.dtype, tensor.shape)
        if change is None:
            assert param.values is not None
            values = param.values
            return ParamDelta(*of_tensor, None, values), tensor_digest(name, values)
        if param.choice.dense:
            key = self._snapshot.key(name)
            new, old = self._new_values(name), self._snapshot.image(key, self._held.get(key)).values
            return ParamDelta(*of_tensor, None, new), change_digest(name, None, old, new)
        one = self._snapshot.sparse(change).decoded()
        assert one.indices is not None
        self._snapshot.check_decoded(self._snapshot.key(name), change, one)
        where = param.box.to_global(one.indices)
        digest = change_digest(name, where, one.old, one.new)
        differences = encoding == DIFFERENCES
        sent = one.new - one.old if differences else one.new
        return ParamDelta(*of_tensor, where, np.asarray(sent), differences), digest
