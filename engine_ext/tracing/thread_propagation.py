"""Propagate tracing into the threads that a loader hands tensors to.

A dispatch mode is local to a thread, so it is entered in every thread that a traced thread starts,
and around every task that a traced thread submits to a thread pool.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch

from engine_ext.model import TracingError

# How long a thread may run on after the loader has returned.
_JOIN_TIMEOUT_S: Final = 10.0


@contextmanager
def traced_threads(trace: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Trace this thread and all threads that work for it, for the duration of the block.

    Replaces methods of `threading.Thread` and `ThreadPoolExecutor`, so only one thread of the
    process may use it at a time. `trace` makes the context that each traced thread runs in.

    Raises:
        TracingError: a thread that was started in the block does not end.
    """
    threads = _TracedThreads(trace)
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def start_traced(thread: threading.Thread) -> None:
        threads.adopt(thread)
        start(thread)

    def submit_traced(
        pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        return threads.submit(submit, pool, function, *args, **kwargs)

    threading.Thread.start = start_traced  # type: ignore[method-assign, assignment]
    ThreadPoolExecutor.submit = submit_traced  # type: ignore[method-assign, assignment]
    try:
        with threads.traced():
            try:
                yield
            finally:
                threads.wait()
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


class _TracedThreads:
    """The threads and tasks that are traced."""

    def __init__(self, trace: Callable[[], AbstractContextManager[Any]]) -> None:
        self._trace = trace
        self._state = threading.local()
        self._threads: list[threading.Thread] = []
        self._futures: list[Future[Any]] = []

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Trace the calling thread."""
        if self.active:
            yield
            return
        self._state.active = True
        try:
            with torch.no_grad(), self._trace():
                yield
        finally:
            self._state.active = False

    @property
    def active(self) -> bool:
        """Whether the calling thread is traced."""
        return getattr(self._state, "active", False)

    def adopt(self, thread: threading.Thread) -> None:
        """Trace a thread that is about to be started, if a traced thread starts it.

        The threads of a pool may outlive the block; their tasks are traced instead.
        """
        if not self.active or getattr(self._state, "submitting", False):
            return
        run = thread.run

        def run_traced() -> None:
            with self.traced():
                run()

        thread.run = run_traced  # type: ignore[method-assign]
        self._threads.append(thread)

    def submit(
        self,
        submit: Callable[..., Future[Any]],
        pool: ThreadPoolExecutor,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Future[Any]:
        """Submit a task, and trace it if a traced thread submits it."""
        if not self.active:
            return submit(pool, function, *args, **kwargs)

        @functools.wraps(function)
        def task(*args: Any, **kwargs: Any) -> Any:
            with self.traced():
                return function(*args, **kwargs)

        self._state.submitting = True
        try:
            future = submit(pool, task, *args, **kwargs)
        finally:
            self._state.submitting = False
        self._futures.append(future)
        return future

    def wait(self) -> None:
        """Wait for the threads and tasks to end."""
        end = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        late = wait(self._futures, max(0.0, end - time.monotonic())).not_done
        if late or any(thread.is_alive() for thread in self._threads):
            raise TracingError("the loader started threads that do not end")
