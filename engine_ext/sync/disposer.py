"""Free what a committed sync has left, while the engine generates again."""

from __future__ import annotations

import contextlib
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
    While an earlier sync's are freed, a later one's are freed with their last reference, so that
    memory does not pile up.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="delta-free", initializer=same_device()
        )
        # The thread starts here: after a commit, nothing that can fail is left.
        self._last = self._thread.submit(_empty, [])
        self._last.result()

    def dispose(self, staged: Sequence[StagedPart], logs: Sequence[UndoLog]) -> None:
        """Take a sync's parts and undo logs that nothing uses any more; they are empty then."""
        if not self._last.done():
            return
        lists = [one for log in logs for one in log.lists()]
        for part in staged:  # what holds most memory first
            lists += [part.together, *part_totals(part).writes.lists()]
            lists += [part.params, part.streamed.rows]
        if sum(map(len, lists)) > _AT_ONCE:
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                self._last = self._thread.submit(_empty, lists)


def _empty(lists: list[list[Any]]) -> None:
    for one in lists:
        while one:
            del one[-_AT_ONCE:]
            time.sleep(_BREAK_S)  # it also gives the lock to a thread that waits
