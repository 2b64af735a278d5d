"""The contract of `delta_server.sources.Source`, over every way in."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import io
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from delta_server.intake import VerifiedPart
from delta_server.request_options import DiskRequest, Options
from delta_server.request_record import RequestRecord
from delta_server.sources import Inlet, Source, deliver
from delta_server.sources.files import Files
from delta_server.sources.log import LogVersion
from delta_server.sources.pulls import PullSource
from delta_server.sources.push import SinglePart, received
from delta_server.sources.store_files import ResolvedFiles
from delta_server.staging import NumberedPart
from engine_ext.errors import DeltaError
from engine_ext.format import Verifier
from tests.support.delta_bodies import (
    BASE,
    NEXT,
    OTHER_STEP,
    RESYNCED,
    SHAPES,
    STEP,
    VERSION,
    Weights,
    bare,
    delta_part,
    same,
)
from tests.support.endpoint_rig import Rig
from tests.support.folder_writer import write_checkpoint
from tests.unit.server.service_parts import assert_unchanged

SERVER = Path(__file__).parents[3] / "server/delta_server"
TARGET = VERSION + 1
# One tensor each, so that they are parts that only their version connects.
HALVES = [bare(delta_part({name: elements})) for name, elements in STEP.items()]


@dataclass
class Delivery:
    """One source, what it is asked for, and what it has done."""

    inlet: Inlet
    root: Path
    options: Options = field(default_factory=lambda: Options(weight_version=TARGET))
    record: RequestRecord = field(default_factory=RequestRecord)
    verified: list[VerifiedPart] = field(default_factory=list)
    completed: list[NumberedPart] = field(default_factory=list)
    settled: list[str | None] = field(default_factory=list)

    async def run(self, source: Source) -> dict[str, Any]:
        return await deliver(Watched(source, self))


class Watched(Source):
    """A source that notes what it is asked for and what it answers."""

    def __init__(self, source: Source, delivery: Delivery) -> None:
        super().__init__(source.inlet, source.options, source.record)
        self.source, self.delivery = source, delivery

    async def parts(self) -> AsyncGenerator[VerifiedPart, None]:
        async for one in self.source.parts():
            self.delivery.verified.append(one)
            yield one

    async def complete(self, verified: Sequence[VerifiedPart]) -> list[NumberedPart]:
        self.delivery.completed = await self.source.complete(verified)
        return self.delivery.completed

    async def settled(self, status: str | None) -> None:
        self.delivery.settled.append(status)
        await self.source.settled(status)


Make = Callable[[Delivery, Sequence[bytes]], Source]


def _write(folder: Path, bodies: Sequence[bytes]) -> list[Path]:
    folder.mkdir(exist_ok=True, parents=True)
    paths = [folder / f"{number}.safetensors" for number in range(len(bodies))]
    for path, body in zip(paths, bodies, strict=True):
        path.write_bytes(body)
    return paths


def posted(delivery: Delivery, bodies: Sequence[bytes]) -> Source:
    """The body of a request, or what a trainer hands to an engine's transfer API."""

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(bodies[0]), 100):
            yield bodies[0][start : start + 100]

    inlet, record = delivery.inlet, delivery.record
    arriving = received(inlet, chunks(), len(bodies[0]), None, record)
    return SinglePart(inlet, arriving, delivery.options, record)


def made(delivery: Delivery, bodies: Sequence[bytes]) -> Source:
    """A part that this process makes, as for a step without changes."""
    read = asyncio.to_thread(delivery.inlet.intake.read, io.BytesIO(bodies[0]))
    return SinglePart(delivery.inlet, read, delivery.options, delivery.record)


def requested(delivery: Delivery, bodies: Sequence[bytes]) -> Source:
    """The files of a disk request."""
    _write(delivery.root, bodies)
    request = DiskRequest(model_path=str(delivery.root))
    files = delivery.inlet.store_files.resolved(request)
    return Files(delivery.inlet, files, delivery.options, delivery.record)


def pulled(delivery: Delivery, bodies: Sequence[bytes]) -> Source:
    """A version that the engine is asked to fetch."""
    inlet = delivery.inlet
    _write(delivery.root / f"weight_v{TARGET:06d}", bodies)
    source = PullSource(str(delivery.root), inlet.settings.folders, inlet.store_files)
    return Files(inlet, source.resolved(TARGET), delivery.options, delivery.record)


def logged(delivery: Delivery, bodies: Sequence[bytes]) -> Source:
    """A version of a delta log."""
    paths = _write(delivery.root / f"weight_v{TARGET:06d}", bodies)
    found, records = ResolvedFiles(paths, [str(delivery.root)]), {"weight_v000008": "a record"}
    return LogVersion(delivery.inlet, found, delivery.options, delivery.record, records)


SINGLE: dict[str, Make] = {"posted": posted, "made": made}
SEVERAL: dict[str, Make] = {"requested": requested, "pulled": pulled, "logged": logged}
WAYS = {**SINGLE, **SEVERAL}


@pytest.fixture
def delivery(disk_rig: Rig, root: Path) -> Delivery:
    return Delivery(disk_rig.service.inlet, root)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Make:
    return WAYS[request.param]


