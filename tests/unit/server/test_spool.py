"""The spool: what it keeps, what it refuses, and that nothing of a refused body stays."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from delta_server import spool as spool_module
from delta_server import spool_files
from delta_server.spool import Spool, Spooled
from delta_server.upload_limits import MinimumRate
from engine_ext.errors import DeltaError, MalformedPart, SpoolFull, TooLarge, UploadTooSlow
from engine_ext.files import durable_files
from engine_ext.wire import Limits, decode_part
from tests.support.delta_bodies import STEP, delta_part, pieces, zstd_declaring

LIMITS = Limits(max_part_bytes=4096)
PLAIN = delta_part(STEP, encoding="deltas")
ZSTD = delta_part(STEP, encoding="deltas_zstd")
# Too long, and no container either: which of the two is found first depends on the chunks.
OVERSIZED = (MalformedPart, TooLarge)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(str(tmp_path), LIMITS)
    yield spool
    spool.close()


def files(spool: Spool) -> list[Path]:
    return list(spool.directory.iterdir())


def receive(
    spool: Spool, chunks: AsyncIterator[bytes], declared: int | None = None, stall: float = 5
) -> Spooled:
    return asyncio.run(spool.receive(chunks, declared, MinimumRate(stall, 1)))


def read(spool: Spool, path: Path) -> Spooled:
    with open(path, "rb", buffering=0) as source:
        return spool.read(source)


async def stalling(body: bytes) -> AsyncIterator[bytes]:
    yield body
    await asyncio.sleep(60)


async def breaking(body: bytes) -> AsyncIterator[bytes]:
    yield body
    raise ConnectionResetError("the sender went away")


# The folder ----------------------------------------------------------------------------------


def test_the_folder_is_private_and_goes_with_close(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), LIMITS)
    assert spool.directory.parent == tmp_path
    assert stat.S_IMODE(spool.directory.stat().st_mode) == 0o700
    spooled = receive(spool, pieces(PLAIN, 100))
    assert stat.S_IMODE(spooled.path.stat().st_mode) == 0o600
    spool.close()
    assert list(tmp_path.iterdir()) == []
    spool.close()


def test_the_folder_goes_with_the_spool(tmp_path: Path) -> None:
    Spool(str(tmp_path), LIMITS)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


SERVERS = """
import os, signal, sys
from delta_server.spool import Spool
from engine_ext.wire import Limits

def start():
    spool = Spool(sys.argv[1], Limits())
    (spool.directory / "part.safetensors").write_bytes(b"left behind")
    print(spool.directory, flush=True)
    return spool

killed = os.fork()
if not killed:
    left = start()  # a spool that nobody holds is removed at once
    os.kill(os.getpid(), signal.SIGKILL)
assert os.waitpid(killed, 0)[1] == signal.SIGKILL
assert sys.stdin.readline()
living = start()
sys.stdin.read()
"""


@pytest.mark.slow
def test_what_a_killed_server_left_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVERS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as servers:
        assert servers.stdin is not None
        assert servers.stdout is not None
        its = Path(servers.stdout.readline().strip())
        assert (its / "part.safetensors").exists()
        print("go on", file=servers.stdin, flush=True)
        other = Path(servers.stdout.readline().strip())
        assert not its.exists()
        mine = Spool(str(tmp_path), LIMITS)
        assert (other / "part.safetensors").exists()
        servers.communicate("", timeout=10)
        assert servers.returncode == 0
    assert not other.exists()  # it has ended in order
    assert list(tmp_path.iterdir()) == [mine.directory]
    mine.close()


def test_only_spools_are_removed(tmp_path: Path) -> None:
    (tmp_path / "somebody's").mkdir()
    (tmp_path / "delta-spool-without-a-lock").mkdir()  # as the first versions made them
    target = tmp_path / "delta-elsewhere"
    target.mkdir()
    (target / "kept").touch()
    (tmp_path / "delta-updates-spool-link").symlink_to(target)
    (tmp_path / "delta-updates-spool-file").touch()
    Spool(str(tmp_path), LIMITS).close()
    left = {path.name for path in tmp_path.iterdir()}
    left.remove("delta-spool-without-a-lock")
    assert left == {"somebody's", "delta-elsewhere"} | {
        f"delta-updates-spool-{kind}" for kind in ("link", "file")
    }
    assert (target / "kept").exists()


def test_another_users_spool_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "delta-updates-spool-theirs"
    theirs.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(spool_module.os, "geteuid", lambda: os.getuid() + 1)
        Spool(str(tmp_path), LIMITS).close()
    assert theirs.exists()
    Spool(str(tmp_path), LIMITS).close()
    assert not theirs.exists()


def test_where_nothing_can_be_locked_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(durable_files.fcntl, "flock", flock)
    one = Spool(str(tmp_path), LIMITS)
    other = Spool(str(tmp_path), LIMITS)
    assert one.directory.exists()
    one.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_that_another_server_takes_for_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is removed before it is locked; then another is made."""
    make, removed = spool_module.tempfile.mkdtemp, []

    def mkdtemp(**options: Any) -> str:
        folder = make(**options)
        if len(removed) < 2:
            removed.append(folder)
            os.rmdir(folder)
            if len(removed) == 2:
                os.mkdir(folder + "-other")
                monkeypatch.setattr(spool_module.os, "open", opening(folder + "-other"))
        return str(folder)

    def opening(other: str) -> Any:
        original = os.open

        def opened(path: Any, *arguments: Any, **options: Any) -> int:
            monkeypatch.setattr(spool_module.os, "open", original)
            return original(other, *arguments, **options)

        return opened

    monkeypatch.setattr(spool_module.tempfile, "mkdtemp", mkdtemp)
    spool = Spool(str(tmp_path), LIMITS)
    assert len(removed) == 2
    assert spool.directory.exists()
    assert str(spool.directory) not in removed
    spool.close()


