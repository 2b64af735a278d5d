"""The error tree of the receiver.

Every error that a request can meet is one of these. Each class fixes the HTTP status it is
answered with and the state the engine is in afterwards; a subclass inherits both::

    DeltaError
    ├── MalformedPart          400  truncated or malformed container, unknown encoding, bad version
    │   └── ChecksumMismatch   400  the bytes are not the ones the sender hashed
    ├── Unauthorized           401  no token or signature, or a wrong one
    ├── AccessDenied           403  no token is set, and the client is not trusted
    ├── PathForbidden          403  a path outside every --delta-root
    ├── UploadTooSlow          408  the body did not arrive in time
    ├── Conflict               409  the request is sound, but not now
    │   ├── VersionConflict    409  the engine is not at the sync's base version
    │   ├── BaseMismatch       409  the engine's old bytes are not the sender's
    │   ├── SyncInProgress     409  another sync has parts staged; retry later
    │   ├── GroupAborted       409  the group of engines has decided against the sync
    │   ├── RunConflict        409  another run owns the engine
    │   │   └── RunFenced      409  another run, or a later process of this one, has taken over
    │   ├── WeightsAsleep      409  the engine has released its weights
    │   ├── VersionNotServed   409  a request asked for a version that the engine does not serve
    │   └── LogDamaged         409  the delta log has no sound route from here
    │       └── LogDiverged    409  the delta log does not continue the engine's history
    ├── TooLarge               413  body or declared size over a limit
    ├── UnsupportedMedia       415  content type or content encoding
    ├── NotUpdatable           422  unknown tensor, wrong shape or dtype, bad index, inexact tensor
    │   ├── AdapterNotLoaded   422  no LoRA adapter of this name is loaded, or it takes no updates
    │   └── SaltUnavailable    422  the engine cannot do flush_cache=salt
    ├── TooManyUploads         429  too many updates in progress; retry later
    ├── PartUnavailable        502  another host of the engine could not get the part
    ├── SpoolFull              507  no room for the body
    ├── AuditUnavailable       507  no record of the sync can be written
    ├── WriteUndone            500  the write failed, and every rank was put back
    ├── CommittedNotResumed    500  committed, but publishing or resuming failed: send it again
    └── CommitFailed           500  the write failed half-way: the engine is ``uncertain``
        └── EngineUncertain    503  an earlier write did; only a full resync is taken

Everything but `CommitFailed`, `CommittedNotResumed` and `WriteUndone` is raised before the first
byte is written, or after every rank has put back what it had overwritten: a `BaseMismatch` of a
weight that changed between staging and commit can be found by the pass that writes. After
`CommitFailed` some weights might be new and some old: generation answers 503 until a ``full`` sync
has committed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

logger = logging.getLogger(__name__)

EngineState = Literal["unchanged", "uncertain", "committed"]
BY_NAME: dict[str, type[DeltaError]] = {}  # every class of the tree but its root


class DeltaError(Exception):
    """Base of the tree.

    Args:
        message: what is wrong and, if known, what to do next.
        operands: facts for programs (``expected``, ``actual``, ``tensor``, ...), which become keys
            of the answer's error. Values must be JSON types.
    """

    status: ClassVar[int] = 500
    engine_state: ClassVar[EngineState] = "unchanged"

    def __init__(self, message: str, **operands: Any) -> None:
        super().__init__(message)
        self.message = message
        self.operands = operands

    def __init_subclass__(cls) -> None:
        BY_NAME[cls.__name__] = cls

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON object under ``error`` in an answer."""
        facts = {"message": self.message, "engine_state": self.engine_state, **self.operands}
        return {"type": type(self).__name__, **facts}


class MalformedPart(DeltaError):
    """The bytes are not a delta part, or its metadata contradicts itself."""

    status = 400


class ChecksumMismatch(MalformedPart):
    """The part is well formed, but its bytes are not the ones the sender hashed."""


class Unauthorized(DeltaError):
    """The bearer token or the part's signature is missing or wrong."""

    status = 401


class AccessDenied(DeltaError):
    """No token is set, and the request is not known to be from this host or a trusted network."""

    status = 403


class PathForbidden(DeltaError):
    """A disk request names a path outside every ``--delta-root``."""

    status = 403


class UploadTooSlow(DeltaError):
    """The body stalled for longer than the stage timeout, or was below the minimum rate."""

    status = 408


class Conflict(DeltaError):
    """The request is sound, but the engine is not in the state it needs."""

    status = 409


