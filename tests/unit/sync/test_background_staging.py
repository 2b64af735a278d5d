"""The pipe beside a part is open exactly as long as it is being staged."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_ext.errors import NotUpdatable
from engine_ext.files import staging_pipe
from engine_ext.format import Limits, ParamDelta, Part, PartId, decode_part, encode_part
from engine_ext.format.identity import part_identity
from engine_ext.sync.background_staging import BackgroundStaging

DELTA = ParamDelta("w", "bfloat16", (4,), np.array([2]), np.array([7], np.uint16))
BODY = encode_part([DELTA], encoding="deltas", current_version=1)
IDENTITY = part_identity(decode_part(BODY).header, BODY)


class Reader:
    """The HTTP side's end of the pipe of one part."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(BODY)
        self.path, self._pipe = path, staging_pipe(path)
        os.mkfifo(self._pipe)
        self._reader = os.open(self._pipe, os.O_RDONLY | os.O_NONBLOCK)

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


def start(staging: BackgroundStaging, number: int, reader: Reader, stage: Any) -> None:
    staging.start(part_id(number), str(reader.path), stage)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("error", [None, NotUpdatable("no")])
def test_the_pipe_closes_when_the_part_is_done(
    readers: list[Reader], shared: bool, error: Exception | None
) -> None:
    staging = BackgroundStaging(2, Limits(), shared=shared)
    go_on = threading.Event()

    def stage(part: Part) -> Any:
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
    path.write_bytes(BODY)
    staging = BackgroundStaging(1, Limits(), shared=True)
    staging.start(part_id(0), str(path), lambda part: part)
    [part] = staging.results([0])
    assert part.manifest.current_version == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("by", ["clear", "forget"])
def test_a_forgotten_part_is_not_begun(readers: list[Reader], by: str) -> None:
    staging = BackgroundStaging(1, Limits(), shared=True)
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
