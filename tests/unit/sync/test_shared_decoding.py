"""One rank of a host decodes a part for all, whatever happens to it meanwhile."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_ext.errors import ChecksumMismatch, DeltaError, MalformedPart
from engine_ext.files import decoded_path, durable_files, lock_path, remove_beside, unfinished_path
from engine_ext.format import Limits, ParamDelta, Part, decode_part, encode_part, part_identity
from engine_ext.sync import shared_decoding
from engine_ext.sync.shared_decoding import read_part
from tests.support.independent_encoder import assert_same

pytestmark = pytest.mark.slow

RANKS = 8
ENCODINGS = ("indices", "deltas", "gap8_exp")

# Decodes a part as a rank does, and stops in the middle of writing the result.
DIES = """
import sys, time
from engine_ext.sync import shared_decoding
from engine_ext.format import Limits

def stop(file, part, key):
    file.write(b"decoded part 01\\n")
    file.flush()
    print("stopped", flush=True)
    time.sleep(600)

shared_decoding.write_decoded = stop
shared_decoding.read_part(sys.argv[1], sys.argv[2], Limits(), shared=True)
"""

# Decodes a part as a rank does, and says whether it was this process that did the work.
DECODES = """
import sys
from engine_ext.sync import shared_decoding
from engine_ext.format import Limits

decode, decoded = shared_decoding.decode_part, []
shared_decoding.decode_part = lambda *args: decoded.append(1) or decode(*args)
print("ready", flush=True)
sys.stdin.readline()
part = shared_decoding.read_part(sys.argv[1], sys.argv[2], Limits(), shared=True)
print(len(decoded), sum(int(delta.values.sum()) for delta in part.deltas))
"""


def a_part(encoding: str = "gap8_exp", seed: int = 0) -> bytes:
    random = np.random.default_rng(seed)
    indices = np.flatnonzero(random.random(20_000) < 0.1)
    values = random.integers(0, 1 << 15, indices.size, dtype=np.uint16)
    sparse = ParamDelta("sparse", "bfloat16", (100, 200), indices, values)
    dense = ParamDelta("dense", "bfloat16", (50,), None, values[:50])
    return encode_part([sparse, dense], encoding=encoding, current_version=1)


def identity_of(body: bytes) -> str:
    return part_identity(decode_part(body).header, body)


@pytest.fixture
def spooled(tmp_path: Path) -> Callable[[bytes], Path]:
    """Return a function that puts a body into a folder with nothing else in it."""

    def put(body: bytes) -> Path:
        path = tmp_path / "part.safetensors"
        path.write_bytes(body)
        return path

    return put


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that have decoded a part."""
    found: list[int] = []

    def counted(*arguments: Any) -> Part:
        found.append(threading.get_ident())
        return decode_part(*arguments)

    monkeypatch.setattr(shared_decoding, "decode_part", counted)
    return found


def read(path: Path, identity: str, *, shared: bool = True) -> Part:
    return read_part(str(path), identity, Limits(), shared=shared)


def remove(path: Path) -> None:
    """Remove a part as the HTTP side does."""
    path.unlink()
    remove_beside(path)


def read_by_all(path: Path, identity: str) -> list[Part | DeltaError]:
    """What each of eight ranks gets that begin at once."""
    barrier = threading.Barrier(RANKS)

    def rank(_: int) -> Part | DeltaError:
        barrier.wait(30)
        try:
            return read(path, identity)
        except DeltaError as error:
            return error

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(rank, range(RANKS)))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_one_of_eight_ranks_decodes(
    spooled: Callable[[bytes], Path], decodes: list[int], encoding: str
) -> None:
    body = a_part(encoding)
    path = spooled(body)
    for part in read_by_all(path, identity_of(body)):
        assert isinstance(part, Part)
        assert_same(part, decode_part(body).deltas)
    assert len(decodes) == 1
    assert not unfinished_path(path).exists()
    assert decoded_path(path).stat().st_mode & 0o777 == 0o600
    remove(path)
    assert os.listdir(path.parent) == []


def test_the_ranks_keep_what_they_use_when_the_part_is_removed(
    spooled: Callable[[bytes], Path],
) -> None:
    body = a_part()
    path = spooled(body)
    parts = [read(path, identity_of(body)) for _ in range(2)]
    remove(path)
    for part in parts:
        assert_same(part, decode_part(body).deltas)


def test_one_rank_alone_leaves_nothing(spooled: Callable[[bytes], Path]) -> None:
    body = a_part()
    path = spooled(body)
    assert_same(read(path, identity_of(body), shared=False), decode_part(body).deltas)
    assert os.listdir(path.parent) == [path.name]