def test_two_spools_share_a_parent(tmp_path: Path, spool: Spool) -> None:
    other = Spool(str(tmp_path), LIMITS)
    kept = receive(spool, pieces(PLAIN, 100))
    other.close()
    assert kept.path.exists()


@pytest.mark.parametrize(
    ("free", "chosen"),
    [(LIMITS.max_part_bytes, "shared"), (LIMITS.max_part_bytes - 1, "temporary")],
)
def test_default_parent_has_room_for_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, chosen: str
) -> None:
    for name in ("shared", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(spool_module, "_SHARED_MEMORY", str(tmp_path / "shared"))
    monkeypatch.setattr(spool_module.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    spool = Spool(None, LIMITS)
    assert spool.directory.parent == tmp_path / chosen
    spool.close()


def test_default_parent_without_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "_SHARED_MEMORY", str(tmp_path / "absent"))
    monkeypatch.setattr(spool_module.tempfile, "tempdir", str(tmp_path))
    spool = Spool(None, LIMITS)
    assert spool.directory.parent == tmp_path
    spool.close()


# Bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [PLAIN, ZSTD], ids=["plain", "zstd"])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_receive_keeps_the_plain_container(spool: Spool, body: bytes, size: int) -> None:
    spooled = receive(spool, pieces(body, size), declared=len(body))
    data = spooled.path.read_bytes()
    if body is PLAIN:
        assert data == PLAIN
    assert {d.name: d.nnz for d in decode_part(data).deltas} == {n: len(e) for n, e in STEP.items()}
    assert spooled.header.manifest.current_version == 8
    assert spooled.wire_bytes == len(body)
    assert files(spool) == [spooled.path]
    spooled.remove()
    spooled.remove()
    assert files(spool) == []


def test_identity_is_of_what_is_written(spool: Spool) -> None:
    def identity(body: bytes) -> str:
        return receive(spool, pieces(body, 64)).identity

    again = delta_part(STEP, encoding="deltas", sync_id="another", part=3, num_parts=9)
    other = delta_part({**STEP, "norm.weight": {7: 0x3334}}, encoding="deltas")
    assert identity(PLAIN) == identity(again)
    assert identity(PLAIN) != identity(other)


def test_a_part_of_exactly_the_limit_is_taken(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), Limits(max_part_bytes=len(PLAIN)))
    receive(spool, pieces(PLAIN, 100), declared=len(PLAIN))
    spool.close()


def _unreadable() -> AsyncIterator[bytes]:
    raise AssertionError("the body was read")


def test_a_declared_length_over_the_limit_is_refused_unread(spool: Spool) -> None:
    chunks = SimpleNamespace(__aiter__=_unreadable)
    with pytest.raises(TooLarge) as caught:
        receive(spool, chunks, declared=LIMITS.max_part_bytes + 1)  # type: ignore[arg-type]
    assert caught.value.operands == {"limit": LIMITS.max_part_bytes}
    assert files(spool) == []


