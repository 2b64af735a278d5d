"""The operations that the HTTP side asks of every rank's receiver, and their replies.

Each operation is a struct, and its type parameter is the struct of its reply. Its tag is the name
of the method that carries it out, see `engine_ext.receiver.receiver.Receiver`. The engines' own
channels carry a request as its tag and a dict of JSON types, and an answer as ``{"ok": reply}`` or
``{"error": error}`` (see `engine_ext.errors.DeltaError.to_wire`). Only this module converts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar, Union, get_args

import msgspec

from engine_ext.errors import DeltaError, as_delta_error, from_wire
from engine_ext.wire.identity import PartId

Admission = Literal["new", "staged", "already_applied"]

_TAG = "operation"


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the replies; by itself the reply of an operation that has nothing to report."""


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
    """

    adapter: str | None = None

    @property
    def name(self) -> str:
        """The operation's tag."""
        return str(self.__struct_config__.tag)


# Replies -------------------------------------------------------------------------------------


class RankState(Reply, frozen=True, kw_only=True):
    """What every HTTP process must know of a rank."""

    version: int  # of the live weights
    engine_state: Literal["certain", "uncertain"]  # uncertain after a write failed half-way
    resume_owed: bool  # a commit has paused the engine and not resumed it yet


class LeaseGrant(Reply, frozen=True, kw_only=True):
    """The answer to a process that asks for a lease."""

    granted: bool  # whether the process has the lease now
    holder: str | None = None  # if not, the process that has it
    fresh: bool = False  # if so, no other process has had it since this one last had it


class EngineLease(Reply, frozen=True, kw_only=True):
    """A `LeaseGrant`, with the state of the rank that gave it."""

    grant: LeaseGrant
    state: RankState


class StagedSync(Reply, frozen=True, kw_only=True):
    """A sync that has parts, but is not committed."""

    version: int
    base_version: int | None
    sync_id: str | None
    full: bool
    num_parts: int | None
    parts: list[int]  # numbers of the parts that all ranks have staged


class Delivery(Reply, frozen=True, kw_only=True):
    """Whether all of a version has arrived, as far as the ranks know."""

    complete: bool = True  # False: unknown, its files named no count and no digest
    folder: str | None = None  # the version's folder, if all that arrived is from there
    files: list[str] = []  # the names of what arrived


class Written(Reply, frozen=True, kw_only=True):
    """What a commit or a rollback has written."""

    version: int  # of the live weights now
    commit_ms: float  # milliseconds that this rank spent writing and voting
    digest: str  # of what this rank counts, in hex


class CommittedSync(Written, frozen=True, kw_only=True):
    """A sync that was committed."""

    base_version: int
    sync_id: str | None
    full: bool
    apply: str  # name of the applier
    parts: int
    nnz: int  # elements that the sync has sent, without those skipped
    tensors: int  # tensors that it has named, without those skipped
    elements: int  # elements of those tensors
    skipped: dict[str, int] = {}  # elements sent of tensors that the engine ignores, by name
    rollback: bool  # whether this version can be rolled back


class RolledBack(Written, frozen=True, kw_only=True):
    """A rollback; `rolled_back` is the version that was left."""

    rolled_back: int


class LoadedAdapter(Reply, frozen=True, kw_only=True):
    """A LoRA adapter that the engine has loaded; no digest before a request has named it."""

    name: str
    version: int
    digest: str | None


class ScrubState(Reply, frozen=True, kw_only=True):
    """What scrubbing has found on one rank."""

    passes: int  # over all tensors, since the start
    passed_at: float | None  # Unix time at which the last one ended
    mismatched: list[str]  # tensors whose live memory is not what the syncs have written
    error: str | None  # what ended the last pass early


