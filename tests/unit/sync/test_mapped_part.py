"""Mapping a part's file: locked while it is mapped, and never one that is being written."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_ext.errors import MalformedPart
from engine_ext.format import Limits, PartId, decode_part, part_identity
from engine_ext.sync import mapped_part
from engine_ext.sync.background_staging import BackgroundStaging
from engine_ext.sync.mapped_part import map_part
from tests.support.delta_bodies import OTHER_STEP, delta_part

BODY, OTHER = delta_part(), delta_part(OTHER_STEP)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "0.safetensors"
    path.write_bytes(BODY)
    return path


def is_free(path: Path) -> bool:
    """Whether the HTTP process could write the file again."""
    with open(path, "rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_the_lock_lives_as_long_as_the_mapping(path: Path) -> None:
    assert is_free(path)
    data = map_part(str(path))
    view = memoryview(data)[3:5]
    assert not is_free(path)
    del data
    assert not is_free(path)
    assert view.tobytes() == BODY[3:5]
    del view
    assert is_free(path)


def test_several_ranks_map_it(path: Path) -> None:
    one, other = map_part(str(path)), map_part(str(path))
    assert one[:] == other[:] == BODY
    del one
    assert not is_free(path)


def test_what_a_rank_writes_stays_its_own(path: Path) -> None:
    map_part(str(path))[0] = 255
    assert path.read_bytes() == BODY


def test_a_file_that_is_being_written(path: Path) -> None:
    with open(path, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(FileNotFoundError):
            map_part(str(path))


@pytest.mark.parametrize("another", [False, True])
def test_a_file_that_gets_another_name_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    def flock(file: Any, operation: int) -> None:
        path.rename(path.with_suffix(".unused"))
        if another:
            path.write_bytes(OTHER)

    monkeypatch.setattr(mapped_part.fcntl, "flock", flock)
    with pytest.raises(FileNotFoundError):
        map_part(str(path))


def test_without_locks_it_is_copied(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(mapped_part.fcntl, "flock", flock)
    data = map_part(str(path))
    path.write_bytes(OTHER)
    assert data[:] == BODY
    data[0] = 255  # torch makes no tensor of read-only memory


def _missing(path: Path) -> None:
    path.unlink()


def _of_another_part(path: Path) -> None:
    path.write_bytes(OTHER)


def _cut(path: Path) -> None:
    os.truncate(path, 100)


@pytest.mark.parametrize(
    ("change", "error"),
    [(_missing, FileNotFoundError), (_of_another_part, MalformedPart), (_cut, MalformedPart)],
)
def test_a_part_that_is_not_what_has_arrived_is_not_staged(
    path: Path, change: Callable[[Path], None], error: type[Exception]
) -> None:
    change(path)
    identity = part_identity(decode_part(BODY).header, BODY)
    staging = BackgroundStaging(1, Limits(), shared=False)
    part = PartId(version=8, base_version=7, identity=identity)
    staging.start(part, str(path), lambda part: pytest.fail("it was staged"))
    with pytest.raises(error):
        staging.results([0])
