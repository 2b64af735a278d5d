"""The rules of docs/http-api.md, one by one: who owns the weights, and the numbers of a run."""

from __future__ import annotations

from typing import Any

import pytest

from engine_ext.errors import RunConflict, RunFenced, SyncInProgress, VersionConflict
from engine_ext.format import PartId, RunSender, Unproven
from engine_ext.ranks.operations import RunOwner
from engine_ext.sync.sync_state import SyncState
from tests.unit.sync.sync_parts import TIMEOUT, commit, full, part, refused

A = RunSender(run="a", epoch=1, host="one", pid=11)
B = RunSender(run="b", epoch=1, host="two", pid=22)
A_AGAIN = RunSender(run="a", epoch=2, host="one", pid=12)
TWIN = RunSender(run="a", epoch=1, host="two", pid=11)  # has opened a copy of A's state


def of(sender: RunSender | None, version: int = 6, base: int = 5, **changes: Any) -> PartId:
    run = "" if sender is None else f"{sender.run}{sender.epoch}"
    changes.setdefault("identity", f"{run}v{version}")
    return part(version, base, sender=sender, sync_id=f"{run}to{version}", **changes)


def full_of(sender: RunSender, version: int, **changes: Any) -> PartId:
    changes.setdefault("identity", f"{sender.run}{sender.epoch}full{version}")
    return full(version, sender=sender, sync_id=f"{sender.run}full{version}", **changes)


def claim(
    state: SyncState, sender: RunSender, *, takeover: bool = False, now: float = 0.0
) -> RunOwner:
    return state.claim(sender, takeover=takeover, now=now, at=1000 + now)


def owner_in(error: Any) -> Any:
    return error.operands["owner"]


# --- one owner at a time ---


def test_a_fresh_engine_has_no_run(state: SyncState) -> None:
    assert (state.run, state.runs.owner, state.loaded) == (None, None, True)


def test_the_first_part_of_a_run_owns(state: SyncState) -> None:
    assert state.admit(of(A, num_parts=2), 0, 1000.5) == "new"
    assert state.runs.owner == RunOwner(run="a", epoch=1, host="one", pid=11, since=1000.5)
    assert state.run is None  # staging is not committing


def test_a_committed_version_is_of_its_run(state: SyncState) -> None:
    commit(state, of(A))
    assert (state.version, state.run, state.loaded) == (6, "a", False)


def test_another_run_is_refused_by_name(state: SyncState) -> None:
    state.admit(of(A), 0, 1000)
    state.settle(0, staged=True)
    state.commit()
    for other in (of(B, 7, 6), full_of(B, 9), of(None, 7, 6), full(1)):
        error = refused(state, other, RunConflict, now=5)
        assert owner_in(error) == {
            "run": "a", "epoch": 1, "host": "one", "pid": 11, "since": 1000
        }  # fmt: skip
        for word in ("run a", "process 11", "one", "1970-01-01 00:16:40", "--takeover"):
            assert word in error.message
    assert (state.version, state.run) == (6, "a")


def test_a_refused_part_owns_nothing(state: SyncState) -> None:
    refused(state, of(A, 9, 8), VersionConflict)
    assert state.runs.owner is None


def test_a_repeat_owns_nothing(state: SyncState) -> None:
    commit(state, of(A))
    state.release(A)
    state.admit(of(None, 7, 6, num_parts=2), 0)
    assert state.admit(of(A), 0) == "already_applied"
    assert state.runs.owner is None


def test_a_part_of_another_run_is_no_repeat(state: SyncState) -> None:
    commit(state, of(A, identity="same"))
    state.release(A)
    assert not state.seen(6, "same", "b")
    refused(state, of(B, identity="same"), VersionConflict)


def test_a_claim_can_be_repeated(state: SyncState) -> None:
    first = claim(state, A)
    state.admit(of(A, num_parts=2), 1)
    assert claim(state, A, now=50) == first
    assert state.describe() is not None


def test_a_claim_of_another_run_is_refused(state: SyncState) -> None:
    claim(state, A)
    with pytest.raises(RunConflict) as caught:
        claim(state, B)
    assert owner_in(caught.value)["run"] == "a"


# --- processes of one run ---


