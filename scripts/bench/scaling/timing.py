"""Time short pieces of work on a machine that others use as well."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import psutil

from engine_ext.resources import usable_cores

_LARGE = 384 << 20  # bytes; more than a core's share of today's caches
_NEW_PAGES = 256 << 20  # bytes; more than what one step that is timed keeps or needs
_IDLE_WAIT_S = 15.0
_IDLE_S, _IDLE_PERCENT = 0.3, 8.0


def take_new_pages() -> None:
    """Let every array of 128 KiB or more lie in new pages, from now on in this process.

    A benchmark that repeats a step gets the memory of the step before, whose pages are there. A
    sync keeps what it stages, so that it is given new pages, which the system clears one by one.
    """
    threshold = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
    ctypes.CDLL(None).mallopt(threshold, 128 << 10)


def write_free_pages(nbytes: int) -> None:
    """Write to as many bytes of free memory, page by page, and give them back.

    A hypervisor may have taken pages that its guest has left free ("free page reporting"). The next
    write to each then takes 4 to 40 us instead of 0.5 to 2, which is no cost of a sync.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, nbytes, flags=flags) as pages:
        for start in range(0, nbytes, mmap.PAGESIZE):
            pages[start] = 1


def wait_until_idle() -> None:
    """Wait until the cores have nothing to do, for 15 seconds at most.

    An engine's threads wait in a loop after a sync, and others may use the machine.
    """
    deadline = time.monotonic() + _IDLE_WAIT_S
    while time.monotonic() < deadline and psutil.cpu_percent(_IDLE_S) > _IDLE_PERCENT:
        pass


class ColdCaches:
    """Fills the caches with something else, once free pages are there to be written to."""

    def __init__(self, nbytes: int = _LARGE) -> None:
        self._other = np.ones(nbytes // 8, np.uint64)

    def __call__(self) -> None:
        write_free_pages(_NEW_PAGES)
        self._other.max()


def other_cores_busy() -> contextlib.AbstractContextManager[None]:
    """Keep all cores but one busy inside the block, with processes that compare weights.

    In a sync the cores share caches and memory with the other stages.
    """
    return beside("scripts.bench.scaling.busy_core", usable_cores() - 1)


@contextlib.contextmanager
def beside(module: str, count: int) -> Iterator[None]:
    """Run a module in some processes inside the block.

    Each writes a line to stdout when it has begun, and ends when its stdin is closed.

    Raises:
        OSError: One has ended too early.
    """
    command = [sys.executable, "-m", module]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            stack.enter_context(process)  # closes its stdin at the end, and waits
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise OSError(f"{module} has ended")
        yield


def fastest(
    calls: Mapping[str, Callable[[], Any]],
    repeats: int,
    before: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return the least CPU seconds of this process, all threads, for each of some calls.

    The calls take turns, so that a disturbance of some seconds does not hit one of them alone. CPU
    time leaves out the time in which other processes have the cores.

    Args:
        before: called before each call, not timed.
    """
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            before()
            start = time.process_time()
            call()
            found[name] = min(found[name], time.process_time() - start)
    return found
