"""How fast the link to one engine is, as the requests to it have shown.

A request with a body of n bytes takes o + n / v + w seconds: an overhead, whatever its size; the
link; and the engine's own work, of which its answer tells. Of a post it also tells for how long
the body was arriving, which is n / v where bytes are handed on as they come, and next to nothing
where something on the way has kept them back. So the rest of its time, without that, is never less
than o. The least such rest of the last posts, or the time of a request without a body where that
is less, is taken for o; and what a post took beyond o and w, for n / v.

What takes no longer than the overhead cannot be told from chance, nor does it matter: such a post
says that the link is fast. Of what the last posts say the median is taken, each with the weight of
its bytes. An engine that tells nothing of a post's arrival is taken to have no overhead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from typing import Any, Final

_UNKNOWN: Final = 125e6  # bytes a second, of 1 Gbit/s, until a post has been measured
_FAST: Final = 1e10  # bytes a second, where it does not matter
_LEAST_MEASURED: Final = 1 << 16  # bytes; the time of a smaller post is not that of its bytes
_KEPT: Final = 16  # posts


class LinkSpeed:
    """The link to one engine.

    Attributes:
        measured: bytes a second; None until a post has been measured.
    """

    def __init__(self) -> None:
        self.measured: float | None = None
        self._overheads: deque[float] = deque(maxlen=_KEPT)  # seconds
        self._posts: deque[tuple[float, int]] = deque(maxlen=_KEPT)  # bytes a second, and bytes

    def note(self, nbytes: int, seconds: float, answer: dict[str, Any]) -> None:
        """Take in a request that was answered.

        Args:
            nbytes: of its body.
            seconds: that it took, with the engine's own work.
            answer: the engine's.
        """
        timings = answer.get("timings_ms")
        known = timings if isinstance(timings, dict) else {}
        told = {key: ms / 1e3 for key, ms in known.items() if isinstance(ms, (int, float))}
        arriving = told.get("receive_ms")
        work = told.get("stage_ms", 0.0) + told.get("pause_ms", 0.0)
        if arriving is not None and "total_ms" in told:
            work = told["total_ms"] - arriving
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
        """What to reckon with."""
        return self.measured or _UNKNOWN


def _median(weighted: deque[tuple[float, int]]) -> float:
    """The value at half of the weight."""
    ordered = sorted(weighted)
    sums = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(sums, sums[-1] / 2)][0]