def test_a_later_process_replaces_an_earlier_one(state: SyncState) -> None:
    commit(state, of(A))
    state.admit(of(A, 7, 6, num_parts=2), 0)
    assert state.admit(of(A_AGAIN, 7, 6), 1) == "new"
    assert state.runs.owner is not None
    assert (state.runs.owner.epoch, state.runs.owner.pid) == (2, 12)
    error = refused(state, of(A, 7, 6, part=1, num_parts=2, identity="x"), RunFenced)
    assert owner_in(error)["epoch"] == 2


def test_a_later_process_that_claims_drops_parts(state: SyncState) -> None:
    state.admit(of(A, num_parts=2), 0)
    claim(state, A_AGAIN)
    assert state.sync is None


def test_an_earlier_process_stays_fenced(state: SyncState) -> None:
    claim(state, A_AGAIN)
    state.release(A_AGAIN)
    refused(state, of(A), RunFenced)
    with pytest.raises(RunFenced):
        claim(state, A, takeover=True)


def test_a_twin_is_refused_as_another_run_is(state: SyncState) -> None:
    commit(state, of(A))
    for one in (of(TWIN, 7, 6), full_of(TWIN, 9)):
        error = refused(state, one, RunConflict)
        assert "same state" in error.message
        assert owner_in(error)["host"] == "one"
    with pytest.raises(RunConflict):
        claim(state, TWIN)
    assert not state.release(TWIN)
    commit(state, of(A, 7, 6))


def test_a_twin_can_take_over(state: SyncState) -> None:
    state.admit(of(A, num_parts=2), 0)
    assert claim(state, TWIN, takeover=True).host == "two"
    assert state.sync is None
    refused(state, of(A), RunConflict)
    state.release(TWIN)
    claim(state, A)
    commit(state, of(A))


def test_who_names_no_process_is_no_twin(state: SyncState) -> None:
    claim(state, A)
    commit(state, of(RunSender(run="a", epoch=1)))
    assert state.runs.owner is not None
    assert state.runs.owner.pid == 11


def test_a_new_attempt_replaces_the_own_one(state: SyncState) -> None:
    state.admit(of(A, 6, num_parts=2), 0)
    assert state.admit(of(A, 7, num_parts=2), 1) == "new"
    assert state.describe().version == 7  # type: ignore[union-attr]
    refused(state, of(A, 6, part=1, num_parts=2, identity="late"), SyncInProgress, now=2)


# --- takeovers ---


def test_a_takeover_fences_for_good(state: SyncState) -> None:
    commit(state, of(A))
    state.admit(of(A, 7, 6, num_parts=2), 0)
    assert claim(state, B, takeover=True, now=5).run == "b"
    assert state.sync is None
    for one in (of(A, 7, 6), of(A_AGAIN, 7, 6), of(A), full_of(A, 99)):
        error = refused(state, one, RunFenced)
        assert owner_in(error)["run"] == "b"
        assert owner_in(error)["since"] == 1005
        for word in ("run a", "run b", "process 22", "two", "00:16:45"):
            assert word in error.message
    for takeover in (False, True):
        with pytest.raises(RunFenced):
            claim(state, A, takeover=takeover)
    state.release(B)
    refused(state, of(A, 7, 6), RunFenced)
    assert (state.version, state.run) == (6, "a")  # until the new owner has sent something


def test_who_took_over_has_its_own_numbers(state: SyncState) -> None:
    commit(state, of(A, 57, 5))
    claim(state, B, takeover=True)
    commit(state, full_of(B, 1))
    assert (state.version, state.run) == (1, "b")
    assert (state.runs.highest("a"), state.runs.highest("b")) == (57, 1)


def test_a_takeover_of_nobody_fences_nobody(state: SyncState) -> None:
    commit(state, of(A))
    state.release(A)
    claim(state, B, takeover=True)
    state.release(B)
    claim(state, A)
    assert state.admit(of(A, 7, 6), 0) == "new"


# --- giving up ---


def test_a_release_drops_what_was_staged(state: SyncState) -> None:
    commit(state, of(A))
    state.admit(of(A, 7, 6, num_parts=2), 0)
    assert state.release(A)
    assert (state.sync, state.runs.owner, state.run) == (None, None, "a")
    assert not state.release(A)
    claim(state, B)
    assert state.admit(of(B, 7, 6), 0) == "new"


