"""The replies to the operations that the HTTP side asks of every rank, and what they consist of."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine_ext.structs import prepare

Admission = Literal["new", "staged", "already_applied"]


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the replies, and the reply of an operation that has nothing to report."""


class CallerPause(msgspec.Struct, frozen=True, kw_only=True):
    """A pause of generation that is not a commit's."""

    since: float  # Unix time at which an HTTP process has seen it
    began: float  # the same on a clock that all HTTP processes share, in seconds
    by: str | None  # address of the client that asked for it; None if it is not known


class EngineUse(msgspec.Struct, frozen=True, kw_only=True):
    """Who has paused the engine, and what a commit owes; the value of the board's item `ENGINE`."""

    resume_owed: bool = False  # a commit, not the caller, has paused the engine, and must resume it
    publish_owed: bool = False  # a commit might have written without publishing the version yet
    pause: CallerPause | None = None  # that lasts, as it was last recorded


class RankState(Reply, frozen=True, kw_only=True):
    """The state of a rank that every HTTP process must know."""

    version: int  # of the live weights
    # uncertain after a write failed half-way, mismatched after a scan or scrubbing found other bits
    engine_state: Literal["certain", "mismatched", "uncertain"]
    resume_owed: bool  # a commit has paused the engine and not resumed it yet
    paused: CallerPause | None = None  # as it was last recorded
    asleep: bool = False  # the engine has released the weights' memory
    released: bool = False  # that, or other memory that it needs to generate
    foreign: str | None = None  # what changed the weights outside of delta sync since the last sync


class BoardItem(Reply, frozen=True, kw_only=True):
    """An item of the board after an operation, see `engine_ext.ranks.board.Board`."""

    value: Any = None  # of JSON types; None: none was put yet
    revision: int = 0  # another one after every change of the value and of the holder
    holder: str | None = None  # the process that has the item's lease
    written: bool = False  # whether the operation has put a value
    entries: list[Any] = []  # the newest one last; empty if the operation does not ask for them


class BoardLease(Reply, frozen=True, kw_only=True):
    """The answer to a process that acquires or releases a lease, with the rank's state then."""

    granted: bool  # whether the process has it now
    item: BoardItem
    state: RankState


class RunOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns the weights, or has staged parts; see `engine_ext.format.identity.RunSender`."""

    run: str
    epoch: int
    host: str | None
    pid: int | None
    since: float  # Unix time


class RunClaimed(Reply, frozen=True, kw_only=True):
    """The owner of the weights after a claim or its end."""

    owner: RunOwner | None
    released: bool = False  # whether the run has owned them until now, and gave them up
    highest: int | None  # number that a version of the run has had; None before the first


class PreparedSync(msgspec.Struct, frozen=True, kw_only=True):
    """A staged sync that all ranks have voted for, and that its group of engines decides on."""

    group: str
    until: float  # Unix time at which its lease ends
    ends: float  # the same on a clock that all HTTP processes share, in seconds
    # Known to the HTTP side alone: whether commit is recorded here, and the engines of the group
    # that did not answer when the lease had ended.
    recorded: bool = False
    unreachable: list[str] = []


class StagedSync(Reply, frozen=True, kw_only=True):
    """A sync that has parts, but is not committed."""

    version: int
    base_version: int | None
    sync_id: str | None
    full: bool
    num_parts: int | None
    parts: list[int]  # numbers of the parts that all ranks have staged
    bytes: int = 0  # of its parts so far, as they were sent
    run: str | None = None  # None: its parts name none
    owner: RunOwner | None = None  # its sender, if its parts name a run
    since: float = 0.0  # Unix time of its first part
    prepared: PreparedSync | None = None  # None: no group of engines decides on it


class Delivery(Reply, frozen=True, kw_only=True):
    """Whether all of a version has arrived, as far as the ranks know."""

    complete: bool = True  # False: unknown, its files named no count and no digest
    folder: str | None = None  # the version's folder, if all that arrived is from there
    files: list[str] = []  # the names of the files that arrived


class Written(Reply, frozen=True, kw_only=True):
    """The result of a commit or a rollback."""

    version: int  # of the live weights now
    vote_ms: float = 0.0  # milliseconds that this rank spent checking, and voting before the write
    commit_ms: float  # milliseconds that this rank spent writing and voting
    digest: str  # of the elements that this rank counts, in hex
    run: str | None  # the version's run; None: loaded with the engine


class CommittedSync(Written, frozen=True, kw_only=True):
    """A sync that was committed."""

    base_version: int
    base_run: str | None  # the run of the version before
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
    """The state of scrubbing on one rank."""

    passes: int  # over all tensors, since the start
    passed_at: float | None  # Unix time at which the last one ended
    mismatched: list[str]  # tensors whose live memory differs from the syncs' values
    error: str | None  # the error that ended the last pass early


class RankStatus(RankState, frozen=True, kw_only=True):
    """The state of one rank's receiver."""

    run: str | None  # the version's run; None: as for `Written`
    owner: RunOwner | None  # the only run that can change it; None: anyone can
    loaded: bool  # nothing was written since the engine has started
    mismatched: list[str] = []  # tensors found to hold other bits since the last full sync
    delivery: Delivery = Delivery()
    staged: StagedSync | None
    last_sync: CommittedSync | None
    can_roll_back: bool
    apply: str  # name of the applier
    certification: dict[str, int]  # number of tensors by certification status
    uncertified: dict[str, str]  # why each refused tensor could not be certified, by name
    digest: str  # of what this rank counts, in hex
    awaits: str | msgspec.UnsetType = msgspec.UNSET  # the sync that must come before deltas
    adapters: list[LoadedAdapter] | msgspec.UnsetType = msgspec.UNSET  # if the engine takes any
    scrub: ScrubState | None = None  # None if scrubbing is off


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that only the ranks know of an engine with several HTTP processes (SGLang)."""

    idle: bool  # no request runs
    weight_version: str


class RankReport(Reply, frozen=True, kw_only=True):
    """The state of one rank."""

    state: RankState
    status: RankStatus | None = None  # if it was asked for
    unseen: list[str] = []  # the identities in question that were not committed
    findings: int = 0  # of scrubbing since the start: a tensor counts whenever it becomes wrong
    serving: Serving | None = None  # if the engine's adapter adds it


class PartBegun(Reply, frozen=True, kw_only=True):
    """How a part was admitted, see `engine_ext.sync.sync_state.SyncState.admit`."""

    admission: Admission
    search_ms: float | None = None  # milliseconds; set if this rank searched its model for copies


class PartProgress(Reply, frozen=True, kw_only=True):
    """Whether a part is staged on this rank."""

    done: bool


class SyncPrepared(Reply, frozen=True, kw_only=True):
    """How far the staged sync is."""

    complete: bool  # all of its parts are staged
    done: bool  # it is complete, and can be committed now
    rebuilt: int = 0  # modules rebuilt so far on this rank
    base: Delivery | None = None  # if complete: of the version that it replaces, unless it is full


class LogRecords(msgspec.Struct, frozen=True, kw_only=True):
    """Records of the last versions in the delta log that have led to the engine's version.

    The value of the item `LOG_RECORDS`, which the ranks change with their weights: a delta of the
    log adds its record, a full version drops those before it, and a rollback restores them.
    """

    version: int = 0  # the engine's
    records: dict[str, str] = {}  # by folder's name, see `engine_ext.log.records`


prepare(EngineUse, LogRecords)


class RankPlan(Reply, frozen=True, kw_only=True):
    """One row per checkpoint tensor, or None if the engine has loaded no checkpoint yet."""

    tensors: list[dict[str, Any]] | None


class RankDigest(Reply, frozen=True, kw_only=True):
    """The digest of each covered tensor's elements that this rank counts, in hex."""

    version: int
    tensors: dict[str, str]  # scanned from live memory, if a scan was asked for; else `tracked`
    tracked: dict[str, str]  # added up over the syncs
    corrupted: list[str]  # tensors of modules that a scan found different from a rebuild


class SyncRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one request for an update; see `CommittedSync` for the counts."""

    at: float  # Unix time at which the request began
    outcome: str  # committed, staged, refused, ...
    error: str | None = None  # type of the error that it was answered with
    message: str | None = None
    version: int | None = None
    base_version: int | None = None
    run: str | None = None  # the version's run
    sync_id: str | None = None
    full: bool = False
    reason: str | None = None  # why it was full
    parts: int = 0  # number of its parts
    nnz: int | None = None
    elements: int | None = None
    tensors: int | None = None
    bytes: int = 0  # of the parts
    apply: str | None = None
    rebuilt: int | None = None  # modules that the engine's own processing has computed anew
    adapter: str | None = None  # the LoRA adapter that it was for
    timings_ms: dict[str, float]  # milliseconds by phase