@pytest.fixture(params=SEVERAL)
def several(request: pytest.FixtureRequest) -> Make:
    return SEVERAL[request.param]


def again(delivery: Delivery) -> Delivery:
    return Delivery(delivery.inlet, delivery.root, delivery.options)


def refused(rig: Rig, delivery: Delivery, source: Callable[[], Source]) -> DeltaError:
    """The error of a delivery."""

    async def run() -> None:
        await delivery.run(source())

    with pytest.raises(DeltaError) as caught:
        rig.run(run())
    return caught.value


def answered(rig: Rig, delivery: Delivery, make: Make, bodies: Sequence[bytes]) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        return await delivery.run(make(delivery, bodies))

    answer: dict[str, Any] = rig.run(run())
    return answer


# What is delivered ---------------------------------------------------------------------------


def test_a_version_is_committed_once(disk_rig: Rig, delivery: Delivery, way: Make) -> None:
    answer = answered(disk_rig, delivery, way, [delta_part()])
    assert (answer["status"], answer["version"]) == ("committed", TARGET)
    assert delivery.settled == ["committed"]
    assert same(disk_rig.engine.weights, NEXT)
    assert disk_rig.spooled() == []
    repeat = again(delivery)
    assert answered(disk_rig, repeat, way, [delta_part()])["status"] == "already_applied"
    assert repeat.settled == ["already_applied"]
    assert disk_rig.engine.writes == [1, 1]
    assert disk_rig.spooled() == []


def test_a_version_is_staged_alone(disk_rig: Rig, delivery: Delivery, way: Make) -> None:
    delivery.record.commits = False
    assert answered(disk_rig, delivery, way, [delta_part()])["status"] == "staged"
    assert delivery.settled == ["staged"]
    assert same(disk_rig.engine.weights, BASE)
    assert disk_rig.spooled() == []
    # A replay commits what it stages: what is left would keep out what leads around it.
    assert (disk_rig.status().staged is None) == (way is logged)


def test_parts_are_verified_and_numbered(disk_rig: Rig, delivery: Delivery, several: Make) -> None:
    answered(disk_rig, delivery, several, HALVES)
    assert len(delivery.verified) == len(HALVES)
    assert all(one.identity and one.manifest.part is None for one in delivery.verified)
    ids = [part for part, _ in delivery.completed]
    assert [(part.part, part.num_parts) for part in ids] == [(0, 2), (1, 2)]
    assert len({part.sync_id for part in ids} - {None}) == 1
    assert all(part.unproven is not None and not part.unproven.apart for part in ids)
    assert same(disk_rig.engine.weights, NEXT)
    assert delivery.settled == ["committed"]


@pytest.mark.parametrize("way", SINGLE.values(), ids=SINGLE)
def test_a_part_without_numbers_stands_apart(disk_rig: Rig, delivery: Delivery, way: Make) -> None:
    answered(disk_rig, delivery, way, HALVES[:1])
    [(part, _)] = delivery.completed
    assert (part.part, part.num_parts) == (0, 1)
    assert part.unproven is not None
    assert part.unproven.apart


def test_what_says_its_sync_is_left_alone(disk_rig: Rig, delivery: Delivery, way: Make) -> None:
    body = delta_part(sync_id="s", part=0, num_parts=2)
    assert answered(disk_rig, delivery, way, [body])["status"] == "staged"
    [(part, _)] = delivery.completed
    assert (part.sync_id, part.part, part.num_parts, part.unproven) == ("s", 0, 2, None)


def test_a_rest_leaves_out_what_was_seen(disk_rig: Rig, delivery: Delivery) -> None:
    answered(disk_rig, delivery, requested, HALVES[:1])
    rest = again(delivery)
    assert answered(disk_rig, rest, requested, HALVES)["status"] == "committed"
    assert [part.num_parts for part, _ in rest.completed] == [1]
    assert len(rest.verified) == 2
    assert disk_rig.spooled() == []
    assert same(disk_rig.engine.weights, NEXT)


def test_a_checkpoint_of_another_trainer(disk_rig: Rig, delivery: Delivery) -> None:
    def bits(weights: Weights, name: str) -> torch.Tensor:
        return torch.from_numpy(weights[name]).view(torch.bfloat16).reshape(SHAPES[name])

    tensors = {name: bits(RESYNCED, name) for name in SHAPES}
    folder = write_checkpoint(delivery.root, TARGET, tensors)

    async def run() -> Any:
        found = nullcontext(ResolvedFiles([folder], [str(delivery.root)]))
        return await delivery.run(Files(delivery.inlet, found, delivery.options, delivery.record))

    assert disk_rig.run(run())["status"] == "committed"
    assert all(part.full and part.unproven is None for part, _ in delivery.completed)
    assert delivery.settled == ["committed"]
    assert same(disk_rig.engine.weights, RESYNCED)


# What is refused -----------------------------------------------------------------------------