class RankStatus(RankState, frozen=True, kw_only=True):
    """The state of one rank's receiver."""

    asleep: bool  # the engine has released the weights' memory
    foreign: str | None  # what changed the weights outside of delta sync since the last sync
    delivery: Delivery = Delivery()
    staged: StagedSync | None
    last_sync: CommittedSync | None
    can_roll_back: bool
    apply: str  # name of the applier
    certification: dict[str, int]  # number of tensors by certification status
    uncertified: dict[str, str]  # why each refused tensor could not be certified, by name
    digest: str  # of what this rank counts, in hex
    awaits: str | msgspec.UnsetType = msgspec.UNSET  # what must come before it takes deltas
    adapters: list[LoadedAdapter] | msgspec.UnsetType = msgspec.UNSET  # if the engine takes any
    scrub: ScrubState | None = None  # None if scrubbing is off


class Unseen(Reply, frozen=True, kw_only=True):
    """The identities that were not committed at the version in question."""

    unseen: list[str]


class PartBegun(Reply, frozen=True, kw_only=True):
    """How a part was admitted, see `engine_ext.receiver.sync_state.SyncState.admit`."""

    admission: Admission


class PartProgress(Reply, frozen=True, kw_only=True):
    """Whether a part is staged on this rank."""

    done: bool


class PartSettled(Reply, frozen=True, kw_only=True):
    """Whether all parts of the staged sync are staged, and it needs no `PrepareSync`."""

    complete: bool
    prepared: bool
    base: Delivery | None = None  # if complete: of the version that it replaces, unless it is full


class SyncPrepared(Reply, frozen=True, kw_only=True):
    """Whether nothing is left to do before the staged sync can be committed."""

    done: bool
    rebuilt: int  # modules rebuilt so far on this rank


class Pulled(Reply, frozen=True, kw_only=True):
    """Versions that were pulled under the name of a checkpoint; none if `source` is empty."""

    source: str = ""  # the folder that they are published in
    target: int = 0  # the last of them
    sync_id: str | None = None  # of what was staged


class RankPlan(Reply, frozen=True, kw_only=True):
    """One row per checkpoint tensor, or None if the engine has loaded no checkpoint yet."""

    tensors: list[dict[str, Any]] | None


class ScrubFindings(Reply, frozen=True, kw_only=True):
    """The tensors that scrubbing has found to be other than written, each told once."""

    mismatched: list[str]


class RankDigest(Reply, frozen=True, kw_only=True):
    """The digest of each covered tensor's elements that this rank counts, in hex."""

    version: int
    tensors: dict[str, str]  # scanned from live memory, if a scan was asked for; else `tracked`
    tracked: dict[str, str]  # what the syncs add up to
    corrupted: list[str]  # whose modules a scan found different from what processing makes of them


class SyncRecord(Reply, frozen=True, kw_only=True):
    """The result of one request for an update; see `CommittedSync` for the counts."""

    at: float  # Unix time at which the request began
    outcome: str  # committed, staged, refused, ...
    error: str | None = None  # type of the error that it was answered with
    message: str | None = None
    version: int | None = None
    base_version: int | None = None
    sync_id: str | None = None
    full: bool = False
    parts: int = 0  # that it has sent
    nnz: int | None = None
    elements: int | None = None
    tensors: int | None = None
    bytes: int = 0  # of the parts
    apply: str | None = None
    rebuilt: int | None = None  # modules that the engine's own processing has computed anew
    adapter: str | None = None  # the LoRA adapter that it was for
    timings_ms: dict[str, float]  # milliseconds by phase


class History(Reply, frozen=True, kw_only=True):
    """The last syncs, the newest one last."""

    syncs: list[SyncRecord]


# Operations ----------------------------------------------------------------------------------


class GetStatus(Operation[RankStatus], frozen=True, tag="status"):
    """Describe the receiver."""


class GetState(Operation[RankState], frozen=True, tag="state"):
    """Describe what every HTTP process must know; cheap."""


class AcquireLease(Operation[EngineLease], frozen=True, kw_only=True, tag="acquire_lease"):
    """Let one HTTP process pause the engine; see `engine_ext.receiver.lease.Lease.acquire`."""

    holder: str
    resumes: bool
    instead_of: str | None


