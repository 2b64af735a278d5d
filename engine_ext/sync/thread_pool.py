"""Threads that share the work of staging and writing a sync."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Final, TypeVar

from engine_ext.kernels import same_device

_MANY: Final = 1 << 17  # bytes that take a thread far longer than to be woken
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ThreadPool:
    """Runs a function on up to `size` items at once, in the calling thread and in others."""

    def __init__(self, threads: int) -> None:
        self.size = threads
        self._executor = ThreadPoolExecutor(
            max(threads - 1, 1), thread_name_prefix="delta-write", initializer=same_device()
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

        errors: list[BaseException] = []
        state, running, ended = threading.Condition(), 0, False

        def work() -> None:
            try:
                while True:
                    try:
                        found, own = todo.popleft()
                    except IndexError:  # another thread might have taken the last one
                        return
                    for item in own:
                        if errors:
                            return
                        found.append(function(item))
            except BaseException as error:
                errors.append(error)
                todo.clear()

        def help_out() -> None:
            nonlocal running
            with state:
                if ended:  # the others have done it while this was queued
                    return
                running += 1
            try:
                work()
            finally:
                with state:
                    running -= 1
                    state.notify()

        try:
            # Also with the threads that there are; what was queued for another one can run later.
            with contextlib.suppress(RuntimeError):
                for _ in range(min(self.size, len(todo)) - 1):
                    self._executor.submit(help_out)
            work()
        finally:
            with state:
                ended = True
                state.wait_for(lambda: not running)
        if errors:
            try:
                raise errors[0]
            finally:  # nothing here holds one: an error has this frame, and so all items
                errors.clear()
        return [*chain.from_iterable(results)]
