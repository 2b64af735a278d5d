"""Faults of the objects that a followed log has in its store, one row each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

from engine_ext.log.catalog import folder_name
from tests.faults.following import FollowHarness
from tests.faults.store_fault import lasting

MOST = 1 << 20

Spoil = Callable[[bytes], bytes | None]  # None: the object is deleted


def bit(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def shorter(data: bytes) -> bytes:
    return data[: len(data) // 2]


def empty(data: bytes) -> bytes:
    return b""


def gone(data: bytes) -> None:
    return None


def other_base(data: bytes) -> bytes:
    return re.sub(rb'("base_version": ?)', rb"\g<1>1", data)


def other_hash(data: bytes) -> bytes:
    return re.sub(
        rb'("xxh3_128": ?".*?)([0-9a-f])"', lambda m: m[1] + other_digit(m[2]) + b'"', data
    )


def other_digit(digit: bytes) -> bytes:
    return b"1" if digit == b"0" else b"0"


def spoilt(harness: FollowHarness, end: str, spoil: Spoil, *, repaired: bool) -> Iterator[None]:
    """An object of the new version is not what was written, before the engine reads it.

    It is repaired, or a full version follows.
    """
    with harness.held():
        harness.publish()
        folder = folder_name(harness.newest)
        [found] = harness.log.store.list(folder).values()
        [name] = [name for one in found.names if (name := f"{folder}/{one}").endswith(end)]
        good = harness.log.store.read(name, MOST)
        bad = spoil(good)
        if bad is None:
            harness.log.store.delete([name])
        else:
            assert bad != good
            harness.log.store.put(name, bad)
    yield
    if repaired:
        harness.log.store.put(name, good)
    else:
        harness.publish(full=True)


PART = "_flush0001.safetensors"
PARTS = {
    "bit": bit,
    "shorter": shorter,
    "empty": empty,
    "gone": gone,
}
DONE = {"bit": bit, "shorter": shorter, "other hash": other_hash, "other base": other_base}

OBJECTS = [
    *lasting(
        "part in the store corrupted, truncated or deleted",
        "LogDamaged",
        "once it is repaired, or a full version follows",
        *(
            (f"part: {what}", partial(spoilt, end=PART, spoil=spoil, repaired=True))
            for what, spoil in PARTS.items()
        ),
        *(
            (f"part: {what}, full", partial(spoilt, end=PART, spoil=spoil, repaired=False))
            for what, spoil in (("bit", bit), ("gone", gone))
        ),
        about="weight_v",
    ),
    *lasting(
        "list of a version's parts (`DONE`) in the store corrupted or truncated",
        "LogDamaged",
        "once it is repaired, or a full version follows",
        *(
            (f"DONE: {what}", partial(spoilt, end="/DONE", spoil=spoil, repaired=True))
            for what, spoil in DONE.items()
        ),
        *(
            (f"DONE: {what}, full", partial(spoilt, end="/DONE", spoil=spoil, repaired=False))
            for what, spoil in (("bit", bit), ("other hash", other_hash))
        ),
        about="weight_v",
    ),
]
