"""The rules of docs/wire-format.md and docs/http-api.md, one by one: parts and syncs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.errors import Conflict, SyncInProgress, VersionConflict
from engine_ext.format.identity import PartId
from engine_ext.sync.sync_state import SyncState
from tests.support.served_models import PROPERTY
from tests.unit.sync.sync_parts import commit, full, part, refused

# --- one sync, from its parts to its commit ---


def test_a_sync_of_one_part(state: SyncState) -> None:
    assert state.admit(part(), 0) == "new"
    sync = state.sync
    assert sync is not None
    assert not sync.complete  # it has arrived, but is not staged yet
    state.settle(0, staged=True)
    assert (sync.complete, state.version) == (True, 5)  # staging is not committing
    state.commit()
    assert (state.version, state.sync) == (6, None)


def test_versions_may_be_skipped(state: SyncState) -> None:
    commit(state, part(9, 5))
    assert state.version == 9


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_parts_come_in_any_order(state: SyncState, order: tuple[int, ...]) -> None:
    for position, number in enumerate(order):
        assert state.sync is None or not state.sync.complete
        assert state.admit(part(part=number, num_parts=3, identity=str(number)), position) == "new"
        state.settle(number, staged=True)
    assert state.sync is not None
    assert state.sync.complete


def test_num_parts_may_come_with_the_last_part_only(state: SyncState) -> None:
    for number, num_parts in ((0, None), (2, None), (1, 3)):
        assert state.sync is None or not state.sync.complete
        state.admit(part(part=number, num_parts=num_parts, identity=str(number)), 0)
        state.settle(number, staged=True)
    assert state.sync is not None
    assert state.sync.complete


def test_a_part_that_is_not_staged_yet_holds_the_commit(state: SyncState) -> None:
    state.admit(part(part=0, num_parts=2, identity="a"), 0)
    state.admit(part(part=1, num_parts=2, identity="b"), 0)
    state.settle(1, staged=True)
    assert state.sync is not None
    assert not state.sync.complete


def test_a_refused_part_can_be_sent_again_with_other_bytes(state: SyncState) -> None:
    state.admit(part(part=0, num_parts=2, identity="good"), 0)
    state.settle(0, staged=True)
    state.admit(part(part=1, num_parts=2, identity="bad"), 0)
    state.settle(1, staged=False)
    assert state.admit(part(part=1, num_parts=2, identity="better"), 1) == "new"
    state.settle(1, staged=True)
    assert state.sync is not None
    assert state.sync.complete


def test_a_sync_whose_only_part_was_refused_keeps_nobody_out(state: SyncState) -> None:
    state.admit(part(sync_id="a"), 0)
    state.settle(0, staged=False)
    assert state.admit(part(sync_id="b"), 0) == "new"


def test_a_dropped_sync_keeps_nobody_out(state: SyncState) -> None:
    state.admit(part(sync_id="a"), 0)
    state.drop()
    assert state.admit(part(sync_id="b"), 0) == "new"


# --- repeats ---


def test_a_part_that_is_staged_is_not_staged_twice(state: SyncState) -> None:
    one = part(part=0, num_parts=2)
    assert [state.admit(one, 0), state.admit(one, 1)] == ["new", "staged"]
    state.settle(0, staged=True)
    assert state.admit(one, 2) == "staged"


@pytest.mark.parametrize("number", [0, 1])
def test_any_part_of_the_committed_sync_is_already_applied(state: SyncState, number: int) -> None:
    parts = [part(part=n, num_parts=2, identity=str(n)) for n in (0, 1)]
    commit(state, *parts)
    assert state.admit(parts[number], 10) == "already_applied"
    assert state.sync is None


def test_a_repeat_is_answered_while_the_next_sync_is_staging(state: SyncState) -> None:
    commit(state, part(6, 5))
    state.admit(part(7, 6, num_parts=2), 0)
    assert state.admit(part(6, 5), 0) == "already_applied"
    assert state.describe().version == 7  # type: ignore[union-attr]


def test_a_repeat_is_known_by_its_bytes_not_by_its_sync_id(state: SyncState) -> None:
    commit(state, part(sync_id="first try"))
    assert state.admit(part(sync_id="second try"), 0) == "already_applied"


def test_a_full_sync_to_the_same_version_has_parts_of_its_own(state: SyncState) -> None:
    """Also those that have not changed since the committed one."""
    first = [full(6, part=n, num_parts=2, identity=str(n), sync_id="a") for n in (0, 1)]
    commit(state, *first)
    commit(
        state,
        full(6, part=0, num_parts=None, identity="changed", sync_id="b"),
        full(6, part=1, num_parts=2, identity="1", sync_id="b"),
    )
    assert state.admit(full(6, part=1, num_parts=2, identity="1", sync_id="b"), 0) == (
        "already_applied"
    )


def test_only_the_last_committed_sync_is_remembered(state: SyncState) -> None:
    commit(state, part(6, 5))
    commit(state, part(7, 6))
    refused(state, part(6, 5), VersionConflict)


def test_the_same_bytes_for_another_version_are_another_part(state: SyncState) -> None:
    commit(state, part(6, 5, identity="empty"))
    commit(state, part(7, 6, identity="empty"))
    assert state.version == 7


def test_a_freshly_loaded_engine_has_seen_nothing(state: SyncState) -> None:
    assert not state.seen(5, "v5")
    refused(state, part(5, 4), VersionConflict)


@pytest.mark.parametrize("staged", [False, True])
def test_the_same_number_with_other_bytes_is_a_conflict(state: SyncState, staged: bool) -> None:
    state.admit(part(part=0, num_parts=2, identity="one"), 0)
    if staged:
        state.settle(0, staged=True)
    refused(state, part(part=0, num_parts=2, identity="other"), Conflict)


# --- other syncs ---


@pytest.mark.parametrize(
    "other",
    [part(6, sync_id="b"), part(6), part(7, 5, sync_id="a"), full(9, sync_id="a"), full(6)],
    ids=["sync id", "no sync id", "version", "full", "full, no sync id"],
)
def test_another_sync_has_to_wait(state: SyncState, other: PartId) -> None:
    state.admit(part(6, sync_id="a", num_parts=2), 100)
    error = refused(state, other, SyncInProgress, now=100.5)
    assert error.operands["retry_after"] == 60
    assert error.operands["staged_version"] == 6
    assert error.operands["staged_sync_id"] == "a"


@PROPERTY
@given(
    st.floats(0.1, 1e4, allow_nan=False),
    st.floats(0, 0.999),
    st.floats(0, 1e6, allow_nan=False),
)
def test_whoever_waits_as_told_gets_in(timeout: float, passed: float, start: float) -> None:
    """``Retry-After`` is whole seconds, long enough, and not longer than the timeout needs."""
    state = SyncState(5, timeout)
    state.admit(part(6, sync_id="a", num_parts=2), start)
    now = start + timeout * passed
    wait = refused(state, part(6, sync_id="b"), SyncInProgress, now).operands["retry_after"]
    assert isinstance(wait, int)
    assert 1 <= wait <= timeout * (1 - passed) + 2
    assert state.admit(part(6, sync_id="b"), now + wait + 1e-6 * (1 + start)) == "new"


def test_every_part_starts_the_time_again(state: SyncState) -> None:
    state.admit(part(part=0, num_parts=3, identity="a", sync_id="a"), 0)
    state.admit(part(part=1, num_parts=3, identity="b", sync_id="a"), 50)
    refused(state, part(6, sync_id="b"), SyncInProgress, now=109)
    assert state.admit(part(6, sync_id="b"), 110) == "new"


def test_a_refused_part_does_not_start_the_time_again(state: SyncState) -> None:
    state.admit(part(part=0, num_parts=2, identity="a", sync_id="a"), 0)
    refused(state, part(part=0, num_parts=2, identity="x", sync_id="a"), Conflict, now=50)
    assert state.admit(part(6, sync_id="b"), 60) == "new"


def test_a_stale_sync_is_dropped_with_its_parts(state: SyncState) -> None:
    state.admit(part(part=0, num_parts=2, identity="old", sync_id="a"), 0)
    state.settle(0, staged=True)
    state.admit(part(part=1, num_parts=2, identity="new", sync_id="b"), 60)
    assert state.describe().parts == []  # type: ignore[union-attr]
    refused(state, part(part=1, num_parts=2, identity="late", sync_id="a"), SyncInProgress, 61)


def test_a_slow_sender_still_finds_its_own_sync(state: SyncState) -> None:
    state.admit(part(part=0, num_parts=2, identity="a"), 0)
    state.settle(0, staged=True)
    assert state.admit(part(part=1, num_parts=2, identity="b"), 1000) == "new"
    state.settle(1, staged=True)
    assert state.sync is not None
    assert state.sync.complete
