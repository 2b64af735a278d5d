"""The operations that the HTTP side asks of every rank's receiver.

Each operation is a struct, and its type parameter is the struct of its reply, one of those of
`engine_ext.ranks.replies`, which this module exports too. Its tag is the name of the method that
carries it out, see `engine_ext.sync.receiver.Receiver`. The engines' own channels carry a
request as its tag and a dict of JSON types, and an answer as ``{"ok": reply}`` or
``{"error": error}`` (see `engine_ext.errors.DeltaError.to_wire`). Only this module converts them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, Union, get_args

import msgspec

from engine_ext.errors import DeltaError, as_delta_error, from_wire
from engine_ext.format import PartId, RunSender
from engine_ext.ranks.replies import (
    Admission,
    BoardItem,
    BoardLease,
    CallerPause,
    CommittedSync,
    Delivery,
    EngineUse,
    LoadedAdapter,
    LogRecords,
    PartBegun,
    PartProgress,
    PreparedSync,
    RankDigest,
    RankPlan,
    RankReport,
    RankState,
    RankStatus,
    Reply,
    RolledBack,
    RunClaimed,
    RunOwner,
    ScrubState,
    Serving,
    StagedSync,
    SyncPrepared,
    SyncRecord,
    Written,
)
from engine_ext.structs import prepare

__all__ = [
    "AbortSync",
    "Admission",
    "BeginPart",
    "BoardItem",
    "BoardLease",
    "CallerPause",
    "ClaimRun",
    "CommitSync",
    "CommittedSync",
    "Delivery",
    "EngineUse",
    "FileStamp",
    "GetDigest",
    "GetItem",
    "GetPlan",
    "GetStatus",
    "HoldSync",
    "LeaseItem",
    "LoadedAdapter",
    "LogRecords",
    "Operation",
    "PartBegun",
    "PartProgress",
    "Parts",
    "PollPart",
    "PrepareSync",
    "PreparedSync",
    "PutItem",
    "RankDigest",
    "RankPlan",
    "RankReport",
    "RankState",
    "RankStatus",
    "Reply",
    "ReplyT",
    "Request",
    "RollBack",
    "RolledBack",
    "RunClaimed",
    "RunOwner",
    "ScrubState",
    "Serving",
    "StagedSync",
    "Stop",
    "StoppedCall",
    "SyncPrepared",
    "SyncRecord",
    "Written",
    "decode_answers",
    "decode_request",
    "encode_answer",
    "encode_request",
]

_TAG = "operation"

ReplyT = TypeVar("ReplyT", bound=Reply)


class Operation(
    msgspec.Struct,
    Generic[ReplyT],
    frozen=True,
    forbid_unknown_fields=True,
    tag_field=_TAG,
    omit_defaults=True,
    kw_only=True,
):
    """Base of the operations.

    Attributes:
        adapter: the LoRA adapter whose own tensors are meant; None means the model's weights.
        refusal: the error, as JSON, for which this rank refuses the operation: the engine was to
            stop for it on this rank, and could not. Other ranks learn of it in their vote.
    """

    adapter: str | None = None
    refusal: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """The operation's tag."""
        return str(self.__struct_config__.tag)


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of one version, by their identities."""

    version: int
    run: str | None = None  # that the parts name
    identities: list[str]


class GetStatus(Operation[RankReport], frozen=True, kw_only=True, tag="status"):
    """Describe the rank; without `details` only what every HTTP process must know, cheaply."""

    details: bool = True
    parts: Parts | None = None  # find which of them were not committed at their version


class GetItem(Operation[BoardItem], frozen=True, kw_only=True, tag="get"):
    """Read an item of the board with its entries, see `engine_ext.ranks.board.Board`."""

    key: str


class PutItem(Operation[BoardItem], frozen=True, kw_only=True, tag="put"):
    """Replace the value of an item of the board, see `engine_ext.ranks.board.Board.put`."""

    key: str
    value: Any
    expected: int
    append: Any = None
    most: int = 0


class LeaseItem(Operation[BoardLease], frozen=True, kw_only=True, tag="lease"):
    """Acquire or release the lease of an item, see `engine_ext.ranks.board.Board.lease`."""

    key: str
    holder: str
    release: bool = False
    instead_of: str | None = None
    value: Any = None
    expected: int | None = None


class FileStamp(msgspec.Struct, frozen=True, kw_only=True):
    """Place, size and time of writing of a file; another file, or another content, has others."""

    inode: int
    size: int  # bytes
    modified_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileStamp:
        """Return the stamp of a file by what `os.stat` has returned of it."""
        return cls(inode=found.st_ino, size=found.st_size, modified_ns=found.st_mtime_ns)


class PartSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where hosts without the spool get a part, as long as it is being staged."""

    url: str
    token: str  # bearer token of that URL
    size: int  # bytes
    content: str  # xxh3_128 of these, in hex
    # Identity of the file; a file at the same path on another host has another one.
    inode: int
    modified_ns: int


class BeginPart(Operation[PartBegun], frozen=True, kw_only=True, tag="begin"):
    """Admit a part and start staging it."""

    part: PartId
    path: str  # the file that intake has left of the part
    stamp: FileStamp | None = None  # of that file; None: not known
    pipe: str | None = None  # named pipe that a rank holds open for writing while it stages
    source: PartSource | None = None  # for ranks of other hosts, if there are any
    nbytes: int = 0  # of the part as it was sent
    now: float  # seconds on a clock that all HTTP processes share
    at: float = 0.0  # Unix time
    shares_doubts: bool = False  # the ranks wait for each other, and take each other's doubts first


class PollPart(Operation[PartProgress], frozen=True, kw_only=True, tag="poll"):
    """Ask whether a part is staged."""

    part: PartId


