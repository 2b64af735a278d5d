"""Parts that are posted side by side: in any order of their ends, with a failure anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_sender.encode import sync_round
from delta_sender.encode.encoding_policy import EncodingPolicy
from delta_sender.encode.part_builder import EncodedPart
from delta_sender.encode.sync_round import Attempt, SyncRound
from delta_sender.publish.bandwidth import LinkSpeed
from delta_sender.publish.destination import Destination
from delta_sender.publish.post_queue import PostQueue
from delta_sender.results import SyncError
from delta_sender.run import Run

PROPERTY = settings(deadline=None, database=None, max_examples=60)
POLICY = EncodingPolicy("deltas")
ATTEMPT = Attempt(1, False, POLICY, POLICY)


def round_of(encoders: int, destinations: int = 1, posts: int = 1) -> SyncRound:
    with mock.patch.object(sync_round, "usable_cores", return_value=encoders):
        ways: dict[str, Any] = {"destinations": destinations, "posts_in_flight": posts}
        return SyncRound(1, Run.opened(), full=False, started=0.0, **ways)


class Receiver(Destination):
    """Take each part after a time of its own, or refuse it.

    Attributes:
        begun, taken: numbers of the parts that have come, and that were taken, in order.
        most: how many have come at once.
    """

    def __init__(
        self, at_once: int, seconds: dict[int, float], refused: dict[int, SyncError]
    ) -> None:
        self.speed, self.highest_posted = LinkSpeed(), 0
        self.at_once, self.seconds, self.refused = at_once, seconds, refused
        self.begun: list[int] = []
        self.taken: list[int] = []
        self.in_flight = self.most = 0
        self.begun_by_then: int | None = None  # when the first one was refused
        self.lock = threading.Lock()

    def deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]:
        assert body == bytes([part])
        with self.lock:
            if last:
                assert self.in_flight == 0
                assert sorted(self.taken) == list(range(part))
            self.begun.append(part)
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
            # The thread of the refused post has this long to make the refusal known.
            least = 0.0 if self.begun_by_then is None else 0.05
        time.sleep(max(least, self.seconds.get(part, 0.0)))
        with self.lock:
            self.in_flight -= 1
            if part in self.refused:
                self.begun_by_then = self.begun_by_then or len(self.begun)
                raise self.refused[part]
            self.taken.append(part)
        return {"status": "committed" if last else "staged", "part": part}


def refusal(kind: str = "SpoolFull") -> SyncError:
    return SyncError(kind, 400, {"type": kind, "engine_state": "unchanged"})


def put_all(queue: PostQueue, shared: SyncRound, count: int, fails: int | None = None) -> None:
    """Put parts; encoding one of them fails."""

    def encode(number: int) -> bytes:
        if number == fails:
            raise ArithmeticError(number)
        return bytes([number])

    for number in range(count):
        body = shared.body(ATTEMPT, number, lambda number=number: encode(number))  # type: ignore[misc]
        queue.put(EncodedPart(body, 1, number, number == count - 1))
        del body


def send_all(
    queue: PostQueue, shared: SyncRound, count: int, fails: int | None = None
) -> dict[str, Any]:
    with queue.encoding():
        put_all(queue, shared, count, fails)
    return queue.finish()


@pytest.mark.slow
@PROPERTY
@given(
    count=st.integers(1, 9),
    at_once=st.integers(1, 4),
    encoders=st.integers(1, 3),
    seconds=st.dictionaries(st.integers(0, 8), st.floats(0.0, 0.004)),
)
def test_all_are_posted_and_the_last_one_alone(
    count: int, at_once: int, encoders: int, seconds: dict[int, float]
) -> None:
    receiver = Receiver(at_once, seconds, {})
    shared = round_of(encoders)
    queue = PostQueue(receiver, shared, waits=False)
    assert send_all(queue, shared, count) == {"status": "committed", "part": count - 1}
    assert sorted(receiver.taken) == list(range(count))
    assert receiver.begun[-1] == count - 1
    assert receiver.most <= at_once
    assert queue.posting_last
    assert queue.wire_bytes == count
    if at_once == 1:
        assert receiver.taken == list(range(count))


@pytest.mark.slow
@PROPERTY
@given(
    count=st.integers(2, 9),
    at_once=st.integers(1, 4),
    encoders=st.integers(1, 3),
    seconds=st.dictionaries(st.integers(0, 8), st.floats(0.0, 0.004)),
    refused=st.sets(st.integers(0, 8)),
    unencoded=st.none() | st.integers(0, 8),
)
def test_failure_stops_posts_and_waits_for_all_answers(
    count: int,
    at_once: int,
    encoders: int,
    seconds: dict[int, float],
    refused: set[int],
    unencoded: int | None,
) -> None:
    errors = {number: refusal() for number in refused}
    receiver = Receiver(at_once, seconds, errors)
    shared = round_of(encoders)
    queue = PostQueue(receiver, shared, waits=False)
    fails = {number for number in {*refused, unencoded} if number is not None and number < count}
    failed: BaseException | None = None
    try:
        send_all(queue, shared, count, unencoded)
    except (SyncError, ArithmeticError) as error:
        queue.abandon()
        failed = queue.reason(error)
    assert (failed is None) == (not fails)
    assert receiver.in_flight == 0
    begun = list(receiver.begun)
    if fails:
        # But those that were about to leave; and the last one only if it is what fails.
        assert len(begun) - (receiver.begun_by_then or len(begun)) < at_once
        assert queue.posting_last == (fails == {count - 1} != {unencoded})
        assert isinstance(failed, ArithmeticError) or failed in errors.values()
    time.sleep(0.002)
    assert receiver.begun == begun


@pytest.mark.parametrize(("at_once", "encoders"), [(1, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize("slow", ["posts", "encoding"])
def test_bodies_are_bounded(at_once: int, encoders: int, slow: str) -> None:
    count, most, alive, lock = 24, 0, 0, threading.Lock()

    class Body(bytes):
        def __del__(self) -> None:
            nonlocal alive
            with lock:
                alive -= 1

    receiver = Receiver(at_once, dict.fromkeys(range(count), 0.005 * (slow == "posts")), {})
    shared = round_of(encoders)
    queue = PostQueue(receiver, shared, waits=False)

    def encode(number: int) -> bytes:
        nonlocal most, alive
        time.sleep(0.005 * (slow == "encoding"))
        with lock:
            alive += 1
            most = max(most, alive)
        return Body([number])

    with queue.encoding():
        for number in range(count):
            part = shared.body(ATTEMPT, number, lambda number=number: encode(number))  # type: ignore[misc]
            queue.put(EncodedPart(part, 1, number, number == count - 1))
            del part
    queue.finish()
    assert receiver.most == (at_once if slow == "posts" else receiver.most)
    assert most <= encoders + at_once
    assert alive == 0


@contextmanager
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    try:
        yield event
    finally:
        event.set()


def test_parts_are_encoded_at_once_and_outside_of_any_lock() -> None:
    shared = round_of(3)
    together = threading.Barrier(3, timeout=20)

    def encode() -> bytes:
        together.wait()
        return b"x"

    bodies = [shared.body(ATTEMPT, number, encode) for number in range(3)]
    assert [body.result(20) for body in bodies] == [b"x"] * 3


def test_equal_parts_are_encoded_once_for_all_destinations() -> None:
    shared = round_of(2, destinations=2, posts=1)
    calls: list[int] = []
    with gate() as go:

        def encode(number: int) -> bytes:
            assert go.wait(20)
            calls.append(number)
            return bytes([number])

        first = [shared.body(ATTEMPT, n, lambda n=n: encode(n)) for n in range(3)]  # type: ignore[misc]
        second = [shared.body(ATTEMPT, n, lambda n=n: encode(n)) for n in range(3)]  # type: ignore[misc]
        assert [one is other for one, other in zip(first, second, strict=True)] == [True] * 3
        go.set()
        assert [body.result(20) for body in first] == [b"\0", b"\1", b"\2"]
        # Three are kept; who asks later for an earlier one has it encoded again.
        shared.body(ATTEMPT, 3, lambda: encode(3)).result(20)
        assert shared.body(ATTEMPT, 1, lambda: encode(1)) is first[1]
        assert shared.body(ATTEMPT, 0, lambda: encode(0)) is not first[0]
    assert sorted(calls[:4]) == [0, 1, 2, 3]


def test_what_a_failed_round_has_not_encoded_is_not_encoded() -> None:
    shared = round_of(1)
    with gate() as go:
        begun = shared.body(ATTEMPT, 0, lambda: bytes(go.wait(20)))
        queued = shared.body(ATTEMPT, 1, lambda: pytest.fail("encoded"))
        shared.fail(SyncError("over"))
    assert begun.result(20) == b"\0"
    with pytest.raises(SyncError, match="over"):
        queued.result(20)


def test_a_hurried_round_waits_for_encoding_only() -> None:
    """So that the snapshot can advance; the receiver is still busy with the first part."""
    shared = round_of(1)
    with gate() as go:

        class Busy(Receiver):
            def deliver(self, body: bytes, version: int, part: int, last: bool) -> dict[str, Any]:
                assert go.wait(20)
                return super().deliver(body, version, part, last)

        receiver = Busy(2, {}, {})
        queue = PostQueue(receiver, shared, waits=False)
        shared.is_hurried = True
        with queue.encoding():
            put_all(queue, shared, 9)
        assert receiver.taken == []
        go.set()
        assert queue.finish()["part"] == 8
    assert sorted(receiver.taken) == list(range(9))


def test_the_end_of_encoding_is_waited_for_even_after_a_failure() -> None:
    """The encoders read the snapshot, which can advance after that."""
    shared = round_of(2)
    running: list[int] = []

    def encode(number: int) -> bytes:
        running.append(number)
        time.sleep(0.02 * number)
        running.remove(number)
        return bytes([number])

    queue = PostQueue(Receiver(2, {}, {0: refusal()}), shared, waits=False)

    def put_many() -> None:
        with queue.encoding():
            for number in range(99):
                body = shared.body(ATTEMPT, number, lambda number=number: encode(number))  # type: ignore[misc]
                queue.put(EncodedPart(body, 1, number, False))

    with pytest.raises(SyncError, match="SpoolFull"):
        put_many()
    assert running == []
    queue.abandon()


@pytest.mark.parametrize("first", [0, 1])
def test_the_refusal_that_says_why_is_reported(first: int) -> None:
    """Not that of a part that was refused because the sync had been dropped."""
    errors = {0: refusal("NotUpdatable"), 1: refusal("Conflict")}
    receiver = Receiver(2, {first: 0.0, 1 - first: 0.05}, errors)
    shared = round_of(2)
    queue = PostQueue(receiver, shared, waits=False)
    with pytest.raises(SyncError) as caught:
        send_all(queue, shared, 3)
    queue.abandon()
    assert queue.reason(caught.value) is errors[0 if 0 in receiver.begun else 1]
    other = KeyError("of the tensors")
    assert queue.reason(other) is other


@pytest.mark.parametrize("kind", ["NotUpdatable", "SpoolFull"])
@pytest.mark.parametrize("late", [True, False])
def test_part_that_comes_after_drop_is_dropped(kind: str, late: bool) -> None:
    receiver = Receiver(2, {0: 0.01, 1: 0.1 if late else 0.0}, {0: refusal(kind)})
    shared = round_of(2)
    queue = PostQueue(receiver, shared, waits=False)
    if not late:
        receiver.at_once = 1
    with pytest.raises(SyncError, match=kind):
        send_all(queue, shared, 3)
    queue.abandon()
    again = late and kind == "NotUpdatable"
    assert sorted(receiver.begun) == [0, *[0] * again, *[1] * late]
    if again:
        assert receiver.begun[-1] == 0


def test_fewer_are_posted_where_there_is_no_room_for_so_many() -> None:
    receiver = Receiver(3, dict.fromkeys(range(12), 0.002), {})
    shared = round_of(2)
    queue = PostQueue(receiver, shared, waits=False)
    receiver.at_once = 1  # as a 429 makes it
    send_all(queue, shared, 12)
    assert receiver.most == 1
