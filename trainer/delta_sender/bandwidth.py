"""Estimate the speed of the link to one engine from the requests to it.

A request with a body of n bytes takes ``o + n / v + w`` seconds: a fixed overhead, the link, and
the engine's own work, which its answer reports. Link speed is bytes over request time, excluding
the overhead and the engine's work.

The answer to a post also reports how long the body was arriving. That is ``n / v`` if bytes are
forwarded as they come, and next to nothing if a proxy buffers them; so request time without the
engine's work and without arrival is never less than the overhead. The overhead is estimated as the
least of these over the last posts, or the time of a request without a body if that is less. An
engine that does not report arrival is assumed to have no overhead.

A post that takes no longer than the overhead is indistinguishable from noise, and counts as a fast
link. The estimate is the median of the last posts, weighted by their bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from typing import Any, Final

_UNKNOWN: Final = 125e6  # bytes/s until a post has been measured: 1 Gbit/s
_FAST: Final = 1e10  # bytes/s of a link whose time is lost in the overhead
_LEAST_MEASURED: Final = 1 << 16  # bytes; smaller posts say nothing about the link
_KEPT: Final = 16  # posts


class LinkSpeed:
    """Speed of the link to one engine."""

    def __init__(self) -> None:
        self.measured: float | None = None  # bytes/s
        self._overheads: deque[float] = deque(maxlen=_KEPT)  # seconds
        self._posts: deque[tuple[float, int]] = deque(maxlen=_KEPT)  # bytes/s, and bytes

    def note(self, nbytes: int, seconds: float, answer: dict[str, Any]) -> None:
        """Take in a request with a body of `nbytes` that was answered after `seconds`."""
        timings = answer.get("timings_ms")
        timings = timings if isinstance(timings, dict) else {}
        reported = {key: ms / 1e3 for key, ms in timings.items() if isinstance(ms, (int, float))}
        arriving = reported.get("receive_ms")
        work = reported.get("stage_ms", 0.0) + reported.get("pause_ms", 0.0)
        if arriving is not None and "total_ms" in reported:
            work = reported["total_ms"] - arriving
        rest = seconds - work
        if nbytes == 0:
            self._overheads.append(rest)
        elif arriving is not None:
            self._overheads.append(max(rest - arriving, 0.0))
        if nbytes < _LEAST_MEASURED or rest <= 0:
            return
        overhead = 0.0 if arriving is None else min(self._overheads)
        link = rest - overhead
        self._posts.append((nbytes / link if link > overhead else _FAST, nbytes))
        self.measured = _median(self._posts)

    @property
    def bytes_per_s(self) -> float:
        """The measured speed, or a default."""
        return self.measured or _UNKNOWN


def _median(weighted: deque[tuple[float, int]]) -> float:
    """Return the value at half of the weight."""
    ordered = sorted(weighted)
    sums = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(sums, sums[-1] / 2)][0]