class PrepareSync(Operation[SyncPrepared], frozen=True, kw_only=True, tag="prepare"):
    """Keep a part that every rank has staged; else do a share of the work before the commit.

    That work is of the whole sync that the part belongs to, see `SyncOperations.prepare`.
    """

    part: PartId
    keep: bool = False


class HoldSync(Operation[Reply], frozen=True, kw_only=True, tag="hold"):
    """Vote on the complete staged sync as before its commit, and hold it for a group of engines.

    If it is held for the group, its lease alone is changed.
    """

    version: int
    sync_id: str | None
    prepared: PreparedSync


class AbortSync(Operation[Reply], frozen=True, kw_only=True, tag="abort"):
    """Forget the staged sync, if there is one.

    One that is held for a group is kept, if the request names a part or a version, and not the
    group.

    Attributes:
        part: forget this part alone, which some rank has refused.
        version, sync_id: forget the sync only if it is this one.
        group: that has decided against it.
        unloads: requests cannot name the adapter any more, so that no more syncs are taken for it.
    """

    part: PartId | None = None
    version: int | None = None
    sync_id: str | None = None
    group: str | None = None
    unloads: bool = False


class ClaimRun(Operation[RunClaimed], frozen=True, kw_only=True, tag="claim"):
    """Let only the process of a run change the weights from now on.

    Attributes:
        releases: end that instead, and drop what the process has staged.
        takeover: also from another run, which is fenced.
        now, at: as in `BeginPart`.
    """

    sender: RunSender
    releases: bool = False
    takeover: bool = False
    now: float
    at: float


class CommitSync(Operation[CommittedSync], frozen=True, kw_only=True, tag="commit"):
    """Write the staged sync on every rank, or on none.

    Attributes:
        group: that has decided for it, if it is held for one.
    """

    version: int
    sync_id: str | None
    group: str | None = None


class RollBack(Operation[RolledBack], frozen=True, tag="rollback"):
    """Restore the version before the last one."""


class GetPlan(Operation[RankPlan], frozen=True, tag="plan"):
    """List every checkpoint tensor with its placement on this rank."""


class GetDigest(Operation[RankDigest], frozen=True, kw_only=True, tag="digest"):
    """Compute the digests; with `scan` from live memory."""

    scan: bool


def _reply_type(operation: type[Operation[ReplyT]]) -> type[ReplyT]:
    [base] = operation.__orig_bases__  # type: ignore[attr-defined]
    reply_type: type[ReplyT]
    [reply_type] = get_args(base)
    return reply_type


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank's engine has stopped for an operation.

    Attributes:
        stop_ms, caches_ms: milliseconds until it had stopped, and that its caches took then.
        refusal: the error, as JSON, if one of the two has failed.
    """

    stop_ms: float
    caches_ms: float
    refusal: dict[str, Any] | None = None


@dataclass(frozen=True)
class StoppedCall(Generic[ReplyT]):
    """Answers of all ranks to an operation for which their engine was stopped.

    Attributes:
        answers: every rank's reply or error, in rank order.
        refusal: why the engine could not stop, or not treat its caches; every rank has refused
            the operation then.
        stop_ms, caches_ms: see `Stop`.
    """

    answers: list[ReplyT | DeltaError]
    refusal: DeltaError | None
    stop_ms: float
    caches_ms: float

    @classmethod
    def of(cls, answers: list[ReplyT | DeltaError], stops: Sequence[Stop]) -> StoppedCall[ReplyT]:
        """Return it with the first of the `stops`' times, as the first rank's reply has its own."""
        refusals = [from_wire(stop.refusal) for stop in stops if stop.refusal is not None]
        first = stops[0]
        return cls(answers, refusals[0] if refusals else None, first.stop_ms, first.caches_ms)


# The operations above; an adapter can define more for itself.
Request: Any = Union[tuple(Operation.__subclasses__())]  # noqa: UP007
prepare(Stop, Request, *map(_reply_type, Operation.__subclasses__()))


# Transport -----------------------------------------------------------------------------------


def encode_request(request: Operation[Any]) -> tuple[str, dict[str, Any]]:
    """Return the operation's tag and its fields as JSON types.

    Raises:
        TypeError: `request` is not an operation.
    """
    if not isinstance(request, Operation):
        raise TypeError(f"not an operation: {request!r}")
    arguments: dict[str, Any] = msgspec.to_builtins(request)
    return str(arguments.pop(_TAG)), arguments


def decode_request(operation: str, arguments: dict[str, Any], types: Any = Request) -> Any:
    """Return the operation, one of the union `types`, that `encode_request` has encoded.

    Raises:
        DeltaError: the tag is unknown, or a field is missing, unknown or of another type.
    """
    try:
        return msgspec.convert({**arguments, _TAG: operation}, types)
    except (TypeError, msgspec.ValidationError) as error:
        raise DeltaError(f"invalid operation {operation!r}: {error}") from error


def encode_answer(carry_out: Callable[[], Reply]) -> dict[str, Any]:
    """Call `carry_out` and return its reply, or what it raises, as an answer; never raises."""
    try:
        return {"ok": msgspec.to_builtins(carry_out())}
    except Exception as error:
        return {"error": as_delta_error(error).to_wire()}


def decode_answers(
    request: Operation[ReplyT], answers: Sequence[dict[str, Any]]
) -> list[ReplyT | DeltaError]:
    """Return every rank's reply to the operation, or its error, in rank order.

    Raises:
        msgspec.ValidationError: an answer is not one to this operation.
    """
    reply_type = _reply_type(type(request))
    return [
        from_wire(answer["error"])
        if "error" in answer
        else msgspec.convert(answer.get("ok"), reply_type)
        for answer in answers
    ]
