"""Build the parts of a sync for one destination while the weights are being read.

`PartBuilder` puts params together and has them encoded; a `ParamSource` says which params there are
and what is sent of each. `ChangedTensors` is the source of whole tensors; trainers whose ranks hold
shards have another one.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from delta_sender.diff.change import Bits, Change, EncodedElements, decoded
from delta_sender.encode.acked_state import AckedState, digest_of
from delta_sender.encode.encoding_policy import (
    REACH,
    EncodingChoice,
    ParamStats,
    escaped_of,
)
from delta_sender.encode.sync_round import Attempt, SyncRound
from engine_ext.dtypes import TORCH_DTYPE
from engine_ext.format import (
    DIFFERENCES,
    PACKED_ENCODINGS,
    Digest,
    EncodedDelta,
    ParamDelta,
    change_digest,
    differences_of,
    encode_part,
)

_FIRST: Final = 8 << 20  # bytes of the first part, so that the engine begins early
_FAR: Final = min(REACH.values())  # elements that every encoding can reach
_LARGE: Final = 128 << 20  # bytes; a larger tensor goes dense if most of it has changed


class EncodedPart(NamedTuple):
    """A part: the body to post once encoded, version, number from 0, whether it is the last."""

    body: Future[bytes]
    version: int
    number: int
    last: bool


class Param(Protocol):
    """What one param adds to a part."""

    @property
    def choice(self) -> EncodingChoice:
        """How it travels."""

    @property
    def dtype(self) -> str:
        """Its manifest dtype; a part has params of one."""

    @property
    def nbytes(self) -> int:
        """Bytes of positions and values, before compression."""


_ParamT = TypeVar("_ParamT", bound=Param)


class ParamSource(Protocol[_ParamT]):
    """The params that a destination is to be sent in one attempt."""

    def params(self) -> Iterator[_ParamT]:
        """Yield them, while the weights are being read."""

    def metadata(self, params: Sequence[_ParamT], encoding: str, last: bool) -> dict[str, Any]:
        """Return what a part of these says of the model; called in the order of the parts."""

    def shares_bytes_by(self, params: Sequence[_ParamT]) -> Hashable:
        """Return what destinations have in common that are sent the same bytes for these."""

    def encode(self, params: Sequence[_ParamT], *, encoding: str, **metadata: Any) -> bytes:
        """Return a part's bytes; called in a thread of the round."""


@dataclass(slots=True)
class Bucket(Generic[_ParamT]):
    """Params of one encoding and dtype that will be one part, `stored` or compressed."""

    encoding: str
    stored: bool = False
    params: list[_ParamT] = field(default_factory=list)
    nbytes: int = 0

    def split(self) -> list[Bucket[_ParamT]]:
        """Take the smallest of several params out, and return a bucket with it.

        Nothing is posted together with the last part, so it should be small.
        """
        if len(self.params) < 2:
            return []
        sizes = [param.nbytes for param in self.params]
        smallest = sizes.index(min(sizes))
        taken = [self.params.pop(smallest)]
        return [Bucket(self.encoding, self.stored, taken, sizes[smallest])]


