"""Ask engines that follow a delta log to look at it now, without waiting for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, Union

from delta_sender.options import SenderOptions
from delta_sender.publish.http_client import EngineClient
from delta_sender.results import SyncError

Told = Union[int, SyncError, None]  # noqa: UP007
_MOST_AT_ONCE: Final = 32


class Notifier:
    """Pokes engines, each with one request at a time; what comes meanwhile is one more afterwards.

    Args:
        urls: The engines' roots.
        options: Of the HTTP clients.
    """

    def __init__(self, urls: Sequence[str], options: SenderOptions) -> None:
        self._clients = {url: EngineClient(url, options) for url in urls}
        self._lock = threading.Condition()
        self._wanted: dict[str, int] = {}
        self._busy: set[str] = set()
        self._queue: deque[str] = deque()
        self._threads = 0
        self._told: dict[str, Told] = {}

    @property
    def clients(self) -> list[EngineClient]:
        """The engines' clients."""
        return [*self._clients.values()]

    @property
    def told(self) -> Mapping[str, Told]:
        """By url: the version that the engine was at after its last look, or why there was none."""
        with self._lock:
            return dict(self._told)

    def poke(self, version: int) -> None:
        """Ask every engine to look at the log, which has a version now."""
        with self._lock:
            for url in self._clients:
                self._wanted[url] = version
                if url not in self._busy:
                    self._busy.add(url)
                    self._queue.append(url)
            while self._threads < min(len(self._busy), _MOST_AT_ONCE):
                self._threads += 1
                # A program that ends does not wait for engines that do not answer.
                threading.Thread(target=self._run, name="delta-notify", daemon=True).start()

    def wait(self, timeout: float | None = None) -> Mapping[str, Told]:
        """Wait until nobody is being asked, or some seconds; return a copy of `told`."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self._busy:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._lock.wait(left)
            return dict(self._told)

    def close(self) -> None:
        """Close the clients; requests that have begun end on their own."""
        with self._lock:
            self._busy.difference_update(self._queue)
            self._queue.clear()
            self._lock.notify_all()
        for client in self._clients.values():
            client.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._threads -= 1
                    return
                url = self._queue.popleft()
            self._ask(url)

    def _ask(self, url: str) -> None:
        while True:
            with self._lock:
                version = self._wanted[url]
            told: Told
            try:
                told = self._clients[url].catch_up()
            except SyncError as failed:
                told = failed
            except Exception as error:  # a closed client
                told = SyncError(f"{type(error).__name__}: {error}")
            with self._lock:
                self._told[url] = told
                if self._wanted[url] == version:
                    self._busy.discard(url)
                    self._lock.notify_all()
                    return
