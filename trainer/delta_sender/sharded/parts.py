"""One rank's parts of a sync: which they are, known before the first is sent, and their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from delta_sender.diff.host import Change
from delta_sender.diff.loop import Bits
from delta_sender.diff.snapshot import Changes
from delta_sender.encode.encoding_policy import EncodingChoice, ParamStats, escaped_share
from delta_sender.encode.part_sizes import most_bytes
from delta_sender.encode.sync_round import Attempt
from delta_sender.sharded.box import Box
from delta_sender.sharded.owned import OwnedShards, ShardedState
from delta_sender.sharded.ownership import Tensor
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.format import (
    DIFFERENCES,
    Digest,
    ParamDelta,
    change_digest,
    encode_part,
    tensor_digest,
)

_POSITION: int = 4  # bytes of a position, about


@dataclass(frozen=True, slots=True)
class Param:
    """One tensor, or this rank's changes of it, in a part.

    Attributes:
        change: Of this rank's box; None: the whole tensor is sent.
        counts: Whether it counts in the part's digest.
    """

    tensor: Tensor
    box: Box
    change: Change | None
    choice: EncodingChoice
    counts: bool

    @property
    def nbytes(self) -> int:
        """Bytes of positions and values, about."""
        if self.change is None or self.choice.dense:
            return self.tensor.nbytes
        width = TORCH_DTYPE[self.tensor.dtype].itemsize
        return self.change.nnz * (width + _POSITION)


@dataclass(slots=True)
class Bucket:
    """Params of one encoding and dtype that are one part."""

    encoding: str
    params: list[Param] = field(default_factory=list)
    nbytes: int = 0


@dataclass(slots=True)
class Sent:
    """What a rank has sent of one attempt."""

    digest: Digest = Digest.ZERO  # that it adds to the model's
    nnz: int = 0
    picked: Counter[str] = field(default_factory=Counter)

    def add(self, other: Sent) -> None:
        """Add what another part has."""
        self.digest += other.digest
        self.nnz += other.nnz
        self.picked.update(other.picked)


class PartPlan:
    """The parts of one attempt that this rank sends.

    Args:
        state: What the engine holds.
        read: Changes of this rank's boxes, from the snapshot.
        bucket_bytes: Most bytes of positions and values in a part, before compression; of this
            rank's first parts see `most_bytes`.
        speed: Of the link, in bytes/s.

    Attributes:
        names: Of the tensors that the engine gets, from all ranks.
        buckets: This rank's parts.
    """

    def __init__(
        self,
        rank: int,
        owned: OwnedShards,
        state: ShardedState,
        attempt: Attempt,
        read: Changes,
        *,
        bucket_bytes: int,
        speed: float,
    ) -> None:
        self._rank, self._owned, self._snapshot = rank, owned, state.snapshot
        self._policy, self._full, self._speed = attempt.policy, attempt.full, speed
        self._plan, self._read, self._held = state.plan, read, state.missed
        self.names = state.plan.names
        self.buckets = self._buckets(bucket_bytes)

    def _buckets(self, bucket_bytes: int) -> list[Bucket]:
        """Put params together, as many as a part may have or one param."""
        full: list[Bucket] = []
        filling: dict[tuple[str, str], Bucket] = {}
        for name in self.names:
            param = self._param(name)
            if param is None:
                continue
            kind = param.choice.encoding, param.tensor.dtype
            bucket = filling.setdefault(kind, Bucket(param.choice.encoding))
            if bucket.params and bucket.nbytes + param.nbytes > most_bytes(bucket_bytes, len(full)):
                full.append(bucket)
                bucket = filling[kind] = Bucket(param.choice.encoding)
            bucket.params.append(param)
            bucket.nbytes += param.nbytes
        return [*full, *filling.values()]

    def _param(self, name: str) -> Param | None:
        """Return what this rank sends of a tensor; None for nothing."""
        tensor, box = self._owned.ownership[name], self._owned.boxes.get(name)
        counts = self._plan.counts(name)
        if self._full:
            if tensor.assembler != self._rank:
                return None
            return Param(tensor, Box.whole(tensor.shape), None, self._choose(tensor, None), counts)
        if box is None:
            return None
        key = self._snapshot.key(name)
        change = self._snapshot.change_between(key, self._held.get(key), self._read.get(key))
        if change is None:
            return None
        choice = self._choose(tensor, change, box, proven=counts)
        return Param(tensor, box, change, choice, counts)

    def _choose(
        self, tensor: Tensor, change: Change | None, box: Box | None = None, proven: bool = False
    ) -> EncodingChoice:
        dtype = TORCH_DTYPE[tensor.dtype]
        if change is None or box is None:
            stats = ParamStats(tensor.numel, tensor.numel, dtype.itemsize, dtype.is_floating_point)
            return self._policy.choose(stats, True, self._speed)
        escaped = None
        if proven and self._policy.may_send_differences:
            escaped = escaped_share(change.old, change.new)
        is_large = change.indices is None and box.is_whole
        stats = ParamStats(
            box.numel, change.nnz, dtype.itemsize, dtype.is_floating_point, escaped, is_large
        )
        # Only whole tensors can travel dense.
        return self._policy.choose(stats, False, self._speed, sparse=not box.is_whole)

    def new_values(self, name: str) -> Bits:
        """Return the new bits of this rank's box of a tensor, [n]; read-only."""
        key = self._snapshot.key(name)
        return self._snapshot.image(key, self._read.get(key)).values

    def encode(
        self, bucket: Bucket, whole: Mapping[str, Bits], sent: Sent, metadata: Mapping[str, Any]
    ) -> bytes:
        """Return a part's bytes, and note in `sent` what it has.

        Args:
            whole: The tensors that are sent whole in a full sync, by name, bits [numel].
            metadata: What `encode_part` takes; with "digest_before" the part declares its own.
        """
        deltas = []
        for param in bucket.params:
            delta, digest = self._delta(param, bucket.encoding, whole)
            deltas.append(delta)
            sent.nnz += delta.nnz
            sent.picked[str(param.choice)] += 1
            if param.counts:
                sent.digest += digest
        declares = "digest_before" in metadata or bucket.encoding == DIFFERENCES
        digest_part = sent.digest.hex() if declares else None
        return encode_part(deltas, encoding=bucket.encoding, digest_part=digest_part, **metadata)

    def _delta(
        self, param: Param, encoding: str, whole: Mapping[str, Bits]
    ) -> tuple[ParamDelta, Digest]:
        """Return a param as it is sent, and what it adds to the digest."""
        tensor, change = param.tensor, param.change
        name, of_tensor = tensor.name, (tensor.name, tensor.dtype, tensor.shape)
        if change is None:
            values = whole[name]
            return ParamDelta(*of_tensor, None, values), tensor_digest(name, values)
        if param.choice.dense:
            key = self._snapshot.key(name)
            new, old = self.new_values(name), self._snapshot.image(key, self._held.get(key)).values
            return ParamDelta(*of_tensor, None, new), change_digest(name, None, old, new)
        change = self._snapshot.sparse(change)
        assert change.indices is not None
        where = param.box.to_global(change.indices)
        digest = change_digest(name, where, change.old, change.new)
        differences = encoding == DIFFERENCES
        values = change.new - change.old if differences else change.new
        return ParamDelta(*of_tensor, where, np.asarray(values), differences), digest