class PartBuilder(Generic[_ParamT]):
    """The parts of one attempt for one destination.

    Args:
        source: What the parts have.
        base_version: That the parts apply to.
        bucket_bytes: Most bytes of positions and values in a part, before compression; see
            `most_bytes`.
    """

    def __init__(
        self,
        sync_round: SyncRound,
        attempt: Attempt,
        source: ParamSource[_ParamT],
        *,
        base_version: int,
        bucket_bytes: int,
    ) -> None:
        self._round, self._attempt, self._source = sync_round, attempt, source
        self._base_version = None if attempt.full else base_version
        self._bucket_bytes = bucket_bytes

    def __iter__(self) -> Iterator[EncodedPart]:
        """Build part by part; the weights that they need are read meanwhile.

        Parts hold params of one encoding and dtype, as many as fit or one param; of several
        parts the last one holds one param, if that makes it smaller. They are encoded in threads
        of the round: be in `SyncRound.reading` until they are.
        """
        number = 0
        unfilled: list[Bucket[_ParamT]] = []
        for bucket in self._filled(unfilled):
            yield self.part(bucket, number)
            number += 1
        rest = sorted(unfilled, key=lambda bucket: -bucket.nbytes)
        if rest and (number or rest[1:]):
            rest += rest[-1].split()
        for bucket in rest or [Bucket[_ParamT](self._attempt.policy.empty)]:
            yield self.part(bucket, number, last=not rest or bucket is rest[-1])
            number += 1

    def buckets(self) -> list[Bucket[_ParamT]]:
        """Return all buckets, of a sync whose last part is another's."""
        unfilled: list[Bucket[_ParamT]] = []
        return [*self._filled(unfilled), *unfilled]

    def part(self, bucket: Bucket[_ParamT], number: int, last: bool = False) -> EncodedPart:
        """Begin to encode the params of a bucket, which does not keep them."""
        params, bucket.params = bucket.params, []
        metadata = {
            **self.common_metadata,
            "encoding": bucket.encoding,
            "stored": bucket.stored,
            "part": number,
            "num_parts": number + 1 if last else None,  # unknown before all is read
            **self._source.metadata(params, bucket.encoding, last),
        }
        key = (*metadata.items(), self._source.shares_bytes_by(params))
        encode = functools.partial(self._source.encode, params, **metadata)
        body = self._round.body(self._attempt, key, encode)
        return EncodedPart(body, self._attempt.version, number, last)

    @functools.cached_property
    def common_metadata(self) -> dict[str, Any]:
        """Metadata of every part of the sync."""
        return {
            "sync_id": self._round.sync_id(self._attempt),
            "current_version": self._attempt.version,
            "base_version": self._base_version,
            "full": self._attempt.full,
            **self._round.run.metadata,
        }

    def _filled(self, unfilled: list[Bucket[_ParamT]]) -> Iterator[Bucket[_ParamT]]:
        """Yield buckets as they are full; the others are in `unfilled` in the end."""
        filling: dict[tuple[str, bool, str], Bucket[_ParamT]] = {}
        count, most = 0, most_bytes(self._bucket_bytes, 0)
        for param in self._source.params():
            choice, size = param.choice, param.nbytes
            kind = choice.encoding, choice.stored, param.dtype
            bucket = filling.get(kind)
            if bucket is not None and bucket.nbytes + size > most:
                yield bucket
                count += 1
                bucket, most = None, most_bytes(self._bucket_bytes, count)
            if bucket is None:
                bucket = filling[kind] = Bucket(choice.encoding, choice.stored)
            bucket.params.append(param)
            bucket.nbytes += size
        unfilled += filling.values()


def most_bytes(bucket_bytes: int, before: int) -> int:
    """Return the most bytes of positions and values in a part, before compression.

    Twice as many as in the part before it, from 8 MiB up to `bucket_bytes`.

    Args:
        before: How many parts of the sync come before it.
    """
    return min(bucket_bytes, _FIRST << min(before, 16))


class TensorParam(msgspec.Struct, eq=False, gc=False):
    """A tensor, whole or what has changed of it, in a part."""

    name: str  # that it is sent under
    sent: Change | ParamDelta  # with its indices; dense
    change: Change | None  # of what the destination holds; None if a full sync finds none
    is_key: bool  # `name` is the name in the snapshot, so that the digest of `change` is valid
    choice: EncodingChoice
    dtype: str
    nbytes: int  # of positions and values, before compression

    @property
    def values(self) -> Bits:
        """Its new bit patterns, [nnz], or [numel] if it is dense."""
        return self.sent.values if isinstance(self.sent, ParamDelta) else self.sent.decoded().new

    @property
    def digest(self) -> Digest:
        """What it adds to the digest."""
        if self.change is None:
            return Digest.ZERO
        if self.is_key and self.change.digest is not None:
            return self.change.digest
        one = self.change.decoded()
        wide = None if one.indices is None else one.indices.astype(np.int64)
        return change_digest(self.name, wide, one.old, one.new)


class Speed(Protocol):
    """A link's speed, as the posts show it by then."""

    @property
    def bytes_per_s(self) -> float: ...


