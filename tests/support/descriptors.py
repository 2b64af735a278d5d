"""Count what a process holds open."""

from __future__ import annotations

import contextlib
import gc
import os


def open_descriptors() -> int:
    """Return how many file descriptors this process has open, sockets not counted.

    Nor are those of garbage. Clients in this process close idle connections at any time.
    """
    gc.collect()
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(not target.startswith("socket:") for target in targets)
