"""The spool: what it keeps, what it refuses, and that nothing of a refused body stays."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard

from delta_server.intake import Intake, VerifiedPart
from delta_server.spool_files import SpoolFile
from delta_server.upload_limits import MinimumRate
from engine_ext.conformance.verified_file import verified_file
from engine_ext.errors import (
    ChecksumMismatch,
    DeltaError,
    MalformedPart,
    SpoolFull,
    TooLarge,
    UploadTooSlow,
)
from engine_ext.format import (
    BIT_CHANGES,
    ENCODINGS,
    DecodedPart,
    FrameReader,
    Limits,
    ParamDelta,
    Verifier,
    decode_part,
    read_container,
    sign,
)
from engine_ext.format.checksum import xxh3_checksum
from engine_ext.format.container import write_container
from engine_ext.format.manifest import manifest_checksum
from tests.support.cases import case
from tests.support.delta_bodies import STEP, delta_part, part_of, pieces, sparse, zstd_declaring
from tests.support.independent_encoder import sendable
from tests.support.verified_part import read_verified

LIMITS = Limits(max_part_bytes=4096)
PLAIN = delta_part(STEP, encoding="deltas")
ZSTD = delta_part(STEP, encoding="deltas_zstd")
PACKED = delta_part(STEP, encoding="gap8_exp")


def encoded(encoding: str) -> bytes:
    """Sparse and dense tensors, as an encoding takes them."""
    deltas = [sparse(name, elements) for name, elements in STEP.items()]
    if encoding == BIT_CHANGES:  # has no dense form
        changes = {"cleared": np.array([0x00FF, 0xFFFF], np.uint16)}
        flipped = [
            sparse(delta.name, {3: 1, 5: 0x1234}, new_checksum="adler32:0000000a", **changes)
            for delta in deltas
        ]
        return part_of(*flipped, encoding=encoding)
    dense = ParamDelta("w", "bfloat16", (3,), None, np.array([1, 0x7FC1, 0xFFFF], np.uint16))
    taken, metadata = sendable(encoding, [*deltas, dense])
    return part_of(*taken, encoding=encoding, **metadata)


# Too long, and no container either: which of the two is found first depends on the chunks.
OVERSIZED = (MalformedPart, TooLarge)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Intake]:
    spool = Intake(str(tmp_path), LIMITS)
    yield spool
    spool.close()


def files(spool: Intake) -> list[Path]:
    return list(spool.directory.iterdir())


def receive(
    spool: Intake, chunks: AsyncIterator[bytes], declared: int | None = None, stall: float = 5
) -> VerifiedPart:
    return asyncio.run(spool.receive(chunks, declared, MinimumRate(stall, 1)))


def read(spool: Intake, path: Path) -> VerifiedPart:
    with open(path, "rb", buffering=0) as source:
        return spool.read(source)


async def stalling(body: bytes) -> AsyncIterator[bytes]:
    yield body
    await asyncio.sleep(60)


async def breaking(body: bytes) -> AsyncIterator[bytes]:
    yield body
    raise ConnectionResetError("the sender went away")


def bits_of(part: DecodedPart | None) -> dict[str, tuple[Any, ...]]:
    """All that a part says of each tensor, to the bit."""
    assert part is not None
    return {
        delta.name: (
            *(delta.dtype, delta.shape, delta.differences, delta.new_checksum),
            *(
                None if array is None else (array.dtype.str, array.tolist())
                for array in (delta.indices, delta.values, delta.cleared)
            ),
        )
        for delta in part.deltas
    }


@pytest.mark.parametrize("encoding", [*ENCODINGS, BIT_CHANGES])
def test_ranks_read_what_was_sent(spool: Intake, encoding: str) -> None:
    body = encoded(encoding)
    sent = bits_of(decode_part(b"".join(FrameReader(LIMITS.max_part_bytes).feed(body))))
    for size in (1, 7, 1 << 20):
        with case(f"pieces of {size}"):
            spooled = receive(spool, pieces(body, size), declared=len(body))
            data = spooled.path.read_bytes()
            assert (spooled.identity, data) == verified_file(body)
            assert bits_of(read_verified(data, spooled.identity)) == sent
            assert spooled.manifest.current_version == 8
            assert spooled.wire_bytes == len(body)
            assert files(spool) == [spooled.path]
            spooled.remove()
            spooled.remove()
            assert files(spool) == []


def test_identity_is_of_what_is_written(spool: Intake) -> None:
    def identity(body: bytes) -> str:
        return receive(spool, pieces(body, 64)).identity

    again = delta_part(STEP, encoding="deltas", sync_id="another", part=3, num_parts=9)
    other = delta_part({**STEP, "norm.weight": {7: 0x3334}}, encoding="deltas")
    assert identity(PLAIN) == identity(again)
    assert identity(PLAIN) != identity(other)


@pytest.mark.parametrize("body", [PLAIN, PACKED], ids=["plain", "packed"])
def test_changed_data_leaves_no_file(spool: Intake, body: bytes) -> None:
    changed = body[:-1] + bytes([body[-1] ^ 1])
    with pytest.raises(ChecksumMismatch):
        receive(spool, pieces(changed, 1 << 20))
    assert files(spool) == []


def test_a_corrupt_frame_with_the_right_checksum_leaves_no_file(spool: Intake) -> None:
    header, positions, values = read_container(PACKED, Limits())
    broken = positions[:-1]
    metadata = {**header.metadata, "checksum": xxh3_checksum(broken.data, values.data)}
    metadata["manifest_checksum"] = manifest_checksum(metadata)
    body = write_container(broken, [values], "uint8", metadata)
    with pytest.raises(MalformedPart, match="frame"):
        receive(spool, pieces(body, 1 << 20))
    assert files(spool) == []


def test_a_part_of_exactly_the_limit_is_taken(tmp_path: Path) -> None:
    spool = Intake(str(tmp_path), Limits(max_part_bytes=len(PLAIN)))
    receive(spool, pieces(PLAIN, 100), declared=len(PLAIN))
    spool.close()


def _unreadable() -> AsyncIterator[bytes]:
    raise AssertionError("the body was read")


def test_a_declared_length_over_the_limit_is_refused_unread(spool: Intake) -> None:
    chunks = SimpleNamespace(__aiter__=_unreadable)
    with pytest.raises(TooLarge) as caught:
        receive(spool, chunks, declared=LIMITS.max_part_bytes + 1)
    assert caught.value.operands == {"limit": LIMITS.max_part_bytes}
    assert files(spool) == []


def zeros_behind(body: bytes, count: int) -> bytes:
    """A zstd frame without a declared size, of a body and many zeros."""
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return compressor.compress(body + bytes(count)) + compressor.flush()


REFUSED: dict[str, tuple[bytes, Any]] = {
    "empty": (b"", MalformedPart),
    "ends in the length": (PLAIN[:3], MalformedPart),
    "ends in the header": (PLAIN[:100], MalformedPart),
    "last byte missing": (PLAIN[:-1], MalformedPart),
    "one byte more": (PLAIN + b"\0", MalformedPart),
    "many bytes more": (PLAIN + bytes(8192), OVERSIZED),
    "zstd magic cut": (ZSTD[:3], MalformedPart),
    "zstd cut": (ZSTD[:-1], MalformedPart),
    "data behind the frame": (ZSTD + b"\0", MalformedPart),
    "zstd corrupt": (ZSTD[:40] + b"\xff" * 8 + ZSTD[48:], MalformedPart),
    "declares less": (zstd_declaring(len(PLAIN) - 1, PLAIN), MalformedPart),
    "declares more": (zstd_declaring(len(PLAIN) + 1, PLAIN), MalformedPart),
    "declares over the limit": (zstd_declaring(LIMITS.max_part_bytes + 1, PLAIN), TooLarge),
    "declares absurdly much": (zstd_declaring(1 << 62, PLAIN), TooLarge),
    "header length over the limit": (b"\xff" * 64, TooLarge),
    "zeros in a frame": (zeros_behind(b"", 1 << 20), OVERSIZED),
    "bomb": (zeros_behind((8192).to_bytes(8, "little"), 1 << 20), TooLarge),
}


def test_nothing_stays_of_a_refused_body(spool: Intake) -> None:
    for (kind, (body, error)), size in itertools.product(REFUSED.items(), (9, 1 << 20)):
        with case(f"{kind}, pieces of {size}"):
            with pytest.raises(error):
                receive(spool, pieces(body, size))
            assert files(spool) == []


def test_a_body_without_end_is_stopped_at_the_limit(spool: Intake) -> None:
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        yield (1 << 20).to_bytes(8, "little")
        while True:
            taken += 1
            yield b" " * 1024

    with pytest.raises(TooLarge):
        receive(spool, endless())
    assert taken <= LIMITS.max_part_bytes // 1024
    assert files(spool) == []


def test_a_stalled_body_is_given_up(spool: Intake) -> None:
    for body in (b"", PLAIN[:50], ZSTD[:50]):
        with case(body):
            with pytest.raises(UploadTooSlow):
                receive(spool, stalling(body), stall=0.05)
            assert files(spool) == []


def test_nothing_stays_of_a_body_whose_stream_fails(spool: Intake) -> None:
    with pytest.raises(ConnectionResetError):
        receive(spool, breaking(PLAIN[:50]))
    assert files(spool) == []


def test_nothing_stays_of_a_cancelled_body(spool: Intake) -> None:
    async def cancelled() -> None:
        task = asyncio.ensure_future(spool.receive(stalling(PLAIN[:50]), None, MinimumRate(60, 1)))
        await asyncio.sleep(0.02)
        assert len(files(spool)) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    assert files(spool) == []


def test_nothing_stays_of_a_cancelled_signed_frame(
    spool: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread writes the part to another file, and the request is given up meanwhile."""
    reached, given_up = threading.Event(), threading.Event()
    original = SpoolFile.seal

    def seal(file: SpoolFile) -> Any:
        reached.set()
        assert given_up.wait(20)
        return original(file)

    monkeypatch.setattr(SpoolFile, "seal", seal)

    async def cancelled() -> None:
        verifier = Verifier("a key", sign("a key", ZSTD))
        body, rate = pieces(ZSTD, 50), MinimumRate(60, 1)
        task = asyncio.ensure_future(spool.receive(body, None, rate, verifier))
        while not reached.is_set():
            await asyncio.sleep(0.001)
        assert len(files(spool)) == 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        given_up.set()
        while files(spool):
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(cancelled(), 20))