class ChangedTensors:
    """What one destination lacks of a snapshot's tensors, or all of them in a full sync.

    Args:
        state: What the destination holds; not changed here. The round starts from its snapshot.

    Attributes:
        digest: After the parts that were built so far; None if no digest is kept.
    """

    def __init__(
        self, sync_round: SyncRound, attempt: Attempt, state: AckedState, speed: Speed
    ) -> None:
        provable = state.digest is not None or not attempt.policy.any_base
        assert provable, "no digest would prove what this attempt leads to"
        self._round, self._attempt = sync_round, attempt
        self._snapshot, self._state, self._speed = state.snapshot, state, speed
        self._nnz = self._parts = 0
        self._choices: Counter[EncodingChoice] = Counter()
        policy = attempt.policy
        self._sparsely = policy.sparsely(proven=False), policy.sparsely(proven=True)
        self.digest = state.digest

    def params(self) -> Iterator[TensorParam]:
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
                    yield TensorParam(name, sent, change, name == key, choice, sent.dtype, nbytes)

    def metadata(self, params: Sequence[TensorParam], encoding: str, last: bool) -> dict[str, Any]:
        """Count a part, advance `digest`, and return the digests that the part declares."""
        self._parts += 1
        self._nnz += sum(param.sent.nnz for param in params)
        self._choices.update(param.choice for param in params)
        if self.digest is None:
            proves = self._state.proves_parts and not self._attempt.full
            if proves or encoding == DIFFERENCES:  # they are refused without
                return {"digest_part": self._digest_of(params).hex()}
            return {}
        digests: dict[str, str] = {}
        part, before = self._digest_of(params), self._state.digest
        self.digest += part
        if before is not None and not (self._attempt.full or self._attempt.policy.any_base):
            digests |= {"digest_part": part.hex(), "digest_before": before.hex()}
        if last:
            digests["digest_after"] = self.digest.hex()
        return digests

    def shares_bytes_by(self, params: Sequence[TensorParam]) -> Hashable:
        """See `ParamSource`: destinations that have missed nothing get the same for the same."""
        choices = tuple([(param.name, param.choice) for param in params])
        has_own = bool(self._state.missed or self._state.unproven) and not self._attempt.full
        return choices, id(self._state) if has_own else None

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
            "parts": self._parts,
            "digest": None if self.digest is None else self.digest.hex(),
            "picked": {str(choice): count for choice, count in self._choices.items()},
        }

    def encode(self, params: Sequence[TensorParam], *, encoding: str, **metadata: Any) -> bytes:
        """Return a part's bytes."""
        changes = [(param.name, param.sent) for param in params if isinstance(param.sent, Change)]
        following = iter(_deltas(changes, differences=encoding == DIFFERENCES))
        deltas = [
            param.sent if isinstance(param.sent, ParamDelta) else next(following)
            for param in params
        ]
        return encode_part(deltas, encoding=encoding, **metadata)

    def _digest_of(self, params: Sequence[TensorParam]) -> Digest:
        """Return what a part adds to the digest."""
        plan = self._state.plan
        if self._attempt.full:  # of the very values that are sent
            return digest_of(
                (param.name, param.values) for param in params if param.name in plan.digested
            )
        return Digest.total(param.digest for param in params if plan.counts(param.name))

    def _choose(self, name: str, change: Change | None) -> EncodingChoice:
        """Return how a param travels. Differences need old values that a digest proves."""
        policy, full = self._attempt.policy, self._attempt.full
        is_proven = not full and self._state.plan.counts(name)
        is_large = change is not None and change.is_dense
        if policy.is_fixed and not (full or change is None or is_large):
            if (numel := math.prod(change.shape)) > _FAR:
                return policy.sparsely(proven=is_proven, numel=numel)
            return self._sparsely[is_proven]
        image = self._snapshot.image(self._snapshot.key(name))
        values, escaped = image.values, None
        nnz = values.size if change is None else change.nnz
        # Its indices would be searched again, and take several times as much memory.
        only_dense = full or change is None or (is_large and values.nbytes > _LARGE)
        if change is not None and is_proven and policy.may_send_differences:
            escaped = escaped_of(change)
        floating = TORCH_DTYPE[image.dtype].is_floating_point
        stats = ParamStats(values.size, nnz, values.itemsize, floating, escaped, is_large)
        return policy.choose(stats, only_dense, self._speed.bytes_per_s)


def _deltas(
    named: Sequence[tuple[str, Change]], *, differences: bool
) -> list[ParamDelta | EncodedDelta]:
    """Return sparse changes as they are sent: their new values, or new minus old ones."""
    deltas: dict[int, ParamDelta | EncodedDelta] = {}
    rest: list[int] = []
    for number, (name, change) in enumerate(named):
        one = change.elements
        if differences and isinstance(one, EncodedElements) and one.stream is not None:
            of_tensor = name, change.dtype, change.shape
            deltas[number] = EncodedDelta(*of_tensor, one.stream, one.differences)
        else:
            rest.append(number)
    elements = [*decoded((named[number][1].elements for number in rest), with_old=differences)]
    values = [one.new for one in elements]
    if differences:
        values = differences_of(values, [one.old for one in elements])
    for number, own, sent in zip(rest, elements, values, strict=True):
        name, change = named[number]
        of_tensor = name, change.dtype, change.shape
        deltas[number] = ParamDelta(*of_tensor, own.indices, sent, differences, own.stream)
    return [deltas[number] for number in range(len(named))]


def _sparse_bytes(change: Change, encoding: str) -> int:
    """Return the bytes of a change's positions and new values, before compression."""
    if change.stream is not None and encoding in PACKED_ENCODINGS:
        return change.stream.nbytes + change.nnz * change.width
    return change.elements.position_bytes(encoding) + change.nnz * change.width
