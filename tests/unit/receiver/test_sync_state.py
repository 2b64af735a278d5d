"""The rules of docs/wire-format.md and docs/http-api.md, one by one, and then at random."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_ext.errors import (
    Conflict,
    DeltaError,
    EngineUncertain,
    MalformedPart,
    SyncInProgress,
    VersionConflict,
    WeightsAsleep,
)
from engine_ext.receiver.sync_state import SyncState
from engine_ext.wire.identity import PartId
from engine_ext.wire.operations import StagedSync
from tests.support.receiver_harness import PROPERTY

TIMEOUT = 60.0


def part(version: int = 6, base: int | None = 5, **changes: Any) -> PartId:
    values = {"identity": f"v{version}", "num_parts": 1, "base_version": base, **changes}
    return PartId(version=version, **values)


def full(version: int, **changes: Any) -> PartId:
    return part(version, None, full=True, **changes)


def commit(state: SyncState, *parts: PartId, uncertain: bool = False, now: float = 0.0) -> None:
    """Bring a whole sync in, and write it."""
    for one in parts:
        assert state.admit(one, now) == "new"
        state.settle(one.part, staged=True)
    assert state.sync is not None
    assert state.sync.complete
    state.fail() if uncertain else state.commit()


def refused(state: SyncState, one: PartId, error: type[DeltaError], now: float = 0.0) -> DeltaError:
    """The error that a part is answered with; it must not change what is staged."""
    before = state.describe()
    with pytest.raises(error) as caught:
        state.admit(one, now)
    assert type(caught.value) is error
    assert state.describe() == before
    return caught.value


@pytest.fixture
def state() -> SyncState:
    return SyncState(5, TIMEOUT)


# --- one sync, from its parts to its commit ---


def test_a_sync_of_one_part(state: SyncState) -> None:
    assert state.admit(part(), 0) == "new"
    assert state.sync is not None
    assert not state.sync.complete  # it has arrived, but is not staged yet
    state.settle(0, staged=True)
    assert state.sync.complete
    assert state.version == 5  # staging is not committing
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
    return part(version, version - 1, identity=identity, continues=True, **changes)


def test_a_continuation_is_its_own_transaction_at_the_same_version(state: SyncState) -> None:
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


def test_a_failed_write_leaves_the_version_and_forgets_what_was_applied(state: SyncState) -> None:
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


# --- at random, against the rules said a second time ---


@dataclass
class Staged:
    """What the oracle knows of the staged sync."""

    first: PartId
    last: float
    num_parts: int | None = None
    identities: dict[int, str] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)

    def is_of(self, one: PartId) -> bool:
        return (one.version, one.sync_id) == (self.first.version, self.first.sync_id)

    @property
    def complete(self) -> bool:
        return self.num_parts is not None and self.settled == set(range(self.num_parts))


ANY_PART = st.builds(
    PartId,
    version=st.integers(0, 7),
    base_version=st.integers(-1, 6) | st.none(),
    identity=st.sampled_from("xyz"),
    sync_id=st.sampled_from(["a", "b", None]),
    full=st.booleans(),
    part=st.integers(0, 3),
    num_parts=st.integers(1, 4) | st.none(),
    continues=st.booleans(),
)


class SyncMachine(RuleBasedStateMachine):
    """Where several rules refuse a part, any of their errors will do."""

    @initialize(version=st.integers(0, 3))
    def start(self, version: int) -> None:
        self.state = SyncState(version, TIMEOUT)
        self.now = 0.0
        self.version = version
        self.committed: set[str] = set()
        self.staged: Staged | None = None
        self.uncertain = False
        self.asleep = False

    def reasons(self, one: PartId, staged: Staged | None) -> set[type[DeltaError]]:
        """Every rule that refuses this part."""
        found: set[type[DeltaError]] = set()
        if self.asleep:
            found.add(WeightsAsleep)
        if self.uncertain and not one.full:
            found.add(EngineUncertain)
        num_parts = [n for n in (one.num_parts, staged and staged.num_parts) if n is not None]
        numbers = [one.part]
        if staged is not None:
            numbers += staged.identities
            if not staged.is_of(one):
                return {*found, SyncInProgress}
            if (one.base_version, one.full) != (staged.first.base_version, staged.first.full):
                found.add(MalformedPart)
            if staged.identities.get(one.part, one.identity) != one.identity:
                found.add(Conflict)
        elif not one.full and not (one.continues and one.version == self.version):
            if one.base_version is None or one.base_version < 0:
                found.add(MalformedPart)
            elif one.base_version != self.version:
                found.add(VersionConflict)
            elif one.version <= self.version:
                found.add(MalformedPart)
        if len(set(num_parts)) > 1 or any(max(numbers) >= n for n in num_parts):
            found.add(MalformedPart)
        return found

    def outcome(self, one: PartId) -> str | type[DeltaError]:
        try:
            return self.state.admit(one, self.now)
        except DeltaError as error:
            return type(error)

    def arrive(self, one: PartId) -> None:
        staged = self.staged
        applied = (
            not self.uncertain
            and one.version == self.version
            and one.identity in self.committed
            and not (staged is not None and staged.is_of(one))
        )
        stale = staged is not None and self.now - staged.last >= TIMEOUT and not staged.is_of(one)
        reasons = set() if applied else self.reasons(one, None if stale else staged)
        outcome = self.outcome(one)
        if reasons:
            assert outcome in reasons
            if stale and self.state.sync is None:
                self.staged = None
            return
        if applied:
            assert outcome == "already_applied"
            return
        if staged is None or stale:
            staged = self.staged = Staged(one, self.now)
        assert outcome == ("staged" if one.part in staged.identities else "new")
        staged.identities[one.part] = one.identity
        staged.num_parts = staged.num_parts if one.num_parts is None else one.num_parts
        staged.last = self.now

    @rule(one=ANY_PART)
    def any_part(self, one: PartId) -> None:
        self.arrive(one)

    @rule(
        number=st.integers(0, 2),
        num_parts=st.sampled_from([1, 2, 3, None]),
        identity=st.sampled_from("xyz"),
        is_full=st.booleans(),
        continues=st.booleans(),
    )
    def likely_part(
        self, number: int, num_parts: int | None, identity: str, is_full: bool, continues: bool
    ) -> None:
        """One that fits what is staged, or starts from where the engine is."""
        if self.staged is not None:
            like = self.staged.first
            fitting = PartId(
                version=like.version,
                base_version=like.base_version,
                identity=self.staged.identities.get(number, identity),
                sync_id=like.sync_id,
                full=like.full,
                part=number,
                num_parts=num_parts if self.staged.num_parts is None else self.staged.num_parts,
                continues=like.continues,
            )
        else:
            version = self.version + (0 if continues else 1)
            base = None if is_full else version - 1
            fitting = PartId(
                version=version,
                base_version=base,
                identity=identity,
                full=is_full,
                part=number,
                num_parts=num_parts,
                continues=continues and not is_full,
            )
        self.arrive(fitting)

    @rule(number=st.integers(0, 3), staged=st.booleans())
    def settle(self, number: int, staged: bool) -> None:
        self.state.settle(number, staged=staged)
        if self.staged is None or number not in self.staged.identities:
            return
        if staged:
            self.staged.settled.add(number)
        else:
            self.staged.settled.discard(number)
            del self.staged.identities[number]
            if not self.staged.identities:
                self.staged = None

    @precondition(lambda self: self.staged is not None)
    @rule()
    def settle_all(self) -> None:
        assert self.staged is not None
        for number in list(self.staged.identities):
            self.settle(number, True)

    @precondition(lambda self: self.staged is not None and self.staged.complete)
    @rule(fails=st.booleans())
    def commit(self, fails: bool) -> None:
        assert self.staged is not None
        one, identities = self.staged.first, set(self.staged.identities.values())
        self.state.fail() if fails else self.state.commit()
        self.staged, self.uncertain = None, fails
        if fails:
            self.committed = set()
        elif one.continues and one.version == self.version:
            self.committed = self.committed | identities
        else:
            self.committed = identities
        self.version = self.version if fails else one.version

    @rule(seconds=st.sampled_from([1.0, 59.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(asleep=st.booleans())
    def sleep(self, asleep: bool) -> None:
        self.state.asleep = self.asleep = asleep

    @rule()
    def drop(self) -> None:
        self.state.drop()
        self.staged = None

    @invariant()
    def agrees(self) -> None:
        assert self.state.version == self.version
        assert self.state.uncertain == self.uncertain
        assert (self.state.sync is None) == (self.staged is None)
        if self.staged is not None:
            assert self.state.sync is not None
            assert self.state.sync.complete == self.staged.complete
            assert set(self.state.sync.slots) == set(self.staged.identities)
            described = self.state.describe()
            assert described is not None
            assert described.parts == sorted(self.staged.settled)
        for identity in "xyz":
            expected = identity in self.committed and not self.uncertain
            assert self.state.seen(self.version, identity) == expected


TestSyncMachine = SyncMachine.TestCase
TestSyncMachine.settings = settings(
    deadline=None, database=None, max_examples=150, stateful_step_count=30
)
