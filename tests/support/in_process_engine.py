"""The endpoints over an engine in this process: real receivers on two ranks, weights in arrays."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import zstandard
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from numpy.typing import NDArray

from delta_server.routes import attach
from delta_server.service import DeltaService
from delta_server.spool_files import SUFFIX
from engine_ext.apply.staged import StagedParam, StagedPart, UndoLog
from engine_ext.errors import BaseMismatch, DeltaError, NotUpdatable
from engine_ext.receiver.receiver import Receiver
from engine_ext.settings import Settings
from engine_ext.wire import Limits, ParamDelta, Part, encode_part
from engine_ext.wire.digest import Digest, change_digest, tensor_digest
from engine_ext.wire.operations import Operation, ReplyT, decode_answers, encode_request

DELTA = "/update_weights_delta"
FROM_DISK = "/update_weights_from_disk"
STATUS = "/delta_status"
COMPLETIONS = "/v1/completions"

RANKS = 2
VERSION = 7
MAX_BODY_BYTES = 1 << 14
SHAPES = {"embed.weight": (4, 6), "layer.weight": (6, 2), "norm.weight": (8,)}

Weights = dict[str, NDArray[np.uint16]]
Changes = Mapping[str, Mapping[int, int]]

# New bits by flat index, on both ranks' halves of the tensors.
STEP: Changes = {"embed.weight": {0: 0x1111, 13: 0x7FC1}, "norm.weight": {7: 0x3333}}
OTHER_STEP: Changes = {"embed.weight": {0: 0x4444}, "layer.weight": {1: 0x5555, 11: 0x6666}}


# Weights and parts ---------------------------------------------------------------------------


def fresh_weights() -> Weights:
    """The bf16 bits of every tensor, flat, as they are loaded."""
    return {
        name: (np.arange(np.prod(shape)) + 1000 * i).astype(np.uint16)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def after(weights: Weights, *steps: Changes) -> Weights:
    """A copy of `weights` with some changes."""
    result = {name: bits.copy() for name, bits in weights.items()}
    for step in steps:
        for name, elements in step.items():
            result[name][list(elements)] = list(elements.values())
    return result


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def sparse(name: str, elements: Mapping[int, int], **changes: Any) -> ParamDelta:
    """One tensor's changed elements; `changes` are other fields of the delta."""
    fields = {
        "name": name,
        "dtype": "bfloat16",
        "shape": SHAPES.get(name, (8,)),
        "indices": np.array(sorted(elements), np.int64),
        "values": np.array([elements[i] for i in sorted(elements)], np.uint16),
    }
    return ParamDelta(**(fields | changes))


def part_of(*deltas: ParamDelta, version: int | None = VERSION + 1, **metadata: Any) -> bytes:
    """One part with these deltas."""
    metadata.setdefault("encoding", "indices")
    return encode_part(deltas, current_version=version, **metadata)


def delta_part(
    changes: Changes = STEP, version: int | None = VERSION + 1, **metadata: Any
) -> bytes:
    """One part that makes these changes."""
    return part_of(*(sparse(n, e) for n, e in changes.items()), version=version, **metadata)


def full_part(weights: Weights, version: int, names: Any = None, **metadata: Any) -> bytes:
    """One part with every element of these tensors."""
    deltas = [
        ParamDelta(name, "bfloat16", SHAPES[name], None, weights[name])
        for name in (names or weights)
    ]
    return part_of(*deltas, version=version, full=True, **metadata)


def bare(body: bytes) -> bytes:
    """The part without any metadata that the wire format does not require."""
    optional = ("current_version", "base_version", "part", "num_parts", "sync_id")
    return forged(body, **dict.fromkeys(optional))


def forged(body: bytes, **metadata: str | None) -> bytes:
    """The part with other metadata, and no manifest checksum; None drops a key."""
    end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:end])
    changed = {**header["__metadata__"], "manifest_checksum": None, **metadata}
    header["__metadata__"] = {k: v for k, v in changed.items() if v is not None}
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + body[end:]


def forged_params(body: bytes, **changes: Any) -> bytes:
    """The part with its first param's entry changed."""
    end = 8 + int.from_bytes(body[:8], "little")
    params = json.loads(json.loads(body[8:end])["__metadata__"]["params"])
    params[0].update(changes)
    return forged(body, params=json.dumps(params))


def zstd_declaring(content_size: int, body: bytes) -> bytes:
    """A zstd frame that holds `body` and declares that it holds `content_size` bytes."""
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(body)
    parameters = zstandard.get_frame_parameters(frame)
    assert parameters.content_size == zstandard.CONTENTSIZE_UNKNOWN
    # Descriptor: 8-byte content size, single segment, and the checksum flag as it was.
    blocks = frame[zstandard.frame_header_size(frame) :]
    descriptor = 0b1110_0000 | (frame[4] & 0b0000_0100)
    return frame[:4] + bytes([descriptor]) + content_size.to_bytes(8, "little") + blocks


