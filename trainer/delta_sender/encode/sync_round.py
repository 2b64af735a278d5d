"""Share one sync between all destinations: the weights are read once, and sent while being read.

Parts are encoded side by side, in threads that all destinations share.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from delta_sender.diff.change import Change
from delta_sender.diff.observations import Observed
from delta_sender.diff.snapshot import Changes
from delta_sender.encode.encoding_policy import EncodingPolicy
from delta_sender.results import SyncError
from delta_sender.run import Run
from engine_ext.resources import usable_cores

# Each takes the memory of a part that is being encoded. So many fill a link of 30 Gbit/s.
MOST_ENCODERS = 8
_WORTH_WAKING = 1 << 18  # bytes of changes, or 64 tensors
_LOOK_S = 0.02  # after which a sender looks for fewer


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way of sending a round to a destination."""

    version: int
    full: bool  # every tensor is sent dense
    policy: EncodingPolicy
    next_policy: EncodingPolicy  # of later rounds if this attempt commits
    reason: str | None = None  # why it is full
    replaced: int | None = None  # the version that a full one replaces, if that is known

    @property
    def key(self) -> str:
        """A string that attempts with the same content share."""
        return "full" if self.full else str(self.policy)


class SyncRound:
    """One sync. One thread reads the weights while others send; equal parts are encoded once.

    Args:
        version: The version that every engine is to reach.
        run: The sender's.
        destinations: How many share the round.
        posts_in_flight: Most posts to one destination at once.
        started: When it began, by `time.perf_counter`.
        writers: How many must have it on disk before an engine commits it; see `note_written`.
        new_id: Makes the id of a sync, given the key of its attempts.
        shares: Whether destinations can be sent the same bytes.

    Attributes:
        encoders: How many parts are encoded at once.
        observed: The findings of reading; set when all is read.
        writes_last: Whether a log's version is finished after the engines have staged all; see
            `let_write`.
    """

    def __init__(
        self,
        version: int,
        run: Run,
        *,
        full: bool,
        destinations: int,
        posts_in_flight: int,
        started: float,
        writers: int = 0,
        new_id: Callable[[str], str] = lambda key: uuid.uuid4().hex,
        shares: bool = True,
    ) -> None:
        self.version, self.run, self.full, self.started = version, run, full, started
        self.changes: Changes = {}  # of the snapshot; complete once all is read
        self.observed = Observed()
        self.is_hurried = False  # senders must be done with reading soon; see `release`
        self._tensors: list[tuple[str, Change | None]] = []
        self._is_complete = self._is_released = False
        self._writers, self._readers = writers, 0
        self.writes_last = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self.encoders = min(usable_cores(), MOST_ENCODERS)
        self._pool = ThreadPoolExecutor(self.encoders, thread_name_prefix="delta-part")
        self._senders = destinations
        # As many as a destination might have unposted, so that those in step with it find them.
        self._keep = self.encoders + posts_in_flight if shares and destinations > 1 else 0
        self._lock = threading.Lock()
        self._sync_ids: dict[str, str] = {}  # by attempt
        self._new_id = new_id
        self._bodies: defaultdict[str, OrderedDict[Hashable, Future[bytes]]]
        self._bodies = defaultdict(OrderedDict)

    def read(self, tensors: Iterable[tuple[str, Change | None]]) -> None:
        """Take in what `Snapshot.read` yields.

        Senders are woken for some small changes at a time: waking them takes longer than one. What
        comes before a tensor that takes long to come, they find by themselves.
        """
        left = _WORTH_WAKING
        for key, change in tensors:
            left -= _WORTH_WAKING // 64
            if change is not None:
                left -= change.nbytes
                self.changes[key] = change
            self._tensors.append((key, change))  # senders copy what is there, also meanwhile
            if left <= 0:
                left = _WORTH_WAKING
                with self._changed:
                    self._changed.notify_all()
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make every sender of the round raise an error, at its next part."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def note_written(self) -> None:
        """Note that a writer has all of it on disk; after the last one, engines can commit."""
        with self._changed:
            self._writers -= 1
            self._changed.notify_all()

    def wait_until_written(self) -> None:
        """Wait until engines can commit; raise the error that the round has failed with.

        A log that writes last is not waited for.
        """
        with self._changed:
            while self._writers > (1 if self.writes_last else 0):
                self.check()
                self._changed.wait()

    def let_write(self) -> None:
        """Let the log that writes last finish its version, and wait until it has.

        Raises the error that the round has failed with.
        """
        with self._changed:
            self.writes_last = False
            self._changed.notify_all()
        self.wait_until_written()

    def wait_to_write(self) -> None:
        """Wait until a log can finish its version; raise the error that the round has failed with.

        Returns at once if it does not write last.
        """
        with self._changed:
            while self.writes_last:
                self.check()
                self._changed.wait()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the snapshot, and what is relative to it, from moving on inside the block.

        Raises:
            SyncError: They have moved on.
        """
        with self._changed:
            if self._is_released:
                raise SyncError(
                    "the sync ended without this engine, which gets all changes in the next one"
                )
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def release(self) -> None:
        """Wait until nobody reads, and let nobody begin: the snapshot is about to advance.

        A sender that has not posted everything by then continues with the parts it has made.
        """
        with self._changed:
            self.is_hurried = True
            while self._readers > 0:
                self._changed.wait()
            self._is_released = True

    def check(self) -> None:
        """Raise the error that the round has failed with, if it has."""
        if self._failure is not None:
            raise self._failure

    def tensors(self) -> Iterator[tuple[str, Change | None]]:
        """Yield all that is read, from the first tensor on, as it comes."""
        known = 0
        while True:
            with self._changed:
                while known == len(self._tensors) and not self._is_complete:
                    self.check()
                    self._changed.wait(_LOOK_S)
                found = self._tensors[known:]
                if not found:
                    return
            yield from found
            known += len(found)

    def leave(self) -> None:
        """Note that a destination is done with the round; after the last one, its threads end."""
        with self._lock:
            self._senders -= 1
            if not self._senders:
                self._pool.shutdown(wait=False)

    def sync_id(self, attempt: Attempt) -> str:
        """Return the id that all destinations share that are sent the same."""
        with self._lock:
            if attempt.key not in self._sync_ids:
                self._sync_ids[attempt.key] = self._new_id(attempt.key)
            return self._sync_ids[attempt.key]

    def sync_ids(self) -> frozenset[str]:
        """Return all ids that were given."""
        with self._lock:
            return frozenset(self._sync_ids.values())

    def body(self, attempt: Attempt, key: Hashable, encode: Callable[[], bytes]) -> Future[bytes]:
        """Begin to encode a part, once for all destinations that ask for the same key.

        The last parts of an attempt are kept for destinations that ask later. `encode` reads data
        that must not change until the part is encoded: be `reading` until then.
        """
        with self._lock:
            bodies = self._bodies[attempt.key]
            body = bodies.get(key)
            if body is None:
                body = bodies[key] = self._pool.submit(self._encode, encode)
                while len(bodies) > self._keep:
                    bodies.popitem(last=False)
            return body

    def _encode(self, encode: Callable[[], bytes]) -> bytes:
        self.check()
        return encode()