# A full disk ---------------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Every spool file takes 64 bytes and then fails."""
    original = os.pwritev

    def pwritev(descriptor: int, views: list[memoryview], offset: int) -> int:
        if offset >= 64:
            raise OSError(request.param, os.strerror(request.param))
        return original(descriptor, [views[0][: 64 - offset]], offset)

    monkeypatch.setattr(os, "pwritev", pwritev)


@pytest.mark.parametrize("full_disk", [errno.ENOSPC, errno.EDQUOT], indirect=True)
@pytest.mark.usefixtures("full_disk")
def test_a_full_spool_is_said_so(spool: Intake, tmp_path: Path) -> None:
    with pytest.raises(
        SpoolFull, match=r"folder /.* is full; set --delta-tuning spool-dir=.*--buck"
    ):
        receive(spool, pieces(PLAIN, 1 << 20))
    source = tmp_path / "part.safetensors"
    source.write_bytes(PLAIN)
    with pytest.raises(SpoolFull):
        read(spool, source)
    assert files(spool) == []


@pytest.mark.parametrize("full_disk", [errno.EIO], indirect=True)
@pytest.mark.usefixtures("full_disk")
def test_another_failure_of_the_disk_is_not_a_full_spool(spool: Intake) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        receive(spool, pieces(PLAIN, 1 << 20))
    assert files(spool) == []


def test_no_room_for_another_file(spool: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "no inodes")

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(SpoolFull):
        receive(spool, pieces(PLAIN, 1 << 20))


# Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [PLAIN, ZSTD], ids=["plain", "zstd"])
def test_read_keeps_a_copy(spool: Intake, tmp_path: Path, body: bytes) -> None:
    source = tmp_path / "part.safetensors"
    source.write_bytes(body)
    spooled = read(spool, source)
    source.write_bytes(b"\0" * len(body))
    assert (spooled.identity, spooled.path.read_bytes()) == verified_file(body)
    assert spooled.wire_bytes == len(body)
    assert spooled.path.parent == spool.directory


def test_nothing_stays_of_a_refused_file(spool: Intake, tmp_path: Path) -> None:
    source = tmp_path / "part.safetensors"
    bodies: list[tuple[bytes, type[DeltaError]]] = [
        (b"", MalformedPart),
        (PLAIN[:-1], MalformedPart),
        (b"\xff" * 9000, TooLarge),
    ]
    for body, error in bodies:
        source.write_bytes(body)
        with case(body[:20]), pytest.raises(error):
            read(spool, source)
        assert files(spool) == []
