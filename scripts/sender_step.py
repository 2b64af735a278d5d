"""One sync of the reference sender, as all engines share it: read once, sent while it is read."""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator

from sender_snapshot import Change, Changes

_KEPT_BODIES = 2


class Step:
    """What is to be sent. One thread reads it while others send. Parts that are alike are encoded
    once.

    Args:
        version: that every engine is to be at.
        full: send every tensor dense.
        engines: how many share it.
        started: when it began, by `time.perf_counter`.

    Attributes:
        changes: from the snapshot to what every engine is to hold; all of them once it was read.
        is_logged: it is in the delta log, or there is none.
    """

    def __init__(
        self, version: int, *, full: bool, engines: int, started: float, is_logged: bool = True
    ) -> None:
        self.version, self.full, self.started = version, full, started
        self.changes: Changes = {}
        self._read: list[tuple[str, Change | None]] = []
        self._complete, self.is_logged = False, is_logged
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

    def note_logged(self) -> None:
        """Let engines commit."""
        with self._news:
            self.is_logged = True
            self._news.notify_all()

    def wait_until_logged(self) -> None:
        """Wait until the delta log has all of the step; raises the error it has failed with."""
        with self._news:
            while not self.is_logged:
                self.check()
                self._news.wait()

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
