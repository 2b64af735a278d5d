"""Following a loader into the threads that it hands tensors to.

What watches operators is local to a thread, so it is set up in every thread that a followed
thread starts, and around whatever a followed thread submits to a thread pool.
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

from engine_ext.model.state_guard import TracingError

# How long a thread that the loader has left behind may take to end.
_PATIENCE_S: Final = 10.0


@contextmanager
def followed(watch: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Set up `watch` in this thread and in all threads that work for it, for the time of the block.

    Args:
        watch: makes the context that a thread is to run in.

    Raises:
        TracingError: a thread that was started in the block does not end.

    Not to be used by two threads at once: it replaces methods of `threading.Thread` and
    `ThreadPoolExecutor`.
    """
    followers = _Followers(watch)
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def start_followed(thread: threading.Thread) -> None:
        followers.adopt(thread)
        start(thread)

    def submit_followed(
        pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        return followers.submit(submit, pool, function, *args, **kwargs)

    threading.Thread.start = start_followed  # type: ignore[method-assign, assignment]
    ThreadPoolExecutor.submit = submit_followed  # type: ignore[method-assign, assignment]
    try:
        with followers.here():
            try:
                yield
            finally:
                followers.wait()
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


class _Followers:
    """The threads that are followed."""

    def __init__(self, watch: Callable[[], AbstractContextManager[Any]]) -> None:
        self._watch = watch
        self._state = threading.local()
        self._threads: list[threading.Thread] = []
        self._futures: list[Future[Any]] = []

    @contextmanager
    def here(self) -> Iterator[None]:
        """Follow the calling thread."""
        if self.following:
            yield
            return
        self._state.following = True
        try:
            with torch.no_grad(), self._watch():
                yield
        finally:
            self._state.following = False

    @property
    def following(self) -> bool:
        """Whether the calling thread is followed."""
        return getattr(self._state, "following", False)

    def adopt(self, thread: threading.Thread) -> None:
        """Follow a thread that is about to be started, if a followed thread starts it.

        The threads of a pool may outlive the block; their tasks are followed instead.
        """
        if not self.following or getattr(self._state, "submitting", False):
            return
        run = thread.run

        def run_followed() -> None:
            with self.here():
                run()

        thread.run = run_followed  # type: ignore[method-assign]
        self._threads.append(thread)

    def submit(
        self,
        submit: Callable[..., Future[Any]],
        pool: ThreadPoolExecutor,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Future[Any]:
        """Submit, and follow the task if a followed thread submits it."""
        if not self.following:
            return submit(pool, function, *args, **kwargs)

        @functools.wraps(function)
        def task(*args: Any, **kwargs: Any) -> Any:
            with self.here():
                return function(*args, **kwargs)

        self._state.submitting = True
        try:
            future = submit(pool, task, *args, **kwargs)
        finally:
            self._state.submitting = False
        self._futures.append(future)
        return future

    def wait(self) -> None:
        """Wait for all that was started."""
        end = time.monotonic() + _PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        late = wait(self._futures, max(0.0, end - time.monotonic())).not_done
        if late or any(thread.is_alive() for thread in self._threads):
            raise TracingError("the loader leaves threads behind that do not end")