class ReleaseLease(Operation[Reply], frozen=True, kw_only=True, tag="release_lease"):
    """Return the lease; `owed` if generation must still be resumed."""

    holder: str
    owed: bool


class AcquireLogLease(Operation[LeaseGrant], frozen=True, kw_only=True, tag="acquire_log_lease"):
    """Let one HTTP process replay the delta log."""

    holder: str
    instead_of: str | None


class ReleaseLogLease(Operation[Reply], frozen=True, kw_only=True, tag="release_log_lease"):
    """Return the lease of the delta log."""

    holder: str


class FindUnseen(Operation[Unseen], frozen=True, kw_only=True, tag="unseen"):
    """Find which parts were not committed at this version."""

    version: int
    identities: list[str]


class PartSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where hosts without the spool get a part, as long as it is being staged."""

    url: str
    token: str  # bearer token of that URL
    size: int  # bytes
    content: str  # xxh3_128 of these, in hex


class BeginPart(Operation[PartBegun], frozen=True, kw_only=True, tag="begin"):
    """Admit a part and start staging it."""

    part: PartId
    path: str  # the spool file that holds the part
    source: PartSource | None = None  # for ranks of other hosts, if there are any
    now: float  # seconds on a clock that all HTTP processes share


class PollPart(Operation[PartProgress], frozen=True, kw_only=True, tag="poll"):
    """Ask whether a part is staged."""

    part: PartId


class SettlePart(Operation[PartSettled], frozen=True, kw_only=True, tag="settle"):
    """Keep a part that every rank has staged, or forget one that some rank refused."""

    part: PartId
    staged: bool


class PrepareSync(Operation[SyncPrepared], frozen=True, kw_only=True, tag="prepare"):
    """Do a share of what must precede the commit of a staged sync; `part` is one of its parts."""

    part: PartId


class DropSync(Operation[Reply], frozen=True, kw_only=True, tag="drop"):
    """Forget the staged sync; with a version, only if it is that one."""

    version: int | None = None
    sync_id: str | None = None


class CommitSync(Operation[CommittedSync], frozen=True, kw_only=True, tag="commit"):
    """Write the staged sync on every rank, or on none."""

    version: int
    sync_id: str | None


class RollBack(Operation[RolledBack], frozen=True, tag="rollback"):
    """Restore the version before the last one."""


class RecordPull(Operation[Reply], frozen=True, kw_only=True, tag="record_pull"):
    """Remember what was pulled under the name of a checkpoint."""

    checkpoint: str
    pulled: Pulled


class FindPull(Operation[Pulled], frozen=True, kw_only=True, tag="find_pull"):
    """Find what was pulled under the name of a checkpoint."""

    checkpoint: str


class GetPlan(Operation[RankPlan], frozen=True, tag="plan"):
    """List every checkpoint tensor with its placement on this rank."""


class GetDigest(Operation[RankDigest], frozen=True, kw_only=True, tag="digest"):
    """Compute the digests; with `scan` from live memory."""

    scan: bool


class TakeScrubFindings(Operation[ScrubFindings], frozen=True, tag="take_scrub_findings"):
    """Return what scrubbing has found since the last request of any process."""


class RecordSync(Operation[SyncRecord], frozen=True, kw_only=True, tag="record"):
    """Add a request to the history; the reply includes the parts staged before it."""

    record: SyncRecord


class GetHistory(Operation[History], frozen=True, tag="history"):
    """List the last syncs."""


class UnloadAdapter(Operation[Reply], frozen=True, tag="unload_adapter"):
    """Learn that requests cannot name the adapter any more."""


# The operations above; an adapter may define more for itself.
Request: Any = Union[tuple(Operation.__subclasses__())]  # noqa: UP007


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
    [operation] = type(request).__orig_bases__  # type: ignore[attr-defined]
    [reply_type] = get_args(operation)
    return [
        from_wire(answer["error"])
        if "error" in answer
        else msgspec.convert(answer.get("ok"), reply_type)
        for answer in answers
    ]
