"""Faults of the host of an engine that follows a log in a store: its clock and its cache."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from engine_ext.log.catalog import folder_name
from tests.faults.following import CACHE_BYTES, FollowHarness
from tests.faults.observed import fill, wait_until
from tests.faults.store_answers import BUSY, WELL, parts
from tests.faults.store_fault import lasting
from tests.support.store_proxy import Fault

HOURS_S = 3600.0


def clock_jumps(harness: FollowHarness, seconds: float) -> Iterator[None]:
    """And back again, with a version after each jump."""
    harness.set_clock(seconds)
    try:
        harness.publish()
        yield
    finally:
        harness.set_clock(0)
    harness.publish()


def cache_taken(harness: FollowHarness) -> Iterator[None]:
    """A rank of another engine of the host holds a part that leaves room for none."""
    others = harness.cache() / ("0" * 32 + ".part")
    with others.open("wb") as file:
        file.truncate(CACHE_BYTES - 100)
        fcntl.flock(file, fcntl.LOCK_SH)
        harness.publish()
        yield
        others.unlink()


def disk_full(harness: FollowHarness) -> Iterator[None]:
    filler = fill(harness.cache())
    harness.publish()
    yield
    filler.unlink()


def cache_changed(harness: FollowHarness, change: Callable[[Path], None]) -> Iterator[None]:
    """The last part cannot be read, and those that are in the cache are changed meanwhile."""
    before = {*harness.cache().glob("*.part")}

    def no_last_part(method: str, path: str, number: int) -> Fault | None:
        return BUSY if parts(method, path) and "_flush0002" in path else None

    with harness.answers(no_last_part):
        report = harness.publish()
        wait_until(lambda: len({*harness.cache().glob("*.part")} - before) == 2)
        for path in harness.cache().glob("*.part"):
            change(path)
        yield
    harness.reaches(report.version)
    folder = f"/{folder_name(report.version)}/"
    asked = {k: n for k, n in harness.proxy.requests.items() if parts(*k) and folder in k[1]}
    assert min(asked.values()) >= 2, asked


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def link_elsewhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def cache_emptied(harness: FollowHarness) -> Iterator[None]:
    """Delete all of the cache, including the folder that the engine has there for itself."""
    for path in harness.cache().iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    harness.publish()
    yield


HOST = [
    *lasting(
        "clock of a following engine's host jumps",
        None,
        None,
        ("clock forward", partial(clock_jumps, seconds=50 * HOURS_S)),
        ("clock back", partial(clock_jumps, seconds=-50 * HOURS_S)),
    ),
    *lasting(
        "cache has no room for a part, or its disk is full",
        "SpoolFull",
        "once there is room",
        ("cache taken", cache_taken),
        ("cache disk full", disk_full),
    ),
    *lasting(
        "parts in the cache changed while others cannot be read",
        "PartUnavailable",
        WELL,
        *(
            (f"cache: {change.__name__}", partial(cache_changed, change=change))
            for change in (flip, cut, extend, link_elsewhere)
        ),
    ),
    *lasting("cache emptied", None, None, ("cache emptied", cache_emptied)),
]
