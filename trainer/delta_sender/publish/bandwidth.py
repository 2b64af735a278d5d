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

Posts that cross at the same time share the link, so that each shows only its share of the speed.
The link's speed while a post crosses is what all posts together have sent then, each as evenly as
it crossed; that is known when every post has ended that had begun by then.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from threading import Lock
from typing import Any, Final, NamedTuple

_UNKNOWN: Final = 125e6  # bytes/s until a post has been measured: 1 Gbit/s
_FAST: Final = 1e10  # bytes/s of a link whose time is lost in the overhead
_LEAST_MEASURED: Final = 1 << 16  # bytes; smaller posts say nothing about the link
_KEPT: Final = 16  # posts


class _Post(NamedTuple):
    """When the body of a post was crossing the link."""

    begin: float
    end: float
    nbytes: int
    is_fast: bool  # it took no longer than the overhead

    def within(self, other: _Post) -> float:
        """Return the bytes that crossed while `other` did."""
        shared = min(self.end, other.end) - max(self.begin, other.begin)
        return self.nbytes * max(shared, 0.0) / (self.end - self.begin)


class LinkSpeed:
    """Speed of the link to one engine."""

    def __init__(self) -> None:
        self.measured: float | None = None  # bytes/s
        self._overheads: deque[float] = deque(maxlen=_KEPT)  # seconds
        self._rates: deque[tuple[float, int]] = deque(maxlen=_KEPT)  # bytes/s, and bytes
        self._lock = Lock()
        self._begun: dict[object, float] = {}  # requests in flight
        self._ended: list[_Post] = []  # that might have crossed with one that is not rated yet
        self._unrated: list[_Post] = []

    @contextlib.contextmanager
    def crossing(self) -> Iterator[float]:
        """Count a request in flight inside the block; give the time at which it begins."""
        request, start = object(), time.perf_counter()
        with self._lock:
            self._begun[request] = start
        try:
            yield start
        finally:
            with self._lock:
                del self._begun[request]
                self._rate()

    def note(self, nbytes: int, seconds: float, answer: dict[str, Any], ended: float) -> None:
        """Take in a request with a body of `nbytes` that was answered after `seconds`.

        To be called inside of `crossing`, at whose end it is rated; `ended` is the time of the
        answer.
        """
        timings = answer.get("timings_ms")
        timings = timings if isinstance(timings, dict) else {}
        reported = {key: ms / 1e3 for key, ms in timings.items() if isinstance(ms, (int, float))}
        arriving = reported.get("receive_ms")
        work = reported.get("stage_ms", 0.0) + reported.get("pause_ms", 0.0)
        if arriving is not None and "total_ms" in reported:
            work = reported["total_ms"] - arriving
        rest = seconds - work
        with self._lock:
            if nbytes == 0:
                self._overheads.append(rest)
            elif arriving is not None:
                self._overheads.append(max(rest - arriving, 0.0))
            if nbytes < _LEAST_MEASURED or rest <= 0:
                return
            overhead = 0.0 if arriving is None else min(self._overheads)
            link = rest - overhead
            end = ended - work
            post = _Post(end - max(link, 1e-9), end, nbytes, link <= overhead)
            self._ended.append(post)
            self._unrated.append(post)

    def _rate(self) -> None:
        """Rate the posts that no request in flight can have crossed with."""
        since = min(self._begun.values(), default=float("inf"))
        for post in [one for one in self._unrated if one.end <= since]:
            self._keep(post, sum(other.within(post) for other in self._ended))
            self._unrated.remove(post)
        needed = min([since, *(post.begin for post in self._unrated)])
        self._ended = [post for post in self._ended if post.end > needed]

    def _keep(self, post: _Post, together: float) -> None:
        """Add what the link has carried while a post crossed to the estimate."""
        rate = _FAST if post.is_fast else together / (post.end - post.begin)
        self._rates.append((rate, post.nbytes))
        self.measured = _median(self._rates)

    @property
    def bytes_per_s(self) -> float:
        """The measured speed, or a default."""
        return self.measured or _UNKNOWN


def _median(weighted: deque[tuple[float, int]]) -> float:
    """Return the value at half of the weight."""
    ordered = sorted(weighted)
    sums = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(sums, sums[-1] / 2)][0]
