"""An engine of two ranks with what it must hold: send it parts, and compare the two."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from hypothesis.stateful import RuleBasedStateMachine

from delta_server import recent
from engine_ext.conformance.toy_models import Checkpoint
from engine_ext.errors import NotUpdatable
from engine_ext.format import ParamDelta
from engine_ext.sync import post_load
from tests.support.delta_bodies import forged
from tests.support.endpoint_rig import STATUS
from tests.support.engine_oracle import (
    TIMEOUT,
    Answer,
    Bits,
    Committed,
    Fault,
    Known,
    Part,
    Sender,
)
from tests.support.served_engine import ServedRig
from tests.support.served_models import bits, changed, one_part
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

UNCERTAIN = ("CommitFailed", "EngineUncertain")
# The error that a part is answered with when a fault has happened.
ERRORS: dict[Fault, str] = {
    "refused": "NotUpdatable",
    "broken": "DeltaError",
    "unprocessed": "NotUpdatable",
    "undone": "WriteUndone",
    "mixed": "CommitFailed",
    "lost": "CommitFailed",
    "unpaused": "DeltaError",
    "unpublished": "CommittedNotResumed",
}


class InPlace(Model):
    """Layers whose rows are divided between the ranks, and a norm that all ranks hold."""

    shapes: ClassVar = linear_shapes("one", "two")

    def build(self, rank: int, ranks: int) -> None:
        for name in ("one", "two"):
            setattr(self, name, Layer(Method(), rank=rank, ranks=ranks))


class Rebuilt(Model):
    """One module of each kind of rebuild, and a tensor that is written in place."""

    shapes: ClassVar = {**linear_shapes("int8", "packed", "second"), "mixer.A_log": (OUT,)}
    renamed: ClassVar = {"mixer.A_log": "mixer.A"}

    def build(self, rank: int, ranks: int) -> None:
        methods: tuple[Method, ...] = (Int8(), Packed(), SecondCopy())
        for name, method in zip(("int8", "packed", "second"), methods, strict=True):
            setattr(self, name, Layer(method, rank=rank, ranks=ranks))
        self.mixer = Mixer()
        del self.mixer.D


class ModelledEngine(RuleBasedStateMachine):
    """An engine, what it must hold, and the parts that were sent to it.

    Attributes:
        computed: the tensors that post-load processing computes.
        occurred: how often each status, error and fault was seen, over all histories.
    """

    kind: ClassVar[type[Model]] = InPlace
    computed: ClassVar[frozenset[str]] = frozenset()
    occurred: ClassVar[Counter[str]] = Counter()
    rig: ServedRig  # once it has started

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(patch.object(recent, "_ASKED_EVERY_S", 0.0))
        self._patches.enter_context(patch.object(post_load, "_BATCH", 1))
        self._rigs = map(str, itertools.count())
        self._ids = map(str, itertools.count())
        self.sent: list[Part] = []

    def start(self) -> None:
        """Start the engine anew, from its checkpoint; senders do not notice."""
        if hasattr(self, "rig"):
            self.rig.close()
        folder = Path(self._folder.name, next(self._rigs))
        folder.mkdir()
        self.rig = ServedRig(self.kind, folder, stage_timeout=TIMEOUT)
        self.base: Checkpoint = dict(self.rig.serving.base)
        self.names = sorted(self.base)
        loaded = {name: bits(tensor) for name, tensor in self.base.items()}
        self.known = Known(Committed(0, loaded), frozenset(self.names))
        self.digests: dict[tuple[str, int], str] = {}  # by run and version
        # The log begins anew, too: it would have two contents of one version.
        self.sent = [part for part in self.sent if part.origin != "log"]

    def teardown(self) -> None:
        self._patches.close()
        if hasattr(self, "rig"):
            self.rig.close()
        self._folder.cleanup()

    # Parts -------------------------------------------------------------------------------------

    def make(self, names: list[str], seed: int, **facts: Any) -> Part:
        """A part of some tensors, made as a trainer that knows the engine's weights makes it."""
        full, checkpoint = facts.get("full", False), self.checkpoint(self.known.at.bits)
        deltas, changes = [], {}
        for k, name in enumerate(names):
            new = changed(checkpoint[name], seed + k)
            old, values = self.known.at.bits[name], bits(new)
            indices = None if full else np.flatnonzero(old != values)
            values = values if indices is None else values[indices]
            changes[name] = (indices, values)
            deltas.append(ParamDelta(name, "bfloat16", tuple(new.shape), indices, values))
        part = Part(b"", changes, **facts)
        metadata: dict[str, Any] = {}
        if not part.bare:
            base = None if full or part.is_malformed or not part.names_base else part.base
            metadata = {"base_version": base, "part": part.number, "num_parts": part.count}
        if part.sender is not None:
            run, epoch = part.sender
            metadata |= {"run": run, "run_epoch": epoch, "run_owner": f"host-{run}:{epoch}"}
        body = one_part(
            deltas,
            current_version=part.version,
            sync_id=part.sync_id,
            full=full,
            **metadata,
        )
        if part.is_malformed:
            body = forged(body, base_version=str(part.base))
        return Part(body, changes, **facts)

    def checkpoint(self, found: Bits) -> Checkpoint:
        return {
            name: torch.from_numpy(values.view(np.int16).copy())
            .view(torch.bfloat16)
            .reshape(self.base[name].shape)
            for name, values in found.items()
        }

    def next_version(self, sender: Sender | None) -> int:
        run = self.known.at.run if sender is None else sender[0]
        return max(self.known.at.version, self.known.highest.get(run or "", 0)) + 1

    def split(self, seed: int, count: int, **facts: Any) -> list[Part]:
        """The parts of a sync."""
        sync_id = next(self._ids)
        return [
            self.make(
                self.names[number::count],
                seed + 7 * number,
                number=number,
                count=count,
                sync_id=sync_id,
                **facts,
            )
            for number in range(count)
        ]

    def deliver(
        self,
        process: int,
        part: Part,
        fault: Fault | None = None,
        rank: int = 0,
        writes: int = 0,
    ) -> None:
        self.sent = [*self.sent[-15:], part]
        if fault == "unprocessed" and not self.computed.intersection(self.known.named_with(part)):
            fault = None
        if fault == "unpaused" and self.known.paused:
            fault = None  # a commit does not pause a paused engine
        with self.armed(fault, rank, writes):
            if part.origin == "log":
                answer = self.rig.replay(process, part.body)
            else:
                answer = self.rig.send_to(process, part.body).json()
        self.follow(answer, *self.known.take(part, fault))
        if fault is not None and answer.get("error", {}).get("type") == ERRORS[fault]:
            self.occurred[fault] += 1

    @contextlib.contextmanager
    def armed(self, fault: Fault | None, rank: int, writes: int) -> Iterator[None]:
        """Let something fail meanwhile, on one rank if ranks have to do with it.

        Args:
            writes: how many writes of the rank succeed before one fails.
        """
        applier = self.rig.served_engine.appliers[rank]
        failing: Any = contextlib.nullcontext()
        if fault == "refused":
            applier.refuses = NotUpdatable("not here", tensor="one")
        elif fault == "broken":
            applier.refuses = RuntimeError("a bug")
        elif fault == "unprocessed":
            failing = not_processing(rank)
        elif fault in ("undone", "mixed"):
            applier.writes, applier.undoes = writes, fault == "undone"
            applier.rolls_back = fault == "undone"
        elif fault == "lost":
            self.rig.engine.loses["commit"] = ConnectionError("lost")
        elif fault == "unpaused":
            self.rig.engine.fails["stop"] = RuntimeError("not now")
        elif fault == "unpublished":
            self.rig.engine.fails["publish"] = RuntimeError("not now")
        with failing:
            yield
        self.rig.heal()

    def follow(self, answer: dict[str, Any], expected: Answer, possible: list[Known]) -> None:
        """The answer is the expected one, and the engine is in one of the possible states."""
        if isinstance(expected, str):
            assert answer.get("status") == expected, (answer, expected)
            self.occurred[expected] += 1
        else:
            error = answer.get("error", {})
            assert error.get("type") in expected, (answer, expected)
            self.occurred[error["type"]] += 1
            kinds = {"CommittedNotResumed": "committed", **dict.fromkeys(UNCERTAIN, "uncertain")}
            assert error["engine_state"] == kinds.get(error["type"], "unchanged")
        self.hold(possible)

    def hold(self, possible: list[Known]) -> None:
        """The engine holds one of these."""
        observed = self.observed(0)
        held = [known for known in possible if known.facts() == observed]
        assert held, (observed, [known.facts() for known in possible])
        self.known = held[0]

    def status(self, process: int) -> dict[str, Any]:
        found: dict[str, Any] = self.rig.ask(process, "GET", STATUS).json()
        return found

    def observed(self, process: int) -> dict[str, Any]:
        return self.facts_of(self.status(process))

    @staticmethod
    def facts_of(status: dict[str, Any]) -> dict[str, Any]:
        """The facts of the oracle, as the status says them."""
        version, health, staged = status["version"], status["health"], status["staged"]
        return {
            "version": version["number"],
            "run": version["run"],
            "owner": sender_of(status["owner"]),
            "state": health["state"],
            "foreign": health["changed_externally"] is not None,
            "asleep": health["asleep"],
            "loaded": version["loaded"],
            "rolls_back": version["can_roll_back"],
            "published": version["published"],
            "staged": None
            if staged is None
            else {
                **{key: staged[key] for key in ("version", "base_version", "full", "num_parts")},
                "parts": staged["parts"],
                "owner": sender_of(staged["owner"]),
            },
        }


@contextlib.contextmanager
def not_processing(rank: int) -> Iterator[None]:
    """Let the engine's post-load processing fail on a rank."""
    original = Int8.process_weights_after_loading

    def process(method: Int8, layer: Any) -> None:
        if layer.rank == rank:
            raise ValueError("no memory left")
        original(method, layer)

    with patch.object(Int8, "process_weights_after_loading", process):
        yield


def sender_of(owner: dict[str, Any] | None) -> Sender | None:
    return None if owner is None else (owner["run"], owner["epoch"])
