"""Ranks of an engine, in threads of this process."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Final

# Only a rank that hangs, or never comes, takes so long: the others fail then. Compiling kernels on
# a busy machine takes seconds.
HANGS_AFTER_S: Final = 60


class Group:
    """An all-gather over threads, as the ranks of an engine have over processes."""

    def __init__(self, size: int, timeout_s: float = HANGS_AFTER_S) -> None:
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._values: list[Any] = [None] * size

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


@dataclass
class ThreadRanks:
    """One rank's place in a `Group`."""

    group: Group
    rank: int

    def all_gather(self, value: Any) -> list[Any]:
        return self.group.all_gather(self.rank, value)
