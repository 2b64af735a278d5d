"""Statuses of engines that a test stands in for."""

from __future__ import annotations

from typing import Any

import msgspec

from engine_ext.ranks.replies import CommittedSync
from engine_ext.ranks.status import EngineStatus, HealthStatus, VersionStatus

_VERSION = VersionStatus(
    number=0,
    published="0",
    run=None,
    by_rank=[0],
    digest="0" * 32,
    digest_algorithm="multilinear-1",
    complete=True,
    loaded=True,
    can_roll_back=False,
)
_HEALTH = HealthStatus(
    state="certain",
    mismatched=[],
    asleep=False,
    changed_externally=None,
    paused=None,
    resume_owed=False,
    awaits_full_sync=False,
    certification=[{}],
    uncertified={},
)
_IDLE = EngineStatus(
    engine="stand-in",
    adapter=None,
    ranks=1,
    apply="scatter",
    version=_VERSION,
    health=_HEALTH,
    owner=None,
    staged=None,
    last_sync=None,
    scrub=None,
    log=None,
    adapters=None,
)


def changed(
    status: EngineStatus,
    *,
    version: dict[str, Any] | None = None,
    health: dict[str, Any] | None = None,
    **keys: Any,
) -> EngineStatus:
    """A status with other values for some keys, and for some of two of its groups."""
    return msgspec.structs.replace(
        status,
        version=msgspec.structs.replace(status.version, **version or {}),
        health=msgspec.structs.replace(status.health, **health or {}),
        **keys,
    )


def engine_status(**keys: Any) -> EngineStatus:
    """The status of an idle engine with other values for some keys, see `changed`."""
    return changed(_IDLE, **keys)


def last_sync(version: int, sync_id: str | None) -> CommittedSync:
    """A commit that led to this version; only that and its id are of interest."""
    return CommittedSync(
        version=version,
        commit_ms=1.0,
        digest="0" * 32,
        run=None,
        base_version=version - 1,
        base_run=None,
        sync_id=sync_id,
        full=False,
        apply="scatter",
        parts=1,
        nnz=0,
        tensors=0,
        elements=0,
        rollback=False,
    )