@pytest.mark.parametrize("late", [of(A, 7, 6, num_parts=2), full_of(A, 8)])
def test_a_late_part_does_not_own_again(state: SyncState, late: PartId) -> None:
    """It was on its way when its sender released the engine."""
    commit(state, of(A))
    state.release(A)
    error = refused(state, late, RunFenced)
    assert "released" in error.message
    assert owner_in(error) is None
    assert (state.runs.owner, state.sync, state.version) == (None, None, 6)
    claim(state, B)
    assert owner_in(refused(state, late, RunConflict))["run"] == "b"


@pytest.mark.parametrize("sender", [A, A_AGAIN])
def test_a_released_run_owns_by_a_claim(state: SyncState, sender: RunSender) -> None:
    claim(state, A)
    state.release(A)
    claim(state, sender)
    assert state.admit(of(sender, num_parts=2), 0) == "new"


def test_a_later_epoch_owns_a_released_run(state: SyncState) -> None:
    commit(state, of(A))
    state.release(A)
    assert state.admit(of(A_AGAIN, 7, 6, num_parts=2), 0) == "new"
    refused(state, of(A, 7, 6, num_parts=2), RunFenced)


@pytest.mark.parametrize("other", [B, None])
def test_a_number_of_another_run_is_no_base(state: SyncState, other: RunSender | None) -> None:
    """A sent version 6 before the engine was restarted, and another trainer has come first."""
    commit(state, of(other))
    if other is not None:
        state.release(other)
    error = refused(state, of(A, 7, 6), VersionConflict)
    assert error.operands["actual"] == 6
    assert "claim" in error.message
    assert state.runs.owner is None
    claim(state, A)  # and look what is there
    commit(state, of(A, 7, 6))


def test_only_the_owner_releases(state: SyncState) -> None:
    claim(state, A_AGAIN)
    assert not state.release(A)
    assert not state.release(B)
    assert state.runs.owner is not None


# --- senders that name no run ---


def test_anonymous_versions_are_of_one_run(state: SyncState) -> None:
    commit(state, of(None, 6, 5))
    commit(state, of(None, 7, 6))
    commit(state, full(9))
    assert (state.run, state.runs.owner) == ("anonymous-1", None)


@pytest.mark.parametrize("number", [1, 57])
def test_an_anonymous_run_begins_anew(state: SyncState, number: int) -> None:
    """A trainer that resumes without its state counts from 1 again."""
    commit(state, of(None, 57, 5))
    commit(state, full(number, identity="other"))
    assert (state.version, state.run) == (number, "anonymous-2")
    commit(state, of(None, number + 1, number))
    assert state.run == "anonymous-2"


def test_an_anonymous_delta_after_a_rollback(state: SyncState) -> None:
    """Its number was another's; the run that had it is left."""
    commit(state, of(None, 6, 5))
    commit(state, of(None, 7, 6))
    state.roll_back()
    assert (state.version, state.run) == (6, "anonymous-1")
    commit(state, of(None, 7, 6, identity="other"))
    assert state.run == "anonymous-2"


def test_a_continuation_stays_in_its_run(state: SyncState) -> None:
    for identity in ("one", "two"):
        commit(state, part(identity=identity, sync_id=identity, unproven=Unproven()))
    assert (state.version, state.run) == (6, "anonymous-1")


def test_nobody_continues_a_named_version(state: SyncState) -> None:
    commit(state, of(A))
    state.release(A)
    refused(state, part(identity="rest", unproven=Unproven()), VersionConflict)


def test_a_run_claims_an_anonymous_engine(state: SyncState) -> None:
    commit(state, of(None, 6, 5))
    claim(state, A)
    commit(state, of(A, 7, 6))
    refused(state, of(None, 8, 7), RunConflict)


