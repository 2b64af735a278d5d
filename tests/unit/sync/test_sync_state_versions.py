"""The rules of docs/wire-format.md and docs/http-api.md, one by one: versions, and uncertainty."""

from __future__ import annotations

from typing import Any

import pytest

from engine_ext.errors import (
    BaseMismatch,
    EngineUncertain,
    MalformedPart,
    VersionConflict,
    WeightsAsleep,
)
from engine_ext.format import PartId, Unproven
from engine_ext.ranks.operations import StagedSync
from engine_ext.sync.sync_state import SyncState
from tests.unit.sync.sync_parts import TIMEOUT, commit, full, part, refused

# --- the base ---


@pytest.mark.parametrize("base", [0, 4, 6, 2**63 - 2])
def test_a_wrong_base_is_named(state: SyncState, base: int) -> None:
    error = refused(state, part(2**63 - 1, base), VersionConflict)
    assert (error.operands["expected"], error.operands["actual"]) == (base, 5)
    assert state.sync is None


@pytest.mark.parametrize("version", [5, 4, 0])
def test_a_delta_leads_forward(state: SyncState, version: int) -> None:
    refused(state, part(version, 5, identity="x"), MalformedPart)


@pytest.mark.parametrize("base", [-1, None])
def test_only_a_full_sync_leads_to_version_0(base: int | None) -> None:
    state = SyncState(0, TIMEOUT)
    refused(state, part(0, base), MalformedPart)
    commit(state, full(0))
    assert state.version == 0


@pytest.mark.parametrize("version", [0, 4, 5, 6, 2**63 - 1])
def test_a_full_sync_leads_to_any_version(state: SyncState, version: int) -> None:
    commit(state, full(version))
    assert state.version == version
    assert state.admit(full(version), 0) == "already_applied"


@pytest.mark.parametrize(
    "other",
    [part(6, 4, part=1, num_parts=2, identity="b"), full(6, part=1, num_parts=2, identity="b")],
    ids=["base_version", "full"],
)
def test_the_parts_of_a_sync_agree(state: SyncState, other: PartId) -> None:
    state.admit(part(6, 5, part=0, num_parts=2), 0)
    refused(state, other, MalformedPart)


def test_the_parts_of_a_sync_agree_about_num_parts(state: SyncState) -> None:
    state.admit(part(part=0, num_parts=2), 0)
    refused(state, part(part=1, num_parts=3, identity="b"), MalformedPart)


@pytest.mark.parametrize(
    ("first", "second"),
    [((3, None), (0, 2)), ((0, 2), (2, None)), ((0, 2), (5, None))],
)
def test_no_part_beyond_num_parts(
    state: SyncState, first: tuple[int, int | None], second: tuple[int, int | None]
) -> None:
    state.admit(part(part=first[0], num_parts=first[1], identity="a"), 0)
    refused(state, part(part=second[0], num_parts=second[1], identity="b"), MalformedPart)


def test_a_first_part_beyond_num_parts_stages_nothing(state: SyncState) -> None:
    refused(state, part(part=2, num_parts=2), MalformedPart)
    assert state.sync is None


# --- continuations: slime publishes one version in several disk requests ---


def disk(version: int, identity: str, **changes: Any) -> PartId:
    return part(version, version - 1, identity=identity, unproven=Unproven(), **changes)


def test_continuation_is_own_transaction_at_same_version(state: SyncState) -> None:
    for identity in ("one", "two", "three"):
        commit(state, disk(6, identity, sync_id=identity))
        assert state.version == 6
    for identity in ("one", "two", "three"):
        assert state.admit(disk(6, identity), 0) == "already_applied"


def test_the_next_version_forgets_the_continued_one(state: SyncState) -> None:
    commit(state, disk(6, "one"))
    commit(state, disk(6, "two"))
    commit(state, disk(7, "three"))
    refused(state, disk(6, "one"), VersionConflict)
    assert state.seen(7, "three")
    assert not state.seen(7, "two")


