"""The answer of ``GET /delta_status``; whoever writes or reads its keys has them from here.

Times are Unix times in seconds, digests and hashes hex. Readers ignore keys that they do not know.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from engine_ext.ranks.replies import (
    CommittedSync,
    LoadedAdapter,
    RunOwner,
    ScrubState,
    StagedSync,
    SyncRecord,
)
from engine_ext.structs import prepare

OTHER_FORM: Final = (
    "no status of this version of delta-updates; engine and client must be of one version"
)
HealthState = Literal["certain", "uncertain", "mismatched", "waiting_for_log"]


class VersionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The version of the weights."""

    number: int
    published: str  # the weight version that the engine itself reports
    run: str | None  # the version's run; None: loaded with the engine
    by_rank: list[int]  # replica by replica; they differ only while the engine is uncertain
    digest: str  # of the weights
    digest_algorithm: str
    complete: bool | None  # all of the version has arrived; None if nothing can show it
    loaded: bool  # nothing was written since the engine has started
    can_roll_back: bool  # the old values of the last version are kept


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP process that answers."""

    host: str
    model: str | None  # folder or name of the checkpoint, as the engine was given it
    since: float  # when it began
    seconds: float  # until now


class PauseStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pause of generation that a caller, not a commit, has asked for."""

    since: float | None  # None if it did not come through the engine's HTTP server
    seconds: float | None  # until now
    by: str | None  # address of the client; None if it is not known


class HealthStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine serves the version's bits, and what cannot be updated."""

    state: HealthState
    mismatched: list[str]  # tensors found to hold other bits since the last full sync
    asleep: bool  # the weights' memory is released
    changed_externally: str | None  # what changed the weights outside of delta sync
    paused: PauseStatus | None
    resume_owed: bool  # a commit has paused the engine and not resumed it yet
    awaits_full_sync: bool  # the engine takes no delta before one
    certification: list[dict[str, int]]  # per rank: number of tensors by certification status
    uncertified: dict[str, str]  # why each refused tensor cannot be updated, by name


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine takes versions together with other followers of its log."""

    name: str
    complete: int | None  # the newest version that the group takes; None before the first
    prepared: int | None  # version that the engine has prepared, and waits to commit
    waits_for: list[str]  # the members that keep the group from the next version, and why


class FollowStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine follows its delta log."""

    name: str  # the engine's, among the log's followers
    pid: int | None  # of the HTTP process that looks at the log; None before the first look
    interval: float  # seconds between two looks
    hold: int  # versions that the engine stays behind the newest
    pinned: int | None  # a version that the engine does not go past
    looked_at: float | None  # end of the last look
    failures: int  # looks that an error has ended
    error: dict[str, Any] | None  # the error that ended the last look
    group: GroupStatus | None = None  # None if the engine takes each version alone


class LogStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The delta log of the engine."""

    folder: str  # or its URL
    newest: int | None  # version in it; None if it has none, or was never read
    problem: dict[str, Any] | None  # the error that keeps the engine from the newest version
    from_peers: int = 0  # bytes of parts that other engines have sent, since the engine's start
    follow: FollowStatus | None = None  # None if the engine does not follow the log


class AuditStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The audit trail of the engine."""

    file: str
    records: int  # written since the engine's start
    pending: int  # records that could not be written yet; no version is taken before they are
    last: str | None  # SHA-256 of the last record's line
    problem: dict[str, Any] | None  # the error of the last attempt to write


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine, or of one LoRA adapter of it."""

    engine: str
    adapter: str | None  # whose status it is; None: the model's
    ranks: int  # that hold weights
    server: ServerStatus | None = None
    apply: str  # how syncs are written: scatter, masked or reload
    version: VersionStatus
    health: HealthStatus
    owner: RunOwner | None  # the only run that can change the weights; None: anyone can
    staged: StagedSync | None  # parts of a sync that is not committed
    last_sync: CommittedSync | None
    scrub: ScrubState | None  # of all ranks together; None if scrubbing is off
    log: LogStatus | None
    audit: AuditStatus | None = None  # None without an audit file
    adapters: list[LoadedAdapter] | None  # None if the engine takes none
    plan: list[list[dict[str, Any]]] | msgspec.UnsetType | None = msgspec.UNSET  # on request
    history: list[SyncRecord] | msgspec.UnsetType = msgspec.UNSET  # on request


prepare(EngineStatus)


def decode_status(content: bytes) -> EngineStatus:
    """Return the status in the body of an answer.

    Raises:
        ValueError: it is none, or that of a version with another form.
    """
    try:
        return msgspec.json.decode(content, type=EngineStatus)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{OTHER_FORM}: {error}") from error
