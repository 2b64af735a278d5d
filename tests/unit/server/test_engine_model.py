"""Everything that can happen to an engine, at random, against a model of what it must hold.

Two HTTP processes serve two ranks. Senders of several runs and of none, a delta log and the
engine's own endpoints send whole syncs and parts, in any order, late, twice and damaged; ranks
refuse, fail and cannot be restored; answers are lost; something else changes the weights. After
each step the answer, the status, the digest and every byte of each rank's memory are compared with
`tests.support.engine_oracle`.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any, get_args
from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    rule,
)

from engine_ext.format.digest import Digest, tensor_digest
from tests.support.engine_oracle import LOG, TIMEOUT, Bits, Fault, Part, Sender
from tests.support.histories import run_histories
from tests.support.modelled_engine import ERRORS, ModelledEngine, Rebuilt

pytestmark = pytest.mark.slow

RUNS: list[Sender | None] = [("a", 1), ("a", 2), ("b", 1), None, None]
SENDERS = st.sampled_from(RUNS)
NAMED = st.sampled_from([one for one in RUNS if one is not None])
PROCESSES = st.integers(0, 1)
SEEDS = st.integers(0, 255)
FAULTS = st.sampled_from([*[None] * len(get_args(Fault)), *get_args(Fault)])
RARELY = st.sampled_from([*[False] * 3, True])
FULL = st.sampled_from([False, False, True])
SEED = 1
WRITES = st.integers(0, 12)
REFUSALS = (
    *("RunFenced", "RunConflict", "SyncInProgress", "EngineUncertain", "WeightsAsleep"),
    *("VersionConflict", "BaseMismatch"),
)


class EngineModel(ModelledEngine):
    """No rule has a precondition: what requests at once lead to differs from run to run, and what
    hypothesis draws must not."""

    # The engine at the last check; and what one serves that has loaded a content.
    checked: tuple[Any, int] = (None, 0)
    loaded: tuple[dict[str, bytes], list[dict[str, Any]]] = ({}, [])

    @initialize()
    def begin(self) -> None:
        self.start()

    # What senders do ---------------------------------------------------------------------------

    @rule(
        process=PROCESSES,
        sender=SENDERS,
        seed=SEEDS,
        full=FULL,
        count=st.integers(1, 3),
        shuffled=st.randoms(use_true_random=False),
        fault=FAULTS,
        rank=st.integers(0, 1),
        writes=WRITES,
        ends=st.sampled_from([True, True, True, False]),
        as_owner=st.sampled_from([True, True, True, False]),
    )
    def sync(
        self,
        process: int,
        sender: Sender | None,
        seed: int,
        full: bool,
        count: int,
        shuffled: Any,
        fault: Fault | None,
        rank: int,
        writes: int,
        ends: bool,
        as_owner: bool,
    ) -> None:
        """A sync that leads on from the engine's version; perhaps its last part does not come."""
        full = full or not self.known.certain
        if as_owner and self.known.owner is not None:
            sender = self.known.owner
        parts = self.split(
            seed,
            count,
            version=self.next_version(sender),
            base=None if full else self.known.at.version,
            full=full,
            sender=sender,
        )
        shuffled.shuffle(parts)
        for number, part in enumerate(parts[: None if ends else -1]):
            is_last = number == count - 1
            self.deliver(process, part, fault if is_last else None, rank, writes)

    @rule(
        process=PROCESSES,
        sender=SENDERS,
        seed=SEEDS,
        version=st.integers(0, 7),
        base=st.none() | st.integers(-1, 6),
        full=st.booleans(),
        number=st.integers(0, 3),
        count=st.sampled_from([4, 4, None]),
        sync_id=st.sampled_from(["x", "y", None]),
    )
    def any_part(
        self,
        process: int,
        sender: Sender | None,
        seed: int,
        version: int,
        base: int | None,
        full: bool,
        number: int,
        count: int | None,
        sync_id: str | None,
    ) -> None:
        part = self.make(
            self.names[number::3],
            seed,
            version=version,
            base=None if full else version - 1 if base is None else base,
            names_base=base is not None,
            full=full,
            number=number,
            count=count,
            sync_id=sync_id,
            sender=sender,
        )
        self.deliver(process, part)

    @rule(process=PROCESSES, seed=SEEDS, number=st.integers(0, 2), full=st.booleans())
    def join(self, process: int, seed: int, number: int, full: bool) -> None:
        """A part that fits the staged sync, or contradicts it."""
        if self.known.staged is None or self.known.staged.first.origin != "sender":
            return
        first, count = self.known.staged.first, self.known.staged.count
        part = self.make(
            self.names[number :: count or 3],
            seed,
            version=first.version,
            base=None if full else self.known.at.version,
            full=full,
            number=number,
            count=max(count or 3, number + 1),
            sync_id=first.sync_id,
            sender=first.sender,
        )
        self.deliver(process, part)

    @rule(
        process=PROCESSES,
        which=st.integers(0, 15),
        fault=FAULTS,
        rank=st.integers(0, 1),
        writes=WRITES,
    )
    def send_again(
        self, process: int, which: int, fault: Fault | None, rank: int, writes: int
    ) -> None:
        """A part that was sent before: late, or because its answer was lost."""
        if self.sent:
            self.deliver(process, self.sent[which % len(self.sent)], fault, rank, writes)

    @rule(senders=st.tuples(SENDERS, SENDERS), seed=SEEDS, twice=st.booleans(), one=st.booleans())
    def send_at_once(
        self, senders: tuple[Sender | None, ...], seed: int, twice: bool, one: bool
    ) -> None:
        """Two parts at once, to two processes: it is as if one came first, or was not taken.

        One of them is taken, if it would be alone.
        """
        version = max(self.next_version(sender) for sender in senders)
        facts = {"version": version, "base": self.known.at.version}
        first, second = self.split(seed, 2, sender=senders[0], **facts)
        if twice:
            second = first
        elif not one:
            [second] = self.split(seed + 1, 1, sender=senders[1], **facts)
        answers = self.rig.send_at_once([first.body, second.body])
        possible = []
        alone = [copy.deepcopy(self.known).take(part)[0] for part in (first, second)]
        none = [] if any(isinstance(answer, str) for answer in alone) else [list[Part]()]
        for order in ([first, second], [second, first], [first], [second], *none):
            known = copy.deepcopy(self.known)
            for part in order:
                [*_, known] = known.take(part)[1]
            possible.append(known)
        for answer in answers:
            error = answer.get("error", {})
            state = "uncertain" if error.get("type") == "EngineUncertain" else "unchanged"
            assert error.get("engine_state", "unchanged") == state
        commits = sum(answer.get("status") == "committed" for answer in answers)
        self.hold([one for one in possible if one.commits == self.known.commits + commits])

    @rule(process=PROCESSES, seed=SEEDS, ahead=st.sampled_from([0, 0, 1]), name=st.integers(0, 4))
    def send_bare(self, process: int, seed: int, ahead: int, name: int) -> None:
        """A part that names only its version; other parts can be the rest of that version."""
        version = self.known.at.version + ahead
        part = self.make(
            [self.names[name % len(self.names)]],
            seed,
            version=version,
            base=version - 1,
            bare=True,
        )
        self.deliver(process, part)

    @rule(process=PROCESSES, sender=SENDERS, seed=SEEDS, where=st.floats(0, 1, exclude_max=True))
    def damage(self, process: int, sender: Sender | None, seed: int, where: float) -> None:
        """A part with one byte changed in transit is refused, wherever the byte is."""
        [part] = self.split(
            seed,
            1,
            version=self.next_version(sender),
            base=self.known.at.version,
            sender=sender,
        )
        body = bytearray(part.body)
        at, key = int(where * len(body)), body.index(b"manifest_checksum")
        if key <= at < key + len(b"manifest_checksum"):
            at = -1  # without the key, all that is left out is the check
        body[at] ^= 1
        before = self.known.facts()
        response = self.rig.send_to(process, bytes(body))
        assert response.status_code >= 400
        assert response.json()["error"]["engine_state"] in ("unchanged", "uncertain")
        assert self.observed(0) == before

    @rule(process=PROCESSES, seed=SEEDS, full=st.booleans())
    def follow_log(self, process: int, seed: int, full: bool) -> None:
        """A delta log has a later version of its own run."""
        [part] = self.split(
            seed,
            1,
            version=self.next_version(LOG),
            base=None if full else self.known.at.version,
            full=full,
            sender=LOG,
            origin="log",
        )
        self.deliver(process, part)

    @rule(process=PROCESSES, ahead=st.integers(-1, 2))
    def advance(self, process: int, ahead: int) -> None:
        version = max(0, self.known.at.version + ahead)
        part = Part(
            b"",
            {},
            version=version,
            base=self.known.at.version,
            sync_id=f"version:{version}",
            origin="engine",
        )
        body = {"new_version": str(version)}
        answer = self.rig.ask(process, "POST", "/update_weight_version", json=body).json()
        self.follow(answer, *self.known.advance(part))

    @rule(process=PROCESSES, sender=NAMED, takeover=st.booleans())
    def claim(self, process: int, sender: Sender, takeover: bool) -> None:
        answer = self.change_owner(process, "claim", sender, takeover=takeover)
        self.follow(answer, self.known.claim(sender, takeover=takeover), [self.known])

    @rule(process=PROCESSES, sender=NAMED)
    def release(self, process: int, sender: Sender) -> None:
        answer = self.change_owner(process, "release", sender)
        self.follow(answer, self.known.release(sender), [self.known])

    def change_owner(self, process: int, action: str, sender: Sender, **keys: Any) -> Any:
        run, epoch = sender
        body = {"run": run, "epoch": epoch, "host": f"host-{run}", "pid": epoch}
        request = {"action": action, **body, **keys}
        return self.rig.ask(process, "POST", "/delta_run", json=request).json()

    @rule(
        process=PROCESSES,
        fault=st.sampled_from([None, None, "mixed"]),
        rank=st.integers(0, 1),
        writes=WRITES,
    )
    def roll_back(self, process: int, fault: Fault | None, rank: int, writes: int) -> None:
        with self.armed(fault, rank, writes):
            answer = self.rig.ask(process, "POST", "/delta_rollback").json()
        self.follow(answer, self.known.roll_back(fault), [self.known])

    # What else happens -------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([TIMEOUT / 4, TIMEOUT]))
    def wait(self, seconds: float) -> None:
        self.known.now += seconds
        self.rig.served_engine.later += seconds
        self.rig.uses += 1

    @rule(happens=RARELY)
    def overwrite(self, happens: bool) -> None:
        if happens and not self.known.asleep:
            self.rig.overwrite("a reload")
            self.known.overwrite()

    @rule(process=PROCESSES)
    def scan(self, process: int) -> None:
        """Memory holds what was written."""
        if self.known.certain and not self.known.asleep:
            assert self.scanned(process) == []

    @rule(process=PROCESSES, rank=st.integers(0, 1), of_both_ranks=st.booleans(), happens=RARELY)
    def corrupt(self, process: int, rank: int, of_both_ranks: bool, happens: bool) -> None:
        """A bit of one rank's memory flips, perhaps of a copy, and a scan finds it."""
        if happens and self.known.certain and not self.known.asleep:
            shard = next(name for name in self.names if name.endswith(".bias"))
            flipped = "norm" if of_both_ranks else shard
            self.rig.corrupt(rank, flipped)
            assert self.scanned(process) == [flipped]
            self.known.mismatched = True

    def scanned(self, process: int) -> list[str]:
        """The tensors that a scan finds corrupted."""
        response = self.rig.ask(process, "GET", "/delta_digest?scan=true")
        assert response.status_code == 200
        found: list[str] = response.json()["corrupted"]
        return found

    @rule(happens=RARELY)
    def sleep(self, happens: bool) -> None:
        if happens:
            self.rig.fall_asleep()
            self.known.fall_asleep()

    @rule()
    def wake_up(self) -> None:
        self.rig.wake_up()
        self.known.asleep = False

    @rule(happens=RARELY)
    def restart(self, happens: bool) -> None:
        if happens and self.known.at.version > 1:
            self.start()

    @rule(process=PROCESSES, seed=SEEDS)
    def recover(self, process: int, seed: int) -> None:
        """A full sync of the owner ends every bad state, once no one else's parts are staged."""
        self.wake_up()
        if self.known.certain:
            return
        self.wait(TIMEOUT)
        commits = self.known.commits
        for part in self.split(
            seed,
            2,
            version=self.next_version(self.known.owner),
            base=None,
            full=True,
            sender=self.known.owner,
        ):
            self.deliver(process, part)
        assert self.known.commits == commits + 1
        assert self.known.certain

    @rule(
        process=PROCESSES,
        seed=SEEDS,
        full=FULL,
        count=st.integers(1, 2),
        rank=st.integers(0, 1),
        writes=WRITES,
        happens=RARELY,
    )
    def fail_in_every_way(
        self,
        process: int,
        seed: int,
        full: bool,
        count: int,
        rank: int,
        writes: int,
        happens: bool,
    ) -> None:
        """Each fault in turn happens to a sync of the owner, and its last part is sent again."""
        if not happens:
            return
        order = random.Random(seed)
        for number, fault in enumerate(get_args(Fault)):
            self.recover(process, seed)
            self.wait(TIMEOUT)
            owner, new = self.known.owner, seed + 17 * number
            self.sync(process, owner, new, full, count, order, fault, rank, writes, True, True)
            self.memory_is_of_the_version_to_the_bit()
            self.send_again(process, -1, None, rank, writes)

    # What must hold always ---------------------------------------------------------------------

    @invariant()
    def engine_holds_what_is_known(self) -> None:
        """Since a check, a step can have done nothing."""
        if self.checked == (self.rig, self.rig.uses):
            return
        self.every_process_reports_what_the_engine_holds()
        self.requests_are_answered_by_the_version_they_ask_for()
        self.memory_is_of_the_version_to_the_bit()
        at = self.known.at
        if self.known.certain and at.run is not None and at.whole:  # it names one content
            digest = digest_of(at.bits)
            assert self.digests.setdefault((at.run, at.version), digest) == digest
        assert self.rig.spooled() == []
        self.checked = (self.rig, self.rig.uses)

    def every_process_reports_what_the_engine_holds(self) -> None:
        for process in range(2):
            status = self.status(process)
            assert self.facts_of(status) == self.known.facts()
            assert self.rig.generates(process) == (not self.known.uncertain)
            if not self.known.uncertain and not self.known.foreign:
                assert status["version"]["digest"] == digest_of(self.known.at.bits)
        assert self.rig.engine.paused == self.known.paused

    def requests_are_answered_by_the_version_they_ask_for(self) -> None:
        version = self.known.at.version
        for process in range(2):
            served = self.rig.generates_of(process, version)
            assert self.known.certain or not served
            assert served or self.known.paused or not self.known.certain
        assert not self.rig.generates_of(0, version + 1)

    def memory_is_of_the_version_to_the_bit(self) -> None:
        if not self.known.certain:
            return
        held = {name: values.tobytes() for name, values in self.known.at.bits.items()}
        if self.loaded[0] != held:
            self.loaded = held, self.rig.fresh_memory(self.checkpoint(self.known.at.bits))
        assert self.rig.memory() == self.loaded[1]


