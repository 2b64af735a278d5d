"""The rules of docs/wire-format.md and docs/http-api.md at random, written a second time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_ext.errors import (
    BaseMismatch,
    Conflict,
    DeltaError,
    EngineUncertain,
    MalformedPart,
    SyncInProgress,
    VersionConflict,
    WeightsAsleep,
)
from engine_ext.format import PartId, Unproven
from engine_ext.sync.sync_state import SyncState
from tests.unit.sync.sync_parts import TIMEOUT


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
    unproven=st.none() | st.just(Unproven()),
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
        self.mismatched = False
        self.asleep = False

    def reasons(self, one: PartId, staged: Staged | None) -> set[type[DeltaError]]:
        """Every rule that refuses this part."""
        found: set[type[DeltaError]] = set()
        if self.asleep:
            found.add(WeightsAsleep)
        if self.uncertain and not one.full:
            found.add(EngineUncertain)
        if self.mismatched and not one.full:
            found.add(BaseMismatch)
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
            not (self.uncertain or self.mismatched)
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
                unproven=like.unproven,
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
                unproven=Unproven() if continues and not is_full else None,
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
        if self.mismatched and not one.full:
            with pytest.raises((BaseMismatch, WeightsAsleep)):
                self.state.check_writable(full=False)
            return
        self.state.fail() if fails else self.state.commit()
        self.staged, self.uncertain, self.mismatched = None, fails, False
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

    @precondition(lambda self: not self.uncertain)
    @rule()
    def mismatch(self) -> None:
        self.state.mismatched |= {"w"}
        self.mismatched = True

    @rule()
    def drop(self) -> None:
        self.state.drop()
        self.staged = None

    @invariant()
    def agrees(self) -> None:
        assert self.state.version == self.version
        assert self.state.uncertain == self.uncertain
        memory = "mismatched" if self.mismatched else "certain"
        assert self.state.engine_state == ("uncertain" if self.uncertain else memory)
        assert (self.state.sync is None) == (self.staged is None)
        if self.staged is not None:
            assert self.state.sync is not None
            assert self.state.sync.complete == self.staged.complete
            assert set(self.state.sync.slots) == set(self.staged.identities)
            described = self.state.describe()
            assert described is not None
            assert described.parts == sorted(self.staged.settled)
        for identity in "xyz":
            known = not (self.uncertain or self.mismatched)
            expected = identity in self.committed and known
            assert self.state.seen(self.version, identity) == expected


TestSyncMachine = SyncMachine.TestCase
TestSyncMachine.settings = settings(
    deadline=None, database=None, max_examples=150, stateful_step_count=30
)
