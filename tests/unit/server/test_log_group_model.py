"""Random lives of followers of one group: no version is taken that a live member has not prepared.

Engines are started, die with or without a heartbeat that is still alive, fail to prepare, and look
at the log in any order while a trainer publishes, or takes its last version back.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_ext.log import GroupMarks, has_prepared, live_heartbeats, open_log, version_of_key
from tests.support.delta_bodies import VERSION, Weights, after, delta_part, fresh_weights, same
from tests.support.endpoint_rig import Rig
from tests.unit.server.delta_logs import CATCH_UP, write

pytestmark = pytest.mark.full

COUNT = 3
ENGINES = st.integers(0, COUNT - 1)


class Group(RuleBasedStateMachine):
    """Up to three engines, and a trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "log").mkdir()
        self.log = open_log(self.folder / "log")
        self.rigs: dict[int, Rig] = {}
        self.number = self.step = 0
        self.newest, self.last = VERSION, VERSION  # that is in the log; that was ever used
        self.weights: dict[int, Weights] = {VERSION: fresh_weights()}
        self.bases: dict[int, int] = {}
        self.complete: set[int] = {VERSION}
        write_mark = GroupMarks.write

        def marked(marks: GroupMarks, key: str, members: Sequence[str]) -> None:
            version = version_of_key(key)
            assert version is not None
            beats = [one for one in live_heartbeats(self.log) if one.group is not None]
            assert all(has_prepared(one, version, key) for one in beats), beats
            self.complete.add(version)
            write_mark(marks, key, members)

        self.patch = mock.patch.object(GroupMarks, "write", marked)
        self.patch.start()

    def teardown(self) -> None:
        self.expire_the_dead()
        for number in range(COUNT):
            self.start(number)
        for _ in range(4):
            for rig in self.rigs.values():
                rig.post(CATCH_UP)
        assert {rig.status().version.number for rig in self.rigs.values()} == {self.newest}
        for rig in self.rigs.values():
            rig.close()
        self.patch.stop()
        shutil.rmtree(self.folder)

    @rule(number=ENGINES)
    def start(self, number: int) -> None:
        if number in self.rigs:
            return
        self.number += 1
        given = {"follow": True, "follow_group": "rollout", "follow_interval": 1000.0}
        spool = self.folder / f"spool{self.number}"
        self.rigs[number] = Rig(spool, log=self.log.location, **given)

    @rule(number=ENGINES)
    def look(self, number: int) -> None:
        if number in self.rigs:
            self.rigs[number].post(CATCH_UP)

    @rule(number=ENGINES)
    def fail_to_prepare(self, number: int) -> None:
        if number in self.rigs:
            self.rigs[number].engine.fails["hold"] = ConnectionError("lost")
            self.rigs[number].post(CATCH_UP)
            self.rigs[number].engine.fails.pop("hold", None)

    @rule(number=ENGINES, is_seen=st.booleans())
    def die(self, number: int, is_seen: bool) -> None:
        """The heartbeat stays, and is old at once if that `is_seen`."""
        if number not in self.rigs:
            return
        rig = self.rigs.pop(number)
        follow = rig.status().log
        assert follow is not None
        assert follow.follow is not None
        beat = Path(self.log.location, "followers", f"{follow.follow.name}.json")
        left = beat.read_bytes() if beat.exists() else None
        rig.close()
        if left is not None:
            beat.write_bytes(left)
            if is_seen:
                self.expire(beat)

    @rule()
    def expire_the_dead(self) -> None:
        names = set()
        for rig in self.rigs.values():
            follow = rig.status().log
            if follow is not None and follow.follow is not None:
                names.add(f"{follow.follow.name}.json")
        for beat in Path(self.log.location).glob("followers/*.json"):
            if beat.name not in names:
                self.expire(beat)

    @staticmethod
    def expire(beat: Path) -> None:
        ago = time.time() - 100_000.0
        os.utime(beat, (ago, ago))

    @rule()
    def publish(self) -> None:
        self.step += 1
        self.last += 1
        change = {"norm.weight": {self.step % 8: 0x100 + self.step}}
        body = delta_part(change, self.last, base_version=self.newest)
        write(self.log, body, number=self.last)
        self.bases[self.last] = self.newest
        self.weights[self.last] = after(self.weights[self.newest], change)
        self.newest = self.last

    @precondition(lambda self: self.newest > VERSION and self.newest not in self.complete)
    @rule()
    def refuse(self) -> None:
        with self.log.writer() as writer:
            writer.refuse(self.newest)
        self.newest = self.bases[self.newest]

    @invariant()
    def engines_have_what_is_complete(self) -> None:
        for rig in self.rigs.values():
            version = rig.status().version.number
            assert version in self.complete
            assert same(rig.engine.weights, self.weights[version])


Group.TestCase.settings = settings(
    max_examples=6,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestGroup = Group.TestCase
