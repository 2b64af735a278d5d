"""The end of staging is a pipe without a writer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from delta_server.staging import StagingPipe
from tests.support.descriptors import open_descriptors

PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "part.safetensors"


def pipe_of(part: Path) -> Path:
    return part.with_name(f"{part.name}.staging")


def begin(part: Path) -> int:
    """What a rank does when it begins to stage."""
    return os.open(pipe_of(part), os.O_WRONLY | os.O_NONBLOCK)


def test_it_ends_with_the_last_rank(part: Path) -> None:
    async def run() -> None:
        with StagingPipe(part) as pipe:
            first = begin(part)
            os.close(first)  # before the second has begun
            ranks = [begin(part), begin(part)]
            assert not await pipe.wait(0.01)
            waiting = asyncio.create_task(pipe.wait(60))
            for rank in ranks:
                await asyncio.sleep(0)
                assert not waiting.done()
                os.close(rank)
            assert await waiting
            assert await pipe.wait(60)

    asyncio.run(run())
    assert os.listdir(part.parent) == []


def test_it_does_not_wait_for_ranks_that_have_not_begun(part: Path) -> None:
    async def run() -> None:
        with StagingPipe(part) as pipe:
            assert await pipe.wait(60)

    asyncio.run(run())


def test_a_rank_that_is_killed_has_ended(part: Path) -> None:
    rank = "import os, sys; os.open(sys.argv[1], os.O_WRONLY); print(flush=True); sys.stdin.read()"

    async def run() -> None:
        with StagingPipe(part) as pipe:
            command = [sys.executable, "-c", rank, str(pipe_of(part))]
            with subprocess.Popen(command, **PIPES) as process:
                assert process.stdout is not None
                process.stdout.readline()
                assert not await pipe.wait(0.01)
                process.send_signal(signal.SIGKILL)
                assert await pipe.wait(60)

    asyncio.run(run())


@pytest.mark.parametrize("fails", ["mkfifo", "open"])
def test_without_pipes_it_does_not_wait(
    part: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*arguments: object) -> int:
        raise PermissionError("no pipes here")

    monkeypatch.setattr(os, fails, unsupported)

    async def run() -> None:
        with StagingPipe(part) as pipe:
            assert await pipe.wait(60)

    asyncio.run(run())
    assert os.listdir(part.parent) == []


@pytest.mark.slow
def test_a_wait_that_is_cancelled_leaves_nothing(part: Path) -> None:
    async def run() -> None:
        before = open_descriptors()
        with StagingPipe(part) as pipe:
            rank = begin(part)
            waiting = asyncio.create_task(pipe.wait(60))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            os.close(rank)
        assert open_descriptors() <= before

    asyncio.run(run())
    assert os.listdir(part.parent) == []
