"""Send or fetch no more than so many bytes per second, over all connections together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

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