def test_only_a_disk_request_continues(state: SyncState) -> None:
    commit(state, disk(6, "one"))
    refused(state, part(6, 5, identity="two"), VersionConflict)


def test_a_continuation_must_name_the_current_version(state: SyncState) -> None:
    commit(state, disk(6, "one"))
    refused(state, disk(5, "two"), VersionConflict)
    refused(state, disk(8, "two"), VersionConflict)


def test_a_full_sync_to_the_current_version_is_no_continuation(state: SyncState) -> None:
    """It replaces everything, so what was committed before is not applied any more."""
    commit(state, disk(6, "one"))
    commit(state, full(6, identity="all"))
    assert state.seen(6, "all")
    assert not state.seen(6, "one")


# --- asleep and uncertain ---


def test_asleep(state: SyncState) -> None:
    commit(state, part(6, 5))
    state.asleep = True
    refused(state, part(7, 6), WeightsAsleep)
    refused(state, full(9), WeightsAsleep)
    state.asleep = False
    assert state.admit(part(7, 6), 0) == "new"


def test_failed_write_keeps_version_and_forgets_applied(state: SyncState) -> None:
    commit(state, part(6, 5))
    commit(state, part(7, 6), uncertain=True)
    assert (state.version, state.uncertain, state.sync) == (6, True, None)
    for one in (part(6, 5), part(7, 6), part(8, 7), disk(6, "x")):
        refused(state, one, EngineUncertain)


@pytest.mark.parametrize("version", [0, 6, 7])
def test_only_a_full_sync_ends_uncertain(state: SyncState, version: int) -> None:
    commit(state, part(6, 5), uncertain=True)
    commit(state, full(version))
    assert (state.version, state.uncertain) == (version, False)
    commit(state, part(version + 1, version, identity="next"))


def test_a_failed_full_sync_stays_uncertain(state: SyncState) -> None:
    commit(state, full(6), uncertain=True)
    refused(state, part(6, 5), EngineUncertain)
    commit(state, full(6))  # the very same bytes are not taken for applied
    assert not state.uncertain


def test_weights_that_were_lost_are_not_already_applied(state: SyncState) -> None:
    """An engine that threw its weights away takes the last full sync once more."""
    commit(state, full(6))
    state.uncertain = True
    assert not state.seen(6, "v6")
    commit(state, full(6))
    assert not state.uncertain


def test_check_writable(state: SyncState) -> None:
    state.check_writable(full=False)
    state.uncertain = True
    state.check_writable(full=True)
    with pytest.raises(EngineUncertain):
        state.check_writable(full=False)
    state.asleep = True
    with pytest.raises(WeightsAsleep):
        state.check_writable(full=True)


def test_describe(state: SyncState) -> None:
    assert state.describe() is None
    state.admit(part(part=1, num_parts=3, sync_id="a"), 0)
    state.admit(part(part=0, num_parts=3, sync_id="a"), 0)
    state.settle(1, staged=True)
    assert state.describe() == StagedSync(
        version=6, base_version=5, sync_id="a", full=False, num_parts=3, parts=[1]
    )


# --- mismatched ---


def test_mismatch_refuses_deltas_until_a_full_sync(state: SyncState) -> None:
    commit(state, part(6, 5))
    assert (state.engine_state, state.mismatched) == ("certain", frozenset())
    state.mismatched |= {"b", "a"}
    assert state.engine_state == "mismatched"
    error = refused(state, part(7, 6), BaseMismatch)
    assert error.operands["tensors"] == ["a", "b"]
    assert "actual" not in error.operands  # a sender would overwrite single tensors
    assert not state.seen(6, "v6")  # a repeat is no answer to what the memory holds
    commit(state, full(7))
    assert (state.version, state.engine_state) == (7, "certain")
    commit(state, part(8, 7))


def test_failed_write_hides_a_mismatch(state: SyncState) -> None:
    state.mismatched |= {"a"}
    commit(state, full(6), uncertain=True)
    assert (state.engine_state, state.version) == ("uncertain", 5)
    commit(state, full(6))
    assert (state.engine_state, state.version) == ("certain", 6)
