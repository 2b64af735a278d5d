"""Build the parts of a sync for one destination while the weights are being read."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from delta_sender.diff.host import Change
from delta_sender.diff.loop import Bits
from delta_sender.encode.acked_state import AckedState, digest_of
from delta_sender.encode.encoding_policy import EncodingChoice, ParamStats, escaped_share
from delta_sender.encode.part_sizes import most_bytes
from delta_sender.encode.sync_round import Attempt, SyncRound
from delta_sender.publish.bandwidth import LinkSpeed
from delta_sender.publish.destination import Part
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.format import (
    DIFFERENCES,
    PACKED_ENCODINGS,
    Digest,
    ParamDelta,
    change_digest,
    differences_of,
    encode_part,
    position_bytes,
)

_LARGE: Final = 128 << 20  # bytes; a larger tensor of which most has changed goes dense


class _Param(msgspec.Struct, eq=False, gc=False):
    """What one param adds to a part."""

    name: str  # that it is sent under
    sent: Change | ParamDelta  # with its indices; dense
    change: Change | None  # of what the destination holds; None if a full sync finds none
    is_key: bool  # `name` is the name in the snapshot, so that the digest of `change` is valid
    choice: EncodingChoice
    nbytes: int  # of positions and values, before compression

    @property
    def values(self) -> Bits:
        """Its new bit patterns, [nnz], or [numel] if it is dense."""
        return self.sent.values if isinstance(self.sent, ParamDelta) else self.sent.new

    @property
    def digest(self) -> Digest:
        """What it adds to the digest."""
        if self.change is None:
            return Digest.ZERO
        if self.is_key and self.change.digest is not None:
            return self.change.digest
        indices = self.change.indices
        wide = None if indices is None else indices.astype(np.int64)
        return change_digest(self.name, wide, self.change.old, self.change.new)


@dataclass(slots=True)
class _Bucket:
    """Params of one encoding and dtype that will be one part."""

    encoding: str
    params: list[_Param] = field(default_factory=list)
    nbytes: int = 0

    def split(self) -> list[_Bucket]:
        """Take the smallest of several params out, and return a bucket with it.

        Nothing is posted beside the last part, so it should be small.
        """
        if len(self.params) < 2:
            return []
        sizes = [param.nbytes for param in self.params]
        smallest = sizes.index(min(sizes))
        return [_Bucket(self.encoding, [self.params.pop(smallest)], sizes[smallest])]


class PartBuilder:
    """The parts of one attempt for one destination.

    Args:
        state: What the destination holds; not changed here. The round starts from its snapshot.
        bucket_bytes: Most bytes of positions and values in a part, before compression; of the first
            parts see `most_bytes`.
        speed: Of the link, as the posts show it by then.
    """

    def __init__(
        self,
        sync_round: SyncRound,
        attempt: Attempt,
        state: AckedState,
        *,
        bucket_bytes: int,
        speed: LinkSpeed,
    ) -> None:
        provable = state.digest is not None or not attempt.policy.any_base
        assert provable, "no digest would prove what this attempt leads to"
        self._round, self._attempt = sync_round, attempt
        self._snapshot, self._state = state.snapshot, state
        self._bucket_bytes, self._speed = bucket_bytes, speed
        self._nnz = self._count = 0
        self._choices: Counter[EncodingChoice] = Counter()
        policy = attempt.policy
        self._sparsely = policy.sparsely(proven=False), policy.sparsely(proven=True)
        self.digest = state.digest  # after the parts built so far; None if no digest is kept

    def __iter__(self) -> Iterator[Part]:
        """Build part by part; the weights that they need are read meanwhile.

        Parts hold params of one encoding and dtype, as many as fit or one param; of several
        parts the last one holds one param, if that makes it smaller. They are encoded in threads
        of the round: be in `SyncRound.reading` until they are.
        """
        for bucket, last in self._buckets():
            yield self._part(bucket, last)

    def _part(self, bucket: _Bucket, last: bool) -> Part:
        """Begin to encode the params of a bucket, which does not keep them."""
        number, self._count = self._count, self._count + 1
        metadata: dict[str, Any] = {
            "encoding": bucket.encoding,
            "sync_id": self._round.sync_id(self._attempt),
            "current_version": self._attempt.version,
            "base_version": None if self._attempt.full else self._state.version,
            "part": number,
            "num_parts": self._count if last else None,  # unknown before all is read
            "full": self._attempt.full,
            **self._round.run.metadata,
            **self._digests(bucket, last),
        }
        params, bucket.params = bucket.params, []
        self._nnz += sum(param.sent.nnz for param in params)
        self._choices.update(param.choice for param in params)
        # Destinations that have missed nothing get the same bytes for the same metadata.
        choices = [(param.name, param.choice) for param in params]
        has_own = bool(self._state.missed or self._state.unproven) and not self._attempt.full
        owner = id(self._state) if has_own else None
        encode = functools.partial(_encode, params, **metadata)
        body = self._round.body(self._attempt, (*metadata.items(), *choices, owner), encode)
        return Part(body, self._attempt.version, number, last)

    def report(self) -> Mapping[str, Any]:
        """Return the fields of `SyncReport` that the parts determine."""
        state, snapshot = self._state, self._snapshot
        images = [snapshot.image(snapshot.key(name)).values for name in state.plan.names]
        return {
            "version": self._attempt.version,
            "full": self._attempt.full,
            "reason": self._attempt.reason,
            "run": self._round.run.name,
            "nnz": self._nnz,
            "numel": sum(image.size for image in images),
            "full_bytes": sum(image.nbytes for image in images),
            "parts": self._count,
            "digest": None if self.digest is None else self.digest.hex(),
            "picked": {str(choice): count for choice, count in self._choices.items()},
        }

    def _digests(self, bucket: _Bucket, last: bool) -> dict[str, str]:
        """Return the digests in a part's metadata, and advance `digest`."""
        if self.digest is None:
            if bucket.encoding == DIFFERENCES:  # they are refused without
                return {"digest_part": self._digest_of(bucket).hex()}
            return {}
        digests: dict[str, str] = {}
        part, before = self._digest_of(bucket), self._state.digest
        self.digest += part
        if before is not None and not (self._attempt.full or self._attempt.policy.any_base):
            digests |= {"digest_part": part.hex(), "digest_before": before.hex()}
        if last:
            digests["digest_after"] = self.digest.hex()
        return digests

    def _digest_of(self, bucket: _Bucket) -> Digest:
        """Return what a part adds to the digest."""
        plan = self._state.plan
        if self._attempt.full:  # of the very values that are sent
            return digest_of(
                (param.name, param.values) for param in bucket.params if param.name in plan.digested
            )
        return Digest.total(param.digest for param in bucket.params if plan.counts(param.name))

    def _buckets(self) -> Iterator[tuple[_Bucket, bool]]:
        """Yield full buckets, and whether each is the last."""
        open_buckets: dict[tuple[str, str], _Bucket] = {}
        most = most_bytes(self._bucket_bytes, 0)
        for param in self._params():
            encoding, dtype, size = param.choice.encoding, param.sent.dtype, param.nbytes
            bucket = open_buckets.get((encoding, dtype))
            if bucket is not None and bucket.nbytes + size > most:
                yield bucket, False
                bucket, most = None, most_bytes(self._bucket_bytes, self._count)
            if bucket is None:
                bucket = open_buckets[encoding, dtype] = _Bucket(encoding)
            bucket.params.append(param)
            bucket.nbytes += size
        rest = sorted(open_buckets.values(), key=lambda bucket: -bucket.nbytes)
        if rest and (self._count or rest[1:]):
            rest += rest[-1].split()
        for bucket in rest or [_Bucket(self._attempt.policy.empty)]:
            yield bucket, not rest or bucket is rest[-1]

    def _params(self) -> Iterator[_Param]:
        """Yield what the destination is to be sent, while it is read."""
        snapshot, full = self._snapshot, self._attempt.full
        unproven = self._state.unproven
        names: defaultdict[str, list[str]] = defaultdict(list)
        for name in self._state.plan.names:
            names[snapshot.key(name)].append(name)
        for key, read in self._round.tensors():
            if key in names:
                found = snapshot.change_between(key, self._state.missed.get(key), read)
                for name in names[key]:
                    if not (full or found or name in unproven):
                        continue
                    change = None if name in unproven else found  # whole, whatever is there
                    choice = self._choose(name, change)
                    sent: Change | ParamDelta
                    if change is None or choice.dense:
                        sent = msgspec.structs.replace(snapshot.image(key, read), name=name)
                        nbytes = sent.payload_bytes(choice.encoding)
                    else:
                        sent = change = found = snapshot.sparse(change)
                        nbytes = _sparse_bytes(change, choice.encoding)
                    yield _Param(name, sent, change, name == key, choice, nbytes)

    def _choose(self, name: str, change: Change | None) -> EncodingChoice:
        """Return how a param travels. Differences need old values that a digest proves."""
        policy, full = self._attempt.policy, self._attempt.full
        is_proven = not full and self._state.plan.counts(name)
        is_large = change is not None and change.indices is None
        if policy.is_fixed and not (full or change is None or is_large):
            return self._sparsely[is_proven]
        image = self._snapshot.image(self._snapshot.key(name))
        values, escaped = image.values, None
        nnz = values.size if change is None else change.nnz
        # Its indices would be searched again, and take several times as much memory.
        only_dense = full or change is None or (is_large and values.nbytes > _LARGE)
        if change is not None and is_proven and policy.may_send_differences:
            escaped = escaped_share(change.old, change.new)
        floating = TORCH_DTYPE[image.dtype].is_floating_point
        stats = ParamStats(values.size, nnz, values.itemsize, floating, escaped, is_large)
        return policy.choose(stats, only_dense, self._speed.bytes_per_s)


def _sparse_bytes(change: Change, encoding: str) -> int:
    """Return the bytes of a change's positions and new values, before compression."""
    if change.stream is not None and encoding in PACKED_ENCODINGS:
        return change.stream.nbytes + change.new.nbytes
    assert change.indices is not None
    return position_bytes(encoding, change.indices) + change.new.nbytes


def _encode(params: Sequence[_Param], *, encoding: str, **metadata: Any) -> bytes:
    changes = [param.sent for param in params if isinstance(param.sent, Change)]
    values = [change.new for change in changes]
    if encoding == DIFFERENCES:  # none is dense
        values = differences_of(values, [change.old for change in changes])
    following = iter(values)
    deltas = [
        param.sent
        if isinstance(param.sent, ParamDelta)
        else param.sent.delta(param.name, next(following), differences=encoding == DIFFERENCES)
        for param in params
    ]
    return encode_part(deltas, encoding=encoding, **metadata)
