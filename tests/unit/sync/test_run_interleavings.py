"""Senders of three runs, senders without one, and a delta log, at random: what must hold always.

A version, which is a run and a number, never names two contents, and numbers never go back inside
of a run, however the senders interleave.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_ext.errors import DeltaError, RunConflict, RunFenced
from engine_ext.format import Origin, PartId, RunSender
from engine_ext.sync.sync_state import SyncState
from tests.unit.sync.sync_parts import TIMEOUT

SENDERS = st.builds(RunSender, run=st.sampled_from("abc"), epoch=st.integers(1, 3))
NUMBERS = st.integers(0, 12)
Content = tuple[str, ...]  # what was written, in this order, since the last full sync


_T = TypeVar("_T")


def outcome(call: Callable[[], _T]) -> tuple[_T | None, DeltaError | None]:
    """What a call returns, or the error that it raises."""
    try:
        return call(), None
    except DeltaError as error:
        return None, error


class Senders(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = SyncState(5, TIMEOUT)
        self.now = 0.0
        self.names = map(str, itertools.count())
        self.content: Content = ()
        self.previous: Content | None = None
        self.known: dict[tuple[str, int], Content] = {}
        self.highest: dict[str, int] = {}
        self.fenced: set[str] = set()
        self.latest: dict[str, int] = {}  # epoch, by run
        self.released: set[tuple[str, int]] = set()  # epochs that have not claimed since
        self.logged = 0

    def is_gone(self, sender: RunSender) -> bool:
        """Whether a takeover, or a later process of its run, has replaced a sender."""
        return sender.run in self.fenced or sender.epoch < self.latest.get(sender.run, 0)

    def arrive(self, part: PartId) -> bool:
        """Let a sync of one part arrive; return whether it is staged."""
        owner, sender = self.state.runs.owner, part.sender
        admission, error = outcome(lambda: self.state.admit(part, self.now, self.now))
        if part.origin == "sender":
            taken = owner is None or (sender is not None and sender.run == owner.run)
            is_late = sender is not None and (sender.run, sender.epoch) in self.released
            is_gone = sender is not None and self.is_gone(sender)
            assert isinstance(error, RunFenced) == (is_late or is_gone)
            assert taken or isinstance(error, RunConflict)
        if error is not None:
            assert self.state.runs.owner == owner
            return False
        if admission == "already_applied":
            return False
        if sender is not None and part.origin == "sender":
            self.latest[sender.run] = sender.epoch
        self.state.settle(0, staged=True)
        return True

    def write(self, *, fails: bool = False) -> None:
        """Commit what is staged."""
        sync = self.state.sync
        assert sync is not None
        if fails:
            self.state.fail()
            self.content = (*self.content, "half of", sync.slots[0].identity)
            return
        before, uncertain = self.content, self.state.uncertain
        self.state.commit()
        written = () if sync.origin == "engine" else (sync.slots[0].identity,)
        self.content = written if sync.full else (*before, *written)
        self.previous = None if uncertain else before  # as old values are kept
        run, version = self.state.run, self.state.version
        assert run is not None
        if sync.sender is not None:
            assert run == sync.sender.run
        elif sync.origin == "sender":
            assert run.startswith("anonymous-")
        assert self.known.setdefault((run, version), self.content) == self.content
        assert version > self.highest.get(run, -1)
        self.highest[run] = version

    def part(
        self, sender: RunSender | None, number: int, *, full: bool, origin: Origin = "sender"
    ) -> PartId:
        return PartId(
            version=number,
            base_version=None if full else self.state.version,
            identity=next(self.names),
            sync_id=next(self.names),
            full=full,
            num_parts=1,
            sender=sender,
            origin=origin,
        )

    @rule(sender=SENDERS | st.none(), number=NUMBERS, full=st.booleans(), ends=st.booleans())
    def send(self, sender: RunSender | None, number: int, full: bool, ends: bool) -> None:
        """A sync, which its sender may leave unfinished."""
        if self.arrive(self.part(sender, number, full=full)) and ends:
            self.write()

    @rule(
        sender=SENDERS | st.none(), full=st.booleans(), fails=st.sampled_from([*[False] * 5, True])
    )
    def send_next(self, sender: RunSender | None, full: bool, fails: bool) -> None:
        """A sync that leads on from the highest number of its run."""
        run = self.state.run if sender is None else sender.run
        number = max(self.state.version, self.highest.get(run or "", -1)) + 1
        if self.arrive(self.part(sender, number, full=full)):
            self.write(fails=fails)

    @precondition(lambda self: self.state.runs.owner is not None)
    @rule(number=NUMBERS, full=st.booleans())
    def send_again(self, number: int, full: bool) -> None:
        """The owner uses one of its numbers twice, with other weights."""
        owner = self.state.runs.owner
        assert owner is not None
        sender = RunSender(run=owner.run, epoch=owner.epoch)
        if number <= self.highest.get(owner.run, -1):
            assert not self.arrive(self.part(sender, number, full=full))

    @precondition(lambda self: self.state.sync is not None)
    @rule()
    def finish(self) -> None:
        """The sender whose sync is staged continues."""
        self.write()

    @rule(full=st.booleans())
    def follow(self, full: bool) -> None:
        """A log has a later version of its own run."""
        number = max(self.state.version, self.logged) + 1
        log = RunSender(run="log", epoch=1)
        if self.arrive(self.part(log, number, full=full, origin="log")):
            self.write()
            self.logged = number

    @rule()
    def advance(self) -> None:
        """POST /update_weight_version."""
        part = self.part(None, self.state.version + 1, full=False, origin="engine")
        if self.arrive(part):
            self.write()

    @rule(sender=SENDERS, takeover=st.booleans())
    def claim(self, sender: RunSender, takeover: bool) -> None:
        owner = self.state.runs.owner
        now_owner, error = outcome(
            lambda: self.state.claim(sender, takeover=takeover, now=self.now, at=self.now)
        )
        conflict = owner is not None and owner.run != sender.run and not takeover
        assert isinstance(error, RunFenced) == self.is_gone(sender)
        assert isinstance(error, RunConflict) == (self.is_gone(sender) or conflict)
        if error is not None or now_owner is None:
            assert self.state.runs.owner == owner
            return
        assert (now_owner.run, now_owner.epoch) == (sender.run, sender.epoch)
        if owner is not None and owner.run != sender.run:
            assert takeover
            self.fenced.add(owner.run)
        self.latest[sender.run] = sender.epoch
        self.released.discard((sender.run, sender.epoch))

    @rule(sender=SENDERS)
    def release(self, sender: RunSender) -> None:
        owner = self.state.runs.owner
        mine = owner is not None and (owner.run, owner.epoch) == (sender.run, sender.epoch)
        assert self.state.release(sender) == mine
        assert self.state.runs.owner == (None if mine else owner)
        if mine:
            self.released.add((sender.run, sender.epoch))

    @rule()
    def roll_back(self) -> None:
        if self.previous is None or self.state.uncertain:
            return
        self.state.drop()
        self.state.roll_back()
        self.content, self.previous = self.previous, None

    @rule(seconds=st.sampled_from([1.0, TIMEOUT]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def staged_parts_are_the_owners(self) -> None:
        sync, owner = self.state.sync, self.state.runs.owner
        if sync is None or sync.origin != "sender":
            return
        if sync.sender is None:
            assert owner is None
        else:
            assert owner is not None
            assert (owner.run, owner.epoch) == (sync.sender.run, sync.sender.epoch)

    @invariant()
    def the_run_is_that_of_the_content(self) -> None:
        run = self.state.run
        if run is not None and not self.state.uncertain:
            assert self.known[run, self.state.version] == self.content


TestSenders = Senders.TestCase
TestSenders.settings = settings(
    deadline=None, database=None, max_examples=200, stateful_step_count=40
)
