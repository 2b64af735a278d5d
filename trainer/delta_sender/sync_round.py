"""One sync of the reference sender, as all engines share it: read once, sent while it is read."""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

from delta_sender.results import SyncError
from delta_sender.snapshot import Change, Changes

_KEPT_BODIES = 2


class SyncRound:
    """What is to be sent. One thread reads it while others send. Parts that are alike are encoded
    once.

    Args:
        version: that every engine is to be at.
        full: send every tensor dense.
        engines: how many share it.
        started: when it began, by `time.perf_counter`.
        keepers: how many must have it on disk before an engine commits it, see `note_kept`.

    Attributes:
        changes: from the snapshot to what every engine is to hold; all of them once it was read.
        hurried: who sends it is to be done with reading soon, see `release`.
    """

    def __init__(
        self, version: int, *, full: bool, engines: int, started: float, keepers: int = 0
    ) -> None:
        self.version, self.full, self.started = version, full, started
        self.changes: Changes = {}
        self._read: list[tuple[str, Change | None]] = []
        self._complete, self._keepers = False, keepers
        self.hurried, self._readers, self._released = False, 0, False
        self._failure: BaseException | None = None
        self._news = threading.Condition()
        self._keep = _KEPT_BODIES if engines > 1 else 0
        self._lock = threading.Lock()
        self._sync_ids: dict[str, str] = {}  # by attempt
        self._bodies: defaultdict[str, OrderedDict[Hashable, bytes]] = defaultdict(OrderedDict)

    def read(self, tensors: Iterable[tuple[str, Change | None]]) -> None:
        """Take in what `Snapshot.read` yields."""
        for kept, change in tensors:
            with self._news:
                self._read.append((kept, change))
                if change is not None:
                    self.changes[kept] = change
                self._news.notify_all()
        with self._news:
            self._complete = True
            self._news.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let whoever sends this end with an error, at its next part."""
        with self._news:
            self._failure = error
            self._news.notify_all()

    def note_kept(self) -> None:
        """One of the keepers has all of it on disk; after the last, engines may commit."""
        with self._news:
            self._keepers -= 1
            self._news.notify_all()

    def wait_until_kept(self) -> None:
        """Wait until engines may commit; raises the error that the step has failed with."""
        with self._news:
            while self._keepers > 0:
                self.check()
                self._news.wait()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The snapshot and what links know beside it stay as they are within.

        Raises:
            SyncError: They have moved on.
        """
        with self._news:
            if self._released:
                raise SyncError(
                    "the others went on without this engine; it gets all in the next sync"
                )
            self._readers += 1
        try:
            yield
        finally:
            with self._news:
                self._readers -= 1
                self._news.notify_all()

    def release(self) -> None:
        """Wait until nobody reads, and let nobody begin: the snapshot is about to move on.

        Who has not posted all by then goes on with what it has made.
        """
        with self._news:
            self.hurried = True
            while self._readers > 0:
                self._news.wait()
            self._released = True

    def check(self) -> None:
        """Raise the error that the step has failed with, if it has."""
        if self._failure is not None:
            raise self._failure

    def tensors(self) -> Iterator[tuple[str, Change | None]]:
        """All that is read, from the first tensor on, as it comes."""
        known = 0
        while True:
            with self._news:
                while known == len(self._read) and not self._complete:
                    self.check()
                    self._news.wait()
                if known == len(self._read):
                    return
            yield self._read[known]
            known += 1

    def sync_id(self, attempt: str) -> str:
        """One for all engines that are sent the same: ``full``, or changes in some encoding."""
        with self._lock:
            return self._sync_ids.setdefault(attempt, uuid.uuid4().hex)

    def sync_ids(self) -> frozenset[str]:
        """All that were given."""
        with self._lock:
            return frozenset(self._sync_ids.values())

    def body(self, attempt: str, key: Hashable, encode: Callable[[], bytes]) -> bytes:
        """A part that one engine gets. The last of an attempt are kept for who follows."""
        with self._lock:
            bodies = self._bodies[attempt]
            body = bodies.get(key)
            if body is None:
                body = bodies[key] = encode()
                while len(bodies) > self._keep:
                    bodies.popitem(last=False)
            return body