@pytest.mark.parametrize("how", ["claim", "part"])
def test_a_run_waits_for_anonymous_parts(state: SyncState, how: str) -> None:
    state.admit(of(None, 6, 5, num_parts=2), 0, 1000)
    if how == "part":
        error: Any = refused(state, of(A), SyncInProgress, now=20)
    else:
        with pytest.raises(SyncInProgress) as caught:
            claim(state, A, now=20)
        error = caught.value
        assert error.operands["until"] == 1060
    assert (error.operands["staged_run"], owner_in(error)) == (None, None)
    assert error.operands["staged_since"] == 1000
    assert (error.operands["retry_after"], state.runs.owner) == (40, None)
    claim(state, A, now=TIMEOUT)
    assert state.sync is None


def test_a_takeover_does_not_wait(state: SyncState) -> None:
    state.admit(of(None, 6, 5, num_parts=2), 0)
    claim(state, A, takeover=True)
    assert state.sync is None


def test_a_released_run_is_not_continued_anonymously(state: SyncState) -> None:
    commit(state, of(A))
    state.release(A)
    commit(state, of(None, 7, 6))
    assert state.run == "anonymous-1"


def test_who_keeps_others_out_is_named(state: SyncState) -> None:
    state.admit(of(A, 6, num_parts=2, origin="log"), 0, 1000)
    error = refused(state, of(B, 6), SyncInProgress, now=10)
    assert error.operands["staged_run"] == "a"
    assert owner_in(error) == {"run": "a", "epoch": 1, "host": "one", "pid": 11, "since": 1000}
    for word in ("run a", "process 11 on one", "version 6", "00:16:40", "retry in 50 s"):
        assert word in error.message


# --- numbers ---


@pytest.mark.parametrize("number", [1, 6, 7])
def test_a_run_uses_a_number_once(state: SyncState, number: int) -> None:
    commit(state, of(A))
    commit(state, of(A, 7, 6))
    error = refused(state, full_of(A, number), VersionConflict)
    assert (error.operands["actual"], error.operands["highest"]) == (7, 7)
    commit(state, full_of(A, 8))


def test_a_rollback_does_not_free_a_number(state: SyncState) -> None:
    commit(state, of(A))
    commit(state, of(A, 7, 6))
    state.roll_back()
    assert (state.version, state.run) == (6, "a")
    error = refused(state, of(A, 7, 6, identity="other"), VersionConflict)
    assert (error.operands["actual"], error.operands["highest"]) == (6, 7)
    commit(state, of(A, 8, 6))


def test_a_rollback_leads_to_the_earlier_run(state: SyncState) -> None:
    commit(state, of(A))
    claim(state, B, takeover=True)
    commit(state, full_of(B, 1))
    state.roll_back()
    assert (state.version, state.run) == (6, "a")
    assert state.runs.owner is not None
    assert state.runs.owner.run == "b"


def test_a_wrong_base_names_the_highest_number(state: SyncState) -> None:
    commit(state, of(A))
    assert refused(state, of(A, 9, 8), VersionConflict).operands["highest"] == 6


def test_a_failed_write_is_of_its_run(state: SyncState) -> None:
    commit(state, of(A), uncertain=True)
    assert (state.run, state.loaded, state.version) == ("a", False, 5)
    assert state.runs.highest("a") is None
    commit(state, full_of(A, 6))
    assert (state.run, state.uncertain) == ("a", False)


# --- what comes from the log, and from the engine itself ---


def test_a_log_asks_nobody(state: SyncState) -> None:
    commit(state, of(A))
    commit(state, of(B, 7, 6, origin="log"))
    assert state.run == "b"
    assert state.runs.owner is not None
    assert state.runs.owner.run == "a"


def test_a_log_makes_no_owner(state: SyncState) -> None:
    commit(state, of(A, origin="log"))
    assert (state.run, state.runs.owner, state.loaded) == ("a", None, False)
    commit(state, full_of(A, 6, origin="log"))  # a full version of the same number
    assert state.admit(of(A, 7, 6), 0) == "new"


def test_an_empty_version_stays_in_its_run(state: SyncState) -> None:
    commit(state, of(A))
    commit(state, part(7, 6, origin="engine"))
    assert (state.version, state.run) == (7, "a")
    refused(state, full_of(A, 7), VersionConflict)
    state.roll_back()
    refused(state, part(7, 6, origin="engine", identity="x"), VersionConflict)
