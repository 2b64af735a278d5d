"""Faults of senders that write the log that an engine follows, one row each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

from tests.faults.following import FollowHarness
from tests.faults.store_fault import lasting
from tests.faults.writers import Halt, writers

PUTS = {
    "its claim": "/claims/",
    "the first part": "_flush0000",
    "the second part": "_flush0001",
    "the last part": "_flush0002",
    "DONE": "/DONE",
}


def killed_while_it_opens(harness: FollowHarness) -> Iterator[None]:
    with writers(harness, 1) as [writer]:
        writer.proxy.faults = halt = Halt("/claims/", "after")
        writer.begin()
        halt.wait()
        writer.kill()
        halt.release()
        yield
    harness.take_over()
    harness.publish()


def killed_at(harness: FollowHarness, part: str, when: Literal["after", "lost"]) -> Iterator[None]:
    """At the PUT of an object: before the store has it, or before the sender knows that it does."""
    with writers(harness, 1) as [writer]:
        writer.open()
        writer.proxy.faults = halt = Halt(part, when)
        writer.begin()
        halt.wait()
        writer.kill()
        halt.release()
        begun = harness.newest + 1
        if (part, when) == ("/DONE", "after"):
            harness.wrote(begun, writer.number)
        assert (begun in harness.visible()) == (begun == harness.newest)
        yield
    harness.take_over()
    harness.publish()


def done_comes_late(harness: FollowHarness) -> Iterator[None]:
    """The request of a dead sender reaches the store when another one has taken over."""
    with writers(harness, 1) as [writer]:
        writer.open()
        writer.proxy.faults = halt = Halt("/DONE", "before")
        writer.begin()
        halt.wait()
        writer.kill()
        harness.take_over()
        halt.release()
        yield
    assert harness.newest + 1 not in harness.visible()
    harness.publish()


def two_at_once(harness: FollowHarness) -> Iterator[None]:
    with writers(harness, 1, 3) as both:
        before = harness.visible()
        for writer in both:
            writer.begin()
        outcomes = [writer.outcome() for writer in both]
        [(winner, version)] = [
            (writer, version)
            for writer, (what, version) in zip(both, outcomes, strict=True)
            if what == "written"
        ]
        assert {what for what, _ in outcomes} - {"written"} <= {"BlockingIOError", "ValueError"}
        harness.wrote(version, winner.number)
        assert harness.visible() == [*before, version]
        yield
    harness.take_over()


def the_other_is_first(harness: FollowHarness) -> Iterator[None]:
    """One is about to make its version visible when the other one takes over."""
    with writers(harness, 1, 3) as [slow, quick]:
        before = harness.visible()
        slow.open()
        slow.proxy.faults = halt = Halt("/DONE", "before")
        slow.begin()
        halt.wait()
        quick.begin()
        what, version = quick.outcome()
        assert (what, version) == ("written", harness.newest + 2)  # the other's number is used
        halt.release()
        assert slow.outcome() == ("BlockingIOError", 0)
        harness.wrote(version, quick.number)
        assert harness.visible() == [*before, version]
        yield
    harness.take_over()


def the_other_is_late(harness: FollowHarness) -> Iterator[None]:
    """One makes its version visible just before the other one would refuse it."""
    with writers(harness, 1, 3) as [slow, quick]:
        slow.open()
        slow.proxy.faults = slow_halt = Halt("/DONE", "before")
        slow.begin()
        slow_halt.wait()
        quick.proxy.faults = quick_halt = Halt("/DONE", "before")
        quick.begin()
        quick_halt.wait()
        slow_halt.release()
        what, version = slow.outcome()
        assert (what, version) == ("written", harness.newest + 1)
        quick_halt.release()
        assert quick.outcome() == ("BlockingIOError", 0)  # the newest version is not its base
        harness.wrote(version, slow.number)
        yield
    harness.take_over()


WRITERS = [
    *lasting(
        "writer of a followed log killed while it opens it, or at a put of a version but the last",
        None,
        "once another has written it",
        ("writer killed while it opens", killed_while_it_opens),
        *(
            (f"writer killed at {what}, {when}", partial(killed_at, part=part, when=when))
            for what, part in PUTS.items()
            for when in ("lost", "after")
            if (what, when) != ("DONE", "after")
        ),
    ),
    *lasting(
        "writer killed at the last put, which reaches the store when another has taken over",
        None,
        "once another has written it",
        ("writer's DONE comes late", done_comes_late),
    ),
    *lasting(
        "writer killed at the last put, before it saw the answer",
        None,
        None,
        ("writer killed at DONE, after", partial(killed_at, part="/DONE", when="after")),
    ),
    *lasting(
        "two writers of one version: both at once, or one is about to end when the other begins",
        None,
        None,
        *((f"two writers at once, {k}", two_at_once) for k in range(3)),
        ("two writers, the other is first", the_other_is_first),
        ("two writers, the other is late", the_other_is_late),
        answer="one is done, the other gets `BlockingIOError` or `ValueError`",
    ),
]