class BreaksOff(Source):
    """A source that fails after its first part."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.inlet, source.options, source.record)
        self.source = source

    async def parts(self) -> AsyncGenerator[VerifiedPart, None]:
        async for one in self.source.parts():
            yield one
            raise OSError("the folder is gone")

    async def complete(self, verified: Sequence[VerifiedPart]) -> list[NumberedPart]:
        raise AssertionError("never reached")

    async def settled(self, status: str | None) -> None:
        await self.source.settled(status)


def test_bytes_or_a_base_that_are_refused(disk_rig: Rig, delivery: Delivery, way: Make) -> None:
    refused(disk_rig, delivery, lambda: way(delivery, [delta_part()[:-1] + b"\xff"]))
    assert (delivery.settled, delivery.completed) == ([None], [])
    assert_unchanged(disk_rig)
    other = Delivery(delivery.inlet, delivery.root, Options(weight_version=TARGET + 1))
    refused(disk_rig, other, lambda: way(other, [delta_part(version=TARGET + 1)]))
    assert other.settled == [None]
    disk_rig.assert_untouched()


def test_parts_that_are_no_version(disk_rig: Rig, delivery: Delivery, several: Make) -> None:
    """Parts are of two versions, one is damaged, or the source fails."""
    mixed = Delivery(delivery.inlet, delivery.root / "mixed", Options())
    bodies = [delta_part(), delta_part(OTHER_STEP, version=TARGET + 1)]
    refused(disk_rig, mixed, lambda: several(mixed, bodies))
    assert mixed.settled == [None]
    assert_unchanged(disk_rig)

    damaged = Delivery(delivery.inlet, delivery.root / "damaged")
    bodies = [*HALVES, HALVES[0][:-1] + b"\xff"]
    refused(disk_rig, damaged, lambda: several(damaged, bodies))
    assert damaged.settled == [None]
    assert_unchanged(disk_rig)

    async def run() -> None:
        await delivery.run(BreaksOff(several(delivery, HALVES)))

    with pytest.raises(OSError, match="the folder is gone"):
        disk_rig.run(run())
    assert delivery.settled == [None]
    disk_rig.assert_untouched()


def test_a_commit_fails(disk_rig: Rig, delivery: Delivery, way: Make) -> None:
    """And is undone, or is not."""
    for shard in disk_rig.engine.shards:
        shard.breaks, shard.undoes = True, True
    for undone in (True, False):
        refused(disk_rig, delivery, lambda: way(delivery, [delta_part()]))
        assert delivery.settled == [None]
        delivery.settled.clear()
        assert disk_rig.status().health.state == ("certain" if undone else "uncertain")
        assert disk_rig.spooled() == []
        for shard in disk_rig.engine.shards:
            shard.undoes = False


# What is cancelled ---------------------------------------------------------------------------


@dataclass
class SlowIntake:
    """An intake that waits before the end of each part."""

    intake: Any
    arrived: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def read(self, source: BinaryIO, verifier: Verifier | None = None) -> VerifiedPart:
        self.arrived.set()
        assert self.goes_on.wait(30)
        verified: VerifiedPart = self.intake.read(source, verifier)
        return verified

    async def receive(self, chunks: AsyncIterator[bytes], *rest: Any) -> VerifiedPart:
        async def slowly() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                yield chunk
                self.arrived.set()
                await asyncio.to_thread(self.goes_on.wait, 30)

        verified: VerifiedPart = await self.intake.receive(slowly(), *rest)
        return verified


async def _until(ready: Callable[[], bool]) -> None:
    while not ready():
        await asyncio.sleep(0.001)


async def _cancelled(work: Awaitable[Any]) -> None:
    with pytest.raises(asyncio.CancelledError):
        await work


@pytest.mark.parametrize("way", {"posted": posted, **SEVERAL}.values(), ids=["posted", *SEVERAL])
def test_a_delivery_is_cancelled_while_it_arrives(
    disk_rig: Rig, delivery: Delivery, way: Make
) -> None:
    slow = SlowIntake(disk_rig.service.intake)
    delivery.inlet = dataclasses.replace(delivery.inlet, intake=slow)  # type: ignore[arg-type]

    async def run() -> None:
        task = asyncio.ensure_future(delivery.run(way(delivery, HALVES)))
        await _until(slow.arrived.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        slow.goes_on.set()
        await _cancelled(task)

    disk_rig.run(run())
    assert delivery.settled == [None]
    disk_rig.assert_untouched()


def test_a_caller_that_leaves_does_not_stop_a_commit(
    disk_rig: Rig, delivery: Delivery, way: Make
) -> None:
    async def run() -> None:
        task = asyncio.ensure_future(delivery.run(way(delivery, [delta_part()])))
        await _until(lambda: bool(delivery.completed))
        task.cancel()
        await _cancelled(task)
        await _until(lambda: bool(delivery.settled))

    disk_rig.run(run())
    assert delivery.settled == ["committed"]
    assert same(disk_rig.engine.weights, NEXT)
    assert disk_rig.spooled() == []


# Who submits ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_only_deliver_submits_parts() -> None:
    callers = []
    for file in sorted(SERVER.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("coordinator.submit"):
                callers.append(str(file.relative_to(SERVER)))
    assert callers == ["sources/__init__.py"]
