"""The endpoints over an engine in this process: real receivers on two ranks, weights in arrays."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from delta_server.request_options import Flush
from engine_ext.conformance.thread_group import HANGS_AFTER_S
from engine_ext.errors import BaseMismatch, DeltaError, NotUpdatable, as_delta_error
from engine_ext.format import DecodedPart, ParamDelta
from engine_ext.format.digest import Digest, change_digest, tensor_digest
from engine_ext.ranks.operations import (
    Operation,
    ReplyT,
    Stop,
    StoppedCall,
    decode_answers,
    encode_request,
)
from engine_ext.settings import Settings
from engine_ext.sync.applier import Applier, Scan
from engine_ext.sync.receiver import Receiver
from engine_ext.sync.staged import StagedParam, StagedPart, UndoLog
from engine_ext.sync.unwritten import Unwritten
from tests.support.delta_bodies import SHAPES, Weights, fresh_weights

RANKS = 2


class Rank:
    """One rank's place; all ranks of an engine share `values` and `barrier`.

    Attributes:
        votes_until_silence: at which vote from now no rank hears another; 0 means never.
    """

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self._values = values
        self._barrier = barrier

        self.votes_until_silence = 0

    def all_gather(self, value: Any) -> list[Any]:
        self.votes_until_silence -= 1
        if self.votes_until_silence == 0:
            raise ConnectionError("the other ranks are gone")
        self._values[self.rank] = value
        self._barrier.wait(timeout=HANGS_AFTER_S)
        # As replicas get it: their values travel as bytes.
        gathered: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(list(self._values)))
        self._barrier.wait(timeout=HANGS_AFTER_S)
        return gathered


def _deltas(part: StagedPart) -> Iterator[ParamDelta]:
    """Iterate over what was sent, which `Shard.stage` keeps."""
    for param in part.params:
        assert param.delta is not None
        yield param.delta


class Shard(Applier):
    """The applier of one rank: it holds an equal share of every tensor's elements.

    Attributes:
        refuses: what `stage` raises for a tensor.
        breaks: whether `write` fails after its first tensor.
        undoes: whether what was written can be taken back.
        writes: how often `write` was called.
    """

    name = "shard"

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._spans = {
            name: (bits.size * rank // RANKS, bits.size * (rank + 1) // RANKS)
            for name, bits in fresh_weights().items()
        }
        self.bits = {n: fresh_weights()[n][a:b] for n, (a, b) in self._spans.items()}
        self.refuses: dict[str, Exception] = {}
        self.breaks = False
        self.undoes = False
        self.writes = 0
        self._before: Weights = {}
        self.copies: dict[str, Digest] = {}

    def stage(self, part: DecodedPart) -> StagedPart:
        for delta in part.deltas:
            if delta.name in self.refuses:
                raise self.refuses[delta.name]
            expected = (SHAPES.get(delta.name), "bfloat16")
            if (delta.shape, delta.dtype) != expected:
                raise NotUpdatable(f"{delta.name} is {expected} here", tensor=delta.name)
        return StagedPart(
            part.manifest, [StagedParam.of(delta, keep=True) for delta in part.deltas]
        )

    def check_sync(self, staged: Sequence[StagedPart], *, full: bool) -> None:
        missing = sorted(SHAPES.keys() - {param.name for part in staged for param in part.params})
        if full and missing:
            raise NotUpdatable(f"missing: {missing}", tensors=missing)

    def check_base(self, staged: Sequence[StagedPart]) -> None:
        """The weights are nobody else's to change."""

    def check_rollback(self, logs: Sequence[UndoLog]) -> None:
        """The weights do not move."""

    def rank_summary(self, staged: Sequence[StagedPart]) -> dict[str, Any]:
        return {"changes": [self._change(part).hex() for part in staged]}

    def agree(self, staged: Sequence[StagedPart], summaries: Sequence[dict[str, Any]]) -> None:
        """The parts that say what they change say what they change here."""
        for number, part in enumerate(staged):
            changes = (Digest.parse(summary["changes"][number]) for summary in summaries)
            change = sum(changes, start=Digest.ZERO).hex()
            if part.manifest.digest_part not in (None, change):
                raise BaseMismatch("other old values", found=change)

    def write(self, staged: Sequence[StagedPart], given_up: Sequence[UndoLog] = ()) -> None:
        self.writes += 1
        self._before = {name: bits.copy() for name, bits in self.bits.items()}
        for delta in (delta for part in staged for delta in _deltas(part)):
            indices, new = self._mine(delta)
            self.bits[delta.name][indices - self._spans[delta.name][0]] = new
            if self.breaks:
                raise RuntimeError("the copy failed")

    def undo(self, staged: Sequence[StagedPart]) -> None:
        if not self.undoes:
            raise RuntimeError("the old values are gone")
        self._restore()

    def finish(self, staged: Sequence[StagedPart]) -> UndoLog:
        return UndoLog()

    def roll_back(self, log: UndoLog) -> None:
        self._restore()

    def _mine(self, delta: ParamDelta) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """The indices of this rank's elements, and their new bits."""
        begin, end = self._spans[delta.name]
        indices = np.arange(delta.numel) if delta.indices is None else delta.indices
        mine = (indices >= begin) & (indices < end)
        indices, values = indices[mine].astype(np.int64), delta.values[mine]
        old = self.bits[delta.name][indices - begin]
        return indices, old + values if delta.differences else values

    def _change(self, part: StagedPart) -> Digest:
        change = Digest.ZERO
        for delta in _deltas(part):
            indices, new = self._mine(delta)
            old = self.bits[delta.name][indices - self._spans[delta.name][0]]
            change += change_digest(delta.name, indices, old, new)
        return change

    def _restore(self) -> None:
        for name, bits in self._before.items():
            self.bits[name][:] = bits

    @property
    def plan(self) -> Any:
        """The attributes of the plan that a receiver reads."""
        return self

    def table(self) -> list[dict[str, Any]]:
        return [{"name": name, "status": "exact", "digested": True} for name in SHAPES]

    def scan(self) -> Scan:
        found = {
            name: tensor_digest(name, bits, start=self._spans[name][0])
            for name, bits in self.bits.items()
        }
        return Scan(found, [], {})

    @property
    def digests(self) -> dict[str, Digest]:
        return self.scan()[0]

    @property
    def digest(self) -> Digest:
        return sum(self.digests.values(), start=Digest.ZERO)

    def unwritten(self) -> Unwritten:
        return Unwritten(())

    def describe(self) -> dict[str, Any]:
        return {
            "apply": self.name,
            "certification": {"exact": len(SHAPES)},
            "uncertified": {},
            "digest": self.digest.hex(),
        }


