"""Run one function for many names, each time in a process of its own.

The processes are forked from one that has imported what they all need, so that each starts at once
and none sees what another one has left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

LOG = "log"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: with an exit code, which is None if it took too long."""

    name: str
    folder: Path
    code: int | None


@dataclass(frozen=True, slots=True)
class _Running:
    name: str
    folder: Path
    process: BaseProcess
    deadline: float


def run_each(
    names: Sequence[str],
    function: Callable[[str, Path], None],
    folder: Path,
    *,
    preload: Sequence[str] = (),
    jobs: int = 1,
    timeout: float,
) -> Generator[Ended, None, None]:
    """Call a function for every name, and yield how each call has ended.

    A call that is still running when the iteration ends is killed, with what it has started.

    Args:
        function: can be pickled; called with a name, and a new folder that the process's output is
            in, in the file `LOG`.
        folder: of the folders.
        preload: modules that are imported once. It is what the first call in a program says.
        jobs: calls at a time.
        timeout: seconds that a call can take, after which it is killed.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([*preload])
    waiting, running = deque(names), dict[int, _Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.popleft()
                own = folder / name
                own.mkdir(parents=True)
                process = context.Process(target=_call, args=(function, name, own))
                process.start()
                running[process.sentinel] = _Running(name, own, process, time.monotonic() + timeout)
            first = min(one.deadline for one in running.values())
            connection.wait([*running], max(0.0, first - time.monotonic()))
            for sentinel, one in list(running.items()):
                code = one.process.exitcode
                if code is not None or one.deadline <= time.monotonic():
                    _kill(running.pop(sentinel).process)
                    yield Ended(one.name, one.folder, code)
    finally:
        for one in running.values():
            _kill(one.process)


def _call(function: Callable[[str, Path], None], name: str, folder: Path) -> None:
    os.setpgrp()
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    function(name, folder)


def _kill(process: BaseProcess) -> None:
    """End a process, and what it has started."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # if it had no group of its own yet
    process.join()
