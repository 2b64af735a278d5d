"""A sender and engines that commit as one, with a crash, a loss or a late message at every step.

The sender is a model: it follows the protocol of `delta_server.fleet`, one message at a time. The
engines are real. After each step no two engines that live have ended one group's sync differently,
and a version number has one content. In the end, all are well again: the engines settle what they
hold, and a new sender brings all to one version.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from engine_ext.ranks.operations import PreparedSync
from engine_ext.ranks.status import EngineStatus
from tests.support.delta_bodies import VERSION, fresh_weights, full_part
from tests.support.fleet_rig import LONG, FleetRig
from tests.support.histories import run_histories

pytestmark = pytest.mark.slow

ENGINES = 3
WHICH = st.integers(0, ENGINES - 1)
# How a message fares.
FARES = st.sampled_from([*["arrives"] * 8, "lost", "answer lost"])
KINDS = st.sampled_from(
    ["lease"] * 3 + ["dies", "cut", "cut", "late", "give up", "sender dies", "claim", "release"]
)
# What happens before a message of a sync, and to whom.
EVENTS = st.tuples(
    st.sampled_from([*range(1, 2 * ENGINES), *[*range(2 * ENGINES, 3 * ENGINES)] * 3]),
    KINDS,
    st.integers(0, 30),
)


@dataclass
class Group:
    """One sync, as its sender knows it."""

    name: str
    version: int
    body: bytes
    epoch: int
    flush_cache: str
    posted: set[str] = field(default_factory=set)
    prepared: set[str] = field(default_factory=set)
    members: list[str] = field(default_factory=list)  # that record; none before
    recorded: set[str] = field(default_factory=set)
    commits: bool | None = None


class FleetModel(RuleBasedStateMachine):
    """No rule has an effect that hypothesis cannot draw again.

    Attributes:
        occurred: how often each thing was seen, over all histories.
    """

    occurred: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.fleet = FleetRig(Path(self._folder.name), ENGINES)
        self.versions = itertools.count(VERSION + 1)
        self.epoch = 1
        self.group: Group | None = None  # of the sender that lives
        self.sent: list[tuple[str, int, str, dict[str, Any]]] = []
        self.groups: list[Group] = []
        # Incarnations of engines that have held a group's sync, and that have committed it.
        self.held: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.committed: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.contents: dict[int, str] = {}
        self.statuses: dict[str, tuple[tuple[int, int], EngineStatus]] = {}

    def teardown(self) -> None:
        try:
            self.all_are_well_again()
        finally:
            self.fleet.close()
            self._folder.cleanup()

    # Messages ------------------------------------------------------------------------------------

    def reach(self, number: int, fare: str, action: str, **fields: Any) -> dict[str, Any]:
        """Send a message of the sender's group; {} if no answer came, or a refusal."""
        assert self.group is not None
        url, group = self.fleet.urls[number], self.group
        if url in self.fleet.cut or fare == "lost":
            return {}
        self.sent.append((url, self.fleet.incarnations[url], action, {"group": group, **fields}))
        answer = self.deliver(url, action, group, **fields)
        return {} if fare == "answer lost" else answer

    def deliver(self, url: str, action: str, group: Group, **fields: Any) -> dict[str, Any]:
        if action == "part":
            response = self.fleet.hold(url, group.body)
        else:
            response = self.fleet.step(url, action, group.name, group.flush_cache, **fields)
        answer: dict[str, Any] = response.json()
        kind = answer.get("status") or answer["error"]["type"]
        self.occurred[f"{action}: {kind}"] += 1
        if response.status_code != 200:
            assert answer["error"]["engine_state"] == "unchanged", answer
        if (prepared := self.prepared(url)) is not None:
            self.held[prepared.group].add((url, self.fleet.incarnations[url]))
        return answer if response.status_code == 200 else {}

    # The sender ----------------------------------------------------------------------------------

    @initialize()
    def begins(self) -> None:
        self.begin()

    def begin(self, flush_cache: str = "true") -> None:
        if self.group is not None and self.group.commits is None:
            return
        version = next(self.versions)
        weights = {name: bits + version for name, bits in fresh_weights().items()}
        name = f"group-{version}"
        body = full_part(
            weights, version, sync_id=name, run="run", run_epoch=self.epoch, run_owner="host:1"
        )
        self.group = Group(name, version, body, self.epoch, flush_cache)
        self.groups.append(self.group)

    def prepare(self, which: int, fare: str) -> None:
        group, url = self.group, self.fleet.urls[which]
        if group is None or group.members or group.commits is not None:
            return
        if url not in group.posted and self.reach(which, "arrives", "part"):
            group.posted.add(url)
        facts = {"version": group.version, "sync_id": group.name, "lease": LONG}
        if url in group.posted and self.reach(which, fare, "prepare", **facts):
            group.prepared.add(url)

    @rule(
        fares=st.lists(FARES, min_size=3 * ENGINES, max_size=3 * ENGINES),
        order=st.permutations(range(ENGINES)),
        events=st.lists(EVENTS, max_size=4),
        quorum=st.sampled_from([ENGINES, ENGINES, ENGINES - 1]),
        ends=st.sampled_from([*range(2, 3 * ENGINES), *[3 * ENGINES] * 6]),
        tidies=st.sampled_from([True, True, False]),
    )
    def sync(
        self,
        fares: list[str],
        order: list[int],
        events: list[tuple[int, str, int]],
        quorum: int,
        ends: int,
        tidies: bool,
    ) -> None:
        """A sync, up to some message, while things happen; perhaps nothing is held before it."""
        if tidies:
            self.fleet.cut.clear()
            for which in range(ENGINES):
                self.lease_ends(which)
            self.give_up()
        self.begin("salt" if order[0] == 0 else "true")
        for number, (phase, which) in enumerate(itertools.product(range(3), order)):
            for when, what, who in events:
                if when == number:
                    self.happen(what, who)
                    self.engines_that_live_have_ended_alike()
            if number >= ends or self.group is None:
                return
            if phase == 1:
                self.begin_to_record(quorum)
            elif phase == 2:  # as a sender does that lacks an answer
                self.give_up()
            self.step(phase, which, fares[number])
            self.engines_that_live_have_ended_alike()
            if phase == 2:  # while others have yet to commit
                self.abort_too_late(which, forces=tidies)

    @rule(phase=st.integers(0, 2), which=WHICH, fare=FARES)
    def step(self, phase: int, which: int, fare: str) -> None:
        (self.prepare, self.record, self.end)[phase](which, fare)

    @rule(what=KINDS, who=st.integers(0, 30))
    def happen(self, what: str, who: int) -> None:
        which = who % ENGINES
        if what == "lease":
            self.lease_ends(which)
        elif what == "dies":
            self.fleet.start(self.fleet.urls[which])
        elif what == "cut":
            self.cut(which)
        elif what == "late":
            self.late(who)
        elif what == "give up":
            self.give_up()
        elif what == "sender dies":
            self.sender_dies()
        elif what == "release":
            self.release(which)
        else:
            self.next_sender_claims(which)

    def begin_to_record(self, quorum: int) -> None:
        group = self.group
        if group is None or group.members or group.commits is not None:
            return
        if len(group.prepared) >= quorum:
            group.members = sorted(group.prepared)

    def record(self, which: int, fare: str) -> None:
        group, url = self.group, self.fleet.urls[which]
        if group is None or url not in group.members or group.commits is not None:
            return
        if self.reach(which, fare, "record", peers=group.members, lease=LONG):
            group.recorded.add(url)
        if group.recorded == {*group.members}:
            group.commits = True

    def give_up(self) -> None:
        if self.group is not None and self.group.commits is None:
            self.group.commits = False

    def end(self, which: int, fare: str) -> None:
        """Send one engine the decision."""
        group = self.group
        if group is None or group.commits is None:
            return
        url = self.fleet.urls[which]
        if group.commits and url in group.members:
            self.reach(which, fare, "commit")
        elif not group.commits:
            self.reach(which, fare, "abort", version=group.version, sync_id=group.name)

    def late(self, which: int) -> None:
        """A message that an engine has had arrives a second time."""
        if not self.sent:
            return
        url, incarnation, action, fields = self.sent[which % len(self.sent)]
        if url not in self.fleet.cut and incarnation == self.fleet.incarnations[url]:
            self.deliver(url, action, **fields)

    def abort_too_late(self, which: int, *, forces: bool) -> None:
        """Somebody ends a group at an engine that has committed it, as if it waited there."""
        url = self.fleet.urls[which]
        place = (url, self.fleet.incarnations[url])
        ended = [group for group in self.groups if place in self.committed[group.name]]
        if url in self.fleet.cut or not ended:
            return
        group = ended[-1]
        fields = {"version": group.version, "sync_id": group.name, "force": forces}
        answer = self.fleet.step(url, "abort", group.name, **fields)
        assert (answer.status_code, answer.json()["error"]["type"]) == (409, "Conflict"), answer
        self.occurred["abort too late"] += 1

    def release(self, which: int) -> None:
        """The sender is closed in the middle of it."""
        if self.group is not None and self.fleet.urls[which] not in self.fleet.cut:
            self.own(which, "release", self.group.epoch)

    # Crashes -------------------------------------------------------------------------------------

    def sender_dies(self) -> None:
        self.group = None
        self.epoch += 1

    def next_sender_claims(self, which: int) -> None:
        if self.fleet.urls[which] not in self.fleet.cut:
            self.own(which, "claim", self.epoch)

    def own(self, which: int, action: str, epoch: int) -> int:
        body = {"action": action, "run": "run", "epoch": epoch, "host": "host", "pid": 1}
        status: int = (
            self.fleet.rigs[self.fleet.urls[which]].post("/delta_run", json=body).status_code
        )
        self.occurred[f"{action}: {status}"] += 1
        return status

    def cut(self, which: int) -> None:
        self.fleet.cut ^= {self.fleet.urls[which]}

    def lease_ends(self, which: int) -> None:
        held = self.prepared(self.fleet.urls[which])
        settled = self.fleet.settle(self.fleet.urls[which])
        if held is not None:
            self.occurred[f"settled: {settled}"] += 1

    # What must hold ------------------------------------------------------------------------------

    def status(self, url: str) -> EngineStatus:
        """The status of an engine, which is the last one if nothing was asked of it meanwhile."""
        place, rig = self.fleet.incarnations[url], self.fleet.rigs[url]
        if url not in self.statuses or self.statuses[url][0] != (place, rig.uses):
            status = self.fleet.status(url)
            self.statuses[url] = (place, rig.uses), status
        return self.statuses[url][1]

    def prepared(self, url: str) -> PreparedSync | None:
        staged = self.status(url).staged
        return None if staged is None else staged.prepared

    @invariant()
    def engines_that_live_have_ended_alike(self) -> None:
        statuses = {url: self.status(url) for url in self.fleet.urls}
        places = {url: (url, self.fleet.incarnations[url]) for url in self.fleet.urls}
        holds: dict[str, str | None] = {}
        for url, status in statuses.items():
            if status.last_sync is not None:
                self.committed[str(status.last_sync.sync_id)].add(places[url])
            prepared = self.prepared(url)
            holds[url] = None if prepared is None else prepared.group
            version = status.version
            assert self.contents.setdefault(version.number, version.digest) == version.digest
        for group in self.groups:
            ended = {
                url: places[url] in self.committed[group.name]
                for url in group.members
                if places[url] in self.held[group.name] and holds[url] != group.name
            }
            assert len({*ended.values()}) <= 1, (group.name, ended)
            if group.commits:
                assert all(ended.values()), (group.name, ended)
            for how in ended.values():
                self.occurred[f"ended: {how}"] += 1

    def all_are_well_again(self) -> None:
        """The engines settle what they hold, and a new sender brings all to one version."""
        self.fleet.cut.clear()
        self.sender_dies()
        for url in self.fleet.urls:
            assert self.fleet.settle(url), url
            assert self.prepared(url) is None
        self.engines_that_live_have_ended_alike()
        for which in range(ENGINES):
            assert self.own(which, "claim", self.epoch) == 200
        self.begin()
        group = self.group
        assert group is not None
        self.sync(["arrives"] * 3 * ENGINES, [*range(ENGINES)], [], ENGINES, 3 * ENGINES, False)
        assert group.commits, group
        assert {self.status(url).version.number for url in self.fleet.urls} == {group.version}
        self.engines_that_live_have_ended_alike()


@pytest.mark.timeout(900)  # a history that fails is made short
def test_engines_agree_whatever_crashes() -> None:
    occurred = run_histories(FleetModel, examples=50, steps=12, fixed=1)
    wanted = {
        "ended: True", "ended: False", "settled: True", "settled: False", "part: SyncInProgress",
        "prepare: GroupAborted", "record: GroupAborted", "commit: already_applied",
        "abort too late",
    }  # fmt: skip
    assert wanted - {*occurred} == set(), occurred


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_engines_agree_over_long_histories() -> None:
    run_histories(FleetModel, examples=1000, steps=20, fixed=None)