async def pieces(body: bytes, size: int) -> AsyncIterator[bytes]:
    """The body in chunks, without a Content-Length."""
    for start in range(0, len(body), size):
        yield body[start : start + size]


# The engine ----------------------------------------------------------------------------------


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
        self._barrier.wait(timeout=5)
        gathered = list(self._values)
        self._barrier.wait(timeout=5)
        return gathered


class Shard:
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

    def stage(self, part: Part) -> StagedPart:
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
        missing = sorted(
            SHAPES.keys() - {param.delta.name for part in staged for param in part.params}
        )
        if full and missing:
            raise NotUpdatable(f"missing: {missing}", tensors=missing)

    def check_base(self, staged: Sequence[StagedPart]) -> None:
        """The weights are nobody else's to change."""

    def prepare(self, staged: Sequence[StagedPart], *, full: bool) -> bool:
        return True

    def is_prepared(self, staged: Sequence[StagedPart]) -> bool:
        return True

    def check_in_place(self) -> None:
        """The weights do not move."""

    def brief(self, staged: Sequence[StagedPart]) -> dict[str, Any]:
        return {"changes": [self._change(part).hex() for part in staged]}

    def agree(self, staged: Sequence[StagedPart], briefs: Sequence[dict[str, Any]]) -> None:
        """The parts that say what they change say what they change here."""
        for number, part in enumerate(staged):
            changes = (Digest.parse(brief["changes"][number]) for brief in briefs)
            change = sum(changes, start=Digest.ZERO).hex()
            if part.manifest.digest_part not in (None, change):
                raise BaseMismatch("other old values", found=change)

    def write(self, staged: Sequence[StagedPart], given_up: Sequence[UndoLog] = ()) -> None:
        self.writes += 1
        self._before = {name: bits.copy() for name, bits in self.bits.items()}
        for delta in (param.delta for part in staged for param in part.params):
            indices, new = self._mine(delta)
            self.bits[delta.name][indices - self._spans[delta.name][0]] = new
            if self.breaks:
                raise RuntimeError("the copy failed")

    def undo(self, staged: Sequence[StagedPart]) -> None:
        if not self.undoes:
            raise RuntimeError("the old values are gone")
        self._restore()

    def finish(self, staged: Sequence[StagedPart]) -> UndoLog:
        return UndoLog([], {})

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
        for delta in (param.delta for param in part.params):
            indices, new = self._mine(delta)
            old = self.bits[delta.name][indices - self._spans[delta.name][0]]
            change += change_digest(delta.name, indices, old, new)
        return change

    def _restore(self) -> None:
        for name, bits in self._before.items():
            self.bits[name][:] = bits

    @property
    def plan(self) -> Shard:
        """What a receiver asks the plan for."""
        return self

    def table(self) -> list[dict[str, Any]]:
        return [{"name": name, "status": "exact", "digested": True} for name in SHAPES]

    def scan(self) -> tuple[dict[str, Digest], list[str]]:
        found = {
            name: tensor_digest(name, bits, start=self._spans[name][0])
            for name, bits in self.bits.items()
        }
        return found, []

    @property
    def digests(self) -> dict[str, Digest]:
        return self.scan()[0]

    @property
    def digest(self) -> Digest:
        return sum(self.digests.values(), start=Digest.ZERO)

    def forget(self) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {
            "apply": self.name,
            "certification": {"exact": len(SHAPES)},
            "uncertified": {},
            "digest": self.digest.hex(),
        }


