"""Any order of the steps of several syncs leaves all weights on all ranks at one version."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_ext.format import ParamDelta
from engine_ext.format.identity import PartId
from engine_ext.sync import rebuild_plan
from engine_ext.sync.staged import StagedPart, Write
from tests.support.quantised_engine import Serving, loaded, served
from tests.support.rank_engine import part_id
from tests.support.served_models import PROPERTY, changed, delta_between, dense_delta, one_part
from tests.support.toy_quantised import (
    OUT,
    Int8,
    Layer,
    Method,
    Mixer,
    Model,
    Packed,
    SecondCopy,
    linear_shapes,
)

RANKS = 2
PARTS = 2
TIMEOUT = 60.0
SENDERS = ("a", "b")

Target = dict[str, torch.Tensor]


class Small(Model):
    """One module of each kind of rebuild, and a tensor that is written in place."""

    shapes: ClassVar = {**linear_shapes("int8", "packed", "second"), "mixer.A_log": (OUT,)}
    renamed: ClassVar = {"mixer.A_log": "mixer.A"}

    def build(self, rank: int, ranks: int) -> None:
        methods: tuple[Method, ...] = (Int8(), Packed(), SecondCopy())
        for name, method in zip(("int8", "packed", "second"), methods, strict=True):
            setattr(self, name, Layer(method, rank=rank, ranks=ranks))
        self.mixer = Mixer()
        del self.mixer.D


NAMES = list(Small.checkpoint())


@dataclass
class Known:
    """What the engine must hold, by the answers that it gave."""

    current: Target
    version: int = 0
    before: Target | None = None
    staged: dict[int, Target] = field(default_factory=dict)
    full: bool = False
    sync_id: str | None = None
    certain: bool = True
    foreign: bool = False


class Run:
    """An engine of two ranks, which several senders use at once."""

    def __init__(self, folder: Path) -> None:
        self.serving = Serving(Small, folder, ranks=RANKS)
        self.engine = self.serving.engine
        self.known = Known(dict(self.serving.base))
        self.parts: dict[str, list[PartId]] = {sender: [] for sender in SENDERS}

    # What senders and the engine do -----------------------------------------------------------

    def send(self, sender: str, number: int, seed: int, full: bool) -> None:
        """Stage one part of two, of a full sync if the engine takes no other."""
        full = full or not self.known.certain or self.known.foreign
        names = NAMES[:3] if number == 0 else NAMES[3:]
        if not full:
            names = [name for k, name in enumerate(names) if (seed >> k) & 1] or names[:1]
        target = {n: changed(self.known.current[n], seed + k) for k, n in enumerate(names)}
        deltas: list[ParamDelta] = [
            dense_delta(n, t) if full else delta_between(n, self.known.current[n], t)
            for n, t in target.items()
        ]
        metadata: dict[str, Any] = {"full": True} if full else {}
        body = one_part(
            deltas,
            current_version=self.known.version + 1,
            base_version=None if full else self.known.version,
            part=number,
            num_parts=PARTS,
            sync_id=sender,
            **metadata,
        )
        part = part_id(body)
        [begun] = self.alike(self.engine.begin(part, self.engine.spool(body)))
        if begun is None:
            return
        if begun["admission"] == "new" and self.known.sync_id != sender:
            self.drop_known()
        done = self.alike(self.engine.poll(part)) != [None]
        settled = self.alike(self.engine.settle(part, staged=done))
        if begun["admission"] == "new" and done and settled != [None]:
            self.known.sync_id, self.known.full = sender, full
            self.known.staged[number] = target
        self.parts[sender] = [*self.parts[sender][-3:], part]

    def take_back(self, sender: str, which: int) -> None:
        """Forget a part, as if some rank had refused it."""
        if not self.parts[sender]:
            return
        self.take_back_part(self.parts[sender][which % len(self.parts[sender])])

    def take_back_part(self, part: PartId) -> None:
        status = self.engine.status()[0]["staged"]
        self.alike(self.engine.settle(part, staged=False))
        now = self.engine.status()[0]["staged"]
        if status != now:
            self.known.staged.pop(part.part)
            if not self.known.staged:
                self.drop_known()

    def send_all(self, sender: str, seed: int, full: bool) -> None:
        for number in range(PARTS):
            self.send(sender, number, seed, full)

    def send_again(self, number: int, seed: int) -> None:
        """Prepare, forget a part if it was sent, and stage it with other bytes."""
        sender, full = self.known.sync_id, self.known.full
        if sender is not None:
            self.prepare_all()
            for part in [one for one in self.parts[sender] if one.part == number][-1:]:
                self.take_back_part(part)
            self.send(sender, number, seed, full)

    def staged_part(self) -> PartId | None:
        """A part of the staged sync, or of one that was."""
        found = self.parts[self.known.sync_id or SENDERS[0]]
        return found[-1] if found else None

    def prepare(self) -> None:
        part = self.staged_part()
        if part is not None:
            self.alike(self.engine.prepare(part))

    def commit(self) -> None:
        sync_id = self.known.sync_id or SENDERS[0]
        version = self.known.version + 1
        self.follow_commit(self.engine.call("commit", version=version, sync_id=sync_id))

    def prepare_all(self) -> None:
        part = self.staged_part()
        if part is not None:
            answers = self.engine.prepare(part)
            while all("ok" in answer and not answer["ok"]["done"] for answer in answers):
                answers = self.engine.prepare(part)

    def prepare_and_commit(self) -> None:
        self.prepare_all()
        self.commit()

    def fail(self, rank: int, writes: int, undo_fails: bool) -> None:
        """Commit, but some write of a rank fails, and perhaps its undo."""
        applier, put = self.serving.applier(rank), Write.put
        write, undo = applier.write, applier.undo
        left: dict[int, bool] = {}  # by the ids of the writes of this rank: whether it fails

        def write_or_fail(staged: Sequence[StagedPart], given_up: Any) -> None:
            own = [one for part in staged for one in part.writes]
            left.update({id(one): number >= writes for number, one in enumerate(own)})
            write(staged, given_up)

        def put_or_fail(one: Write, compares: bool) -> None:
            if left.get(id(one)):
                raise OSError("no more")
            put(one, compares)

        def undo_or_fail(staged: Sequence[StagedPart]) -> None:
            if undo_fails:
                raise OSError("no way back")
            undo(staged)

        with (
            patch.object(Write, "put", put_or_fail),
            patch.object(applier, "write", write_or_fail),
            patch.object(applier, "undo", undo_or_fail),
        ):
            self.prepare_and_commit()

    def cannot_process(self, rank: int) -> None:
        """Prepare while the engine's processing fails on one rank."""
        original = Int8.process_weights_after_loading

        def process(method: Int8, layer: Any) -> None:
            if layer.rank == rank:
                raise ValueError("no memory left")
            original(method, layer)

        with patch.object(Int8, "process_weights_after_loading", process):
            self.prepare()

    def drop(self) -> None:
        self.alike(self.engine.call("drop"))
        self.drop_known()

    def roll_back(self) -> None:
        [answer] = self.alike(self.engine.call("rollback"))
        if answer is not None:
            assert self.known.before is not None
            self.known.current, self.known.before = self.known.before, None
            self.known.version = answer["version"]
            self.drop_known()

    def wait(self) -> None:
        self.engine.now += TIMEOUT

    def reload(self) -> None:
        """The engine loads something else itself, some of it into unprocessed weights."""
        for receiver, model in zip(self.engine.receivers, self.serving.models, strict=True):
            receiver.weights_replaced("a reload")
            int8: Any = model.int8
            int8.weight.zero_()
            model.norm.data.zero_()
            for state in self.serving.states[model.rank].states:
                next(state.weights())[1].zero_()
        self.known.foreign, self.known.before = True, None
        self.drop_known()

    # What must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        """All ranks tell the same, and hold what they tell."""
        [status] = self.alike(
            self.engine.call("status"), keys=("version", "engine_state", "foreign")
        )
        assert status is not None
        assert status["version"] == self.known.version
        assert (status["engine_state"] == "certain") == self.known.certain
        assert (status["foreign"] is None) == (not self.known.foreign)
        staged = self.engine.status()[0]["staged"]
        assert set([] if staged is None else staged["parts"]) == self.known.staged.keys()
        if not self.known.certain or self.known.foreign:
            return
        for rank, model in enumerate(self.serving.models):
            found, expected = served(model), served(fresh(self.known.current, rank))
            assert found == expected
        for answer in self.engine.call("digest", scan=True):
            assert answer["ok"]["tensors"] == answer["ok"]["tracked"]
            assert answer["ok"]["corrupted"] == []

    def follow_commit(self, answers: list[dict[str, Any]]) -> None:
        [committed] = self.alike(answers)
        if committed is not None:
            assert len(self.known.staged) == PARTS
            known = self.known.certain and not self.known.foreign
            self.known.before = self.known.current if known else None
            target = {n: t for part in self.known.staged.values() for n, t in part.items()}
            self.known.current = self.known.current | target
            self.known.version = committed["version"]
            self.known.certain, self.known.foreign = True, False
            self.drop_known()
            return
        error = answers[0]["error"]
        if error["engine_state"] == "uncertain":
            self.known.certain, self.known.foreign, self.known.before = False, False, None
        if error["type"] in ("WriteUndone", "CommitFailed"):
            self.drop_known()

    def drop_known(self) -> None:
        self.known.staged, self.known.sync_id = {}, None

    def alike(
        self, answers: list[dict[str, Any]], keys: tuple[str, ...] | None = None
    ) -> list[dict[str, Any] | None]:
        """The one answer that all ranks gave, or None for an error; they differ in digests only."""
        kinds = {("ok" in answer, str(answer.get("error", {}).get("type"))) for answer in answers}
        assert len(kinds) == 1, answers
        if "error" in answers[0]:
            return [None]
        if keys is not None:
            [_] = {tuple(answer["ok"][key] for key in keys) for answer in answers}
        return [answers[0]["ok"]]


