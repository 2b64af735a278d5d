"""Propagate tracing into the threads that a loader hands tensors to.

A dispatch mode is local to a thread, so it is entered in every thread that a traced thread starts,
and around every task that a traced thread submits to a thread pool.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch

from engine_ext.model import TracingError

# How long a thread can continue after the loader has returned.
_JOIN_TIMEOUT_S: Final = 10.0


class _ThreadState(threading.local):
    traced = False
    submitting = False


@contextmanager
def traced_threads(trace: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Trace this thread and all threads that work for it, for the duration of the block.

    Replaces methods of `threading.Thread` and `ThreadPoolExecutor`, so two threads of the
    process must not use it at the same time. `trace` makes the context that each traced thread
    runs in.

    Raises:
        TracingError: a thread that was started in the block does not end.
    """
    state = _ThreadState()
    threads: list[threading.Thread] = []
    futures: list[Future[Any]] = []
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    @contextmanager
    def traced() -> Iterator[None]:
        if state.traced:
            yield
            return
        state.traced = True
        try:
            with torch.no_grad(), trace():
                yield
        finally:
            state.traced = False

    def start_traced(thread: threading.Thread) -> None:
        # The threads of a pool can outlive the block; their tasks are traced instead.
        if state.traced and not state.submitting:
            thread.run = traced()(thread.run)  # type: ignore[method-assign]
            threads.append(thread)
        start(thread)

    def submit_traced(
        pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if not state.traced:
            return submit(pool, function, *args, **kwargs)
        state.submitting = True
        try:
            future = submit(pool, traced()(function), *args, **kwargs)
        finally:
            state.submitting = False
        futures.append(future)
        return future

    threading.Thread.start = start_traced  # type: ignore[method-assign, assignment]
    ThreadPoolExecutor.submit = submit_traced  # type: ignore[method-assign, assignment]
    try:
        with traced():
            try:
                yield
            finally:
                _wait(threads, futures)
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def _wait(threads: list[threading.Thread], futures: list[Future[Any]]) -> None:
    end = time.monotonic() + _JOIN_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = wait(futures, max(0.0, end - time.monotonic())).not_done
    if late or any(thread.is_alive() for thread in threads):
        raise TracingError("the loader started threads that do not end")
