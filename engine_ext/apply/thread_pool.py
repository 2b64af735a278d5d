"""Threads that share the work of staging and writing a sync."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ThreadPool:
    """Runs a function on up to `threads` items at once, in the calling thread and in others."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="delta-write")

    def map(self, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """Return the results of all items, in order, or raise what the function raised for one.

        If it raises, the items that no thread had started are skipped. Nothing runs after it
        returns or raises, so that an undo never runs during a write.
        """
        results: dict[int, _Result] = {}
        todo = deque(enumerate(items))

        def work() -> None:
            try:
                while True:
                    try:
                        number, item = todo.popleft()
                    except IndexError:  # another thread may have taken the last one
                        return
                    results[number] = function(item)
            except BaseException:
                todo.clear()
                raise

        others = min(self._threads, len(items)) - 1
        futures = [self._executor.submit(work) for _ in range(others)]
        try:
            work()
        finally:
            wait(futures)
        while futures:  # no variable holds one: its error has this frame, and so all items
            futures.pop().result()
        return [results[number] for number in range(len(items))]