class Engine:
    """`delta_server.engine.Engine`, with the failures that a test wants.

    Args:
        receivers: of two ranks that serve a model; by default those of two `Shard`.

    Attributes:
        events: what was asked of the engine that generation feels, in order.
        fails: what a method (or an operation of the receivers) raises, once, instead of doing it.
        loses: what an operation raises, once, after every rank has carried it out and has staged
            what it was sent.
        paused: whether generation is paused.
        shared: whether other HTTP processes serve it.
    """

    name = "in-memory"
    shared = False
    address: str | None = None
    model = "checkpoint"

    def __init__(self, settings: Settings, receivers: Sequence[Receiver] = ()) -> None:
        barrier = threading.Barrier(RANKS)
        values: list[Any] = [None] * RANKS
        self.ranks = [Rank(rank, values, barrier) for rank in range(RANKS)]
        self.shards = [Shard(rank) for rank in range(RANKS)]
        self.receivers = list(receivers) or [
            Receiver(shard, rank, settings)
            for rank, shard in zip(self.ranks, self.shards, strict=True)
        ]
        # One thread per rank: each takes its calls in the order in which they were sent.
        self._workers = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(RANKS)]
        self.events: list[tuple[Any, ...]] = []
        self.fails: dict[str, Exception] = {}
        self.loses: dict[str, Exception] = {}
        self.paused = False
        self.weight_version = "default"

    def close(self) -> None:
        for worker in self._workers:
            worker.shutdown()

    @property
    def weights(self) -> Weights:
        """The live bits of every tensor, from all ranks."""
        return {n: np.concatenate([shard.bits[n] for shard in self.shards]) for n in SHAPES}

    @property
    def writes(self) -> list[int]:
        """How often each rank has written."""
        return [shard.writes for shard in self.shards]

    def set_asleep(self, asleep: bool, *, other: bool = False) -> None:
        for receiver in self.receivers:
            receiver.set_asleep(asleep, other=other)

    def breaks_vote(self, number: int) -> None:
        """Let the ranks not hear each other at the vote of this number, from 1."""
        for rank in self.ranks:
            rank.votes_until_silence = number

    def _record(self, *event: Any) -> None:
        self.events.append(event)
        if event[0] in self.fails:
            raise self.fails.pop(event[0])

    async def call(self, request: Operation[ReplyT]) -> list[ReplyT | DeltaError]:
        if request.name == "commit":
            self._record("commit")
        if request.name in self.fails:
            raise self.fails.pop(request.name)
        sent = json.dumps(encode_request(request))
        loop = asyncio.get_running_loop()
        answers = await asyncio.gather(
            *(
                loop.run_in_executor(worker, receiver.handle, *json.loads(sent))
                for worker, receiver in zip(self._workers, self.receivers, strict=True)
            )
        )
        if request.name in self.loses:
            for receiver in self.receivers:
                receiver._staging.wait()
            raise self.loses.pop(request.name)
        return decode_answers(request, json.loads(json.dumps(answers)))

    async def call_stopped(
        self, request: Operation[ReplyT], flush_cache: Flush
    ) -> StoppedCall[ReplyT]:
        self.paused = True
        stop = Stop(stop_ms=0.0, caches_ms=0.0)
        try:
            self._record("stop", flush_cache)
        except Exception as error:
            stop = msgspec.structs.replace(stop, refusal=as_delta_error(error).to_wire())
        answers = await self.call(msgspec.structs.replace(request, refusal=stop.refusal))
        return StoppedCall.of(answers, [stop])

    async def end_requests(self, mode: str) -> None:
        self.paused = True
        self._record("end_requests", mode)

    async def is_paused(self) -> bool:
        return self.paused

    async def check_salt(self) -> None:
        if "salt" in self.fails:
            raise self.fails["salt"]

    async def publish(self, version: str | None, *, resumes: bool) -> None:
        self._record("publish", version, resumes)
        self.weight_version = version or self.weight_version
        self.paused &= not resumes

    async def pause(self, mode: str = "keep") -> None:
        """Pause as a caller does, by the engine's own method."""
        self.paused = True
        self._record("pause", mode)

    async def resume(self) -> None:
        """Resume as a caller does."""
        self._record("resume")
        self.paused = False

    async def get_weight_version(self) -> str:
        return self.weight_version
