"""The lease of the engine, which one HTTP process at a time holds."""

from __future__ import annotations

from engine_ext.ranks.operations import LeaseGrant
from engine_ext.sync.lease import Lease


def acquire(
    lease: Lease, holder: str, resumes: bool = True, instead_of: str | None = None
) -> LeaseGrant:
    return lease.acquire(holder, resumes=resumes, instead_of=instead_of)


GRANTED = LeaseGrant(granted=True, fresh=True)
STALE = LeaseGrant(granted=True, fresh=False)


def test_one_at_a_time() -> None:
    lease = Lease()
    assert acquire(lease, "a") == GRANTED
    assert acquire(lease, "b") == LeaseGrant(granted=False, holder="a")
    assert acquire(lease, "b", instead_of="c") == LeaseGrant(granted=False, holder="a")
    assert acquire(lease, "a") == GRANTED
    lease.release("a", owed=False)
    assert acquire(lease, "b") == STALE
    assert acquire(lease, "b") == GRANTED


def test_what_was_seen_during_anothers_hold_does_not_count() -> None:
    lease = Lease()
    acquire(lease, "a", resumes=False)
    lease.release("a", owed=False)
    assert acquire(lease, "b", resumes=True) == STALE
    assert not lease.resume_owed
    assert acquire(lease, "b", resumes=True) == GRANTED
    assert lease.resume_owed


def test_what_is_owed_outlives_its_process() -> None:
    lease = Lease()
    acquire(lease, "a")
    assert acquire(lease, "b", resumes=False, instead_of="a") == STALE
    assert lease.resume_owed
    lease.release("a", owed=False)  # it was thought dead
    assert lease.resume_owed
    assert acquire(lease, "c").granted is False
    lease.release("b", owed=True)
    assert acquire(lease, "c", resumes=False) == STALE
    assert lease.resume_owed
    lease.release("c", owed=False)
    assert not lease.resume_owed
