"""How many cores this process can use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of cores that this process can run on; it sets the number of threads."""
    return len(os.sched_getaffinity(0))