class RebuiltModel(EngineModel):
    kind = Rebuilt
    computed = frozenset({"int8.weight"})


def digest_of(found: Bits) -> str:
    return Digest.total(tensor_digest(name, values) for name, values in found.items()).hex()


def run_machine(
    machine: type[EngineModel], examples: int, steps: int, *, fixed: int | None = SEED
) -> Counter[str]:
    """Run histories in which nothing is repeated in the background; see `run_histories`."""
    with mock.patch("delta_server.commit.REPEAT_S", 3600):
        return run_histories(machine, examples, steps, fixed=fixed)


@pytest.mark.timeout(900)  # a history that fails is made short
def test_every_fault_happens_to_engine() -> None:
    occurred = run_machine(EngineModel, examples=30, steps=30)
    wanted = {*get_args(Fault), *ERRORS.values(), *REFUSALS} - {"unprocessed"}
    assert wanted - set(occurred) == set(), occurred


@pytest.mark.timeout(900)  # a history that fails is made short
def test_every_fault_happens_to_engine_that_rebuilds() -> None:
    occurred = run_machine(RebuiltModel, examples=25, steps=30)
    assert set(get_args(Fault)) - set(occurred) == set(), occurred


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [EngineModel, RebuiltModel])
def test_model_holds_over_long_histories(machine: type[EngineModel]) -> None:
    run_machine(machine, examples=400, steps=50, fixed=None)
