"""The pipe next to a part is open exactly as long as the part is being staged."""

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
from engine_ext.format import DecodedPart, ParamDelta, PartId, encode_part
from engine_ext.ranks.operations import BeginPart
from engine_ext.sync.background_staging import BackgroundStaging
from tests.support.verified_file import verified_file

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

    def stage(part: DecodedPart) -> Any:
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
    assert part.manifest.current_version == 1  # type: ignore[attr-defined]


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