class VersionConflict(Conflict):
    """The sync does not start from the engine's version (``expected``, ``actual``)."""


class BaseMismatch(Conflict):
    """The engine's old bytes are not the ones the delta was made against."""

    @classmethod
    def in_memory(cls, names: Iterable[str]) -> BaseMismatch:
        """Return the error for tensors that a scan or scrubbing has found to hold other bits."""
        found = sorted(names)
        return cls(
            f"{len(found)} tensors hold other bits than the syncs have written: {found[:8]}; "
            "send a full sync",
            tensors=found,
        )


class SyncInProgress(Conflict):
    """Another sync has staged parts; retry in ``retry_after`` seconds."""


class GroupAborted(Conflict):
    """The engines that were to commit the sync together have decided against it."""


class RunConflict(Conflict):
    """Another run owns the weights (``owner``): only its sender can change them."""


class RunFenced(RunConflict):
    """The run, or this process of it, was replaced for good (``owner``: by whom, since when)."""


class WeightsAsleep(Conflict):
    """The engine has released its weights' memory (sleep mode)."""


class VersionNotServed(Conflict):
    """The request asked for a version that the engine does not serve, or has left meanwhile."""


class LogDamaged(Conflict):
    """The delta log has no sound route to its newest version; the engine stays where it is."""


class LogDiverged(LogDamaged):
    """The delta log does not continue the engine's history; the engine stays where it is."""


class TooLarge(DeltaError):
    """A body or a declared size is over a limit; nothing of that size was allocated."""

    status = 413

    @classmethod
    def of_part(cls, what: str, limit: int) -> TooLarge:
        """Return the error that a part has too many bytes; `what` says how many."""
        return cls(
            f"{what}, the limit is {limit}; send smaller parts (bucket_bytes=), or raise the "
            "engine's --delta-tuning max-body-bytes",
            limit=limit,
        )


class UnsupportedMedia(DeltaError):
    """The endpoint does not accept this content type or content encoding."""

    status = 415


class NotUpdatable(DeltaError):
    """The engine does not hold the named tensor as sent, or cannot update it exactly."""

    status = 422


class AdapterNotLoaded(NotUpdatable):
    """The engine has loaded no LoRA adapter of this name, or cannot update its tensors."""


class SaltUnavailable(NotUpdatable):
    """The engine, as it was started, cannot keep cached KV for requests in flight alone."""


class TooManyUploads(DeltaError):
    """``--delta-tuning max-uploads`` updates are in progress; retry in ``retry_after`` seconds."""

    status = 429


class PartUnavailable(DeltaError):
    """A part could not be had from the engine's first host, or from a store; send it again."""

    status = 502


class SpoolFull(DeltaError):
    """The spool folder, or the cache of another host, has no room for the body."""

    status = 507


class AuditUnavailable(DeltaError):
    """No record can be appended to the audit file, without which no version is taken."""

    status = 507


class WriteUndone(DeltaError):
    """The write failed on some rank and was undone on every rank.

    If the sync was a full one, the engine can no more be rolled back to the version before its own.
    """


class CommittedNotResumed(DeltaError):
    """Every rank has committed, but publishing the version or resuming generation failed.

    A repeat of the sync does both again, and is answered ``already_applied``.
    """

    engine_state = "committed"


class CommitFailed(DeltaError):
    """The write failed on some rank and could not be undone, or a check changed the model."""

    engine_state = "uncertain"


class EngineUncertain(CommitFailed):
    """An earlier write failed half-way; only a ``full`` sync is accepted until one commits."""

    status = 503


_BY_STATE: dict[str, type[DeltaError]] = {
    "uncertain": CommitFailed,
    "committed": CommittedNotResumed,
}


def from_wire(error: dict[str, Any]) -> DeltaError:
    """Return the error that `DeltaError.to_wire` has encoded, in a rank's or an HTTP answer."""
    operands = {k: v for k, v in error.items() if k not in ("type", "message", "engine_state")}
    unknown = _BY_STATE.get(str(error.get("engine_state")), DeltaError)
    known = BY_NAME.get(str(error.get("type")), unknown)
    return known(str(error.get("message")), **operands)


def as_delta_error(error: Exception, *, log: bool = True) -> DeltaError:
    """Return the error as one of the tree; any other is a bug: logged, and made a `DeltaError`."""
    if isinstance(error, DeltaError):
        return error
    if log:
        logger.error("a delta operation failed", exc_info=error)
    return DeltaError(f"{type(error).__name__}: {error}")
