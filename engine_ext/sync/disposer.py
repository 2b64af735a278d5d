"""Free what a committed sync has left, while the engine generates again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from engine_ext.kernels import same_device
from engine_ext.sync.staged import StagedPart, UndoLog
from engine_ext.sync.totals import part_totals

_AT_ONCE: Final = 32  # objects, in much less than a millisecond
_BREAK_S: Final = 1e-4


class Disposer:
    """Frees staged params and undo logs in a thread, a few at a time.

    To free tens of thousands of them takes as long as to write them, and the interpreter's lock.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="delta-free", initializer=same_device()
        )

    def dispose(self, staged: Sequence[StagedPart], logs: Sequence[UndoLog]) -> None:
        """Take a sync's parts and undo logs that nothing uses any more; they are empty then."""
        lists: list[list[Any]] = [log.writes for log in logs]
        for part in staged:
            lists += [part.params, part.together, *part_totals(part).writes.lists()]
        if sum(map(len, lists)) > _AT_ONCE:
            self._thread.submit(_empty, lists)


def _empty(lists: list[list[Any]]) -> None:
    for one in lists:
        while one:
            del one[-_AT_ONCE:]
            time.sleep(_BREAK_S)  # it also gives the lock to a thread that waits
