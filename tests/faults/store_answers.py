"""Faults of what a store answers to an engine that follows a log in it, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tests.faults.following import FollowHarness
from tests.faults.store_fault import Lasts, lasting
from tests.support.object_stores import BUCKET
from tests.support.store_proxy import Fault

WELL = "once the store is well"

Asks = Callable[[str, str], bool]  # of a method and a path


def parts(method: str, path: str) -> bool:
    return method == "GET" and path.endswith(".safetensors")


def marks(method: str, path: str) -> bool:
    return method == "GET" and path.endswith("/DONE")


def listings(method: str, path: str) -> bool:
    return method == "GET" and path.rstrip("/") == f"/{BUCKET}"


def reads(method: str, path: str) -> bool:
    return method == "GET"


def writes(method: str, path: str) -> bool:
    return method == "PUT"


def everything(method: str, path: str) -> bool:
    return True


def answered(
    harness: FollowHarness, fault: Fault, asks: Asks, *, first_only: bool = False
) -> Iterator[None]:
    """Two versions come while requests are answered so, or the first one for each object is."""
    seen: set[str] = set()

    def choose(method: str, path: str, number: int) -> Fault | None:
        if not asks(method, path) or (first_only and path in seen):
            return None
        seen.add(path)
        return fault

    with harness.answers(choose):
        for _ in range(2):
            harness.publish()
        yield


def of_all(name: str, fault: Fault, *asked: Asks) -> list[tuple[str, Lasts]]:
    """Return a case for each kind of request that is always answered so."""
    return [
        (f"{name}: {asks.__name__}", partial(answered, fault=fault, asks=asks)) for asks in asked
    ]


def of_first(name: str, fault: Fault) -> list[tuple[str, Lasts]]:
    """Return a case: the first request for each object is answered so."""
    return [(f"{name} at first", partial(answered, fault=fault, asks=reads, first_only=True))]


BUSY = Fault(status=503)
GONE = Fault(status=404)
SLOW = Fault(slow_s=0.1)
SLOWER = Fault(slow_s=0.5)  # than the client waits
CUT = Fault(cut_after=9)
RESET = Fault(reset=True)
BITS = Fault(flip=20)

ANSWERS = [
    *lasting(
        "store answers 503 when an engine reads parts",
        "PartUnavailable",
        WELL,
        *of_all("503", BUSY, parts),
    ),
    *lasting(
        "store answers 503 when an engine lists a log or reads which parts a version has",
        "LogDamaged",
        WELL,
        *of_all("503", BUSY, listings, marks),
    ),
    *lasting(
        "store answers 503 to everything",
        "LogDamaged",
        WELL,
        *of_all("503", BUSY, everything),
        heard=False,
    ),
    *lasting(
        "store answers 404 when an engine lists a log, or reads what is in the list",
        "LogDamaged",
        WELL,
        *of_all("404", GONE, listings, marks, parts),
    ),
    *lasting(
        "bodies from the store take longer than the client waits, or end early",
        "PartUnavailable",
        WELL,
        *of_all("slower", SLOWER, parts),
        *of_all("cut", CUT, parts),
    ),
    *lasting(
        "store resets connections",
        "LogDamaged",
        WELL,
        *of_all("reset", RESET, reads),
    ),
    *lasting(
        "parts or their list changed on the way from the store",
        "LogDamaged",
        WELL,
        *of_all("bits", BITS, parts, marks),
    ),
    *lasting(
        "bodies from the store are slow; the first answer for each object fails, is cut or changed",
        None,
        None,
        *of_all("slow", SLOW, reads),
        *of_first("503", BUSY),
        *of_first("reset", RESET),
        *of_first("cut", CUT),
        ("bits at first", partial(answered, fault=BITS, asks=parts, first_only=True)),
    ),
    *lasting(
        "store refuses an engine's heartbeats",
        None,
        None,
        *of_all("503", BUSY, writes),
        heard=False,
    ),
]