class Engine:
    """`delta_server.engine.Engine`, with the failures that a test wants.

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

    def __init__(self, settings: Settings) -> None:
        barrier = threading.Barrier(RANKS)
        values: list[Any] = [None] * RANKS
        self.ranks = [Rank(rank, values, barrier) for rank in range(RANKS)]
        self.shards = [Shard(rank) for rank in range(RANKS)]
        self.receivers = [
            Receiver(
                shard,
                rank,
                base_version=settings.base_version,
                stage_timeout=settings.stage_timeout,
                read_workers=settings.read_workers,
                shared=True,
                limits=Limits(max_part_bytes=settings.max_body_bytes),
            )
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

    def set_asleep(self, asleep: bool) -> None:
        for receiver in self.receivers:
            receiver.set_asleep(asleep)

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

    async def is_paused(self) -> bool:
        return self.paused

    async def pause(self, mode: str, *, flush_cache: bool) -> None:
        self.paused = True
        self._record("pause", mode, flush_cache)

    async def flush_cache(self) -> None:
        self._record("flush_cache")

    async def resume(self) -> None:
        self._record("resume")
        self.paused = False

    async def set_weight_version(self, version: str) -> None:
        self._record("set_weight_version", version)
        self.weight_version = version

    async def get_weight_version(self) -> str:
        return self.weight_version


# The server ----------------------------------------------------------------------------------


class Rig:
    """An engine's app with the endpoints attached, and a client for it."""

    def __init__(self, spool_dir: Path, **settings: Any) -> None:
        spool_dir.mkdir(exist_ok=True)
        self.settings = Settings(
            **{
                "spool_dir": str(spool_dir),
                "base_version": VERSION,
                "max_body_bytes": MAX_BODY_BYTES,
                **settings,
            }
        )
        self._loop = asyncio.new_event_loop()
        self.engine = self.make_engine()
        self.service = DeltaService(self.engine, self.settings)
        self.app = app_of(self.service)
        self.run(self.service.start())
        self.engine.events.clear()

    def make_engine(self) -> Engine:
        return Engine(self.settings)

    def close(self) -> None:
        if (following := self.service._following) is not None:
            following.cancel()
            self.run(asyncio.wait([following]))
        self.run(self.service.reporter.flush())
        self.service.spool.close()
        self.engine.close()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine, which must not hang."""
        return self._loop.run_until_complete(asyncio.wait_for(work, timeout=30))

    async def request(
        self,
        method: str,
        path: str,
        *,
        app: FastAPI | None = None,
        peer: tuple[str, int] | None = ("127.0.0.1", 9),
        **options: Any,
    ) -> httpx.Response:
        transport = httpx.ASGITransport(app or self.app, client=peer)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await client.request(method, path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.run(self.request("GET", path, **options))

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.run(self.request("POST", path, **options))

    async def sending(self, body: Any, /, **query: Any) -> httpx.Response:
        headers = {"Content-Type": "application/octet-stream"}
        return await self.request("POST", DELTA, content=body, headers=headers, params=query)

    def send(self, body: Any, /, **query: Any) -> httpx.Response:
        """A part by HTTP."""
        return self.run(self.sending(body, **query))

    def disk(self, folder: Path | str, *files: str, path: str = DELTA, **keys: Any) -> Any:
        """A disk request for some files of a folder; without any, for all of them."""
        named = {"files": list(files)} if files else {}
        body = {"model_path": str(folder), "load_format": "delta", **named, **keys}
        return self.post(path, json=body)

    def status(self) -> dict[str, Any]:
        response = self.get(STATUS)
        assert response.status_code == 200
        return response.json()

    @staticmethod
    def digest_of(weights: Weights) -> str:
        """The model's digest, in hex."""
        shares = (tensor_digest(name, bits) for name, bits in weights.items())
        return sum(shares, start=Digest.ZERO).hex()

    def spooled(self) -> list[str]:
        """The files in the spool.

        What lies beside a part that was removed is waited for, a while: a rank that still decodes
        the part removes what it makes.
        """
        deadline = time.monotonic() + 10
        while True:
            files = sorted(self.service.spool.directory.iterdir())
            beside = [file for file in files if file.stem.endswith(SUFFIX)]
            if all(file.with_suffix("") in files for file in beside) or time.monotonic() > deadline:
                return [file.name for file in files]
            time.sleep(0.01)

    def fail_commit(self, version: int = VERSION + 1) -> httpx.Response:
        """Send a delta whose write fails on rank 1, half-way."""
        self.engine.shards[1].breaks = True
        response = self.send(delta_part(version=version))
        self.engine.shards[1].breaks = False
        return response

    def assert_committed(self, response: httpx.Response, weights: Weights, version: int) -> None:
        """The answer is of a commit, and the engine is where the sync leads to."""
        assert response.status_code == 200, response.text
        assert (response.json()["status"], response.json()["version"]) == ("committed", version)
        assert same(self.engine.weights, weights)
        assert self.engine.weight_version == str(version)
        assert not self.engine.paused
        assert self.spooled() == []

    def assert_untouched(self) -> None:
        """Nothing was written since start-up, and the next correct sync is accepted."""
        assert same(self.engine.weights, fresh_weights())
        assert self.engine.writes == [0, 0]
        assert self.engine.weight_version == str(VERSION)
        assert self.status()["version"] == VERSION
        assert not self.engine.paused
        assert self.spooled() == []
        response = self.send(delta_part(OTHER_STEP, sync_id="the next one"))
        self.assert_committed(response, after(fresh_weights(), OTHER_STEP), VERSION + 1)


_SERVED = {COMPLETIONS: "POST", "/generate": "POST", "/v1/models": "GET", "/tokenize": "POST"}


def app_of(service: DeltaService) -> FastAPI:
    """An engine's app, with routes that generate, and the endpoints attached."""
    app = FastAPI()

    async def served(request: Request) -> JSONResponse:
        return JSONResponse("served")

    for path, method in _SERVED.items():
        app.add_route(path, served, [method])
    attach(app)
    app.state.delta_service = service
    return app


def assert_error(
    response: httpx.Response,
    status: int,
    kind: str,
    engine_state: str = "unchanged",
    **operands: Any,
) -> dict[str, Any]:
    """The answer is this error; returns the error object."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert (error["type"], error["engine_state"]) == (kind, engine_state), error
    assert error["message"]
    assert {key: error.get(key) for key in operands} == operands
    return error