def fresh(checkpoint: Target, rank: int) -> Model:
    """What an engine is that has loaded this checkpoint."""
    return loaded(Small, checkpoint, rank, RANKS)


senders = st.sampled_from(SENDERS)
ranks = st.integers(0, RANKS - 1)
Step = Callable[[Run], None]


def step(method: Any, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.tuples(*arguments).map(lambda chosen: lambda run: method(run, *chosen))


numbers, seeds = st.integers(0, PARTS - 1), st.integers(0, 255)
SYNC = step(Run.send_all, senders, seeds, st.sampled_from([False, False, False, True]))
DISTURBANCES = st.one_of(
    step(Run.send, senders, numbers, seeds, st.booleans()),
    step(Run.take_back, senders, st.integers(0, 3)),
    step(Run.prepare),
    step(Run.send_again, numbers, seeds),
    step(Run.cannot_process, ranks),
    step(Run.wait),
    SYNC,
)
FAILING = step(Run.fail, ranks, st.integers(0, 12), st.sampled_from([False, False, True]))
ENDS = st.one_of(
    step(Run.prepare_and_commit),
    step(Run.prepare_and_commit),
    FAILING,
    FAILING,
    step(Run.commit),
    step(Run.drop),
)
AFTERWARDS = st.one_of(
    step(Run.roll_back), step(Run.roll_back), step(Run.prepare_and_commit), step(Run.reload)
)
ROUNDS = st.tuples(
    SYNC, st.lists(DISTURBANCES, max_size=3), ENDS, st.lists(AFTERWARDS, max_size=1)
).map(lambda chosen: [chosen[0], *chosen[1], chosen[2], *chosen[3]])


@pytest.mark.slow
@given(st.lists(ROUNDS, min_size=2, max_size=6))
@hypothesis_settings(PROPERTY, max_examples=30)
def test_every_order_of_steps(rounds: list[list[Step]]) -> None:
    with tempfile.TemporaryDirectory() as folder, patch.object(rebuild_plan, "_BATCH", 1):
        run = Run(Path(folder))
        for one in chain.from_iterable(rounds):
            one(run)
            run.check()
