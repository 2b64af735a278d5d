"""What the processes of an engine share that follows its delta log."""

from __future__ import annotations

from typing import Any

from engine_ext.ranks.operations import AcquireFollowLease, Following, LogLook, ShareFollowing
from engine_ext.sync.following import SharedFollowing


def look(**changes: Any) -> LogLook:
    facts = {"at": 1.0, "newest": 3, "behind": 0, "problem": None, "error": None, "asleep": False}
    return LogLook(**(facts | changes))


def asks(holder: str, dead: str | None = None) -> AcquireFollowLease:
    return AcquireFollowLease(holder=holder, instead_of=dead)


def test_one_process_follows_until_it_is_dead() -> None:
    shared = SharedFollowing()
    assert shared.acquire(asks("a")).granted
    assert shared.acquire(asks("a")).granted
    refused = shared.acquire(asks("b"))
    assert (refused.granted, refused.holder) == (False, "a")
    assert shared.share(ShareFollowing(follower="n")).process == "a"
    assert not shared.acquire(asks("b", dead="c")).granted
    assert shared.acquire(asks("b", dead="a")).granted
    assert shared.share(ShareFollowing(follower="n")).process == "b"
    assert not shared.acquire(asks("c", dead="a")).granted


def test_the_first_name_stays() -> None:
    shared = SharedFollowing()
    assert shared.share(ShareFollowing(follower="first")) == Following(name="first")
    assert shared.share(ShareFollowing(follower="second")).name == "first"


def test_a_pin_stays_until_it_is_changed() -> None:
    shared = SharedFollowing()
    assert shared.share(ShareFollowing(follower="n", pins=True, pin=5)).pin == 5
    assert shared.share(ShareFollowing(follower="n", look=look())).pin == 5
    assert shared.share(ShareFollowing(follower="n", pins=True)).pin is None


def test_failures_are_counted_over_all_processes() -> None:
    shared = SharedFollowing()
    failed = look(error={"type": "LogDamaged"})
    for expected in (1, 2):
        known = shared.share(ShareFollowing(follower="n", look=failed))
        assert (known.failures, known.in_a_row, known.look) == (expected, expected, failed)
    known = shared.share(ShareFollowing(follower="n", look=look()))
    assert (known.failures, known.in_a_row, known.look) == (2, 0, look())
