"""Threads that share the work of staging and writing a sync."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain
from typing import Final, TypeVar

from engine_ext.kernels import same_device

_MANY: Final = 1 << 17  # bytes that take a thread far longer than to be woken
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ThreadPool:
    """Runs a function on up to `threads` items at once, in the calling thread and in others."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(
            threads, thread_name_prefix="delta-write", initializer=same_device()
        )

    def map(
        self,
        function: Callable[[_Item], _Result],
        items: Sequence[_Item],
        size: Callable[[_Item], int] = lambda item: _MANY,
    ) -> list[_Result]:
        """Return the results of all items, in order, or raise what the function raised for one.

        If it raises, the items that no thread had started are skipped. Nothing runs after it
        returns or raises, so that an undo never runs during a write.

        Args:
            size: bytes of an item. A thread takes several small items at a time: threads that take
                turns under the interpreter's lock are slower than one of them.
        """
        results: list[list[_Result]] = []
        todo: deque[tuple[list[_Result], list[_Item]]] = deque()
        room = 0
        for item in items:
            if room <= 0:
                results.append([])
                todo.append((results[-1], []))
                room = _MANY
            todo[-1][1].append(item)
            room -= size(item)

        failed = threading.Event()

        def work() -> None:
            try:
                while True:
                    try:
                        found, own = todo.popleft()
                    except IndexError:  # another thread might have taken the last one
                        return
                    for item in own:
                        if failed.is_set():
                            return
                        found.append(function(item))
            except BaseException:
                failed.set()
                todo.clear()
                raise

        others = min(self._threads, len(todo)) - 1
        futures = [self._executor.submit(work) for _ in range(others)]
        try:
            work()
        finally:
            wait(futures)
        while futures:  # no variable holds one: its error has this frame, and so all items
            futures.pop().result()
        return [*chain.from_iterable(results)]