def test_processes_race(spooled: Callable[[bytes], Path]) -> None:
    body = a_part()
    command = [sys.executable, "-c", DECODES, str(spooled(body)), identity_of(body)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    answers = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    total = sum(int(delta.values.sum()) for delta in decode_part(body).deltas)
    assert sorted(answer[0] for answer in answers) == ["0", "0", "1"]
    assert {answer[1] for answer in answers} == {str(total)}


def test_another_takes_over_from_a_rank_that_dies(
    spooled: Callable[[bytes], Path], decodes: list[int]
) -> None:
    body = a_part()
    path = spooled(body)
    command = [sys.executable, "-c", DIES, str(path), identity_of(body)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "stopped\n"
        assert unfinished_path(path).stat().st_size > 0
        with ThreadPoolExecutor(2) as threads:
            others = [threads.submit(read, path, identity_of(body)) for _ in range(2)]
            assert not any(other.done() for other in others)
            assert decodes == []
            first.send_signal(signal.SIGKILL)
            for other in others:
                assert_same(other.result(60), decode_part(body).deltas)
    assert len(decodes) == 1
    remove(path)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_without_room_every_rank_decodes_for_itself(
    spooled: Callable[[bytes], Path],
    decodes: list[int],
    monkeypatch: pytest.MonkeyPatch,
    error: int,
) -> None:
    def full(file: Any, part: Part, key: str) -> None:
        file.write(b"some")
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(shared_decoding, "write_decoded", full)
    body = a_part()
    path = spooled(body)
    for part in read_by_all(path, identity_of(body)):
        assert isinstance(part, Part)
        assert_same(part, decode_part(body).deltas)
    assert len(set(decodes)) == len(decodes) == RANKS
    assert sorted(os.listdir(path.parent)) == [path.name, lock_path(path).name]


def test_without_locks_every_rank_decodes_for_itself(
    spooled: Callable[[bytes], Path], decodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(durable_files.fcntl, "flock", unsupported)
    body = a_part()
    path = spooled(body)
    assert all(isinstance(part, Part) for part in read_by_all(path, identity_of(body)))
    assert len(decodes) == RANKS
    assert sorted(os.listdir(path.parent)) == [path.name, lock_path(path).name]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_rank_refuses_a_damaged_part_alike(
    spooled: Callable[[bytes], Path], encoding: str
) -> None:
    body = bytearray(a_part(encoding))
    identity = identity_of(bytes(body))
    body[-1] ^= 1
    path = spooled(bytes(body))
    answers = read_by_all(path, identity)
    assert {type(answer) for answer in answers} == {ChecksumMismatch}
    assert len({str(answer) for answer in answers}) == 1
    assert sorted(os.listdir(path.parent)) == [path.name, lock_path(path).name]


def test_every_rank_refuses_another_part_alike(spooled: Callable[[bytes], Path]) -> None:
    path = spooled(a_part())
    answers = read_by_all(path, identity_of(a_part(seed=1)))
    assert {type(answer) for answer in answers} == {MalformedPart}
    assert sorted(os.listdir(path.parent)) == [path.name, lock_path(path).name]


def test_what_was_decoded_of_another_file_is_not_used(
    spooled: Callable[[bytes], Path], decodes: list[int]
) -> None:
    """Also not of the same part in another file: its bytes are verified again."""
    body, other = a_part(), a_part(seed=1)
    path = spooled(body)
    read(path, identity_of(body))
    path.with_suffix(".new").write_bytes(body)
    path.with_suffix(".new").rename(path)
    read(path, identity_of(body))
    assert len(decodes) == 2
    path.with_suffix(".new").write_bytes(other)
    path.with_suffix(".new").rename(path)
    assert_same(read(path, identity_of(other)), decode_part(other).deltas)
    with pytest.raises(MalformedPart):
        read(path, identity_of(body))


@pytest.mark.parametrize("damage", [lambda left: left[:-1], lambda left: b"", lambda left: b"?"])
def test_a_damaged_result_is_replaced(
    spooled: Callable[[bytes], Path], decodes: list[int], damage: Callable[[bytes], bytes]
) -> None:
    body = a_part()
    path = spooled(body)
    read(path, identity_of(body))
    left = decoded_path(path)
    good = left.read_bytes()
    left.write_bytes(damage(good))
    assert_same(read(path, identity_of(body)), decode_part(body).deltas)
    assert len(decodes) == 2
    assert left.read_bytes() == good


@pytest.mark.parametrize("meanwhile", ["decode_part", "write_decoded"])
def test_a_result_does_not_outlive_its_part(
    spooled: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """The request may end while a rank still decodes: another rank has refused the part."""
    body = a_part()
    path = spooled(body)
    original = getattr(shared_decoding, meanwhile)

    def late(*arguments: Any) -> Any:
        remove(path)
        return original(*arguments)

    monkeypatch.setattr(shared_decoding, meanwhile, late)
    assert_same(read(path, identity_of(body)), decode_part(body).deltas)
    assert os.listdir(path.parent) == []


def test_two_ranks_decode_at_once(
    spooled: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has mapped the part when it is removed with its lock, while the other one decodes it."""
    body = a_part()
    path = spooled(body)
    original = shared_decoding.write_decoded
    seen: list[Part] = []

    def interrupted(file: Any, part: Part, key: str) -> None:
        if seen:
            return original(file, part, key)
        seen.append(part)
        file.write(b"some")
        file.flush()
        lock_path(path).unlink()
        seen.append(read(path, identity_of(body)))
        file.seek(0)
        return original(file, part, key)

    monkeypatch.setattr(shared_decoding, "write_decoded", interrupted)
    for part in [read(path, identity_of(body)), seen[1], read(path, identity_of(body))]:
        assert_same(part, decode_part(body).deltas)
