"""Resources of a process: cores of its machine, bytes per second of a link, and the collector.

Nothing here is a setting; callers give the limits.

Imports: nothing of `engine_ext`.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["RateLimit", "no_full_collections", "usable_cores"]


def usable_cores() -> int:
    """Return the number of cores that this process can run on; it sets the number of threads."""
    return len(os.sched_getaffinity(0))


_BURST_S: Final = 0.05  # of unused rate that can be made up for


class RateLimit:
    """A limit that connections share, also those of several senders. Thread-safe.

    Requests for bytes are served in order, each at the rate. An unused share of the rate can be
    made up for within `_BURST_S`, and is lost after that.

    Args:
        bytes_per_second: The rate of bodies; headers and what TCP adds do not count.
        now, sleep: Read a clock in seconds, and wait for some.

    Raises:
        ValueError: The rate is not above 0.
    """

    def __init__(
        self,
        bytes_per_second: float,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 < bytes_per_second < float("inf"):
            raise ValueError(f"not a number of bytes per second above 0: {bytes_per_second}")
        self.bytes_per_second = float(bytes_per_second)
        self._now, self._sleep = now, sleep
        self._lock = threading.Lock()
        self._free_at = float("-inf")

    def wait(self, nbytes: int) -> None:
        """Wait until so many bytes can be transferred."""
        with self._lock:
            begin = max(self._free_at, self._now() - _BURST_S)
            self._free_at = begin + nbytes / self.bytes_per_second
        if (seconds := begin - self._now()) > 0:
            self._sleep(seconds)


_NEVER: Final = 1 << 30
_lock = threading.Lock()
_inside = 0
_before = _during = (0, 0, 0)


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Suspend full garbage collections inside the block, in all threads; young objects are freed.

    A full collection looks at every object of the process, 0.1 s for 300,000 of them, and is made
    whenever as many as a quarter of them are new. It frees cycles that have survived two earlier
    collections; inside the block, they stay. Blocks can nest, and overlap in several threads. A
    collector that is switched off stays off, and one that other code sets inside the block keeps
    that setting. A process that is forked inside a block is outside of it.
    """
    global _inside, _before, _during
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = gc.get_threshold()
            gc.set_threshold(*_before[:2], max(_before[2], _NEVER))
            _during = gc.get_threshold()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and gc.get_threshold() == _during:
                gc.set_threshold(*_before)


def _leave_in_child() -> None:
    """Undo the blocks of the parent's threads, which the forked process does not have."""
    global _lock, _inside
    _lock = threading.Lock()
    if _inside and gc.get_threshold() == _during:
        gc.set_threshold(*_before)
    _inside = 0


os.register_at_fork(after_in_child=_leave_in_child)
