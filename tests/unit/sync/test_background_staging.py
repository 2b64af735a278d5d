"""A part is staged from its verified file, and its pipe is open exactly as long as it is staged."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_ext.conformance.verified_file import verified_file
from engine_ext.errors import MalformedPart, NotUpdatable
from engine_ext.format import ParamDelta, PartId, UnpackedPart, encode_part
from engine_ext.ranks.operations import BeginPart
from engine_ext.sync.background_staging import BackgroundStaging, map_part
from tests.support.descriptors import open_descriptors

pytestmark = pytest.mark.slow

DELTA = ParamDelta("w", "bfloat16", (4,), np.array([2]), np.array([7], np.uint16))
IDENTITY, FILE = verified_file(encode_part([DELTA], encoding="deltas", current_version=1))


class Reader:
    """The HTTP side's end of the pipe of one part."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(FILE)
        self.path, self.pipe = path, f"{path}.staging"
        os.mkfifo(self.pipe)
        self._reader = os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)

    def has_ended(self, seconds: float) -> bool:
        """Whether no one has the pipe open, after one had."""
        return bool(select.select([self._reader], [], [], seconds)[0])

    def close(self) -> None:
        os.close(self._reader)


@pytest.fixture
def readers(tmp_path: Path) -> Iterator[list[Reader]]:
    found = [Reader(tmp_path / f"{number}.safetensors") for number in range(3)]
    yield found
    for reader in found:
        reader.close()


def part_id(number: int) -> PartId:
    return PartId(version=1, base_version=0, identity=IDENTITY, part=number, num_parts=3)


def begin(number: int, path: Path, pipe: str | None = None) -> BeginPart:
    return BeginPart(part=part_id(number), path=str(path), pipe=pipe, now=0.0)


def start(staging: BackgroundStaging, number: int, reader: Reader, stage: Any) -> None:
    staging.start(begin(number, reader.path, reader.pipe), stage)


@pytest.mark.parametrize("error", [None, NotUpdatable("no")])
def test_the_pipe_closes_when_the_part_is_done(
    readers: list[Reader], error: Exception | None
) -> None:
    staging = BackgroundStaging(2)
    go_on = threading.Event()

    def stage(part: UnpackedPart) -> Any:
        assert go_on.wait(60)
        if error is not None:
            raise error
        return part

    for number in range(2):
        start(staging, number, readers[number], stage)
    assert not any(reader.has_ended(0) for reader in readers)
    go_on.set()
    for number, reader in enumerate(readers[:2]):
        assert reader.has_ended(60)
        future = staging.get(number)
        assert future is not None
        assert future.done()
        assert future.exception() is error


def test_a_part_that_no_one_waits_for_is_staged_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    path.write_bytes(FILE)
    staging = BackgroundStaging(1)
    staging.start(begin(0, path), lambda part: part)  # type: ignore[arg-type, return-value]
    [part] = staging.results([0])
    assert part.manifest.current_version == 1


@pytest.mark.parametrize("by", ["clear", "forget"])
def test_a_forgotten_part_is_not_begun(readers: list[Reader], by: str) -> None:
    staging = BackgroundStaging(1)
    go_on, begun = threading.Event(), list[int]()

    def stage(number: int) -> Any:
        begun.append(number)
        assert go_on.wait(60)

    for number, reader in enumerate(readers):
        start(staging, number, reader, lambda part, number=number: stage(number))
    if by == "clear":
        staging.clear()
    else:
        for number in range(3):
            staging.forget(number)
    assert all(reader.has_ended(60) for reader in readers[1:])
    assert not readers[0].has_ended(0)
    go_on.set()
    staging.wait()
    assert readers[0].has_ended(60)
    assert begun == [0]
    assert staging.get(0) is None


# The file -------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "part"
    path.write_bytes(FILE)
    return path


def is_free(path: Path) -> bool:
    """Whether the HTTP process could write the file again."""
    with open(path, "rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_file_is_locked_as_long_as_it_is_mapped(path: Path) -> None:
    one, other = map_part(str(path)), map_part(str(path))
    assert one[:] == other[:] == FILE
    view = memoryview(other)[3:5]
    del one, other
    assert not is_free(path)
    assert view.tobytes() == FILE[3:5]
    del view
    assert is_free(path)


def test_rank_writes_into_no_file(path: Path) -> None:
    map_part(str(path))[0] ^= 255
    assert path.read_bytes() == FILE


def test_file_that_is_being_written_is_not_mapped(path: Path) -> None:
    with open(path, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(FileNotFoundError):
            map_part(str(path))


@pytest.mark.parametrize("another", [False, True])
def test_file_that_is_renamed_meanwhile_is_not_mapped(
    path: Path, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    def flock(file: Any, operation: int) -> None:
        path.rename(path.with_suffix(".unused"))
        if another:
            path.write_bytes(FILE)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(FileNotFoundError):
        map_part(str(path))


def test_file_is_mapped_without_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert map_part(str(path))[:] == FILE


@pytest.mark.parametrize("size", [0, 7, 100, len(FILE) - 1])
def test_cut_file_is_refused(path: Path, size: int) -> None:
    os.truncate(path, size)
    staging = BackgroundStaging(1)
    staging.start(begin(0, path), lambda part: pytest.fail("it was staged"))
    with pytest.raises(MalformedPart if size else ValueError):
        staging.results([0])


def test_a_part_that_cannot_be_begun_leaves_no_pipe_open(
    readers: list[Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = open_descriptors()
    with pytest.raises(RuntimeError, match="new thread"):
        start(BackgroundStaging(1), 0, readers[0], lambda part: part)
    assert open_descriptors() == before
