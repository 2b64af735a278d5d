"""Files of the spool: written again only when no process maps them, and not kept for long."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_server import intake, spool_files
from delta_server.intake import Intake, VerifiedPart
from delta_server.upload_limits import MinimumRate
from engine_ext.conformance.verified_file import verified_file
from engine_ext.errors import DeltaError, SpoolFull
from engine_ext.format import Limits, ParamDelta, Verifier, encode_part, sign
from engine_ext.sync.background_staging import map_part
from tests.support.delta_bodies import STEP, VERSION, after, delta_part, fresh_weights, pieces, same
from tests.support.descriptors import open_descriptors
from tests.support.endpoint_rig import Rig
from tests.support.verified_part import read_verified

RATE = MinimumRate(5, 1)
KEY = "a key of both"


def dense(count: int, seed: int = 0, encoding: str = "deltas") -> bytes:
    """A part with so many random elements."""
    bits = np.random.default_rng(seed).integers(0, 1 << 16, count, np.uint16)
    delta = ParamDelta("w", "bfloat16", (count,), None, bits)
    return encode_part([delta], encoding=encoding, current_version=1)


ONE, OTHER, SMALL = dense(3 << 18, 1), dense(3 << 18, 2), dense(1000, 3)


@pytest.fixture
def spool() -> Iterator[Intake]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as parent:
        spool = Intake(parent, Limits())
        yield spool
        spool.close()


def names(spool: Intake) -> list[str]:
    return sorted(path.suffix for path in spool.directory.iterdir())


def inode(spooled: VerifiedPart) -> int:
    return spooled.path.stat().st_ino


async def receive(spool: Intake, body: bytes, size: int = 1 << 16) -> VerifiedPart:
    return await spool.receive(pieces(body, size), None, RATE)


async def settle(spool: Intake) -> None:
    """Wait until threads have freed what they had to."""
    threads = spool._files.threads
    waiting = [threads.submit(lambda: None) for _ in range(2 * spool_files._THREADS)]
    await asyncio.gather(*map(asyncio.wrap_future, waiting))


# Written again -------------------------------------------------------------------------------


def test_a_removed_parts_file_is_written_again(spool: Intake) -> None:
    async def scenario() -> None:
        first = await receive(spool, ONE)
        file, path = inode(first), first.path
        first.remove()
        assert names(spool) == [spool_files.UNUSED_SUFFIX]
        for body in (OTHER, ONE + b"", OTHER):
            second = await receive(spool, body)
            assert inode(second) == file
            assert (second.identity, second.path.read_bytes()) == verified_file(body)
            assert not path.exists()
            second.remove()
            second.remove()

    asyncio.run(scenario())


def test_a_part_that_was_removed_before_removes_no_other(spool: Intake) -> None:
    async def scenario() -> None:
        first = await receive(spool, ONE)
        first.remove()
        second = await receive(spool, OTHER)
        first.remove()
        third = await receive(spool, ONE)
        assert second.path.read_bytes().startswith(OTHER)
        assert third.path.read_bytes().startswith(ONE)
        assert inode(second) != inode(third)

    asyncio.run(scenario())


@pytest.mark.parametrize("counts", [(5, 3, 5, 4, 9), (1, 9, 2, 9)])
def test_parts_of_other_sizes(spool: Intake, counts: tuple[int, ...]) -> None:
    async def scenario() -> None:
        for seed, count in enumerate(counts):
            body = dense(count << 18, seed)
            spooled = await receive(spool, body, 100_000)
            assert spooled.path.read_bytes() == verified_file(body)[1]
            spooled.remove()
            assert len(names(spool)) == (count << 19 >= spool_files._LARGE)

    asyncio.run(scenario())


def test_a_refused_body_keeps_no_file(spool: Intake) -> None:
    async def scenario() -> None:
        for _ in range(2):  # the second time in the file of the part
            (await receive(spool, ONE)).remove()
            with pytest.raises(DeltaError):
                await receive(spool, OTHER[:-1])
            assert names(spool) == []

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("batches", [0, 1, 3])
def test_a_body_given_up_while_it_is_written(spool: Intake, batches: int) -> None:
    before = open_descriptors()

    async def stalling() -> AsyncIterator[bytes]:
        for number in range(batches):
            yield ONE[number << 18 : (number + 1) << 18]
        await asyncio.sleep(60)

    async def scenario() -> None:
        for _ in range(20):
            task = asyncio.ensure_future(spool.receive(stalling(), None, RATE))
            for _ in range(batches):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await settle(spool)
        assert names(spool) == []

    asyncio.run(scenario())
    assert open_descriptors() <= before


# Ranks that map a part -----------------------------------------------------------------------

RANK = """
import sys
from engine_ext.sync.background_staging import map_part
data = map_part(sys.argv[1])
print("mapped", flush=True)
sys.stdin.readline()
print(bytes(data) == open(sys.argv[2], "rb").read(), flush=True)
data = map_part(sys.stdin.readline().strip())
print("mapped", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_file_is_not_written_while_a_process_maps_it(spool: Intake, tmp_path: Path) -> None:
    """It is once that process is killed."""
    expected = tmp_path / "expected"
    expected.write_bytes(verified_file(ONE)[1])

    async def scenario(rank: subprocess.Popen[str], first: VerifiedPart) -> None:
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert rank.stdout.readline() == "mapped\n"
        file = inode(first)
        first.remove()
        second = await receive(spool, OTHER)
        assert inode(second) != file
        print("compare", file=rank.stdin, flush=True)
        assert rank.stdout.readline() == "True\n"
        print(second.path, file=rank.stdin, flush=True)
        assert rank.stdout.readline() == "mapped\n"
        file = inode(second)
        second.remove()
        rank.kill()
        rank.wait()
        assert inode(await receive(spool, ONE)) == file

    async def main() -> None:
        first = await receive(spool, ONE)
        command = [sys.executable, "-c", RANK, str(first.path), str(expected)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, **pipes) as rank:
            await scenario(rank, first)

    asyncio.run(main())


def test_a_view_of_a_mapping_keeps_the_file(spool: Intake) -> None:
    async def scenario() -> None:
        first = await receive(spool, ONE)
        file = inode(first)
        view = np.frombuffer(map_part(str(first.path)), np.uint8)[10:20]
        first.remove()
        second = await receive(spool, OTHER)
        assert inode(second) != file
        assert view.tobytes() == ONE[10:20]
        file = inode(second)
        view = np.frombuffer(map_part(str(second.path)), np.uint8)[10:20]
        second.remove()
        del view
        assert inode(await receive(spool, ONE)) == file

    asyncio.run(scenario())


@pytest.mark.slow
def test_syncs_through_files_that_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of one rig sync several times; their weights are those of all the steps."""
    monkeypatch.setattr(spool_files, "_LARGE", 1)
    taken, take_file = list[int](), spool_files.SpoolFiles.take

    def take(files: spool_files.SpoolFiles) -> spool_files.SpoolFile:
        file = take_file(files)
        taken.append(file.path.stat().st_ino)
        return file

    monkeypatch.setattr(spool_files.SpoolFiles, "take", take)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as parent:
        rig = Rig(Path(parent))
        steps = [
            {"embed.weight": dict.fromkeys(range(number % 7 + 1), 4352 + number)}
            for number in range(20)
        ]

        async def scenario() -> list[httpx.Response]:
            return [
                await rig.sending(pieces(delta_part(step, version=VERSION + 1 + number), 100))
                for number, step in enumerate(steps)
            ]

        answers = rig.run(scenario())
        assert [answer.json()["status"] for answer in answers] == ["committed"] * len(steps)
        assert same(rig.engine.weights, after(fresh_weights(), *steps))
        assert len(set(taken)) < len(taken) == len(steps)
        rig.close()


# What is kept --------------------------------------------------------------------------------


def test_unused_files_are_soon_deleted(spool: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_files, "_UNUSED_FOR_S", 0.05)

    async def scenario() -> None:
        for _ in range(2):
            (await receive(spool, ONE)).remove()
            assert names(spool) == [spool_files.UNUSED_SUFFIX]
            while names(spool):
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize(
    ("name", "value"),
    [("_MOST_FILES", 2), ("_MOST_BYTES", 2 * len(ONE) + 2000), ("_ROOM_SHARE", 1 << 40)],
)
def test_few_files_are_kept(
    spool: Intake, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    monkeypatch.setattr(spool_files, name, value)

    async def scenario() -> None:
        parts = [await receive(spool, body) for body in (ONE, OTHER, ONE, OTHER)]
        for spooled in parts:
            spooled.remove()
        assert len(names(spool)) == (0 if name == "_ROOM_SHARE" else 2)

    asyncio.run(scenario())


def _on_disk(spool: Intake) -> None:
    spool._files.in_memory = False


def _closed(spool: Intake) -> None:
    spool._files._closed = True


@pytest.mark.parametrize("change", [_on_disk, _closed])
def test_nothing_is_kept(spool: Intake, change: Callable[[Intake], None]) -> None:
    async def scenario() -> None:
        change(spool)
        (await receive(spool, ONE)).remove()
        assert names(spool) == []

    asyncio.run(scenario())


def test_small_or_removed_outside_loop_is_not_kept(spool: Intake) -> None:
    asyncio.run(receive(spool, SMALL)).remove()
    asyncio.run(receive(spool, ONE)).remove()
    assert names(spool) == []


def test_unused_files_go_before_the_spool_is_full(
    spool: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.pwritev

    def pwritev(descriptor: int, views: Any, offset: int) -> int:
        if spool_files.UNUSED_SUFFIX in names(spool):
            raise OSError(errno.ENOSPC, "no room")
        return original(descriptor, views, offset)

    async def scenario() -> None:
        first, second = await receive(spool, ONE), await receive(spool, OTHER)
        first.remove()
        second.remove()
        monkeypatch.setattr(os, "pwritev", pwritev)
        bigger = dense(5 << 18, 5)
        assert (await receive(spool, bigger)).path.read_bytes() == verified_file(bigger)[1]
        assert spool_files.UNUSED_SUFFIX not in names(spool)

    asyncio.run(scenario())


def test_a_full_spool_without_unused_files(spool: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwritev(descriptor: int, views: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.raises(SpoolFull):
        asyncio.run(receive(spool, ONE))
    assert names(spool) == []


@pytest.mark.parametrize("total", [64 << 20, 64 << 30, 0])
def test_spool_leaves_shared_memory_to_the_engine(
    spool: Intake, monkeypatch: pytest.MonkeyPatch, total: int
) -> None:
    """A page that the engine has mapped, and touches first when there is none left, kills it."""
    kept, bigger = min(total // 8, 1 << 30), dense(6 << 18, 5)

    def usage(folder: Path) -> SimpleNamespace:
        used = sum(path.stat().st_size for path in spool.directory.iterdir())
        return SimpleNamespace(total=total, free=max(kept + (6 << 20) - used, 0))

    async def scenario() -> None:
        parts = [await receive(spool, ONE), await receive(spool, OTHER)]
        if not total:  # it has no limit
            parts += [await receive(spool, ONE), await receive(spool, OTHER)]
            return
        with pytest.raises(SpoolFull):
            await receive(spool, bigger)
        with pytest.raises(SpoolFull):
            spool.scratch("delta-", 3 << 20)
        spool.scratch("delta-", 2 << 20).cleanup()
        assert len(names(spool)) == 2
        parts[0].remove()
        # It takes the room of the unused file.
        assert (await receive(spool, bigger)).path.read_bytes() == verified_file(bigger)[1]

    monkeypatch.setattr(shutil, "disk_usage", usage)
    asyncio.run(scenario())


@pytest.mark.slow
def test_closing_frees_everything() -> None:
    before = open_descriptors()

    async def scenario(spool: Intake) -> None:
        first, second = await receive(spool, ONE), await receive(spool, OTHER)
        first.remove()
        spool.close()
        second.remove()
        await asyncio.sleep(0.1)  # its executor's threads end

    with tempfile.TemporaryDirectory(dir="/dev/shm") as parent:
        asyncio.run(scenario(Intake(parent, Limits())))
        assert os.listdir(parent) == []
    assert open_descriptors() <= before


# Any chunks ----------------------------------------------------------------------------------

BODIES = [
    delta_part(STEP, encoding="deltas"),
    delta_part(STEP, encoding="deltas_zstd"),
    dense(4000, 7, "deltas_zstd"),
    dense(4000, 8),
]
KEPT = dense(6000, 9)  # its file is written again, and those of the others are not


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A part: whole, cut, longer, or with another byte."""
    body = draw(st.sampled_from(BODIES))
    at = draw(st.integers(0, len(body) - 1))
    kind = draw(st.sampled_from(["whole", "cut", "longer", "changed"]))
    if kind == "changed":
        return body[:at] + bytes([body[at] ^ draw(st.integers(1, 255))]) + body[at + 1 :]
    return {"whole": body, "cut": body[:at], "longer": body + b"\0" * (at % 9 + 1)}[kind]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(bodies(), st.lists(st.integers(0, 3000), max_size=12), st.booleans(), st.booleans())
def test_chunks_make_no_difference(
    body: bytes, sizes: list[int], is_signed: bool, has_unused: bool
) -> None:
    """The part is the same one, or is refused in the same words, but for zstandard's own."""

    async def chunks() -> AsyncIterator[bytes]:
        at = 0
        for size in sizes:
            yield body[at : at + size]
            at += size
        yield body[at:]

    async def scenario(spool: Intake, source: AsyncIterator[bytes], prepare: bool) -> Any:
        if prepare:
            (await receive(spool, KEPT)).remove()
            assert names(spool) == [spool_files.UNUSED_SUFFIX]
        verifier = Verifier(KEY, sign(KEY, body)) if is_signed else None
        try:
            spooled = await spool.receive(source, None, RATE, verifier)
        except DeltaError as error:
            assert spool_files.SUFFIX not in names(spool)
            return type(error), str(error).partition("zstd decompressor error")[0]
        data = spooled.path.read_bytes()
        assert read_verified(data, spooled.identity) is not None
        spooled.remove()
        return spooled.identity, spooled.manifest, spooled.wire_bytes, data

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/dev/shm") as one:
        patch.setattr(spool_files, "_LARGE", 10_000)
        patch.setattr(intake, "_BATCH_BYTES", 500)
        patch.setattr(intake, "_BATCH_CHUNKS", 3)
        patch.setattr(intake, "_WRITE_BYTES", 700)
        patch.setattr(intake, "_QUICK_BYTES", 1000)
        spool = Intake(one, Limits())
        found = asyncio.run(scenario(spool, chunks(), has_unused))
        plain = asyncio.run(scenario(spool, pieces(body, len(body) or 1), False))
        spool.close()
    assert found == plain