def zeros_behind(body: bytes, count: int) -> bytes:
    """A zstd frame without a declared size, of a body and many zeros."""
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return compressor.compress(body + bytes(count)) + compressor.flush()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", MalformedPart),
        (PLAIN[:3], MalformedPart),
        (PLAIN[:100], MalformedPart),
        (PLAIN[:-1], MalformedPart),
        (PLAIN + b"\0", MalformedPart),
        (PLAIN + bytes(8192), OVERSIZED),
        (ZSTD[:3], MalformedPart),
        (ZSTD[:-1], MalformedPart),
        (ZSTD + b"\0", MalformedPart),
        (ZSTD[:40] + b"\xff" * 8 + ZSTD[48:], MalformedPart),
        (zstd_declaring(len(PLAIN) - 1, PLAIN), MalformedPart),
        (zstd_declaring(len(PLAIN) + 1, PLAIN), MalformedPart),
        (zstd_declaring(LIMITS.max_part_bytes + 1, PLAIN), TooLarge),
        (zstd_declaring(1 << 62, PLAIN), TooLarge),
        (b"\xff" * 64, TooLarge),
        (zeros_behind(b"", 1 << 20), OVERSIZED),
        (zeros_behind((8192).to_bytes(8, "little"), 1 << 20), TooLarge),
    ],
    ids=[
        "empty",
        "ends-in-the-length",
        "ends-in-the-header",
        "last-byte-missing",
        "one-byte-more",
        "many-bytes-more",
        "zstd-magic-cut",
        "zstd-cut",
        "data-behind-the-frame",
        "zstd-corrupt",
        "declares-less",
        "declares-more",
        "declares-over-the-limit",
        "declares-absurdly-much",
        "header-length-over-the-limit",
        "zeros-in-a-frame",
        "bomb",
    ],
)
@pytest.mark.parametrize("size", [9, 1 << 20])
def test_nothing_stays_of_a_refused_body(spool: Spool, body: bytes, error: Any, size: int) -> None:
    with pytest.raises(error):
        receive(spool, pieces(body, size))
    assert files(spool) == []


def test_a_body_without_end_is_stopped_at_the_limit(spool: Spool) -> None:
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


@pytest.mark.parametrize("body", [b"", PLAIN[:50], ZSTD[:50]], ids=["nothing", "plain", "zstd"])
def test_a_stalled_body_is_given_up(spool: Spool, body: bytes) -> None:
    with pytest.raises(UploadTooSlow):
        receive(spool, stalling(body), stall=0.05)
    assert files(spool) == []


def test_nothing_stays_of_a_body_whose_stream_fails(spool: Spool) -> None:
    with pytest.raises(ConnectionResetError):
        receive(spool, breaking(PLAIN[:50]))
    assert files(spool) == []


def test_nothing_stays_of_a_cancelled_body(spool: Spool) -> None:
    async def cancelled() -> None:
        task = asyncio.ensure_future(spool.receive(stalling(PLAIN[:50]), None, MinimumRate(60, 1)))
        await asyncio.sleep(0.02)
        assert len(files(spool)) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    assert files(spool) == []


# A full disk ---------------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Every spool file takes 64 bytes and then fails."""
    original = os.pwritev

    def pwritev(descriptor: int, views: list[memoryview], offset: int) -> int:
        if offset >= 64:
            raise OSError(request.param, os.strerror(request.param))
        return original(descriptor, [views[0][: 64 - offset]], offset)

    monkeypatch.setattr(spool_files.os, "pwritev", pwritev)


@pytest.mark.parametrize("full_disk", [errno.ENOSPC, errno.EDQUOT], indirect=True)
@pytest.mark.usefixtures("full_disk")
def test_a_full_spool_is_said_so(spool: Spool, tmp_path: Path) -> None:
    with pytest.raises(SpoolFull, match="--delta-spool-dir"):
        receive(spool, pieces(PLAIN, 1 << 20))
    source = tmp_path / "part.safetensors"
    source.write_bytes(PLAIN)
    with pytest.raises(SpoolFull):
        read(spool, source)
    assert files(spool) == []


@pytest.mark.parametrize("full_disk", [errno.EIO], indirect=True)
@pytest.mark.usefixtures("full_disk")
def test_another_failure_of_the_disk_is_not_a_full_spool(spool: Spool) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        receive(spool, pieces(PLAIN, 1 << 20))
    assert files(spool) == []


def test_no_room_for_another_file(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "no inodes")

    monkeypatch.setattr(spool_files.os, "open", opened)
    with pytest.raises(SpoolFull):
        receive(spool, pieces(PLAIN, 1 << 20))


# Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [PLAIN, ZSTD], ids=["plain", "zstd"])
def test_read_keeps_a_copy(spool: Spool, tmp_path: Path, body: bytes) -> None:
    source = tmp_path / "part.safetensors"
    source.write_bytes(body)
    spooled = read(spool, source)
    source.write_bytes(b"\0" * len(body))
    assert decode_part(spooled.path.read_bytes()).manifest.current_version == 8
    assert spooled.wire_bytes == len(body)
    assert spooled.path.parent == spool.directory


@pytest.mark.parametrize(
    ("body", "error"),
    [(b"", MalformedPart), (PLAIN[:-1], MalformedPart), (b"\xff" * 9000, TooLarge)],
    ids=["empty", "cut", "no-container"],
)
def test_nothing_stays_of_a_refused_file(
    spool: Spool, tmp_path: Path, body: bytes, error: type[DeltaError]
) -> None:
    source = tmp_path / "part.safetensors"
    source.write_bytes(body)
    with pytest.raises(error):
        read(spool, source)
    assert files(spool) == []
